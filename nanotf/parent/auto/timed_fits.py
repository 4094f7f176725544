"""Measures how long a model's steps take: the trials of `num_processes="auto"` and of `tune`.

    tried                   2, 4, ... processes, while there is time (`Budget`)
      measure
        _measure_workers    several: the user's model and data in workers
        _measure_here       one, for the settings of `tune`: a copy of the model in this process

A trial traces one step, then runs a few more. Its results are discarded: the user's model,
optimizer, metrics, callbacks and this process's random states stay unchanged. Workers end
afterwards. A trial reads arrays by index, and a copy of a `tf.data.Dataset`; workers read its
graph. Data that only this process can read (a generator, a `PyDataset`, a dataset with Python
functions) would lose the batches that a trial reads. They get no trial.

The budget counts all that the user waits for, the start of workers included. A trial begins if it
is expected to end in time, and workers that still run when the time is over are killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nanotf.compat import keras_compiling, keras_models
from nanotf.compat.generation import generation
from nanotf.compat.versions import require_tensorflow
from nanotf.console import Quiet, logger
from nanotf.errors import NanoError
from nanotf.machine import topology
from nanotf.parent import defaults, model_copy
from nanotf.parent.auto.first_epochs import MEASURED_SECONDS, MEASURED_STEPS
from nanotf.parent.fit import fit_call
from nanotf.parent.fit.fit_options import FitOptions
from nanotf.parent.fit_arguments import FitArguments
from nanotf.pool import pool, warm
from nanotf.report import call_report, timeline
from nanotf.report.stopwatch import Stopwatch
from nanotf.shipping import orders
from nanotf.shipping.data import inputs
from nanotf.wire import messages, timing

LOSS_ROUNDS, LOSS_STEPS = 10, 20  # of `losses_here`
TRACES = 2.0  # times the first step of one process, for that of workers: they also make the model

_now = time.monotonic  # clock of the budget


@dataclasses.dataclass(frozen=True)
class Measured:
    """Result of a trial."""

    num_processes: int
    step: float | None  # seconds per step; None if it was not measured, see `note`
    # Seconds until workers are ready; of one process, those of its first step, which is traced
    start_up: float = 0.0
    note: str = ""  # why there is no `step`, for people
    # Seconds after which the trial was stopped, if that is why there is no `step`; else 0
    stopped: float = 0.0
    setting: str = ""  # the settings of `tune` that it was measured with, such as "bf16"
    losses: Sequence[float] = ()  # see `losses_here`; measured where they decide something

    def seconds(self, steps: int | None) -> float:
        """Returns the time of a call with `steps` steps, or of one step if that is None."""
        assert self.step is not None
        if steps is None:
            return self.step
        return self.step * steps + (self.start_up if self.num_processes > 1 else 0.0)


def why_no_trial(x: Any) -> str:
    """Returns why a trial would lose some of these data; "" if it would not."""
    tf = require_tensorflow()
    if isinstance(x, tf.data.Dataset):
        return ""
    if x is None:
        return "there are no data."
    plain = (bool, int, float, str, bytes, np.generic)
    if all(hasattr(v, "__array__") or isinstance(v, plain) for v in tf.nest.flatten(x)):
        return ""
    return (
        f"data of class {type(x).__name__} are read in this process, and a trial would consume "
        "some of them. Pass a number of processes, arrays or a tf.data.Dataset."
    )


def shortened(arguments: FitArguments) -> FitArguments:
    """Returns the arguments of a trial: only training, without the user's callbacks."""
    return dataclasses.replace(
        arguments,
        callbacks=None,
        verbose=0,
        validation_data=None,
        validation_split=0.0,
        validation_steps=None,
        initial_epoch=0,
        epochs=2,
        # Makes arrays endless.
        steps_per_epoch=None,
        shuffle=False,
    )


@contextlib.contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """Restores the last report, and the user's attributes that preparing a `fit` sets."""
    names = ("history", "stop_training")
    before = {name: vars(model)[name] for name in names if name in vars(model)}
    last = call_report.last_report()
    try:
        yield
    finally:
        for name in names:
            if name in before:
                setattr(model, name, before[name])
            elif name in vars(model):
                delattr(model, name)
        call_report.remember(last)


class OutOfTime(NanoError):
    """A trial was stopped because the time for all trials is over."""


