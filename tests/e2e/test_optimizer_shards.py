"""An optimizer's work divided between two workers gives the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_state, fit_both

from nanotf.collectives.engine import part_of
from nanotf.compat import keras_optimizers, versions
from nanotf.keras import Model, Sequential
from nanotf.optimizers import SparseAdam
from nanotf.region.sharded_update import OptimizerShards, ShardedUpdate, pieces_of

L = tf.keras.layers
O = tf.keras.optimizers  # noqa: E741

DIVIDED: dict[str, Callable[[], Any]] = {
    "Adadelta": lambda: O.Adadelta(1.0),
    "Adam": lambda: O.Adam(0.01),
    "Adam amsgrad": lambda: O.Adam(0.01, amsgrad=True),
    "AdamW": lambda: O.AdamW(0.01, weight_decay=0.1),
    "Adamax": lambda: O.Adamax(0.01),
    "Lion": lambda: O.Lion(0.001),
    "RMSprop": lambda: O.RMSprop(0.01, momentum=0.5, centered=True),
    "SGD": lambda: O.SGD(0.1),
    "SGD weight decay": lambda: O.SGD(0.1, weight_decay=0.1),
    "SGD nesterov": lambda: O.SGD(0.1, momentum=0.9, nesterov=True, clipvalue=0.01),
    "schedule": lambda: O.Adam(O.schedules.CosineDecay(0.01, 20)),
    "SparseAdam": lambda: SparseAdam(0.01),
    "SparseAdam clipped": lambda: SparseAdam(0.01, amsgrad=True, clipvalue=0.01),
    "SparseAdam weight decay": lambda: SparseAdam(0.01, weight_decay=0.1),
}
WHOLE: dict[str, Callable[[], Any]] = {
    "clipnorm": lambda: O.Adam(clipnorm=1.0),
    "global_clipnorm": lambda: O.Adam(global_clipnorm=1.0),
    "use_ema": lambda: O.Adam(use_ema=True),
    "Adagrad": lambda: O.Adagrad(0.1),
    "Nadam": lambda: O.Nadam(0.01),
}
ROWS = 50


def data(inputs: int = 6) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    return random.integers(0, 9, (ROWS, inputs)), random.normal(size=ROWS)


def model_of(
    optimizer: Any, *, wrap: Callable[[Any], Any] = lambda layer: layer, tokens: int = 9
) -> Any:
    """Returns an embedding (sparse gradients) of 17 weights per token and dense layers of 1,340."""
    tf.keras.utils.set_random_seed(5)
    model = Sequential(
        [
            L.Input((6,), dtype="int64"),
            L.Embedding(tokens, 17),
            L.Flatten(),
            wrap(L.Dense(13, activation="tanh")),
            L.Dense(1),
        ]
    )
    model.compile(optimizer, "mse")
    return model


def shards_of(model: Any) -> OptimizerShards | None:
    keras_optimizers.build_optimizer(model)
    return OptimizerShards.of(model, keras_optimizers.training_variables(model))


@pytest.mark.parametrize("name", DIVIDED)
@pytest.mark.both_generations
def test_divided(float64: None, name: str) -> None:
    def make() -> Any:
        return model_of(DIVIDED[name]())

    shards = shards_of(make())
    assert shards is not None and shards.dense.trainable == (1, 2, 3, 4) and not shards.refresh
    x, y = data()
    fit_both(make, x=x, y=y, batch_size=16)


@pytest.mark.parametrize("name", DIVIDED)
@pytest.mark.both_generations
def test_tables_of_embeddings(float64: None, name: str) -> None:
    """Tables are divided by an odd number of rows; some rows are never looked up."""

    def make() -> Any:
        return model_of(DIVIDED[name](), tokens=91)

    shards = shards_of(make())
    assert shards is not None and shards.tables.trainable == (0,)
    x, y = data()
    fit_both(make, x=x * 10, y=y, batch_size=16, epochs=3)


class Tied(Model):  # type: ignore[misc]
    """Also reads the embedding's table as a whole, so its gradient is not sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = L.Embedding(91, 17)
        self.dense = L.Dense(17, activation="tanh")

    def call(self, inputs: Any) -> Any:
        found = tf.reduce_mean(self.dense(self.embedding(inputs)), 1)
        return tf.matmul(found, tf.convert_to_tensor(self.embedding.embeddings), transpose_b=True)


@pytest.mark.both_generations
def test_table_that_is_also_read_as_a_whole(float64: None) -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(5)
        model = Tied()
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(O.Adam(0.01), loss)
        model.build((None, 6))
        return model

    x, _ = data()
    fit_both(make, x=x, y=x[:, 0], batch_size=16)


