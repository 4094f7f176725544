"""Tables of reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def lines(headings: Sequence[Sequence[str]], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a table, whose columns are aligned on the right.

    Args:
        headings: the first lines, as a list of cells each.
        rows: the others.
    """
    cells = [*headings, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield "  ".join(f"{text:>{n}}" for text, n in zip(line, widths, strict=True))
