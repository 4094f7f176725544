"""Counts the rows of a request, which decide if it may be computed together with others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nanotf.inference.signature import Signature


def common_rows(signature: Signature, inputs: Mapping[str, np.ndarray[Any, Any]]) -> int | None:
    """Returns the rows of a request's inputs, for `Decoded.rows`.

    Returns:
        The length of the first axis of all inputs; None if they differ, if there are none, or if
        the signature has an input or an output whose first axis is not one of any number of rows:
        a program may add up over the rows, and then no request may be computed with another.
    """
    if not signature.may_have_rows:
        return None
    lengths = {array.shape[:1] for array in inputs.values()}
    if len(lengths) != 1:
        return None
    length = lengths.pop()
    return (length[0] or None) if length else None  # without rows it runs by itself
