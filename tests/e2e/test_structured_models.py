"""Models of any inputs, outputs and layers train, evaluate and predict as in plain Keras."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_history, fit_both
from trainer_model import L, X, Y, example, rows_of

from nanotf.compat.versions import is_keras_3
from nanotf.keras import Model, Sequential

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("steps_per_epoch", [None, 3])
@pytest.mark.both_generations
def test_fit_flow(run_eagerly: bool, steps_per_epoch: int | None) -> None:
    fit_both(
        lambda: example(metrics=["mae"], run_eagerly=run_eagerly),
        x=X, y=Y, batch_size=12, steps_per_epoch=steps_per_epoch,
    )  # fmt: skip


@pytest.mark.both_generations
def test_evaluate_and_predict_in_this_process_after_fit() -> None:
    found, expected = fit_both(lambda: example(metrics=["mae"]), x=X, y=Y, batch_size=12)
    ours = found.evaluate(X, Y, batch_size=7, verbose=0, return_dict=True)
    theirs = expected.evaluate(X, Y, batch_size=7, verbose=0, return_dict=True)
    assert_same_history({k: [v] for k, v in ours.items()}, {k: [v] for k, v in theirs.items()})
    np.testing.assert_allclose(
        found.predict(X, batch_size=7, verbose=0),
        expected.predict(X, batch_size=7, verbose=0),
        rtol=1e-9,
    )
    assert found.metrics_names == expected.metrics_names
    np.testing.assert_allclose(found.train_on_batch(X, Y), expected.train_on_batch(X, Y))
    np.testing.assert_allclose(found.test_on_batch(X, Y), expected.test_on_batch(X, Y))


# ------------------------------------------------------------------------------- inputs and outputs
class Named(Model):  # type: ignore[misc]
    """Takes a list, a tuple or a dict of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = L.Dense(3)
        self.second = L.Dense(3)

    def call(self, inputs: Any) -> Any:
        a, b = (inputs["a"], inputs["b"]) if isinstance(inputs, dict) else inputs
        return self.first(a) + self.second(b)


@pytest.mark.parametrize("kind", ["list", "tuple", "dict"])
def test_fit_takes_structures_of_inputs(kind: str) -> None:
    x: Any = {"a": X, "b": rows_of(46, 2, seed=1)}
    if kind != "dict":
        x = (tuple if kind == "tuple" else list)(x.values())

    def make() -> Any:
        tf.keras.utils.set_random_seed(1)
        model = Named()
        model.compile("sgd", "mse", metrics=["mae"])
        model(tf.nest.map_structure(lambda v: v[:1], x))
        return model

    fit_both(make, x=x, y=Y, batch_size=12)


def nested() -> Any:
    """Returns a model with inputs in a nested structure, and outputs in a dict."""
    tf.keras.utils.set_random_seed(2)
    inputs = {"a": L.Input((4,), name="a"), "b": L.Input((2,), name="b")}
    hidden = L.Concatenate()([inputs["a"], L.Dense(3)(inputs["b"])])
    outputs = {"c": L.Dense(3, name="c")(hidden), "d": L.Dense(1, name="d")(hidden)}
    return Model(inputs, outputs)


@pytest.mark.both_generations
def test_nested_inputs_and_outputs_with_loss_weights() -> None:
    def make() -> Any:
        model = nested()
        model.compile(
            "sgd",
            loss={"c": "mse", "d": "mae"},
            loss_weights={"c": 0.5, "d": 2.0},
            metrics={"c": ["mae"], "d": ["mse"]},
        )
        return model

    x = {"a": X, "b": rows_of(46, 2, seed=1)}
    found, expected = fit_both(make, x=x, y={"c": Y, "d": Y[:, :1]}, batch_size=12)
    theirs, ours = expected.predict(x, verbose=0), found.predict(x, verbose=0)
    for name in ("c", "d"):
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-9)


def test_a_loss_for_one_of_two_outputs_only() -> None:
    def make() -> Any:
        model = nested()
        model.compile("sgd", loss={"c": "mse", "d": None} if is_keras_3() else {"c": "mse"})
        return model

    x = {"a": X, "b": rows_of(46, 2, seed=1)}
    fit_both(make, x=x, y={"c": Y, "d": Y[:, :1]}, batch_size=12)


