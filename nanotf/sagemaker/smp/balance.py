"""Divides a sequence of pieces into contiguous parts of about equal load: a pure function."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from nanotf.errors import ModelError

TOLERANCE = 1.1  # loads up to this many times the best one count as balanced


@dataclass(frozen=True)
class Piece:
    """Operations that stay together."""

    size: int  # bytes of the variables that they use
    cost: float  # of computing them, in any unit
    crossing: int = 0  # bytes that cross a cut before this piece
    fixed: int | None = None  # the only part that it may belong to; None for any


def divide(pieces: Sequence[Piece], parts: int, memory_weight: float) -> list[int]:
    """Returns the part of each piece.

    Among the divisions whose largest load is within `TOLERANCE` of the smallest possible, it takes
    the one with the least bytes that cross.

    Args:
        parts: the number of parts; none is empty.
        memory_weight: 0.0 balances costs, 1.0 sizes.

    Raises:
        ModelError: There are fewer pieces than parts, or fixed pieces leave a part empty.
    """
    loads = _loads(pieces, memory_weight)
    sums = [0.0, *itertools.accumulate(loads)]
    best = _best(pieces, sums, parts, None)
    if best is None:
        raise ModelError(
            "A model is cut between its layers, and into parts of which none is empty. Received: "
            f"partitions={parts}, and a call of {len(pieces)} parts that can be told apart. Use "
            "fewer partitions. Layers that share a variable, and all between them, are one part."
        )
    limit = max(sums[end] - sums[begin] for begin, end in itertools.pairwise(best)) * TOLERANCE
    bounds = _best(pieces, sums, parts, limit)
    assert bounds is not None  # `best` is within the limit
    return [part for part in range(parts) for _ in range(bounds[part], bounds[part + 1])]


def _loads(pieces: Sequence[Piece], memory_weight: float) -> list[float]:
    size = sum(piece.size for piece in pieces) or 1  # a model may have no variables
    cost = sum(piece.cost for piece in pieces) or 1.0
    return [
        memory_weight * piece.size / size + (1 - memory_weight) * piece.cost / cost
        for piece in pieces
    ]


def _best(
    pieces: Sequence[Piece], sums: Sequence[float], parts: int, limit: float | None
) -> list[int] | None:
    """Returns the bounds of the parts: with the smallest largest load, or with the least crossing.

    Args:
        sums: the load of the pieces before each piece, and of all.
        limit: the most load that a part may have; the least bytes that cross are then looked for.
            None looks for the smallest largest load.

    Returns:
        The first piece of each part, and the number of pieces; None if no division is possible.
    """
    count = len(pieces)
    # found[i]: what the first i pieces cost in the parts so far, and the bounds of these.
    found: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for part in range(parts):
        after: dict[int, tuple[float, list[int]]] = {}
        for begin, (cost, bounds) in found.items():
            crossing = pieces[begin].crossing if 0 < begin < count else 0
            for end in range(begin + 1, count + 1):
                # What forbids a part forbids all longer ones that begin here.
                if pieces[end - 1].fixed not in (None, part):
                    break
                load = sums[end] - sums[begin]
                if limit is not None and load > limit * (1 + 1e-9):  # rounding of equal loads
                    break
                new = max(cost, load) if limit is None else cost + crossing
                if end not in after or new < after[end][0]:
                    after[end] = (new, [*bounds, end])
        found = after
    return found[count][1] if count in found else None