class Budget:
    """The time that trials may take together, from now on. Their preparation counts.

    Attributes:
        seconds: see `rule.allowed`; 0 until it is known.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = _now()

    def spent(self) -> float:
        """Returns the seconds since trials began."""
        return _now() - self._began

    def left(self) -> float:
        """Returns the seconds left; below 0 if the budget is spent."""
        return self.seconds - self.spent()


class TimedFit(fit_call.FitCall):
    """A `fit` of a few steps whose results are discarded.

    Args:
        model: the user's model.
        arguments: see `shortened`.
        budget: None if only the model and the data are looked at, and nothing is run.
    """

    quiet = True

    def __init__(
        self,
        model: Any,
        arguments: FitArguments,
        size: int,
        budget: Budget | None = None,
    ) -> None:
        super().__init__(model, arguments, size, FitOptions(sharding="trial"))
        self.steps_per_execution = generation().steps_per_execution(model)
        self.executions = self.epochs = 1
        self.budget = budget

    def again(self, size: int, executions: int, epochs: int, budget: Budget) -> TimedFit:
        """Returns another trial of the same model and data."""
        made = TimedFit(self.model, self.arguments, size, budget)
        made.executions, made.epochs = executions, epochs
        return made

    def order(self) -> orders.FitOrder:
        steps = self.executions * self.steps_per_execution
        # Arrays are endless here, see `shortened`; a dataset has only its own batches.
        if self.data.steps is not None and not isinstance(self.data.train, inputs.ArrayInput):
            steps = min(steps, self.data.steps)
        return dataclasses.replace(
            super().order(), epochs=self.epochs, steps_per_epoch=steps, stop=False
        )

    def on_idle(self, ended: set[int]) -> None:
        super().on_idle(ended)
        self._check_time()

    def handle(self, rank: int, message: Any) -> None:
        super().handle(rank, message)
        self._check_time()

    def _check_time(self) -> None:
        """Raises `OutOfTime` if the time is over."""
        assert self.budget is not None
        if self.budget.left() < 0:
            raise OutOfTime(f"a trial with {self.size} processes was stopped")

    # A trial leaves the user's model as it is: no state comes back, and none is sent again.
    def _note(self, first: messages.Waiting) -> None:
        pass

    def _bring_home(self, first: messages.Waiting) -> None:
        pass

    def _changes(self, is_home: bool, may_reload: bool) -> messages.Proceed:
        return messages.Proceed(self.number)

    def reported(self) -> None:
        pass

    def step_times(self) -> list[tuple[int, int, int]]:
        """Returns begin, end and number of Keras's calls of each execution on rank 0."""
        rows = timeline.rows_of_steps(self.times[0])
        return [(began, ended, calls) for _, began, ended, _, _, _, calls in rows]


def expected(one: Measured, start_up: float) -> float:
    """Returns the seconds that a trial with workers is expected to take.

    Args:
        one: one process, of which the time of a step is known.
        start_up: seconds until workers are ready.
    """
    assert one.step is not None
    # Two steps before those that are measured: one is traced, one tells how many fit.
    steps = 2 * one.step + min(MEASURED_SECONDS, MEASURED_STEPS * one.step)
    return start_up + TRACES * one.start_up + steps


def tried(
    trial: TimedFit,
    plans: Mapping[int, topology.Plan],
    transport: str,
    budget: Budget,
    known: Mapping[int, Measured],
    start_up: float,
) -> list[Measured]:
    """Measures one number of workers after the other while there is time; keeps measurements.

    Args:
        plans: by the number of workers, of those to try.
        known: by the number of processes; one process is among them.
        start_up: seconds until new workers are ready, as far as it is known.
    """
    measured, one = dict(known), known[1]
    cost = expected(one, start_up)
    for number, plan in plans.items():
        # The trial ends a warm pool, but its measurement counts once the pool is warm again.
        is_warm = warm.is_warm(plan, transport)
        if (expected(one, 0.0) if is_warm else cost) > budget.left():
            measured.setdefault(number, Measured(number, None, note="not tried: no time left"))
            continue
        began = budget.spent()
        try:
            found = measure(trial, number, plan, transport, budget)
        except Exception as error:  # such as a full disk; one process can train
            logger.info("The trial with %d processes failed: %s", number, error)
            first_line = str(error).split("\n")[0]
            note = f"failed: {type(error).__name__}: {first_line[:60]}"
            found = Measured(number, None, note=note)
        # What has imported TensorFlow is there now, so the next ones start sooner.
        cost = max(expected(one, 0.0), budget.spent() - began - found.start_up)
        # In a later run they do not: the longest start counts. A warm pool has none.
        start_up = found.start_up if not is_warm and number == min(plans) else start_up
        measured[number] = dataclasses.replace(found, start_up=max(found.start_up, start_up))
    return [measured[number] for number in sorted(measured)]


def measure(
    trial: TimedFit, number: int, plan: topology.Plan, transport: str, budget: Budget
) -> Measured:
    if number == 1:
        return _measure_here(trial, budget)
    return _measure_workers(trial, number, plan, transport, budget)