@pytest.mark.skipif(is_keras_3(), reason="Keras 3 requires one for each output with a loss")
@pytest.mark.parametrize("loss", ["mse", ["mse", None]])
def test_one_target_for_two_outputs(loss: Any) -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(3)
        inputs = L.Input((4,))
        model = Model(inputs, [L.Dense(3, name="a")(inputs), L.Dense(3, name="b")(inputs)])
        model.compile("sgd", loss, metrics=["mae"] if loss == "mse" else [["mae"], []])
        return model

    fit_both(make, x=X, y=Y, batch_size=12)


@pytest.mark.skipif(is_keras_3(), reason="Keras 3 requires the target of every output")
def test_target_of_one_of_two_named_outputs() -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(3)
        inputs = L.Input((4,))
        model = Model(inputs, {"a": L.Dense(3, name="a")(inputs), "b": L.Dense(3)(inputs)})
        model.compile("sgd", loss={"a": "mse"}, metrics={"a": ["mae"]})
        return model

    fit_both(make, x=X, y={"a": Y}, batch_size=12)


@pytest.mark.thorough
def test_no_target_for_some_outputs() -> None:
    inputs_width = 4

    def make() -> Any:
        tf.keras.utils.set_random_seed(2)
        inputs = L.Input((inputs_width,))
        hidden = L.Dense(3, name="a")(inputs)
        others = [L.Dense(2, name="b")(hidden), L.Dense(1, name="c")(hidden)]
        model = Model(inputs, [hidden, *others])
        model.compile("sgd", ["mse", None, None])
        return model

    y: Any = Y if is_keras_3() else [Y, Y[:, :2], Y[:, :1]]
    fit_both(make, x=X, y=y, batch_size=12)


# ------------------------------------------------------------------------------------------- layers
@pytest.mark.both_generations
def test_nested_models_that_are_compiled() -> None:
    def make() -> Any:
        inner, other = example(metrics=["mse"]), example()
        inputs = L.Input((4,))
        outputs = [L.Dense(3, name="a")(inner(inputs)), L.Dense(1, name="b")(other(inputs))]
        model = Model(inputs, outputs)
        model.compile("sgd", ["mse", "mae"], metrics=[["mae"], ["mse"]])
        return model

    found, expected = fit_both(make, x=X, y=[Y, Y[:, :1]], batch_size=12)
    assert found.metrics_names == expected.metrics_names
    assert [m.name for m in found.metrics] == [m.name for m in expected.metrics]


@pytest.mark.both_generations
def test_adapted_layer_before_fit() -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(3)
        normal = L.Normalization()
        normal.adapt(X * 3 + 1)
        model = Sequential([L.Input((4,)), normal, L.Dense(3)])
        model.compile("sgd", "mse")
        return model

    fit_both(make, x=X, y=Y, batch_size=12)


def test_constraints_hold_after_every_step() -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(3)
        model = Sequential([L.Input((4,)), L.Dense(3, kernel_constraint="non_neg")])
        model.compile(tf.keras.optimizers.SGD(0.5), "mse")
        return model

    found, _ = fit_both(make, x=X, y=-Y, batch_size=12)
    assert (found.get_weights()[0] >= 0).all()


class Different(L.Layer):  # type: ignore[misc]
    def call(self, inputs: Any, training: Any = False) -> Any:
        return inputs * (2.0 if training else 1.0)


@pytest.mark.both_generations
def test_training_argument() -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(3)
        model = Sequential([L.Input((4,)), L.Dense(3), Different()])
        model.compile("sgd", "mse")
        return model

    found, expected = fit_both(make, x=X, y=Y, batch_size=12, validation_data=(X, Y))
    assert found.history.history["val_loss"][-1] != found.history.history["loss"][-1]
    outputs = [m.predict(X, verbose=0, num_processes=n) for m, n in ((found, 2), (expected, None))]
    np.testing.assert_allclose(outputs[0], outputs[1], rtol=1e-9)
