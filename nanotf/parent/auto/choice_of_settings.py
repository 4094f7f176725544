"""`fit(num_processes="auto", tune=(...))`: measures settings beside the number of processes.

    choose       measured before? then no trial
      _tried     the model as it is, then each setting on top of what has proved faster
    applied      the settings in force, for trials and for the `fit` itself

`auto` has chosen the number of processes before, with the model as it is. Each setting gets one
trial with that number. A setting is kept if it makes a step clearly faster.

`jit_compile` is tried with the other value than the model's. What XLA computes differs from what
TensorFlow computes in the last digits. `bf16` makes layers compute in bfloat16, as with the dtype
policy "mixed_bfloat16": two to three digits. Keras 2 decides when it makes a variable whether calls
cast it, so `bf16` is not tried there. Nothing is tried that the user has not named.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nanotf.compat import keras_build
from nanotf.compat.versions import is_keras_3
from nanotf.console import logger
from nanotf.machine import topology
from nanotf.parent.auto import candidates, choice, step_key, timed_fits
from nanotf.parent.auto.timed_fits import Measured
from nanotf.parent.where import Where
from nanotf.pool import warm

_FUNCTIONS = ("train_function", "test_function", "predict_function")


# ------------------------------------------------------------------------------- settings
@contextlib.contextmanager
def _other_jit_compile(model: Any) -> Iterator[None]:
    before = model.jit_compile
    model.jit_compile = not before
    try:
        yield
    finally:
        model.jit_compile = before


@contextlib.contextmanager
def _in_bfloat16(model: Any) -> Iterator[None]:
    policies = [
        (layer, layer.dtype_policy)
        for layer in keras_build.with_layers(model)
        if layer.compute_dtype == "float32"
    ]
    try:
        for layer, _ in policies:
            layer.dtype_policy = "mixed_bfloat16"
        yield
    finally:
        for layer, policy in policies:
            layer.dtype_policy = policy


# By the names of `defaults.TUNE`.
_SETTINGS: dict[str, Callable[[Any], contextlib.AbstractContextManager[None]]] = {
    "jit_compile": _other_jit_compile,
    "bf16": _in_bfloat16,
}


@contextlib.contextmanager
def applied(model: Any, settings: Sequence[str]) -> Iterator[None]:
    """Applies settings to a model in this context, and makes Keras trace its steps anew.

    Args:
        model: a compiled Keras model.
        settings: names of `defaults.TUNE`.
    """
    if not settings:
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.callback(_forget_traces, model)  # runs last
        for name in settings:
            stack.enter_context(_SETTINGS[name](model))
        _forget_traces(model)
        yield


def _forget_traces(model: Any) -> None:
    # Keras keeps its step functions until the next `compile`, with the settings of their trace.
    for name in _FUNCTIONS:
        setattr(model, name, None)


def _label(model: Any, settings: Sequence[str]) -> str:
    """Writes settings for people: "jit_compile=True, bf16"."""
    names = {"jit_compile": f"jit_compile={not model.jit_compile}"}
    return ", ".join(names.get(name, name) for name in settings)


# --------------------------------------------------------------------------------- choice
def choose(
    model: Any,
    given: Mapping[str, Any],
    tune: Sequence[str],
    number: int,
    where: Where,
) -> tuple[str, ...]:
    """Returns those of the settings that make a step faster.

    Args:
        model: a compiled Keras model.
        given: the arguments of Keras's `fit` that were given.
        tune: names of `defaults.TUNE`, each once.
        number: the number of processes that `choice.choose` returned.
        where: the place of workers; their number does not matter.

    Raises:
        NanoError: An argument cannot be used.
        Exception: What Keras raises for the arguments.
    """
    plan = candidates.candidates(where.cores_per_process, where.cores)[number]
    chosen = choice.answer(_Settings(model, tune, number, plan, where.transport), model, given)
    return tuple(chosen)


class _Settings:
    """The settings of `tune`, each on top of what has proved faster."""

    otherwise = ()

    def __init__(
        self, model: Any, tune: Sequence[str], size: int, plan: topology.Plan, transport: str
    ) -> None:
        self._model, self._tune, self.size = model, tune, size
        self._plan, self._transport = plan, transport

    def key(self, trial: timed_fits.TimedFit) -> str:
        whole = choice.key_of(trial, {self.size: self._plan}, self._transport)
        return step_key.digest_of(whole, tuple(self._tune))

    def measure(self, trial: timed_fits.TimedFit, known: list[Measured]) -> list[Measured]:
        return known or _tried(trial, self._tune, self.size, self._plan, self._transport)

    def decide(self, measured: Sequence[Measured]) -> tuple[str, ...]:
        return _decide(self._model, self._tune, measured)

    def without_trial(self, why: str) -> str:
        return f"tune: no trial: {why}"

    def with_trial(
        self, measured: Sequence[Measured], chosen: Sequence[str], date: str | None
    ) -> str:
        return f"tune: {_text(self._model, chosen, measured, date)}"


def _decide(model: Any, tune: Sequence[str], measured: Sequence[Measured]) -> tuple[str, ...]:
    """Returns the settings that were kept: each must be clearly faster than those before it."""
    steps = {m.setting: m.step for m in measured if m.step is not None}
    chosen: tuple[str, ...] = ()
    best = steps.get("")
    for name in tune:
        step = steps.get(_label(model, (*chosen, name)))
        if best is not None and step is not None and step < choice.WORTH * best:
            chosen, best = (*chosen, name), step
    return chosen


def _tried(
    trial: timed_fits.TimedFit,
    tune: Sequence[str],
    number: int,
    plan: topology.Plan,
    transport: str,
) -> list[Measured]:
    """Measures the model as it is, and each setting on top of those kept before it."""
    model, arguments = trial.model, trial.arguments
    budget = timed_fits.Budget(None)
    measured: list[Measured] = []
    try:
        for place in range(len(tune) + 1):
            kept = _decide(model, tune[: place - 1], measured) if place else ()
            settings = (*kept, tune[place - 1]) if place else ()
            label = _label(model, settings)
            if "bf16" in settings and not is_keras_3():
                note = "not tried: layers of Keras 2 keep their precision; use run --precision"
                measured.append(Measured(number, None, note=note, setting=label))
                continue
            if place > 1 and budget.left() < 0:
                measured.append(Measured(number, None, note="no time left", setting=label))
                continue
            try:
                with applied(model, settings):
                    one = timed_fits.TimedFit(model, arguments, number, budget)
                    found = timed_fits.measure(one, number, plan, transport, budget)
            # A setting may break the user's code, such as float32 constants in a bfloat16 model.
            except Exception as error:
                logger.info("The trial with %s failed: %s", label or "no setting", error)
                found = Measured(number, None, note=f"failed: {type(error).__name__}")
            measured.append(dataclasses.replace(found, setting=label))
            if place == 0:
                if found.step is None:  # there is nothing to compare with
                    break
                # Compiling takes long, and steps of XLA or bfloat16 may be many times as slow.
                budget.grant(timed_fits.TRIAL_SECONDS)
    finally:
        if number > 1:
            warm.shutdown()  # these workers have drawn random numbers
    return measured


def _text(
    model: Any,
    chosen: Sequence[str],
    measured: Sequence[Measured],
    date: str | None,
) -> str:
    when = "measured" if date is None else f"as measured on {date}"
    each = [
        f"{m.setting or 'the model as it is'} "
        + (m.note if m.step is None else f"{1000 * m.step:.2f}")
        for m in measured
    ]
    return f"{_label(model, chosen) or 'none'}, {when} in ms per step: {'; '.join(each)}."
