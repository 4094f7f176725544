"""Parts of a program that workers divided, or did not: for the report of a call."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Part:
    """Layer, loss or metric, and the way in which the workers computed its calls."""

    name: str
    is_divided: bool  # whether each worker computed its own rows; otherwise each computed all
    why: str = ""  # why it is not divided, or that the user has declared it; empty if it is proved
    # The floating-point operations of its forward pass for one row, as far as TensorFlow's profiler
    # counts them. Without those of the parts inside that are listed by themselves. None if the call
    # could not be traced.
    operations: float | None = None
