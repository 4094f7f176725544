"""All of Keras's optimizers, with their options, for dense and sparse gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_history, assert_same_state

from nanotf.compat.versions import is_keras_3
from nanotf.keras import Model

L = tf.keras.layers
optimizers = tf.keras.optimizers
pytestmark = pytest.mark.both_generations
ROWS = 22  # in batches of 8: neither divides the other
WRAPPERS = ("LossScaleOptimizer", "MultiOptimizer", "Optimizer")  # of other optimizers


def names() -> list[str]:
    found = {name: value for name, value in vars(optimizers).items() if inspect.isclass(value)}
    return sorted(
        n for n, v in found.items() if issubclass(v, optimizers.Optimizer) and n not in WRAPPERS
    )


def options_of(name: str) -> dict[str, dict[str, Any]]:
    """Returns arguments of an optimizer, by what they do."""
    parameters = inspect.signature(getattr(optimizers, name).__init__).parameters
    momentum = {"momentum": 0.9} if "momentum" in parameters else {}
    found: dict[str, dict[str, Any]] = {
        "averages": {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 2},
        "averages at the end": {"use_ema": True, "ema_momentum": 0.9},
        "clipped norms": {"clipnorm": 0.01},
        "clipped values": {"clipvalue": 0.01},
        "clipped norm of all": {"global_clipnorm": 0.01},
        "decay": {"weight_decay": 0.1},
        "schedule": {"learning_rate": optimizers.schedules.ExponentialDecay(0.05, 3, 0.5)},
        **{name: {name: True, **momentum} for name in ("amsgrad", "centered", "nesterov")},
    }
    if is_keras_3():
        found["accumulation"] = {"gradient_accumulation_steps": 2}
        found["loss scale"] = {"loss_scale_factor": 8.0}
    if momentum:
        found["momentum"] = momentum
    return {
        what: given
        for what, given in found.items()
        if parameters.keys() >= given.keys() or not {*given} & {"amsgrad", "centered", "nesterov"}
    }


def assert_same(make: Callable[[], Any]) -> None:
    """Trains a model with one process and with two."""
    random = np.random.default_rng(0)
    x = [random.integers(0, 11, (ROWS, 3)), random.normal(size=(ROWS, 4))]
    y = random.normal(size=(ROWS, 2))

    def trained(**options: Any) -> Any:
        tf.keras.backend.clear_session()  # layers have the same names
        tf.keras.utils.set_random_seed(1)
        ids, values = L.Input((3,), dtype="int64"), L.Input((4,))
        looked_up = L.Flatten()(L.Embedding(11, 3)(ids))
        hidden = L.Concatenate()([looked_up, L.Dense(4, "tanh")(values)])
        model = Model([ids, values], L.Dense(2)(hidden))
        model.compile(make(), "mse")
        history = model.fit(x, y, batch_size=8, epochs=3, verbose=0, shuffle=False, **options)
        return model, history.history

    try:
        expected, theirs = trained()
    except Exception as error:
        pytest.skip(f"Keras itself raises {type(error).__name__}")
    found, ours = trained(num_processes=2)
    assert_same_history(ours, theirs)
    assert_same_state(found, expected)
    assert _names(found) == _names(expected)


def _names(model: Any) -> list[str]:
    found = model.optimizer.variables
    return [getattr(v, "path", v.name) for v in (found() if callable(found) else found)]


# `make test` runs those whose update is more than Adam's, slots of the variables' shapes element by
# element: with norms, means or products of a variable, or without slots.
_SAMPLED = ("Adafactor", "Adam", "Ftrl", "Lamb", "Muon", "SGD")


@pytest.mark.every_case
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in _SAMPLED else pytest.mark.thorough)
        for name in names()
    ],
)
def test_each(float64: None, name: str) -> None:
    assert_same(lambda: getattr(optimizers, name)(learning_rate=0.05))


@pytest.mark.parametrize(("name", "what"), [(n, what) for n in names() for what in options_of(n)])
def test_options(float64: None, name: str, what: str) -> None:
    def make() -> Any:
        optimizer = getattr(optimizers, name)(**{"learning_rate": 0.05, **options_of(name)[what]})
        if what == "decay":
            optimizer.exclude_from_weight_decay(var_names=["bias"])
        return optimizer

    assert_same(make)


@pytest.mark.skipif(not hasattr(optimizers, "MultiOptimizer"), reason="Keras 3.15 has it")
def test_several_in_one(float64: None) -> None:
    def make() -> Any:
        by_path = {".*embedding.*": optimizers.Adam(0.05)}
        return optimizers.MultiOptimizer(
            optimizers.OptimizerMap(optimizers.SGD(0.05, momentum=0.9), by_path)
        )

    assert_same(make)


class WithTotal(optimizers.SGD):  # type: ignore[misc]
    """An own optimizer that keeps a variable beside its slots."""

    def __init__(self, learning_rate: float = 0.05, **kwargs: Any) -> None:
        super().__init__(learning_rate, **kwargs)
        self.total = tf.Variable(1.0, dtype=tf.float64, trainable=False)

    def update_step(self, gradient: Any, variable: Any, *rate: Any) -> None:
        if not isinstance(gradient, tf.IndexedSlices):
            self.total.assign_add(tf.reduce_sum(tf.cast(gradient, tf.float64) ** 2))
            gradient = gradient / tf.cast(self.total, gradient.dtype)
        super().update_step(gradient, variable, *rate)


def test_a_variable_beside_the_slots(float64: None) -> None:
    totals = []

    def make() -> Any:
        made = WithTotal()
        totals.append(made)
        return made

    assert_same(make)
    np.testing.assert_allclose(totals[1].total.numpy(), totals[0].total.numpy(), rtol=1e-10)
    assert totals[0].total.numpy() > 1.0
