"""`num_processes="auto"`: chooses the number of processes that trains a model fastest.

    choose | choice_of_settings.choose     a `Question`
      answer                    measured before? then no trial
        timed_fits.tried        measures the numbers of `candidates` while there is time
        decide                  the fastest number for this call's number of steps

A decision needs times of one process and of at least one number of workers; fewer times are not
remembered.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from nanotf.compat.versions import require_tensorflow
from nanotf.console import logger, say
from nanotf.errors import ModelError, ShippingError
from nanotf.machine import topology
from nanotf.parent.auto import candidates, choice_cache, step_key, timed_fits
from nanotf.parent.auto.timed_fits import Measured, TimedFit
from nanotf.parent.fit_arguments import FitArguments
from nanotf.parent.where import Where
from nanotf.pool import warm
from nanotf.shipping.data import inputs

WORTH = 0.97  # several processes must take less than this share of one process's time


def decide(measured: Sequence[Measured], steps: int | None) -> int:
    """Returns the number of processes that finishes a call first.

    Args:
        steps: steps of the call; None compares steps alone. A short call is not worth starting
            workers.

    Returns:
        1 unless several are clearly faster.
    """
    found = {m.num_processes: m.seconds(steps) for m in measured if m.step is not None}
    if 1 not in found:
        return 1
    best = min(found, key=lambda n: found[n])
    return best if found[best] < WORTH * found[1] else 1


class Question(Protocol):
    """A choice among candidates, which measurements make."""

    size: int  # workers of the trial
    otherwise: Any  # the choice without a trial

    def key(self, trial: TimedFit) -> str:
        """Returns a hash of everything that decides what is measured."""

    def measure(self, trial: TimedFit, known: list[Measured]) -> list[Measured]:
        """Returns the known measurements if they suffice, else others, with those kept."""

    def decide(self, measured: Sequence[Measured]) -> Any:
        """Returns the choice."""

    def without_trial(self, why: str) -> str:
        """Returns the line for a choice without a trial."""

    def with_trial(self, measured: Sequence[Measured], chosen: Any, date: str | None) -> str:
        """Returns the lines for a choice; `date` is that of measurements of an earlier call."""


def answer(question: Question, model: Any, given: Mapping[str, Any]) -> Any:
    """Returns what measurements choose: those of an earlier call, or new ones, which are kept.

    Args:
        model: a compiled Keras model.
        given: the arguments of Keras's `fit` that were given.

    Raises:
        NanoError: An argument cannot be used.
        Exception: What Keras raises for the arguments.
    """
    why_not = timed_fits.why_no_trial(given.get("x"))
    if why_not:
        say_choice(given, question.without_trial(why_not))
        return question.otherwise
    with timed_fits.unchanged(model):
        try:
            shortened = timed_fits.shortened(FitArguments.of(given))
            trial = TimedFit(model, shortened, question.size)
        except (ModelError, ShippingError) as error:  # one process trains whatever Keras can
            say_choice(given, question.without_trial(str(error)))
            return question.otherwise
        key = question.key(trial)
        entry = choice_cache.entries().get(key)
        known = [] if entry is None else [Measured(**m) for m in entry["measured"]]
        measured = question.measure(trial, known)
    date = entry["date"] if entry is not None and measured is known else None
    found = [dataclasses.asdict(m) for m in measured if m.step is not None or m.stopped]
    if date is None and choice_cache.decides(found):
        now = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
        choice_cache.remember(key, {"measured": found, "date": now, "model": str(model.name)})
    chosen = question.decide(measured)
    say_choice(given, question.with_trial(measured, chosen, date))
    return chosen


def choose(model: Any, given: Mapping[str, Any], where: Where) -> int:
    """Returns the number of processes for a `fit(num_processes="auto")`; arguments as `answer`.

    Args:
        where: the place of workers; their number does not matter.
    """
    if where.plan("fit") is None:
        say_choice(given, "TensorFlow sees GPUs; there is nothing to measure on CPU cores.")
        return 1
    plans = candidates.candidates(where.cores_per_process, where.cores)
    if len(plans) < 2:
        say_choice(given, "one process is all that the usable cores allow.")
        return 1
    return int(answer(_Numbers(FitArguments.of(given), plans, where.transport), model, given))


class _Numbers:
    """The numbers of processes among which "auto" chooses."""

    size = otherwise = 1

    def __init__(
        self, arguments: FitArguments, plans: Mapping[int, topology.Plan], transport: str
    ) -> None:
        self._arguments, self._plans, self._transport = arguments, plans, transport

    def key(self, trial: TimedFit) -> str:
        return key_of(trial, self._plans, self._transport)

    def measure(self, trial: TimedFit, known: list[Measured]) -> list[Measured]:
        self._steps = _steps_of_call(trial, self._arguments)
        self._budget = budget = timed_fits.Budget(self._steps)
        by_number = {m.num_processes: m for m in known}
        usable = {
            number: m
            for number, m in by_number.items()
            if number in self._plans and not budget.is_worth_more(m, by_number)
        }
        self._are_known = len(usable) == len(self._plans)
        if self._are_known:
            return known
        return timed_fits.tried(trial, self._plans, self._transport, budget, usable)

    def decide(self, measured: Sequence[Measured]) -> int:
        if self._are_known:  # a trial would have ended the warm pool
            measured = _with_warm_pool(measured, self._plans, self._transport)
        return decide(measured, self._steps)

    def without_trial(self, why: str) -> str:
        return f"no trial, 1 process: {why}"

    def with_trial(self, measured: Sequence[Measured], chosen: int, date: str | None) -> str:
        if date is not None:
            return f"{chosen}, as measured on {date}.{_notes(measured)}"
        return _table(measured, self._steps, chosen, self._budget.spent())


def _with_warm_pool(
    measured: Iterable[Measured], plans: Mapping[int, topology.Plan], transport: str
) -> list[Measured]:
    """Returns the measurements, without the start-up of workers that are already warm."""
    return [
        dataclasses.replace(m, start_up=0.0)
        if warm.is_warm(plans[m.num_processes], transport)
        else m
        for m in measured
    ]


def say_choice(given: Mapping[str, Any], text: str) -> None:
    """Prints what was chosen, or logs it if `fit` is to be quiet.

    Args:
        given: the arguments of `fit` that were given.
    """
    if given.get("verbose", "auto") == 0:
        logger.info('num_processes="auto": %s', text)
    else:
        say(f'num_processes="auto": {text}')


def _notes(measured: Iterable[Measured]) -> str:
    return "".join(f" ({m.num_processes}: {m.note})" for m in measured if m.note)


def _table(measured: Sequence[Measured], steps: int | None, chosen: int, seconds: float) -> str:
    others = [m for m in measured if m.num_processes > 1 and m.step is not None]
    one = measured[0].step
    if chosen == 1 and one is not None and others:
        best = min(others, key=lambda m: m.seconds(steps))
        return (
            f"1, measured in {seconds:.1f} s: {best.num_processes} processes take "
            f"{1000 * (best.step or 0.0):.2f} ms per step, one takes {1000 * one:.2f}"
            + ("" if steps is None else f", and {best.start_up:.1f} s to start")
            + "."
            + _notes(measured)
        )
    lines = [f"{chosen}, measured in {seconds:.1f} s:"]
    lines.append("  processes   ms per step   start-up, s   this fit, s")
    for m in measured:
        if m.step is None:
            lines.append(f"  {m.num_processes:>9}   {m.note}")
            continue
        whole = "?" if steps is None else f"{m.seconds(steps):.1f}"
        start = m.start_up if m.num_processes > 1 else 0.0
        lines.append(
            f"  {m.num_processes:>9}   {1000 * m.step:>11.2f}   {start:>11.1f}   {whole:>11}"
        )
    return "\n".join(lines)


# ---------------------------------------------------------------------------------- the call
def _steps_of_call(trial: TimedFit, arguments: FitArguments) -> int | None:
    each = arguments.steps_per_epoch or trial.data.steps
    return None if each is None else each * max(0, arguments.epochs - arguments.initial_epoch)


def key_of(trial: TimedFit, plans: Mapping[int, topology.Plan], transport: str) -> str:
    """Returns a hash of everything that decides the times: model, cores, versions and more."""
    tf = require_tensorflow()
    train = trial.data.train
    if isinstance(train, inputs.ArrayInput):
        batch = train.batch_size
    else:
        from nanotf.compat import dataset_graphs

        batch = dataset_graphs.batch_size(trial.arguments.x)
    return step_key.digest_of(
        step_key.description_of(trial.model),
        trial.data.specs,
        batch,
        repr(sorted(plans.items())),
        transport,
        _processor(),
        tf.__version__,
        tf.keras.Model.__module__.split(".")[0],
    )


def _processor() -> str:
    """Returns the processor's name: machines with equal cores may share the cache file."""
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return ""
