"""Times of a step: what a partition computed, sent and waited for."""

from __future__ import annotations

import pytest

from nanotf.sagemaker.smp import times
from nanotf.sagemaker.smp.config import Config, load
from nanotf.sagemaker.smp.schedule import Half
from nanotf.sagemaker.smp.times import Label, StepTimes
from nanotf.wire import timing


@pytest.fixture
def config() -> Config:
    return load({"partitions": 2, "microbatches": 2}, {})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The times that are read next."""
    ahead: list[int] = []
    monkeypatch.setattr(timing, "now", lambda: ahead.pop(0))
    monkeypatch.setattr(times, "_last", {})
    return ahead


def test_computations_lie_between_messages(config: Config, clock: list[int]) -> None:
    made = StepTimes(config)
    send = made.noting(Label(0, Half.FORWARD), lambda x: x + 1)
    receive = made.noting(Label(0, waits=True), lambda: "letter")
    note = made.noting(Label(0, Half.BACKWARD), lambda: None)
    for _ in range(2):  # the second execution forgets the first
        clock += [100, 130, 140, 145, 200, 260, 262]
        made.begins()
        assert send(1) == 2
        assert receive() == "letter"
        note()
    found = made.last()
    assert found.number == 2
    assert found.whole == (100, 262)
    assert [(b.kind, b.microbatch, *b.time) for b in found.blocks] == [
        (Half.FORWARD, 0, 100, 130),
        (Half.BACKWARD, 0, 200, 260),
    ]
    assert found.waits == ((145, 200),)
    assert found.computed == 90


def test_a_step_with_gradients_is_preferred(config: Config, clock: list[int]) -> None:
    training, evaluation = StepTimes(config), StepTimes(config)
    training.noting(Label(0, Half.BACKWARD), lambda: None)
    assert times.last(config) is None
    clock += [1, 2, 3]
    evaluation.begins()
    assert times.last(config) is evaluation
    training.begins()
    evaluation.begins()
    assert times.last(config) is training
    assert times.last(load({"partitions": 2, "microbatches": 2}, {})) is None  # `init` again
