"""Ranks and groups of smp, by the tables of the original's documentation."""

from __future__ import annotations

import pytest

from nanotf.errors import InvalidArgumentError
from nanotf.sagemaker.smp import rank_groups

GROUPS = [
    ("cluster", [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2, 4, 6], [1, 3, 5, 7]]),
    ("spread", [[0, 4], [1, 5], [2, 6], [3, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]),
]


@pytest.mark.parametrize(("strategy", "mp_groups", "dp_groups"), GROUPS)
def test_groups_of_eight_processes_and_two_partitions(
    strategy: str, mp_groups: list[list[int]], dp_groups: list[list[int]]
) -> None:
    places = [rank_groups.place(rank, 8, 2, strategy) for rank in range(8)]
    assert sorted({place.mp_group for place in places}) == [tuple(g) for g in mp_groups]
    assert sorted({place.dp_group for place in places}) == [tuple(g) for g in dp_groups]
    for rank, place in enumerate(places):
        assert (place.rank, place.size, place.mp_size, place.dp_size) == (rank, 8, 2, 4)
        assert place.mp_group[place.mp_rank] == place.dp_group[place.dp_rank] == rank


def test_rank_six_with_spread() -> None:
    place = rank_groups.place(6, 8, 2, "spread")
    assert (place.dp_rank, place.mp_rank) == (2, 1)


@pytest.mark.parametrize("strategy", ["cluster", "spread"])
@pytest.mark.parametrize(("size", "partitions"), [(1, 1), (4, 4), (6, 3), (12, 4)])
def test_every_process_has_its_own_place(strategy: str, size: int, partitions: int) -> None:
    places = [rank_groups.place(rank, size, partitions, strategy) for rank in range(size)]
    found = {(place.dp_rank, place.mp_rank) for place in places}
    assert found == {(d, m) for d in range(size // partitions) for m in range(partitions)}


def test_processes_that_partitions_do_not_divide() -> None:
    with pytest.raises(InvalidArgumentError, match=r"Received: 3 processes, partitions=2"):
        rank_groups.place(0, 3, 2)
