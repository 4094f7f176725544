"""How a call's parts were computed: what a worker tells its parent, and a report shows."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Part:
    """How the workers computed the calls of a layer, loss or metric.

    Args:
        name: str.
        is_divided: bool, whether each worker computed its own rows; otherwise each computed all.
        why: str, why it is not divided, or that the user has declared it; empty if it is proved.
        operations: float or None, the floating-point operations of its forward pass for one row, as
            far as TensorFlow's profiler counts them. Without those of the parts inside that are
            listed by themselves. None if the call could not be traced.
    """

    name: str
    is_divided: bool
    why: str = ""
    operations: float | None = None
