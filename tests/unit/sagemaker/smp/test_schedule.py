"""The order in which partitions compute: a pure function, and free of deadlocks."""

from __future__ import annotations

import itertools

import pytest

from nanotf.sagemaker.smp.config import check
from nanotf.sagemaker.smp.schedule import Action, Half, actions


def _text(partition: int, **config: object) -> str:
    return " ".join(str(action) for action in actions(check(config), partition))


def test_orders_of_two_partitions() -> None:
    simple = {"partitions": 2, "microbatches": 4, "pipeline": "simple"}
    assert _text(0, **simple) == _text(1, **simple) == "F0 F1 F2 F3 B0 B1 B2 B3"
    interleaved = {"partitions": 2, "microbatches": 4}
    assert _text(0, **interleaved) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert _text(1, **interleaved) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert _text(0, **interleaved, active_microbatches=1) == "F0 B0 F1 B1 F2 B2 F3 B3"


@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
@pytest.mark.parametrize("active", [1, 2, 6])
def test_no_order_deadlocks(pipeline: str, active: int) -> None:
    """Simulates all partitions: sends do not wait, receives do."""
    for partitions, microbatches in itertools.product((1, 2, 3, 4), (1, 2, 5, 8)):
        config = check(
            {
                "partitions": partitions,
                "microbatches": microbatches,
                "pipeline": pipeline,
                "active_microbatches": active,
            }
        )
        left = [actions(config, number) for number in range(partitions)]
        assert all(len(set(map(str, order))) == 2 * microbatches for order in left)
        done: set[tuple[Half, int, int]] = set()
        while any(left):
            ready = [
                n
                for n in range(partitions)
                if left[n] and _is_ready(left[n][0], n, partitions, done)
            ]
            assert ready, left
            for number in ready:
                action = left[number].pop(0)
                done.add((action.kind, action.microbatch, number))


def _is_ready(
    action: Action, partition: int, partitions: int, done: set[tuple[Half, int, int]]
) -> bool:
    kind, microbatch = action.kind, action.microbatch
    if kind is Half.FORWARD:
        return all((kind, microbatch, earlier) in done for earlier in range(partition))
    results = (Half.FORWARD, microbatch, partitions - 1) in done
    later = range(partition + 1, partitions)
    return results and all((kind, microbatch, n) in done for n in later)
