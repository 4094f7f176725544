"""Alias of `nanotf.keras.optimizers`."""

from nanotf.keras.optimizers import SparseAdam

__all__ = ["SparseAdam"]
