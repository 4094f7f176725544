"""Serves models: a front that speaks HTTP, and warm workers with cores of their own.

- `interface.py`: what the ways to ask for predictions have in common.
"""
