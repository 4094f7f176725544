"""Python values that a step was traced with stay in it, as in one process, until `compile`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_history, assert_same_state

from nanotf.keras import Model, Sequential
from nanotf.pool import warm

pytestmark = pytest.mark.both_generations

L = tf.keras.layers
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(37, 5)), RANDOM.normal(size=(37, 3))


class Scaled(Model):
    """A model whose steps read a number from an attribute and from a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = L.Dense(3, kernel_initializer="ones")
        self.beta = 1.0
        self.options = {"scale": 1.0}

    def call(self, x: Any) -> Any:
        return self.dense(x) * self.options["scale"]

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.beta * tf.reduce_mean((self(x) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}

    def test_step(self, data: Any) -> Any:
        x, y = data
        return {"loss": self.beta * tf.reduce_mean((self(x) - y) ** 2)}


def _change(model: Any, what: str) -> None:
    if what == "attribute":
        model.beta = 2.0
    else:
        model.options["scale"] = 2.0


@pytest.mark.parametrize("what", ["attribute", "dict"])
@pytest.mark.parametrize("ends", [False, True], ids=["", "new-workers"])
def test_a_change_between_two_calls_changes_no_trace(what: str, ends: bool) -> None:
    def run(**workers: Any) -> tuple[Any, dict[str, list[float]]]:
        tf.keras.utils.set_random_seed(1)
        model = Scaled()
        model.compile(tf.keras.optimizers.SGD(0.1))
        calls = {"batch_size": 8, "verbose": 0, **workers}
        found = [model.fit(X, Y, validation_data=(X, Y), **calls).history]
        _change(model, what)
        if ends and workers:
            warm.end_pool()
        found.append(model.fit(X, Y, validation_data=(X, Y), **calls).history)
        found.append({"loss": [model.evaluate(X, Y, **calls, return_dict=True)["loss"]]})
        found.append({"sum": [float(np.sum(model.predict(X, **calls)))]})
        model.compile(tf.keras.optimizers.SGD(0.1))
        found.append(model.fit(X, Y, **calls).history)
        return model, {f"{i} {k}": v for i, h in enumerate(found) for k, v in h.items()}

    (expected, plain), (found, ours) = run(), run(num_processes=2)
    assert_same_history(ours, plain)
    assert_same_state(found, expected)


class Running(L.Layer):  # type: ignore[misc]
    """A layer whose Python code runs at each step, and reads an attribute and a dict then."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.options = 1.0, {"scale": 1.0}

    def call(self, x: Any) -> Any:
        out = tf.numpy_function(lambda v: v * self._now(v), [x], x.dtype)
        out.set_shape(x.shape)
        return out

    def _now(self, like: np.ndarray) -> Any:
        return like.dtype.type(self.factor * self.options["scale"])

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


@pytest.mark.parametrize("what", ["attribute", "dict"])
def test_code_that_steps_run_reads_what_is_there_now(what: str) -> None:
    def run(**workers: Any) -> list[float]:
        tf.keras.utils.set_random_seed(1)
        layer = Running()
        model = Sequential([L.Input((5,)), layer, L.Dense(3)])
        model.compile("sgd", "mse")
        found = []
        for number in (1.0, 2.0, 3.0):
            if what == "attribute":
                layer.factor = number
            else:
                layer.options["scale"] = number
            calls = {"batch_size": 8, "verbose": 0, **workers}
            if number < 3:
                found.append(model.fit(X, Y, **calls).history["loss"][0])
            found.append(model.evaluate(X, Y, **calls))
            found.append(float(np.sum(model.predict(X, **calls))))
        return found

    np.testing.assert_allclose(run(num_processes=2), run(), rtol=1e-4)


def test_a_change_at_the_begin_of_training_is_traced() -> None:
    class Beginning(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            self.model.beta += 1.0

    def run(**workers: Any) -> Any:
        tf.keras.utils.set_random_seed(1)
        model = Scaled()
        model.compile(tf.keras.optimizers.SGD(0.1))
        for _ in range(2):
            model.fit(X, Y, verbose=0, callbacks=[Beginning()], **workers)
        return model

    expected, found = run(), run(num_processes=2)
    assert found.beta == expected.beta == 3.0
    assert_same_state(found, expected)


def test_metrics_that_keras_has_not_built_keep_their_counts() -> None:
    """Several models share a list of metrics: the first epoch of the next does not reset them."""

    def run(**workers: Any) -> list[Any]:
        tf.keras.utils.set_random_seed(1)
        metrics = [tf.keras.metrics.TruePositives(name="tp"), tf.keras.metrics.BinaryAccuracy()]

        def made() -> Any:
            model = Sequential([L.Input((5,)), L.Dense(3, activation="sigmoid")])
            model.compile("sgd", "binary_crossentropy", metrics=metrics)
            return model

        data = {"x": X, "y": np.float64(Y > 0), "verbose": 0, **workers}
        model = made()
        found = [made().evaluate(**data), model.fit(**data, epochs=2).history]
        found += [model.evaluate(**data), made().evaluate(**data)]
        return [x for v in found for x in tf.nest.flatten(v)]

    np.testing.assert_allclose(run(num_processes=2), run(), rtol=1e-5)


def test_text_in_ragged_tensors_inside_a_model() -> None:
    words = np.random.default_rng(0).choice(["good", "bad", "film", "plot", "dull"], (37, 6))
    texts = tf.constant([" ".join(row[: 1 + i % 6]) for i, row in enumerate(words)])[:, None]

    def run(mode: str, **workers: Any) -> Any:
        tf.keras.utils.set_random_seed(1)
        vectorize = L.TextVectorization(max_tokens=9, output_mode=mode)
        vectorize.adapt(texts)
        inputs = tf.keras.Input((1,), dtype="string")
        model = Model(inputs, L.Dense(3)(vectorize(inputs)))
        model.compile("sgd", "mse")
        data = tf.data.Dataset.from_tensor_slices((texts, Y)).batch(8)
        return model, model.fit(data, epochs=2, verbose=0, **workers).history

    for mode in ("multi_hot", "tf_idf"):
        (expected, plain), (found, ours) = run(mode), run(mode, num_processes=2)
        assert_same_history(ours, plain)
        for one, other in zip(found.trainable_variables, expected.trainable_variables, strict=True):
            np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5)
