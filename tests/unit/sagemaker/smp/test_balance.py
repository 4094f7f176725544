"""Contiguous division by load, a pure function."""

from __future__ import annotations

import itertools
import random

import pytest

from nanotf.errors import ModelError
from nanotf.sagemaker.smp.balance import TOLERANCE, Piece, divide


def _largest(pieces: list[Piece], parts: list[int]) -> int:
    return max(
        sum(piece.size for piece, own in zip(pieces, parts, strict=True) if own == part)
        for part in set(parts)
    )


def test_largest_load_is_within_the_tolerance_of_the_smallest() -> None:
    draw = random.Random(0)
    for count, parts in itertools.product((2, 3, 7), (1, 2, 3)):
        if count < parts:
            continue
        pieces = [Piece(draw.randint(1, 99), 0.0, draw.randint(0, 9)) for _ in range(count)]
        found = divide(pieces, parts, memory_weight=1.0)
        assert found == sorted(found)
        assert set(found) == set(range(parts))
        every = (
            sorted([*range(parts), *rest])
            for rest in itertools.product(range(parts), repeat=count - parts)
        )
        best = min(_largest(pieces, candidate) for candidate in every)
        assert _largest(pieces, found) <= best * TOLERANCE * (1 + 1e-9)


def test_weight_of_memory() -> None:
    pieces = [Piece(8, 1.0), Piece(1, 1.0), Piece(1, 8.0)]
    assert divide(pieces, 2, memory_weight=1.0) == [0, 1, 1]
    assert divide(pieces, 2, memory_weight=0.0) == [0, 0, 1]


def test_least_crossing_among_balanced_divisions() -> None:
    pieces = [Piece(100, 1.0), Piece(1, 1.0, crossing=9), Piece(1, 1.0, crossing=2), Piece(98, 1.0)]
    assert divide(pieces, 2, memory_weight=1.0) == [0, 0, 0, 1]


def test_pieces_of_an_earlier_division() -> None:
    pieces = [Piece(1, 1.0), Piece(1, 1.0, fixed=1), Piece(50, 1.0)]
    assert divide(pieces, 2, memory_weight=1.0) == [0, 1, 1]


def test_too_few_pieces() -> None:
    with pytest.raises(ModelError, match=r"partitions=2, and a call of 1 parts"):
        divide([Piece(1, 1.0)], 2, memory_weight=0.5)
