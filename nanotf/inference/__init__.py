"""Trained models as programs: converted to the engine that computes them fastest, and called.

- `signature.py`: what a program takes and returns. It imports no TensorFlow.
"""
