"""Models with `SparseAdam` and `Embedding` train with two processes as with one."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Callable
from typing import Any

import loops
import numpy as np
import pytest
import tensorflow as tf
from parity import L, assert_same_history, assert_same_state, fit_both
from sparse_models import OPTIONS, WIDTH, WORDS, KerasEmbedding, O, data, model_of

import nanotf
from nanotf.compat import keras_common, keras_optimizers
from nanotf.keras import Model, Sequential, nano, nano_multiprocessing
from nanotf.keras.layers import Embedding
from nanotf.keras.optimizers import SparseAdam
from nanotf.pool import warm
from nanotf.region import scope
from nanotf.region.sharded_update import OptimizerShards


# ------------------------------------------------------------- rows that several look-ups share
class Looking(tf.keras.Model):  # type: ignore[name-defined, misc]
    """Looks tokens up, and positions: in a table of their own, or in the tokens'."""

    def __init__(self, is_shared: bool) -> None:
        super().__init__()
        self.tokens, self.dense = KerasEmbedding(WORDS, WIDTH), L.Dense(1)
        self.places = self.tokens if is_shared else KerasEmbedding(WORDS, WIDTH)

    def call(self, tokens: Any) -> Any:
        places = self.places(tf.range(tf.shape(tokens)[1]))
        found = self.tokens(tokens) + places + self.tokens(tf.zeros_like(tokens[:, :1]))
        return self.dense(tf.reduce_mean(found, 1))


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "Adam": lambda: O.Adam(0.05),
    "AdamW": lambda: O.AdamW(0.05),
    "RMSprop": lambda: O.RMSprop(0.05, momentum=0.5),
    "Adagrad": lambda: O.Adagrad(0.05),
    "SGD": lambda: O.SGD(0.05, momentum=0.9),
    "clipnorm": lambda: O.Adam(0.05, clipnorm=0.1),
    "clipvalue": lambda: O.Adam(0.05, clipvalue=0.001),
    "global_clipnorm": lambda: O.SGD(0.05, momentum=0.9, global_clipnorm=0.1),
    "SparseAdam": lambda: SparseAdam(0.05),
}


@pytest.mark.parametrize(("rows", "batch_size"), [(8, 4), (9, 4), (3, 1), (2, 2)])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.both_generations
def test_rows_looked_up_several_times(float64: None, name: str, rows: int, batch_size: int) -> None:
    _, targets = data(rows)
    tokens = np.tile(np.array([[1, 1, 8, 1, 3]], "int32"), (rows, 1))
    for is_shared in (None, False, True):

        def make(is_shared: bool | None = is_shared) -> Any:
            if is_shared is None:
                return model_of(OPTIMIZERS[name](), KerasEmbedding)
            tf.keras.utils.set_random_seed(5)
            model = nanotf.accelerate(Looking(is_shared))
            model(np.zeros((2, 5), "int32"))
            model.compile(OPTIMIZERS[name](), "mse")
            return model

        fit_both(make, x=tokens, y=targets, batch_size=batch_size)


# ------------------------------------------------------------------------------------- SparseAdam
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.both_generations
def test_two_processes(float64: None, name: str) -> None:
    x, y = data()
    fit_both(lambda: model_of(SparseAdam(0.01, **OPTIONS[name])), x=x, y=y, batch_size=16)


@pytest.mark.thorough
def test_training_continues_with_and_without_workers(float64: None) -> None:
    x, y = data()
    arguments = {"x": x, "y": y, "batch_size": 16, "shuffle": False, "verbose": 0}
    trained = []
    for processes in ((1, 1, 1), (2, 1, 2)):
        model = model_of(SparseAdam(0.01), embeddings_regularizer="l2")
        for number in processes:
            history = model.fit(**arguments, num_processes=number)
        trained.append((model, history.history))
    assert_same_history(trained[1][1], trained[0][1])
    assert_same_state(trained[1][0], trained[0][0])


def test_a_batch_with_fewer_rows_than_workers(float64: None) -> None:
    x, y = data(17)
    fit_both(lambda: model_of(SparseAdam(0.01)), x=x, y=y, batch_size=16)


class OwnStep(Model):
    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x, training=True)[:, 0]))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


@pytest.mark.thorough
def test_own_train_step(float64: None) -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(5)
        inputs = tf.keras.Input((5,), dtype="int32")
        model = OwnStep(inputs, L.Dense(1)(L.Flatten()(Embedding(WORDS, 2)(inputs))))
        model.compile(SparseAdam(0.01, clipnorm=0.1))
        return model

    x, y = data(48)
    fit_both(make, x=x, y=y, batch_size=16, epochs=1)


