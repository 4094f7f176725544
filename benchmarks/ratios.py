"""Medians of ratios taken within rounds, and geometric means over models."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

Maybe = float | None


def median(values: Iterable[Maybe]) -> Maybe:
    """Returns the median of the values that are not None; None if there is none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def median_ratio(above: Sequence[Maybe], below: Sequence[Maybe]) -> Maybe:
    """Returns the median over rounds of `above[round] / below[round]`.

    A round in which either is missing does not count. Both have one value per round.
    """
    pairs = zip(above, below, strict=True)
    return median(a / b if a is not None and b else None for a, b in pairs)


def geometric_mean(values: Iterable[Maybe]) -> Maybe:
    """Returns the geometric mean of the values that are not None; None if there is none.

    Raises:
        ValueError: A value is not above 0.
    """
    known = [value for value in values if value is not None]
    if any(value <= 0 for value in known):
        raise ValueError(f"A geometric mean needs values above 0. Received: {known}.")
    return math.exp(statistics.fmean(map(math.log, known))) if known else None