def _measure_workers(
    trial: TimedFit, number: int, plan: topology.Plan, transport: str, budget: Budget
) -> Measured:
    # The first step is traced; the second tells how many fit into the time.
    first = trial.again(number, 1, 2, budget)
    start = timing.now()

    def spent() -> float:
        return timeline.NS * (timing.now() - start)

    if not warm.start_within(plan, transport, budget.left()):
        note = f"not ready after {spent():.1f} s"
        return Measured(number, None, spent(), note, stopped=spent())
    start_up = spent()
    try:
        with warm.pool_for(plan, transport) as workers:
            first.run(workers)
            seconds = _seconds_per_execution(first, workers, budget)
    except OutOfTime:
        note = f"too slow: stopped after {spent():.1f} s"
        return Measured(number, None, start_up, note, stopped=spent())
    finally:
        # The next trial needs other workers, and these have drawn random numbers.
        warm.end_pool()
    return Measured(number, seconds / trial.steps_per_execution, start_up)


def _measure_here(trial: TimedFit, budget: Budget) -> Measured:
    """Measures one process by training a copy of the model in this process.

    A step cannot be stopped here, but it takes as long in a plain `fit`.
    """
    stopwatch = Stopwatch(0, None)
    with _copy_here(trial, stopwatch) as fit:

        def seconds(executions: int, epochs: int) -> float:
            """Trains; returns seconds per execution, ignoring the first of several."""
            stopwatch.begin()
            fit(executions, epochs)
            rows = list(timeline.rows_of_steps(stopwatch.finish()))
            began, ended = rows[min(1, len(rows) - 1)][1], rows[-1][2]
            return timeline.NS * (ended - began) / max(1, len(rows) - 1)

        found = seconds(1, 2)  # the first step is traced; the second tells how many fit
        count = int(min(MEASURED_STEPS, MEASURED_SECONDS / max(found, 1e-6)))
        if count >= 2 and budget.left() > 0:
            found = seconds(count + 1, 1)  # the first does not count
    return Measured(1, found / trial.steps_per_execution)


def losses_here(trial: TimedFit, count: int) -> list[float]:
    """Trains a copy of the model in this process, each time with the same random numbers.

    Args:
        count: of rounds. Each takes the first `LOSS_STEPS` batches, or all if these are fewer.

    Returns:
        The mean loss of each round.
    """
    executions = -(-LOSS_STEPS // trial.steps_per_execution)
    with _copy_here(trial, Stopwatch(0, None)) as fit:
        return [float(fit(executions, 1).history["loss"][0]) for _ in range(count)]


@contextlib.contextmanager
def _copy_here(trial: TimedFit, stopwatch: Stopwatch) -> Iterator[Callable[[int, int], Any]]:
    """Makes a copy of the model, whose executions are timed.

    Yields:
        A function that trains it for some executions in each of some epochs; returns the history.
    """
    a, each = trial.arguments, trial.steps_per_execution
    x, most = a.x, trial.data.steps
    if not isinstance(trial.data.train, inputs.ArrayInput):
        x, most = model_copy.endless_copy(x), None
    # The user's step may print while it is traced; a trial must not show that.
    quiet = contextlib.redirect_stdout(Quiet(sys.stdout))
    with keras_compiling.kept_random_states(), defaults.no_default(), quiet:
        theirs = model_copy.copy_of(trial)
        model_copy.copy_state((trial.model, trial.held), theirs)
        copy = theirs[0]
        copy.make_train_function()
        copy.train_function = stopwatch.timed(timing.TRAIN, copy.train_function)

        def fit(executions: int, epochs: int) -> Any:
            steps = executions * each if most is None else min(executions * each, most)
            return keras_models.keras_method(copy, "fit")(
                x,
                a.y,
                batch_size=a.batch_size,
                class_weight=a.class_weight,
                sample_weight=a.sample_weight,
                shuffle=False,
                epochs=epochs,
                steps_per_epoch=steps,
                verbose=0,
            )

        yield fit


def _seconds_per_execution(first: TimedFit, workers: pool.Pool, budget: Budget) -> float:
    """Measures more executions if there is time for them; otherwise uses the second one."""
    began, ended, calls = first.step_times()[-1]
    seconds = timeline.NS * (ended - began) / calls
    count = int(min(MEASURED_STEPS, MEASURED_SECONDS / max(seconds, 1e-6)))
    if count < 2:
        return seconds
    more = first.again(first.size, count + 1, 1, budget)  # the first does not count
    try:
        more.run(workers)
    except OutOfTime:
        return seconds
    (_, begin, _), *others = more.step_times()
    calls = sum(calls for _, _, calls in others)
    return timeline.NS * (others[-1][1] - begin) / calls if others else seconds