def test_custom_loop(float64: None) -> None:
    step, train = loops.plain_step, loops.plain_train
    x, y = data()
    results = []
    for wrap in (False, True):
        tf.keras.utils.set_random_seed(4)
        model = tf.keras.Sequential(
            [L.Input((5,), dtype="int32"), L.Embedding(WORDS, WIDTH), L.Flatten(), L.Dense(1)]
        )
        optimizer = SparseAdam(0.01, global_clipnorm=0.1)
        run_step: Any = tf.function(step)
        run: Any = train
        if wrap:
            run_step, run = nano_multiprocessing(run_step), nano(num_processes=2)(train)
        dataset = tf.data.Dataset.from_tensor_slices((x, y[:, None])).batch(16)
        losses = run(model, dataset, tf.keras.losses.MeanSquaredError(), optimizer, run_step)
        results.append((losses, model.get_weights()))
    np.testing.assert_allclose(results[1][0], results[0][0], rtol=1e-10)
    for ours, theirs in zip(results[1][1], results[0][1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10)


@pytest.mark.thorough
def test_loss_scaling() -> None:
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    x, y = data()

    def make() -> Any:
        scaled = tf.keras.mixed_precision.LossScaleOptimizer(SparseAdam(0.01))
        return model_of(scaled, embeddings_regularizer="l2")

    expected, found = make(), make()
    untouched = expected.get_weights()[0][24:]
    arguments = {"x": x, "y": y, "batch_size": 16, "shuffle": False, "epochs": 2, "verbose": 0}
    losses = expected.fit(**arguments).history["loss"]
    np.testing.assert_allclose(
        found.fit(**arguments, num_processes=2).history["loss"], losses, rtol=1e-2
    )
    np.testing.assert_array_equal(found.get_weights()[0][24:], untouched)
    assert losses[1] < losses[0]


@pytest.mark.thorough
def test_the_update_of_dense_layers_is_divided(float64: None) -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(5)
        layers = [L.Input((5,), dtype="int32"), Embedding(WORDS, 17), L.Flatten(), L.Dense(30)]
        model = Sequential([*layers, L.Dense(1)])
        model.compile(SparseAdam(0.01, amsgrad=True), "mse")
        return model

    model = make()
    keras_optimizers.build_optimizer(model)
    shards = OptimizerShards.of(model, keras_optimizers.training_variables(model))
    assert shards is not None
    assert shards.dense.trainable == (1, 2, 3, 4)  # the embedding stays whole
    assert not shards.refresh
    x, y = data()
    fit_both(make, x=x, y=y, batch_size=16)


@pytest.mark.both_generations
def test_configuration_and_saved_models(tmp_path: pathlib.Path) -> None:
    optimizer = SparseAdam(0.02, beta_1=0.8, amsgrad=True, clipnorm=0.5)
    config = optimizer.get_config()
    assert SparseAdam.from_config(config).get_config() == config
    x, y = data()
    model = model_of(optimizer, embeddings_regularizer="l2")
    model.fit(x, y, verbose=0, num_processes=2)
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is SparseAdam
    # Keras's own layer works equally.
    assert type(loaded.layers[0]) is KerasEmbedding
    histories = [m.fit(x, y, shuffle=False, verbose=0).history for m in (model, loaded)]
    assert histories[0] == histories[1]


# ---------------------------------------------------------------------------------- transport
class Counting(L.Layer):  # type: ignore[misc]
    """Logs the data that its worker sends to a file: one line per tensor of a collective."""

    def __init__(self, path: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.log = path

    def call(self, inputs: Any) -> Any:
        group = None if scope.exchange is None else scope.exchange.extended.group  # type: ignore[attr-defined]
        if group is not None and not hasattr(group, "counted"):
            group.counted = True
            for name in ("all_reduce_many", "reduce_scatter", "gather_parts", "all_gather"):
                setattr(group, name, self.counted(name, getattr(group, name), group.rank))
        return inputs

    def counted(self, name: str, stock: Any, rank: int) -> Any:
        def noted(array: Any) -> Any:
            with pathlib.Path(f"{self.log}.{rank}").open("a", encoding="utf-8") as file:
                file.write(f"{name} {array.nbytes}\n")
            return array

        def sent(tensor: Any) -> Any:
            """Logs a tensor when it is sent; tensors without a reader are not."""
            tensor = tf.convert_to_tensor(tensor)
            found = tf.numpy_function(noted, [tensor], tensor.dtype, stateful=False)
            return tf.ensure_shape(found, tensor.shape)

        @tf.autograph.experimental.do_not_convert
        def collective(tensors: Any, *rest: Any, **options: Any) -> Any:
            many = isinstance(tensors, (list, tuple))
            tensors = [sent(tensor) for tensor in tensors] if many else sent(tensors)
            return stock(tensors, *rest, **options)

        return collective

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "path": self.log}


def test_a_step_sends_the_touched_rows(tmp_path: pathlib.Path) -> None:
    """The text model of the benchmark: of a table of 10 MB, only the batch's rows are sent."""
    words, width, batch, length = 20_000, 128, 64, 20
    tokens = np.random.default_rng(0).integers(0, 900, (2 * batch, length), dtype=np.int32)
    tokens[:, :8] = 0  # padding
    inputs = tf.keras.Input((length,), dtype="int32")
    hidden = Counting(str(tmp_path / "sent"))(Embedding(words, width)(inputs))
    outputs = L.Dense(2)(L.GlobalMaxPooling1D()(L.Conv1D(16, 5, activation="relu")(hidden)))
    model = nanotf.keras.Model(inputs, outputs)
    model.compile(SparseAdam(), tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    dense = sum(v.shape.num_elements() for v in map(keras_common.tf_variable, model.weights[1:]))
    warm.end_pool()  # the workers' group is changed
    try:
        model.fit(
            tokens, np.zeros(len(tokens)), batch_size=batch, shuffle=False, verbose=0,
            num_processes=2,
        )  # fmt: skip
    finally:
        warm.end_pool()
    for rank in range(2):
        sent: collections.Counter[str] = collections.Counter()
        for line in (tmp_path / f"sent.{rank}").read_text().splitlines():
            sent[line.split()[0]] += int(line.split()[1])
        mine = [tokens[i + rank * 32 : i + rank * 32 + 32] for i in (0, batch)]
        rows = sum(len(np.unique(part)) for part in mine)
        losses = 2 * 32 * 4  # one number per row
        likeness = 16  # compared at the end of the epoch
        assert sent["all_gather"] == rows * (width * 4 + 4) + losses + likeness
        others = sum(sent.values()) - sent["all_gather"]
        assert others < 4 * (2 * 4 * dense)  # dense gradients of two steps, losses, counts
