"""`fit(num_processes="auto", tune=(...))`: measures settings beside the number of processes.

    choose       measured before? then no trial
      _tried     the model as it is, then each setting on top of what has proved faster
    applied      the settings in force, for trials and for the `fit` itself

`auto` has chosen the number of processes before, with the model as it is. Each setting gets one
trial with that number, if a tenth of the time that is left allows it. A setting is kept if it makes
a step clearly faster.

`jit_compile` is tried with the other value than the model's. What XLA computes differs from what
TensorFlow computes in the last digits. `bf16` is tried in two ways, and the faster one is kept:
layers compute in bfloat16, as with the dtype policy "mixed_bfloat16"; or TensorFlow's graphs do,
which layers do not see. Both keep two to three digits. Keras 2 decides when it makes a variable
whether calls cast it, so only the second way is tried there. Nothing is tried that the user has not
named.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from nanotf.compat import keras_build, process_state
from nanotf.compat.versions import is_keras_3
from nanotf.console import logger
from nanotf.machine import topology
from nanotf.parent.auto import choice_cache, rule, step_key, timed_fits
from nanotf.parent.auto.timed_fits import Budget, Measured
from nanotf.parent.fit_arguments import FitArguments
from nanotf.report import call_report

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


@contextlib.contextmanager
def _graphs_in_bfloat16(model: Any) -> Iterator[None]:
    name = "graph options"  # workers get them, too
    jit, options = before = process_state.read(name)
    process_state.adopt({name: (jit, {**options, _PASS: True})})
    try:
        yield
    finally:
        process_state.adopt({name: before})


_PASS = "auto_mixed_precision_onednn_bfloat16"  # of `tf.config.optimizer`
_OF_LAYERS, _OF_GRAPHS = "bf16", "bf16 of graphs"
_SETTINGS: dict[str, Callable[[Any], contextlib.AbstractContextManager[None]]] = {
    "jit_compile": _other_jit_compile,
    _OF_LAYERS: _in_bfloat16,
    _OF_GRAPHS: _graphs_in_bfloat16,
}
# By the names of `defaults.TUNE`, the settings of which one may be kept.
_WAYS = {"jit_compile": ("jit_compile",), "bf16": (_OF_LAYERS, _OF_GRAPHS)}


@contextlib.contextmanager
def applied(model: Any, settings: Sequence[str]) -> Iterator[None]:
    """Applies settings to a model in this context, and makes Keras trace its steps anew.

    Args:
        model: a compiled Keras model.
        settings: keys of `_SETTINGS`.
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


@contextlib.contextmanager
def _kept_traces(model: Any) -> Iterator[None]:
    """Gives the model its step functions back: Keras may be between two epochs that use them."""
    before = {name: getattr(model, name) for name in _FUNCTIONS}
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(model, name, function)


def _label(model: Any, settings: Sequence[str]) -> str:
    """Writes settings for people: "jit_compile=True, bf16"."""
    names = {"jit_compile": f"jit_compile={not model.jit_compile}"}
    return ", ".join(names.get(name, name) for name in settings)


# --------------------------------------------------------------------------------- choice
class ChosenSettings(NamedTuple):
    """The settings of `tune` that were chosen."""

    names: tuple[str, ...] = ()  # keys of `_SETTINGS`
    # If one of them changes numbers: the losses of the same steps without settings and with them,
    # see `timed_fits.losses_here`.
    losses: tuple[Sequence[float], ...] = ()


def choose(
    model: Any,
    arguments: FitArguments,
    tune: Sequence[str],
    number: int,
    plan: topology.Plan,
    transport: str,
    key: str,
    budget: Budget,
    one: Measured,
) -> tuple[ChosenSettings, str]:
    """Returns those of the settings that make a step faster, and a text that says why.

    Args:
        model: without settings.
        arguments: see `timed_fits.shortened`.
        tune: names of `defaults.TUNE`, each once.
        number: of processes, which `choice` has chosen.
        key: of the model's measurements without settings.
        one: one process, of which the time of a step is known.
    """
    key = step_key.digest_of(key, number, tuple(tune))
    entry = choice_cache.entries().get(key)
    if entry is not None:
        measured = [Measured(**m) for m in entry["measured"]]
        when = f"as measured on {entry['date']}"
    else:
        measured = _tried(model, arguments, tune, number, plan, transport, budget, one)
        when = f"measured in {budget.spent():.1f} s"
        found = [dataclasses.asdict(m) for m in measured if m.step is not None]
        if len(found) > 1:  # one alone has nothing to compare with
            choice_cache.remember_now(key, found, str(model.name))
    chosen = _decide(model, tune, measured)
    compared = [m.losses for m in measured if m.setting in ("", _label(model, chosen))]
    losses = tuple(compared) if all(compared) and len(compared) == 2 else ()
    return ChosenSettings(chosen, losses), _text(model, chosen, measured, when, losses)


