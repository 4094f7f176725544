"""Serves models: a front that speaks HTTP, and warm workers with cores of their own.

- `interface.py`: what the ways to ask for predictions have in common.
- `code_folders.py`: where the user's code for a model lies.
"""
