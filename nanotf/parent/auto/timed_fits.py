"""Measures how long a model's steps take: the trials of `num_processes="auto"` and of `tune`.

    tried                   1, 2, 4, ... processes, while there is time (`Budget`)
      measure
        _measure_here       one: a copy of the user's model in this process
        _measure_workers    several: the user's model and data in workers

A trial traces one step, then runs a few more. Its results are discarded: the user's model,
optimizer, metrics, callbacks and this process's random states stay unchanged. Workers end
afterwards. A trial reads arrays by index, and a copy of a `tf.data.Dataset`; workers read its
graph. Data that only this process can read (a generator, a `PyDataset`, a dataset with Python
functions) would lose the batches that a trial reads. They get no trial.

When the time budget of all trials is spent, workers that still run are killed. Worker start-up does
not count: it says nothing about steps, and a busy machine may multiply it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nanotf.compat import keras_compiling, keras_models
from nanotf.compat.generation import generation
from nanotf.compat.versions import require_tensorflow
from nanotf.console import Quiet, logger
from nanotf.errors import NanoError
from nanotf.machine import topology
from nanotf.parent import defaults, model_copy
from nanotf.parent.fit import fit_call
from nanotf.parent.fit.fit_options import FitOptions
from nanotf.parent.fit_arguments import FitArguments
from nanotf.pool import pool, warm
from nanotf.report import call_report, timeline
from nanotf.report.stopwatch import Stopwatch
from nanotf.shipping import orders
from nanotf.shipping.data import inputs
from nanotf.wire import messages, timing

TRIAL_SECONDS = 20.0  # budget of all trials together or, if that is more,
TRIAL_SHARE = 0.05  # this share of the call's time in one process
MEASURED_SECONDS = 1.0  # of steps after the first two, in each trial
MOST_STEPS = 50  # executions in those seconds, at most
PATIENCE = 3.0  # the first workers may always take this many times one process's time
START_UP = 5.0  # seconds, assumed worker start-up until one is measured

_now = time.monotonic  # clock of the budget


@dataclasses.dataclass(frozen=True)
class Measured:
    """Result of a trial."""

    num_processes: int
    step: float | None  # seconds per step; None if it was not measured, see `note`
    start_up: float = 0.0  # seconds until workers are ready
    note: str = ""  # why there is no `step`, for people
    # Seconds after which the trial was stopped, if that is why there is no `step`; else 0
    stopped: float = 0.0
    setting: str = ""  # the settings of `tune` that it was measured with, such as "bf16"

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
    """A trial was stopped because the time budget of all trials is spent."""


class Budget:
    """Time budget of all trials together: `TRIAL_SECONDS`, or `TRIAL_SHARE` of the call.

    Args:
        steps: steps of the call; None if unknown: `TRIAL_SHARE` does not count then.
    """

    def __init__(self, steps: int | None) -> None:
        self.steps = steps
        self.seconds = TRIAL_SECONDS
        self._began = _now()

    def step_takes(self, seconds: float) -> None:
        """Raises the budget to `TRIAL_SHARE` of a call whose steps take at least `seconds`."""
        if self.steps is not None:
            self.seconds = max(self.seconds, TRIAL_SHARE * seconds * self.steps)

    def is_worth_more(self, stopped: Measured, known: Mapping[int, Measured]) -> bool:
        """Returns True if a stopped trial may now take more than twice as long as it did."""
        one = known.get(1)
        if one is not None and one.step is not None:
            self.step_takes(one.step)
        return 0 < 2 * stopped.stopped < self.seconds

    def grant(self, seconds: float) -> None:
        """Makes sure that at least `seconds` are left."""
        self.seconds = max(self.seconds, self.spent() + seconds)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the budget's clock in this context."""
        began = _now()
        try:
            yield
        finally:
            self._began += _now() - began

    def spent(self) -> float:
        """Returns the seconds since trials began, without worker start-up."""
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
        """Raises `OutOfTime` if the budget is spent."""
        assert self.budget is not None
        if self.budget.left() < 0:
            raise OutOfTime(f"a trial with {self.size} processes was stopped")

    # A trial leaves the user's model as it is: no state comes back, and none is sent again.
    def _bring_home(self, first: messages.Waiting) -> None:
        pass

    def _changes(self, first: messages.Waiting) -> messages.Proceed:
        return messages.Proceed(self.number)

    def reported(self) -> None:
        pass

    def step_times(self) -> list[tuple[int, int, int]]:
        """Returns begin, end and number of Keras's calls of each execution on rank 0."""
        rows = timeline.rows_of_steps(self.times[0])
        return [(began, ended, calls) for _, began, ended, _, _, _, calls in rows]