def _decide(model: Any, tune: Sequence[str], measured: Sequence[Measured]) -> tuple[str, ...]:
    """Returns the settings that were kept: each must be clearly faster than those before it."""
    steps = {m.setting: m.step for m in measured if m.step is not None}
    chosen: tuple[str, ...] = ()
    best = steps.get("")
    for name in tune:
        kept = chosen
        for way in _WAYS[name]:
            step = steps.get(_label(model, (*kept, way)))
            # The second way has only to beat the first, which was clearly faster.
            worth = rule.WORTH if chosen == kept else 1.0
            if best is not None and step is not None and step < worth * best:
                chosen, best = (*kept, way), step
    return chosen


def _tried(
    model: Any,
    arguments: FitArguments,
    tune: Sequence[str],
    number: int,
    plan: topology.Plan,
    transport: str,
    budget: Budget,
    one: Measured,
) -> list[Measured]:
    """Measures the model as it is, and each setting on top of those kept before it."""
    measured: list[Measured] = []
    cost = timed_fits.expected(one, 0.0)
    trials = [(place, way) for place, name in enumerate(tune) for way in _WAYS[name]]
    for place, way in [(0, ""), *trials]:
        kept = _decide(model, tune[:place], measured)
        settings = (*kept, way) if way else ()
        label = _label(model, settings)
        note = "" if cost < budget.left() else "no time left"
        if way == _OF_LAYERS and not is_keras_3():
            note = "not tried: layers of Keras 2 keep their precision; use run --precision"
        if note:
            measured.append(Measured(number, None, note=note, setting=label))
            continue
        began = budget.spent()
        try:
            with _kept_traces(model), applied(model, settings):
                fit = timed_fits.TimedFit(model, arguments, number, budget)
                found = timed_fits.measure(fit, number, plan, transport, budget)
        # A setting may break the user's code, such as float32 constants in a bfloat16 model.
        except Exception as error:
            logger.info("The trial with %s failed: %s", label or "no setting", error)
            found = Measured(number, None, note=f"failed: {type(error).__name__}")
        measured.append(dataclasses.replace(found, setting=label))
        cost = max(cost, budget.spent() - began)  # XLA compiles for long
        if found.step is None and not way:  # there is nothing to compare with
            break
    return _with_losses(model, arguments, tune, measured, budget, one)


def _with_losses(
    model: Any,
    arguments: FitArguments,
    tune: Sequence[str],
    measured: Sequence[Measured],
    budget: Budget,
    one: Measured,
) -> list[Measured]:
    """Adds the losses without settings and with those that were chosen, if they change numbers."""
    chosen = _decide(model, tune, measured)
    found: dict[str, Sequence[float]] = {}
    assert one.step is not None
    left = budget.left() - 2 * one.start_up  # each copy traces its first step
    rounds = int(left / max(2 * timed_fits.LOSS_STEPS * one.step, 1e-9))
    rounds = min(rounds, timed_fits.LOSS_ROUNDS)
    if rounds > 1 and not set(chosen).isdisjoint(_WAYS["bf16"]):
        for settings in ((), chosen):
            label = _label(model, settings)  # of the model as it is
            with _kept_traces(model), applied(model, settings):
                trial = timed_fits.TimedFit(model, arguments, 1, budget)
                found[label] = timed_fits.losses_here(trial, rounds)
    return [dataclasses.replace(m, losses=found.get(m.setting, m.losses)) for m in measured]


def _text(
    model: Any,
    chosen: Sequence[str],
    measured: Sequence[Measured],
    when: str,
    losses: Sequence[Sequence[float]],
) -> str:
    each = [
        f"{m.setting or 'the model as it is'} "
        + (m.note if m.step is None else f"{1000 * m.step:.2f}")
        for m in measured
    ]
    text = f"{_label(model, chosen) or 'none'}, {when} in ms per step: {'; '.join(each)}."
    return " ".join([text, *call_report.lines_of_losses(losses)])