@pytest.mark.parametrize("name", ["Adam", "SGD", "SparseAdam"])
@pytest.mark.every_case
@pytest.mark.both_generations
def test_callback_that_changes_a_table(float64: None, name: str) -> None:
    """Workers continue with its values; two calls of `fit` keep the slots."""

    class Halves(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            layer = self.model.layers[0]
            layer.set_weights([0.5 * w for w in layer.get_weights()])

    x, y = data()
    models = []
    for processes in (None, 2):
        model = model_of(DIVIDED[name](), tokens=91)
        for _ in range(2):
            model.fit(
                x * 10, y, batch_size=16, epochs=2, shuffle=False, verbose=0,
                callbacks=[Halves()], num_processes=processes,
            )  # fmt: skip
        models.append(model)
    assert_same_state(models[1], models[0])


@pytest.mark.parametrize("name", WHOLE)
def test_not_divided(name: str) -> None:
    assert shards_of(model_of(WHOLE[name]())) is None


def test_not_divided_because_of_the_model() -> None:
    constrained = Sequential([L.Input((60,)), L.Dense(60, kernel_constraint="non_neg"), L.Dense(1)])
    constrained.compile("adam", "mse")
    assert shards_of(constrained) is None

    class OwnStep(Model):
        def train_step(self, data: Any) -> Any:
            return super().train_step(data)

    inputs = L.Input((60,))
    own = OwnStep(inputs, L.Dense(60)(inputs))
    own.compile("adam", "mse")
    assert shards_of(own) is None
    small = Sequential([L.Input((3,)), L.Dense(1)])
    small.compile("adam", "mse")
    assert shards_of(small) is None


@pytest.mark.skipif(
    not hasattr(O, "legacy") or versions.is_keras_3(), reason="Keras 2 alone has legacy optimizers"
)
@pytest.mark.both_generations
def test_not_divided_with_legacy_optimizers() -> None:
    assert shards_of(model_of(O.legacy.Adam())) is None


@pytest.mark.both_generations
@pytest.mark.skipif(
    versions.keras_version() < (2, 16), reason="the layer fails in Keras 2.15 itself"
)
def test_layers_that_assign_to_their_weights(float64: None) -> None:
    def make() -> Any:
        return model_of(O.Adam(0.01), wrap=L.SpectralNormalization)

    assert shards_of(make()) is None, "the rest is small"
    x, y = data()
    fit_both(make, x=x, y=y, batch_size=16)


class Normed(L.Layer):
    """Keeps the rows of a dense layer's kernel at unit length, by assigning to it."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = units
        self.dense = L.Dense(units)

    def build(self, shape: Any) -> None:
        self.dense.build(shape)
        self.built = True

    def call(self, x: Any) -> Any:
        kernel = self.dense.kernel
        kernel.assign(tf.math.l2_normalize(tf.convert_to_tensor(kernel), axis=0))
        return self.dense(x)

    def get_config(self) -> dict[str, Any]:
        return {"units": self.units}


def test_weights_changed_elsewhere_are_read_before_each_update() -> None:
    model = Sequential([L.Input((90,)), Normed(13), L.Dense(1)])
    model.compile("adam", "mse")
    shards = shards_of(model)
    assert shards is not None and shards.refresh and len(shards.dense.trainable) == 4


@pytest.mark.thorough
@pytest.mark.both_generations
def test_weights_without_a_gradient_do_not_change(float64: None) -> None:
    """The second time their slots are not zero, and weight decay would change them."""

    def make() -> Any:
        tf.keras.utils.set_random_seed(5)
        inputs = L.Input((30,))
        shared = L.Dense(40)(inputs)
        a, b = L.Dense(1, name="a")(shared), L.Dense(5, name="b")(shared)
        model = Model(inputs, [a, b])
        optimizer = O.AdamW(0.01, weight_decay=0.1)
        model.compile(optimizer, ["mse", "mse"])
        x = np.ones((8, 30))
        tf.keras.Model.fit(model, x, [np.ones((8, 1)), np.ones((8, 5))], verbose=0)
        model.compile(optimizer, ["mse", None])
        return model

    random = np.random.default_rng(3)
    x, y = random.normal(size=(ROWS, 30)), random.normal(size=(ROWS, 1))
    assert shards_of(make()) is not None
    model = make()
    before = model.get_layer("b").get_weights()
    fit_both(make, x=x, y=[y, np.zeros((ROWS, 5))], batch_size=16)
    model.fit(x, [y, np.zeros((ROWS, 5))], batch_size=16, num_processes=2, verbose=0)
    for ours, theirs in zip(model.get_layer("b").get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.thorough
def test_gradients_of_unknown_shape(float64: None) -> None:
    """Gradients of a layer normalization between other layers have no shape until they run."""

    def make() -> Any:
        tf.keras.utils.set_random_seed(5)
        inputs = L.Input((5, 16))
        hidden = L.Dense(16)(inputs)
        added = L.Add()([hidden, L.MultiHeadAttention(2, 16)(hidden, hidden)])
        normed = L.LayerNormalization()(added)
        model = Model(inputs, L.Dense(1)(L.GlobalAveragePooling1D()(L.Dense(16)(normed))))
        model.compile(O.Adam(0.01), "mse")
        return model

    shards = shards_of(make())
    assert shards is not None and len(shards.dense.trainable) == 16
    random = np.random.default_rng(3)
    fit_both(make, x=random.normal(size=(ROWS, 5, 16)), y=random.normal(size=ROWS), batch_size=16)


def test_pieces_of_a_part() -> None:
    shapes = [(2, 3), (0,), (), (4,)]
    assert pieces_of((0, 11), shapes) == [(0, 0, 6), (2, 0, 1), (3, 0, 4)]
    assert pieces_of((4, 8), shapes) == [(0, 4, 6), (2, 0, 1), (3, 0, 1)]
    assert pieces_of((8, 11), shapes) == [(3, 1, 4)]
    assert pieces_of((11, 11), shapes) == []


def test_a_worker_without_a_part() -> None:
    """The last of 34 workers, of 1,056 elements."""
    update = object.__new__(ShardedUpdate)
    update.bounds = part_of(33, 34, 1056)
    for dtype in (tf.float64, tf.bool):
        part = update._part_of([tf.ones([32, 32], dtype), tf.ones([32], dtype)])
        assert (part.dtype, part.shape) == (dtype, (0,))
