"""Estimates how long a model computes, from its last batches."""

from __future__ import annotations

import math

_KEEP = 0.98  # the weight of a batch beside that of the next: the last 50 count
_LEAST = 1e-9  # seconds


class Costs:
    """The time of a batch as a line over its rows, by weighted least squares.

    Attributes:
        bytes_per_row: float, of requests' bodies. 0.0 until a batch has ended.
    """

    def __init__(self) -> None:
        self.bytes_per_row = 0.0
        # Weighted sums of 1, rows, seconds, rows * rows, rows * seconds.
        self._sums = [0.0] * 5

    def add(self, rows: int, seconds: float, nbytes: int) -> None:
        """Learns from a batch.

        Args:
            nbytes: of its requests' bodies.
        """
        new = (1.0, rows, seconds, rows * rows, rows * seconds)
        self._sums = [_KEEP * old + now for old, now in zip(self._sums, new, strict=True)]
        share = nbytes / rows
        weight = 1.0 / self._sums[0]  # this batch's share of all weights
        self.bytes_per_row += weight * (share - self.bytes_per_row)

    def rows_of(self, nbytes: int) -> float:
        """Estimates the rows of a request by the size of its body."""
        return max(1.0, nbytes / self.bytes_per_row) if self.bytes_per_row else 1.0

    def line(self) -> tuple[float, float]:
        """Returns the seconds of an empty batch, and those of each row; neither is negative."""
        count, rows, seconds, squares, products = self._sums
        if not count:
            return 0.0, 0.0
        spread = count * squares - rows * rows
        if not self._has_spread():  # nothing tells the two apart
            return 0.0, seconds / rows
        each = (count * products - rows * seconds) / spread
        if each < 0:
            return seconds / count, 0.0
        fixed = (seconds - each * rows) / count
        return (fixed, each) if fixed > 0 else (0.0, seconds / rows)

    def seconds(self, rows: float, most_rows: float) -> float:
        """Estimates how long one worker needs for rows, in batches of at most `most_rows`."""
        fixed, each = self.line()
        return math.ceil(rows / most_rows) * fixed + rows * each

    def rows_within(self, seconds: float) -> float:
        """Returns how many rows a batch may have to end within some seconds; at least 1."""
        count, rows, *_ = self._sums
        if not count:
            return 1.0
        if not self._has_spread():  # a larger batch tells what a row adds
            return max(1.0, 2 * rows / count)
        fixed, each = self.line()
        if fixed >= seconds or each < _LEAST:
            return math.inf  # smaller batches would end no sooner
        return max(1.0, (seconds - fixed) / each)

    def _has_spread(self) -> bool:
        """Returns True if the batches had different numbers of rows."""
        count, rows, _, squares, _ = self._sums
        return count * squares - rows * rows > 1e-6 * squares * count  # above rounding errors
