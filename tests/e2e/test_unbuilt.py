"""Models that the first call builds, from inputs of any type or in the model's own step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_state

from nanotf.keras import Model

pytestmark = pytest.mark.both_generations

L = tf.keras.layers
ROWS, BATCH = 40, 10


def _reals(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(ROWS, *shape))


def _integers(limit: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(2).integers(0, limit, (ROWS, *shape))


class _Trains(Model):
    """Has its own step, which calls `losses_of_rows`."""

    def losses_of_rows(self, data: Any) -> Any:
        raise NotImplementedError

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.losses_of_rows(data))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}

    def test_step(self, data: Any) -> Any:
        return {"loss": tf.reduce_mean(self.losses_of_rows(data))}


class Siamese(_Trains):
    """Has no `call`, and makes its variables in a different order from its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = L.Dense(2)
        self.net = tf.keras.Sequential([L.Dense(3, activation="tanh"), L.Dense(4)])

    def losses_of_rows(self, data: Any) -> Any:
        anchor, positive, negative = (self.head(self.net(x)) for x in data)
        near = tf.reduce_sum(tf.square(anchor - positive), -1)
        return tf.nn.softplus(near - tf.reduce_sum(tf.square(anchor - negative), -1))


class Nodes(L.Layer):
    """Looks rows up by integers, and fails for other types."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words, self.width = words, width

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(
            shape=(self.words, self.width), initializer="random_normal", name="table"
        )

    def call(self, indices: Any) -> Any:
        return tf.gather(tf.convert_to_tensor(self.table), indices)


class Graph(_Trains):
    """Is called on two of the dataset's three arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.message = L.Dense(3, activation="tanh")
        self.out = L.Dense(1)

    def call(self, inputs: Any) -> Any:
        nodes, edges = inputs
        return self.out(tf.gather(self.message(nodes), edges, axis=1, batch_dims=1))

    def losses_of_rows(self, data: Any) -> Any:
        nodes, edges, y = data
        return tf.reduce_mean(tf.square(self([nodes, edges])[..., 0] - y), -1)


class Words(Model):
    """Resembles a language model: a dict of integers, and an embedding inside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = Nodes(11, 3)
        self.out = L.Dense(2)

    def call(self, inputs: Any) -> Any:
        mask = tf.cast(inputs["mask"], tf.keras.backend.floatx())[..., None]
        return self.out(tf.reduce_sum(self.nodes(inputs["ids"]) * mask, 1))


def _triplets() -> tuple[Any, Any]:
    return Siamese, tuple(_reals(5) + shift for shift in (0, 1, 2))


def _graphs() -> tuple[Any, Any]:
    return Graph, (_reals(4, 3), _integers(4, 6), _reals(6))


def _words() -> tuple[Any, Any]:
    return Words, ({"ids": _integers(11, 4), "mask": _integers(2, 4)}, _reals(2))


@pytest.mark.parametrize("kind", [_triplets, _graphs, _words])
@pytest.mark.parametrize("first", ["fit", "evaluate"])
def test_the_first_call_builds(float64: None, kind: Any, first: str) -> None:
    make, arrays = kind()
    data = tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH)
    models: list[Any] = []
    for processes in (None, 2):
        tf.keras.utils.set_random_seed(4)
        model = make()
        model.compile(tf.keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        if first == "evaluate":
            model.evaluate(data, verbose=0, num_processes=processes)
        model.fit(data, epochs=2, verbose=0, num_processes=processes)
        models.append(model)
    assert_same_state(models[1], models[0])


def test_a_model_that_was_called_on_integers(float64: None) -> None:
    """Its configuration has the shapes that it was built with, but no types."""
    _, (x, _) = _words()
    model = Words()
    expected = np.asarray(model(x))
    found = model.predict(x, batch_size=BATCH, verbose=0, num_processes=2)
    np.testing.assert_allclose(found, expected, rtol=1e-10)
