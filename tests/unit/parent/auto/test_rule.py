"""The rule of `num_processes="auto"`: what measuring may cost. No TensorFlow."""

from __future__ import annotations

import dataclasses

import pytest

from nanotf.parent.auto import rule
from nanotf.parent.auto.first_epochs import HandedOver, StepClock, Watch


@pytest.mark.parametrize(
    ("left", "most", "seconds"),
    [(2.0, 2, 0.1), (160.0, 2, 8.0), (160.0, 16, 15.0), (160.0, 1, 0.0), (0.0, 4, 0.0)],
)
def test_a_tenth_of_what_can_be_saved(left: float, most: int, seconds: float) -> None:
    assert rule.allowed(rule.can_save(left, most)) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("start_up", "one", "several", "steps"),
    [
        (5.0, 0.019, 0.012, 778),  # 3 % of one process's time are no gain
        (0.0, 0.019, 0.012, 1),
        (5.0, 0.019, 0.0185, None),
        (5.0, 0.012, 0.019, None),
    ],
)
def test_from_which_number_of_steps_workers_pay(
    start_up: float, one: float, several: float, steps: int | None
) -> None:
    assert rule.pays_from(start_up, one, several) == steps
    if steps is not None:
        assert start_up + steps * several < rule.WORTH * one * steps
        assert start_up + (steps - 1) * several >= rule.WORTH * one * (steps - 1)


def test_numbers_of_steps_for_people() -> None:
    assert rule.in_epochs(778, 90) == "9 epochs"
    assert rule.in_epochs(1, 90) == "1 epoch"
    assert rule.in_epochs(778, None) == "778 steps"


@dataclasses.dataclass
class _Time:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def _run(watch: Watch, time: _Time, epoch: int, steps: list[float], at_once: int = 1) -> None:
    watch.begin_epoch(epoch)
    for number, seconds in enumerate(steps):
        time.now += 0.25  # the iterator
        watch.clock.begin_step()
        time.now += seconds
        watch.end_step((number + 1) * at_once - 1)
    time.now += 100.0  # validation


def _always(epoch: int) -> bool:
    return True


def test_the_first_step_and_the_time_between_epochs_do_not_count() -> None:
    time = _Time()
    watch = Watch(_always, lambda epoch: None)
    watch.clock = clock = StepClock(time)
    _run(watch, time, 0, [50.0, 1.0, 3.0])
    assert clock.first == 50.0
    assert clock.step == 2.25  # with the iterator
    assert watch.steps == 3
    watch.clock.begin_epoch()
    assert clock.step == 2.25


def test_executions_of_several_steps() -> None:
    time = _Time()
    watch = Watch(_always, lambda epoch: None)
    watch.clock = StepClock(time)
    _run(watch, time, 0, [50.0, 4.0], at_once=5)
    assert watch.clock.step == 4.25 / 5
    assert watch.steps == 10


def test_a_choice_is_made_once_and_with_enough_steps() -> None:
    asked: list[int] = []
    time = _Time()
    watch = Watch(lambda epoch: epoch > 6, asked.append)
    watch.clock = StepClock(time)
    _run(watch, time, 3, [50.0])
    _run(watch, time, 4, [0.25])  # the first step of this epoch counts, but is short
    _run(watch, time, 5, [1.0])
    assert asked == []
    _run(watch, time, 6, [1.0])
    assert asked == []
    assert watch.is_open
    _run(watch, time, 7, [1.0])
    _run(watch, time, 8, [1.0])
    assert asked == [7], "others cannot train epoch 6"
    assert not watch.is_open


def test_the_rest_is_handed_over() -> None:
    time = _Time()
    watch = Watch(_always, lambda epoch: "two workers")
    watch.clock = StepClock(time)
    _run(watch, time, 0, [50.0, 2.0])
    with pytest.raises(HandedOver) as raised:
        watch.begin_epoch(1)
    assert (raised.value.epoch, raised.value.choice) == (1, "two workers")
