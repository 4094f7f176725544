"""`parallel="auto"`: measures whether many trials on few cores each, or few on many, end first.

The first trials of a study run on as many workers as there are cores, and are timed: their results
count. Then the time that is left is known, and measuring may take a tenth of what it can save, as
`parent.auto.rule` says. For 1, 2, 4, ... workers, each trains the same model on its share of the
cores, all at the same time. So the measurement includes that trials compete for memory bandwidth.
It takes about a second of training steps for each number of workers, after the model has been
traced, and never more than a trial.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import optuna

from nanotf.compat.versions import require_tensorflow
from nanotf.console import say, status
from nanotf.errors import WorkerError
from nanotf.machine import topology
from nanotf.parent.auto import candidates, rule
from nanotf.parent.auto.first_epochs import StepClock
from nanotf.parent.map import mapping
from nanotf.searching import studies
from nanotf.searching.search_arguments import SearchArguments
from nanotf.searching.space import suggest
from nanotf.searching.trials import Recipe


class _Measured(Exception):
    """Enough steps have been measured."""


@dataclasses.dataclass
class StepTime:
    """The function of `nanotf.map` in a measurement."""

    recipe: Recipe
    parameters: Mapping[str, Any]  # by name

    def __post_init__(self) -> None:
        self.__qualname__ = "nanotf.search"

    def __call__(self, slot: int, fit: Mapping[str, Any]) -> float:
        """Returns the seconds of a training step.

        Args:
            slot: the item of `nanotf.map`; not used.
            fit: the arguments of `fit` that all trials share.
        """
        model = self.recipe.model(self.parameters)
        arguments = self.recipe.fit_arguments(self.parameters, fit)
        clock = _clock()
        # The user's callbacks may write files, or stop the training early.
        arguments |= {"callbacks": [clock], "verbose": 0}
        try:
            model.fit(**arguments)
        except _Measured:
            pass
        # A training of one step has only the traced one; without any, nothing is known.
        return clock.times.step or clock.times.first or math.nan


def _clock() -> Any:
    """Returns a callback that measures steps, and then ends `fit` with `_Measured`."""

    class Clock(require_tensorflow().keras.callbacks.Callback):  # type: ignore[misc]
        times = StepClock()  # of this class, which each call makes anew

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.times.begin_epoch()

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.times.begin_step()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.times.end_step(batch)
            if self.times.is_sure:
                raise _Measured

    return Clock()


def decide(step: Mapping[int, float], trials: int) -> int:
    """Returns the number of workers with which the trials end first.

    Args:
        step: seconds of a step on each worker, by the number of workers. Not empty.
        trials: how many are left.
    """
    # Whole rounds count: ten trials on eight workers take as long as sixteen.
    return min(step, key=lambda workers: (math.ceil(trials / workers) * step[workers], workers))


def may_measure(trial: float, trials: int, numbers: Sequence[int], start_up: float) -> bool:
    """Returns True if measuring is expected to take a tenth of what it can save, at most.

    Args:
        trial: seconds of a trial on the largest number of workers.
        trials: how many are left.
        numbers: of workers that are compared, in ascending order.
        start_up: seconds in which workers start, for each number anew.
    """
    most = numbers[-1]
    left = math.ceil(trials / most) * trial
    cost = len(numbers) * (start_up + trial)  # a measurement takes no longer than a trial
    return cost <= rule.allowed(rule.can_save(left, most))


def choose(request: SearchArguments, study: Any, trials: int, verbose: Any) -> tuple[int, int]:
    """Returns the number of workers, and how many trials they run before the next choice.

    Args:
        study: `optuna.Study`, which remembers the measurement.
        trials: how many are left.
        verbose: as in `search`; unless 0, a line tells the choice.
    """
    plans = candidates.numbers(request.cores_per_process, request.cores)
    numbers = [n for n in plans if n <= trials]
    most = numbers[-1]
    if len(numbers) == 1:
        return most, trials
    key = [topology.usable_count(), request.cores_per_process]  # other cores, other times
    known = study.user_attrs.get(studies.PARALLEL, {})
    # Toward the end of a study, fewer numbers are in question: all were tried.
    if known.get("key") != key or not {*numbers} <= {*known["tried"]}:
        seconds = studies.seconds_of_a_trial(study)
        if seconds is None:
            return most, most  # one round, which tells how long a trial takes
        start_up = rule.start_up()
        if not may_measure(seconds, trials, numbers, start_up):
            if verbose != 0:
                say(
                    f'parallel="auto": {most} at a time, not measured: a trial takes about '
                    f"{seconds:.1f} s, and {trials} are left."
                )
            return most, trials
        with status("measuring how many trials at a time end first"):
            known = {"key": key, "tried": numbers, "step": _measure(request, numbers)}
        study.set_user_attr(studies.PARALLEL, known)
    step = {int(n): t for n, t in known["step"].items() if int(n) in numbers}
    if not step:  # nothing was measured: trials raised what `catch` names, or had no step
        return most, trials
    chosen = decide(step, trials)
    if verbose != 0:
        times = ", ".join(f"{n} at a time: {1000 * t:.2f} ms per step" for n, t in step.items())
        say(f'parallel="auto": {chosen}. Measured {times}.')
    return chosen, trials


def _measure(request: SearchArguments, numbers: list[int]) -> dict[str, float]:
    """Returns the seconds of a step by the number of workers; as text, which a study stores."""
    # One draw, in a study of its own: each number of workers trains the same model.
    draw = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)).ask()
    function = StepTime(request.recipe, suggest(draw, request.space))
    found: dict[str, float] = {}
    for number in numbers:
        # `cores_per_process` limits several workers; a single one may use all cores.
        try:
            steps = mapping.map(
                function,
                range(number),
                number,
                cores_per_process=request.cores_per_process if number > 1 else None,
                shared={"fit": request.fit},
                cores=request.cores,
                seed=0,
                verbose=0,
            )
        except request.catch as error:
            if not isinstance(error, WorkerError):  # of this process, not of the user's `build`
                raise
            continue  # such a trial fails, and tells nothing of time
        seconds = sum(steps) / number
        if math.isfinite(seconds):
            found[str(number)] = seconds
    return found
