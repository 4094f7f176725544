"""`num_processes="auto"`: chooses the number of processes that trains a model fastest.

    Auto.without_data  nothing to choose
    Auto.at_once       an earlier call has measured
    Auto.watch         else this process trains, and times its own steps; between two epochs
      Auto.can_leave   whether another call can train the rest
      Auto.rest        chooses what trains the rest; `rule` says if measuring is worth its time
        timed_fits     measures workers
        decide         the fastest number for the steps that are left
        settings       those of `tune` that are faster, see `choice_of_settings`

A call that ends before the choice leaves the time of its steps to the next one, if it is long
enough for a measurement.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nanotf.compat import keras_build, keras_runs
from nanotf.compat.generation import generation
from nanotf.console import logger, say
from nanotf.errors import ModelError, ShippingError
from nanotf.machine import neighbours, topology
from nanotf.parent.auto import (
    candidates,
    choice_cache,
    choice_of_settings,
    first_epochs,
    rule,
    step_key,
    timed_fits,
)
from nanotf.parent.auto.timed_fits import Budget, Measured, TimedFit
from nanotf.parent.fit_arguments import FitArguments
from nanotf.parent.reading.fit_data import FitData
from nanotf.parent.where import Where
from nanotf.pool import warm
from nanotf.shipping.data import inputs


class Choice(NamedTuple):
    """The number of processes that trains a model, and its settings."""

    number: Any = 1
    settings: tuple[str, ...] = ()  # of `tune`
    losses: tuple[Sequence[float], ...] = ()  # see `choice_of_settings.ChosenSettings`


def decide(measured: Sequence[Measured], steps: int | None) -> int:
    """Returns the number of processes that finishes a call first.

    Args:
        steps: steps that are left; None compares steps alone. A short call is not worth starting
            workers.

    Returns:
        1 unless several are clearly faster.
    """
    found = {m.num_processes: m.seconds(steps) for m in measured if m.step is not None}
    if 1 not in found:  # nothing to compare with
        return 1
    best = min(found, key=lambda n: found[n])
    return best if found[best] < rule.WORTH * found[1] else 1


class Auto:
    """The choice of one `fit(num_processes="auto")`.

    Args:
        model: a Keras model.
        given: the arguments of Keras's `fit` that were given.
        where: the place of workers; their number does not matter.
        tune: names of `defaults.TUNE`, each once.
        resumes: whether `fit` writes checkpoints: such a call has one beginning and one end.

    Raises:
        NanoError: An argument cannot be used.
    """

    def __init__(
        self,
        model: Any,
        given: Mapping[str, Any],
        where: Where,
        tune: Sequence[str] = (),
        resumes: bool = False,
    ) -> None:
        self._model, self._where, self._tune = model, where, tune
        self._numbers = [1]
        self._has_gpus = not where.can_have_workers("fit")
        if not self._has_gpus:
            self._numbers = candidates.numbers(where.cores_per_process, where.cores)
        self.arguments = FitArguments.of(given)
        self._resumes = resumes
        self.watch = first_epochs.Watch(self.can_leave, self.rest)

    def say(self, text: str) -> None:
        """Prints what was chosen, or logs it if `fit` is to be quiet."""
        if self.arguments.verbose == 0:
            logger.info('num_processes="auto": %s', text)
        else:
            say(f'num_processes="auto": {text}')

    # ------------------------------------------------------------------- before training
    def without_data(self) -> Choice | None:
        """Returns the choice, after a line, if nothing can be measured."""
        why = timed_fits.why_no_trial(self.arguments.x)
        if self._has_gpus:
            why = "TensorFlow sees GPUs; there is nothing to measure on CPU cores."
        elif len(self._numbers) < 2 and not self._tune:
            why = "one process is all that the usable cores allow."
        if why:
            self.say(f"one process, not measured: {why}")
            return Choice()
        return None

    def at_once(self, data: FitData) -> Choice | None:
        """Returns the choice if an earlier call has timed a step.

        Args:
            data: of the call; nothing is read.

        Raises:
            NanoError: An argument cannot be used.
            Exception: What Keras raises for the arguments.
        """
        train = data.train  # the data themselves are not kept: they may be large
        self._batch = train.batch_size if isinstance(train, inputs.ArrayInput) else None
        self._specs = data.specs
        if not choice_cache.entries():  # spares the work below, which may build the model
            return None
        budget = Budget()
        with timed_fits.unchanged(self._model):
            if keras_build.needs_call(self._model) and self._trial() is None:  # which builds it
                return Choice()
            one = self._known().get(1)
            if one is None or one.step is None:
                return None
            return self._chosen(budget, one, self.arguments.initial_epoch, data.steps)

    # ------------------------------------------------------------------- between two epochs
    def can_leave(self, epoch: int) -> bool:
        """Returns True if another call can train from an epoch on, as this one would."""
        a = self.arguments
        # With a number of steps, an epoch may begin where the data of the one before have ended.
        if self._resumes or a.steps_per_epoch is not None or a.validation_steps is not None:
            return False
        if a.validation_data is not None and timed_fits.why_no_trial(a.validation_data):
            return False  # Keras may have read a part of them
        # After `BackupAndRestore` has restored a model, Keras may begin elsewhere.
        place = generation().place_to_resume(self._model, epoch, self.watch.steps)
        return place == (epoch, 0)

    def rest(self, epoch: int) -> Choice | None:
        """Returns what trains the rest of the call, from an epoch on; None for this process."""
        chosen = None
        with _only_logged():
            one = self._timed()
            if one is None or not self._may_measure(one, epoch):
                self._explain(one, epoch)
                return None
            budget = Budget()
            keras_runs.forget_validation_data(self._model)  # Keras makes the iterator again
            with timed_fits.unchanged(self._model):
                chosen = self._chosen(budget, one, epoch, self.watch.steps)
        return None if chosen == Choice() else chosen

    def end(self) -> None:
        """Ends a training in this process: says why nothing was measured, if it was not."""
        if not self.watch.is_open:
            return
        self.watch.is_open = False
        with _only_logged():
            one, begin = self._timed(), self.arguments.initial_epoch
            self._explain(one, begin)
            # The next such call measures before it trains.
            if one is not None and self._may_measure(one, begin):
                self._remember([one])

    def _timed(self) -> Measured | None:
        clock = self.watch.clock
        return None if clock.step is None else Measured(1, clock.step, clock.first or 0.0)

    def _left(self, one: Measured, epoch: int, steps: int) -> float:
        """Returns the seconds that the epochs from `epoch` on take in one process."""
        assert one.step is not None
        return one.step * steps * max(0, self.arguments.epochs - epoch)

    def _allowed(self, left: float) -> float:
        """Returns the seconds that measuring may take."""
        # Workers save all but a share of the time; for a setting of `tune` no such limit is known.
        return rule.allowed(left if self._tune else rule.can_save(left, self._numbers[-1]))

    def _may_measure(self, one: Measured, epoch: int) -> bool:
        left = self._left(one, epoch, self.watch.steps)
        return timed_fits.expected(one, self._start_up()) <= self._allowed(left)

    def _start_up(self) -> float:
        """Returns the seconds in which workers of the least number start."""
        if len(self._numbers) < 2 or self._is_warm(self._numbers[1]):
            return 0.0
        return rule.start_up()

    def _is_warm(self, number: int) -> bool:
        """Returns True if workers wait for this call."""
        # First: a plan may warn of other pools, which is of no interest if no worker starts.
        has_some = number > 1 and bool(warm.worker_pids())
        return has_some and warm.is_warm(self._plan(number), self._transport)

    def _explain(self, one: Measured | None, epoch: int) -> None:
        """Says why nothing was measured."""
        if one is None or one.step is None:
            self.say("one process, not measured: the call ended before a step could be timed.")
            return
        each, start_up, most = self.watch.steps, self._start_up(), self._numbers[-1]
        left = self._left(one, epoch, each)
        what = "the rest" if epoch > self.arguments.initial_epoch else "this call"
        text = f"one process, not measured: {what} takes about {_seconds(left)}"
        if most > 1:
            pays = rule.pays_from(start_up, one.step, one.step / most)
            text += f", and workers start in about {_seconds(start_up)}"
            text += f"; they pay from about {rule.in_epochs(pays or 1, each)} at best"
        cost = timed_fits.expected(one, start_up)
        steps = max(1, round(cost / self._allowed(1.0) / one.step))
        if not self._may_measure(one, epoch):
            text += f', and "auto" measures from {rule.in_epochs(steps, each)}'
        else:
            text += ". The next such call measures before it trains"
        self.say(f"{text}.")

    # ------------------------------------------------------------------------- measuring
    def _trial(self) -> TimedFit | None:
        """Returns a trial that was not run; None, after a line, if the model allows none."""
        try:
            return TimedFit(self._model, timed_fits.shortened(self.arguments), 1)
        except (ModelError, ShippingError) as error:  # one process trains whatever Keras can
            self.say(f"one process, not measured: {error}")
            return None

    @property
    def _transport(self) -> str:
        return self._where.transport

    def _plan(self, number: int) -> topology.Plan:
        each = self._where.cores_per_process if number > 1 else None
        return neighbours.plan(number, each, self._where.cores)

    def _known(self) -> dict[int, Measured]:
        """Returns what earlier calls have measured, by the number of processes."""
        entry = choice_cache.entries().get(self._key())
        self._date = None if entry is None else entry["date"]
        found = [] if entry is None else [Measured(**m) for m in entry["measured"]]
        return {m.num_processes: m for m in found if m.num_processes in self._numbers}

    def _key(self) -> str:
        cores = self._where.cores and list(self._where.cores)
        used = self._numbers, self._where.cores_per_process, cores, self._transport
        return step_key.key_of(self._model, self._specs, self._batch, self.arguments.x, used)

    def _remember(self, measured: Iterable[Measured]) -> None:
        found = [dataclasses.asdict(m) for m in measured if m.step is not None or m.stopped]
        choice_cache.remember_now(self._key(), found, str(self._model.name))

    def _chosen(self, budget: Budget, one: Measured, epoch: int, each: int | None) -> Choice:
        """Returns the choice for the epochs from `epoch` on; measures what is not known.

        Args:
            budget: began before anything was prepared.
            one: one process, of which the time of a step is known.
            each: the steps of an epoch, None if unknown.
        """
        steps = None if each is None else each * max(0, self.arguments.epochs - epoch)
        known = {**self._known(), 1: one}
        left = 0.0 if steps is None or one.step is None else one.step * steps
        budget.seconds = rule.allowed(rule.can_save(left, self._numbers[-1]))
        missing = [
            number
            for number in self._numbers
            if (m := known.get(number)) is None
            # A trial that was stopped may be worth more time in a longer call.
            or 0 < 2 * m.stopped < budget.seconds
        ]
        measured, trial = [known[number] for number in sorted(known)], None
        if missing and timed_fits.expected(one, self._start_up()) <= budget.left():
            if (trial := self._trial()) is None:
                return Choice()
            plans = {number: self._plan(number) for number in missing}
            start_up = self._start_up()
            measured = timed_fits.tried(trial, plans, self._transport, budget, known, start_up)
        is_new = any(m not in known.values() and (m.step or m.stopped) for m in measured)
        if is_new or self._date is None:
            self._remember(measured)
        now = measured if is_new else self._with_warm_pool(measured)
        number = decide(now, steps)
        # Times of an earlier call do not tell if workers can have this model.
        if number > 1 and trial is None and self._trial() is None:
            return Choice()
        when = "" if self._date is None else f"; as measured on {self._date}"
        when = f"; measured in {budget.spent():.1f} s" if is_new else when
        self.say(_line(now, number, each, when))
        chosen = Choice(number)
        if self._tune:
            chosen = Choice(number, *self._settings(number, one, left))
        if number == 1 and is_new:
            warm.close_if_idle()  # nothing needs what has imported TensorFlow
        return chosen

    def _settings(
        self, number: int, one: Measured, left: float
    ) -> choice_of_settings.ChosenSettings:
        """Returns those of the settings of `tune` that make a step faster."""
        budget = Budget()
        budget.seconds = rule.allowed(left)
        settings, text = choice_of_settings.choose(
            self._model,
            timed_fits.shortened(self.arguments),
            self._tune,
            number,
            self._plan(number),
            self._transport,
            self._key(),
            budget,
            one,
        )
        self.say(f"tune: {text}")
        return settings

    def _with_warm_pool(self, measured: Sequence[Measured]) -> list[Measured]:
        """Returns the measurements, without the start-up of workers that are already warm."""
        return [
            dataclasses.replace(m, start_up=0.0) if self._is_warm(m.num_processes) else m
            for m in measured
        ]


@contextlib.contextmanager
def _only_logged() -> Iterator[None]:
    """Logs an error: what this process has trained counts, and it can train the rest."""
    try:
        yield
    except Exception as error:
        logger.warning(
            'num_processes="auto" could not choose, and one process trains. %s: %s',
            type(error).__name__,
            error,
        )


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 1 else f"{value:.1f} s"


def _line(measured: Sequence[Measured], number: int, each: int | None, when: str) -> str:
    """Writes a choice for people: "2 workers: 12.0 ms a step beside 19.0 in one process; ..."."""
    one = next(m for m in measured if m.num_processes == 1)
    several = [m for m in measured if m.num_processes > 1 and m.step is not None]
    assert one.step is not None
    notes = "".join(f" ({m.num_processes}: {m.note})" for m in measured if m.note)
    if not several:
        return f"one process: {1000 * one.step:.1f} ms a step{when}.{notes}"
    best = min(several, key=lambda m: m.step or 0.0)
    shown = next((m for m in several if m.num_processes == number), best)
    assert shown.step is not None
    here, there = f"{1000 * one.step:.1f}", f"{1000 * shown.step:.1f}"
    if number > 1:
        text = f"{number} workers: {there} ms a step beside {here} in one process"
    else:
        text = f"one process: {here} ms a step beside {there} with {shown.num_processes} workers"
    pays = rule.pays_from(shown.start_up, one.step, shown.step)
    if pays is None:
        told = "workers do not pay"
    else:
        told = f"workers start in {shown.start_up:.1f} s and pay from {rule.in_epochs(pays, each)}"
    others = [m for m in several if m is not shown]
    also = "".join(f" ({m.num_processes}: {1000 * (m.step or 0.0):.1f} ms)" for m in others)
    return f"{text}{when}; {told}.{also}{notes}"
