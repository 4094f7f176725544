"""The items that a worker has, and their number."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from nanotf.parent.map import item_batches
from nanotf.parent.map.item_batches import GivenItems, Pace
from nanotf.wire.item_pipes import MOST, ItemClaims


def test_short_items_travel_together_and_long_ones_alone() -> None:
    pace = Pace()
    assert pace.most() == 1  # nothing is known
    pace.note([])
    assert pace.most() == 1
    pace.note([0.001, 0.003])
    assert pace.most() == 25
    pace.note([10.0])
    assert pace.most() == 1
    pace.note([1e-7] * 100)
    assert pace.most() == 1  # the estimate falls by halves
    for _ in range(30):
        pace.note([1e-7])
    assert pace.most() == MOST


@pytest.fixture
def given() -> Iterator[GivenItems]:
    made = GivenItems()
    yield made
    made.pipes.close()


def test_what_a_worker_has_begun_stays_its_own(given: GivenItems) -> None:
    assert given.give(1, [7, 8, 9, 10]) == 4
    claims = ItemClaims(*(os.dup(fd) for fd in given.pipes.of_worker))
    assert claims.take(1, 7) and claims.record(7, 0.5, b"seven") and claims.take(1, 8)
    claims.close()  # it dies
    assert [(end.index, end.result) for end in given.new_ends()] == [(7, b"seven")]
    assert given.take_back() == [9, 10]
    assert (given.running, len(given), given.count, given.ended) == (8, 1, 2, 1)


def test_an_end_counts_once(given: GivenItems) -> None:
    given.give(1, [3])
    assert given.end(3) and not given.end(3)
    assert given.running is None and given.ended == 1


def test_a_worker_is_late_with_its_item(given: GivenItems, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(item_batches.time, "monotonic", lambda: now[0])
    given.give(1, [0, 1])
    assert not given.is_late()
    now[0] += 1
    assert given.is_late() and given.seconds() == 1
    given.end(0)
    assert not given.is_late()
    now[0] += 1
    given.end(1)
    assert not given.is_late()  # it has nothing to do
