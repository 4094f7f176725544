"""Workers that end, and those that cannot be started in their place."""

from __future__ import annotations

import collections
import types
from typing import Any

from nanotf.parent.map.item_run import ItemRun


def _run() -> Any:
    """A run without workers; one item waits."""
    run: Any = object.__new__(ItemRun)
    run._absent, run._lost, run._unreplaced = set(), set(), set()
    run._given, run._results, run._waiting = {}, {}, collections.deque[int]()
    return run


def _pool(size: int) -> Any:
    replaced: list[int] = []
    return types.SimpleNamespace(size=size, replaced=replaced, replace=replaced.append)


def _gone(rank: int) -> Any:
    died = types.SimpleNamespace(what=f"Worker {rank} died.")
    return types.SimpleNamespace(worker=types.SimpleNamespace(died=lambda doing: died))


def test_the_place_of_a_worker_that_ended_idle_is_used_when_others_cannot_start() -> None:
    run, pool = _run(), _pool(3)
    for rank in (0, 1):
        run._died(pool, rank, _gone(rank))
    assert pool.replaced == []  # nothing waited
    run._waiting.append(7)
    run._died(pool, 2, _gone(2))
    assert pool.replaced == [2]
    died = types.SimpleNamespace(what="Worker 2 did not start.")
    run._give_up(pool, 2, died)
    assert pool.replaced == [2, 0]
    run._give_up(pool, 0, died)
    assert pool.replaced == [2, 0, 1]
    failed: list[Any] = []
    run._failed, run._finish = lambda index, died: died, failed.extend
    run._give_up(pool, 1, died)
    assert [outcome.index for outcome, _ in failed] == [7] and not run._waiting