def tried(
    trial: TimedFit,
    plans: Mapping[int, topology.Plan],
    transport: str,
    budget: Budget,
    known: Mapping[int, Measured],
) -> list[Measured]:
    """Measures one candidate after the other while there is time; keeps known measurements.

    The next call tries the candidates that there was no time for.
    """
    measured: list[Measured] = []
    steps, cost = budget.steps, 0.0
    for number, plan in plans.items():
        if number in known:
            measured.append(known[number])
            continue
        one = measured[0] if measured else None
        # The trial ends a warm pool, but its measurement counts once the pool is warm again.
        is_warm = warm.is_warm(plan, transport)
        short = one is not None and steps is not None and one.seconds(steps) < START_UP
        if short and not is_warm:
            note = (
                f"not tried: this fit takes less time than starting workers, about {START_UP:g} s"
            )
            measured.append(Measured(number, None, note=note))
            continue
        if len(measured) == 1:  # no decision is possible without it, now or in the next call
            budget.grant(PATIENCE * cost)
        elif cost > budget.left() and one is not None:
            measured.append(Measured(number, None, note="not tried: no time left"))
            continue
        start = budget.spent()
        try:
            found = measure(trial, number, plan, transport, budget)
        except NanoError as error:
            logger.info("The trial with %d processes failed: %s", number, error)
            note = f"failed: {type(error).__name__}: {str(error).splitlines()[0][:60]}"
            found = Measured(number, None, note=note)
        finally:
            # The next number needs other workers, and these have drawn random numbers.
            if number > 1:
                warm.shutdown()
        if is_warm:  # start-up was not measured, but later workers have to start
            found = dataclasses.replace(found, start_up=START_UP)
        measured.append(found)
        cost = budget.spent() - start
        if number == 1 and found.step is not None:
            budget.step_takes(found.step)
    return measured


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
    with contextlib.ExitStack() as stack:
        with budget.paused():
            workers = stack.enter_context(warm.pool_for(plan, transport))
        start_up, spent = timeline.NS * (timing.now() - start), budget.spent()
        try:
            first.run(workers)
        except OutOfTime:
            spent = budget.spent() - spent
            note = f"too slow: stopped after {spent:.1f} s"
            return Measured(number, None, start_up, note, stopped=spent)
        seconds = _seconds_per_execution(first, workers, budget)
    return Measured(number, seconds / trial.steps_per_execution, start_up)


def _measure_here(trial: TimedFit, budget: Budget) -> Measured:
    """Measures one process by training a copy of the model in this process.

    A step cannot be stopped here, but it takes as long in a plain `fit`.
    """
    a, each = trial.arguments, trial.steps_per_execution
    x, most = a.x, trial.data.steps
    if not isinstance(trial.data.train, inputs.ArrayInput):
        x, most = model_copy.endless_copy(x), None
    stopwatch = Stopwatch(0, None)
    # The user's step may print while it is traced; a trial must not show that.
    quiet = contextlib.redirect_stdout(Quiet(sys.stdout))
    with keras_compiling.kept_random_states(), defaults.no_default(), quiet:
        theirs = model_copy.copy_of(trial)
        model_copy.copy_state((trial.model, trial.held), theirs)
        copy = theirs[0]
        copy.make_train_function()
        copy.train_function = stopwatch.timed(timing.TRAIN, copy.train_function)

        def seconds(executions: int, epochs: int) -> float:
            """Trains; returns seconds per execution, ignoring the first of several."""
            steps = executions * each if most is None else min(executions * each, most)
            stopwatch.begin()
            keras_models.keras_method(copy, "fit")(
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
            rows = list(timeline.rows_of_steps(stopwatch.finish()))
            began, ended = rows[min(1, len(rows) - 1)][1], rows[-1][2]
            return timeline.NS * (ended - began) / max(1, len(rows) - 1)

        found = seconds(1, 2)  # the first step is traced; the second tells how many fit
        count = int(min(MOST_STEPS, MEASURED_SECONDS / max(found, 1e-6)))
        if count >= 2 and budget.left() > 0:
            found = seconds(count + 1, 1)
    return Measured(1, found / each)


def _seconds_per_execution(first: TimedFit, workers: pool.Pool, budget: Budget) -> float:
    """Measures more executions if there is time for them; otherwise uses the second one."""
    began, ended, calls = first.step_times()[-1]
    seconds = timeline.NS * (ended - began) / calls
    count = int(min(MOST_STEPS, MEASURED_SECONDS / max(seconds, 1e-6)))
    if count < 2:
        return seconds
    more = first.again(first.size, count + 1, 1, budget)
    try:
        more.run(workers)
    except OutOfTime:
        return seconds
    (_, begin, _), *others = more.step_times()
    calls = sum(calls for _, _, calls in others)
    return timeline.NS * (others[-1][1] - begin) / calls if others else seconds
