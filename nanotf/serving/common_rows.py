"""Counts the rows of a request, which decide if it may be computed together with others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nanotf.inference.signature import Signature, TensorSpec


def common_rows(signature: Signature, inputs: Mapping[str, np.ndarray[Any, Any]]) -> int | None:
    """Returns the rows of a request's inputs, for `Decoded.rows`.

    Returns:
        The length of the first axis of all inputs; None if they differ, if there are none, or if
        the signature has an input or an output whose first axis is not one of any number of rows:
        a program may add up over the rows, and then no request may be computed with another.
    """
    if not all(_has_rows(spec) for spec in (*signature.inputs, *signature.outputs)):
        return None
    if not inputs or not all(array.ndim for array in inputs.values()):
        return None
    lengths = {len(array) for array in inputs.values()}
    return (lengths.pop() or None) if len(lengths) == 1 else None


def _has_rows(spec: TensorSpec) -> bool:
    return spec.shape is None or (len(spec.shape) > 0 and spec.shape[0] is None)
