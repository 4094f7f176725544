"""`SparseAdam` and `Embedding`: sparse gradients, from the layer to the update."""

from __future__ import annotations

import collections
import importlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import loops
import numpy as np
import pytest
import tensorflow as tf
from parity import L, assert_same_history, assert_same_state, fit_both

import nanotf
from nanotf.compat import keras_common, keras_optimizers, versions
from nanotf.compat.generation import generation
from nanotf.errors import InvalidArgumentError
from nanotf.keras import Model, Sequential, nano, nano_multiprocessing
from nanotf.keras import models as nano_models
from nanotf.keras.layers import Embedding
from nanotf.keras.optimizers import SparseAdam
from nanotf.pool import warm
from nanotf.region import scope
from nanotf.region.sharded_update import OptimizerShards

IS_KERAS_3 = versions.is_keras_3()
O = tf.keras.optimizers  # noqa: E741
KerasAdam, KerasEmbedding = O.Adam, L.Embedding
ROWS, WORDS, WIDTH = 52, 30, 4
saving = importlib.import_module(versions.keras_module_name()).saving


def data(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens, some repeated, from another part of the vocabulary each step; and targets."""
    random = np.random.default_rng(3)
    tokens = (np.arange(rows) // 16 * 4)[:, None] + random.integers(0, 9, (rows, 5))
    return tokens.astype("int32"), random.normal(size=rows)


def model_of(
    optimizer: Any,
    layer: Callable[..., Any] = Embedding,
    jit_compile: bool = False,
    **options: Any,
) -> Any:
    tf.keras.utils.set_random_seed(5)
    model = Sequential(
        [
            L.Input((5,), dtype="int32"),
            layer(WORDS, WIDTH, **options),
            L.GlobalAveragePooling1D(),
            L.Dense(13, activation="tanh"),
            L.Dense(1),
        ]
    )
    model.compile(optimizer, "mse", jit_compile=jit_compile)
    return model


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
    some = np.random.default_rng(3).integers(0, 9, (1, 5)).astype("int32")
    for tokens in (np.ones((rows, 5), "int32"), np.tile(some, (rows, 1))):
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


# --------------------------------------------------------------------------------- SparseAdam
def _reference(
    table: np.ndarray, gradients: Any, steps: int, *, amsgrad: bool, rate: float = 0.1
) -> np.ndarray:
    """Computes the docstring's formulas, row by row."""
    table, m, v, largest = table.copy(), *(np.zeros_like(table) for _ in range(3))
    for step in range(1, steps + 1):
        indices, values = gradients[step - 1]
        for i in set(indices.tolist()):
            g = values[indices == i].sum(axis=0)
            m[i] = 0.9 * m[i] + (1 - 0.9) * g
            v[i] = 0.999 * v[i] + (1 - 0.999) * g**2
            largest[i] = np.maximum(largest[i], v[i])
            scale = rate * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
            table[i] -= scale * m[i] / (np.sqrt(largest[i] if amsgrad else v[i]) + 1e-7)
    return table


def _variable(value: Any) -> Any:
    return generation().make_variable(value, "table")


def _steps(steps: int = 6) -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(1)
    return [(random.integers(0, 8, 9), random.normal(size=(9, 3))) for _ in range(steps)]


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.both_generations
def test_the_formula_with_duplicates(float64: None, jit_compile: bool, amsgrad: bool) -> None:
    gradients = _steps()
    start = np.random.default_rng(2).normal(size=(11, 3))
    optimizer, table = SparseAdam(0.1, amsgrad=amsgrad), _variable(start)
    optimizer.build([table])

    @tf.function(reduce_retracing=True, jit_compile=jit_compile)
    def step(values: Any, indices: Any) -> None:
        optimizer.apply_gradients([(tf.IndexedSlices(values, indices, [11, 3]), table)])

    for indices, values in gradients:
        step(tf.constant(values), tf.constant(indices))
    expected = _reference(start, gradients, 6, amsgrad=amsgrad)
    # Keras 2 keeps its learning rate in float32 if floatx was float32 on import.
    np.testing.assert_allclose(keras_common.tf_variable(table), expected, rtol=1e-10)
    assert np.array_equal(keras_common.tf_variable(table)[8:], start[8:])


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "amsgrad": {"amsgrad": True},
    "clipnorm": {"clipnorm": 0.01},
    "global_clipnorm": {"global_clipnorm": 0.01},
    "clipvalue": {"clipvalue": 0.01},
    "weight_decay": {"weight_decay": 0.1},
    "use_ema": {"use_ema": True, "ema_overwrite_frequency": 3},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.both_generations
def test_dense_gradients_are_adams(float64: None, name: str) -> None:
    tables = []
    for make in (SparseAdam, O.Adam):
        optimizer, table = make(0.1, **OPTIONS[name]), _variable(np.ones((11, 3)))
        for indices, values in _steps():
            dense = tf.convert_to_tensor(tf.IndexedSlices(values, indices, [11, 3]))
            optimizer.apply_gradients([(dense, table)])
        tables.append(keras_common.tf_variable(table).numpy())
    np.testing.assert_array_equal(*tables)


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("name", ["clipnorm", "global_clipnorm", "clipvalue"])
@pytest.mark.both_generations
def test_clipping_sees_the_sum_of_a_row(float64: None, name: str, jit_compile: bool) -> None:
    """In a first step that touches all rows, Adam computes the same."""
    if jit_compile and versions.keras_version() < (2, 16):
        pytest.skip("XLA of TensorFlow 2.15 must prove the number of unique rows")
    values = tf.constant(np.random.default_rng(0).normal(size=(6, 3)))
    gradient = tf.IndexedSlices(values, tf.constant([0, 1, 1, 2, 2, 2]), tf.constant([3, 3]))
    options = {"epsilon": 0.1, **OPTIONS[name]}
    found = _after_a_step(SparseAdam(0.1, **options), gradient, jit_compile)
    expected = _after_a_step(O.Adam(0.1, **options), tf.convert_to_tensor(gradient))
    # Keras's Adam rounds its betas to float32 for the bias correction.
    np.testing.assert_allclose(found, expected, rtol=1e-8)


def _after_a_step(optimizer: Any, gradient: Any, jit_compile: bool = False) -> np.ndarray:
    table = _variable(np.ones((3, 3)))
    optimizer.build([table])

    @tf.function(jit_compile=jit_compile)
    def step(gradient: Any) -> None:
        optimizer.apply_gradients([(gradient, table)])

    step(gradient)
    return np.asarray(keras_common.tf_variable(table).numpy())


@pytest.mark.thorough
def test_a_model_compiled_by_xla(float64: None) -> None:
    x, y = data(48)
    models = []
    for jit_compile in (True, False):
        model = model_of(SparseAdam(0.01, clipnorm=0.01), jit_compile=jit_compile)
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
        models.append(model)
    assert_same_state(*models)


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


REFUSED = {"gradient_accumulation_steps": 2, "loss_scale_factor": 4.0}


@pytest.mark.skipif(not IS_KERAS_3, reason="options of Keras 3")
@pytest.mark.parametrize("name", REFUSED)
def test_options_that_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"Received: {name}={REFUSED[name]}"):
        SparseAdam(**{name: REFUSED[name]})


# ---------------------------------------------------------------------------------- Embedding
def _loss_and_gradient(layer: Any, tokens: Any) -> tuple[float, Any]:
    with tf.GradientTape() as tape:
        layer(tokens)
        loss = tf.add_n(layer.losses)
    return float(loss), tape.gradient(loss, keras_common.tf_variable(layer.embeddings))


def test_the_penalty_is_of_the_rows_looked_up(float64: None) -> None:
    tokens = np.array([[1, 2, 2], [2, 7, 0]])
    layer = Embedding(9, 3, embeddings_regularizer=tf.keras.regularizers.L2(0.5))
    loss, gradient = _loss_and_gradient(layer, tokens)
    table = np.array(layer.get_weights()[0])
    samples = 2 if not IS_KERAS_3 or versions.keras_version() >= (3, 14) else 1
    assert loss == pytest.approx(0.5 * (table[tokens] ** 2).sum() / samples, rel=1e-12)
    assert isinstance(gradient, tf.IndexedSlices)
    assert sorted(gradient.indices.numpy()) == [0, 1, 2, 2, 2, 7]
    theirs = KerasEmbedding(9, 3, embeddings_regularizer=tf.keras.regularizers.L2(0.5))
    theirs.build((None, 3))
    theirs.set_weights([table])
    loss, gradient = _loss_and_gradient(theirs, tokens)
    assert loss == pytest.approx(0.5 * (table**2).sum(), rel=1e-12)
    assert not isinstance(gradient, tf.IndexedSlices)


@pytest.mark.both_generations
def test_arguments_are_keras_own() -> None:
    layer = Embedding(
        9,
        3,
        "ones",
        embeddings_regularizer="l2",
        embeddings_constraint="non_neg",
        mask_zero=True,
        name="words",
        weights=[np.full((9, 3), 2.0)],
    )
    assert np.all(layer(np.array([[1, 0]])) == 2)
    assert np.array_equal(layer.compute_mask(tf.constant([[1, 0]])), [[True, False]])
    config = layer.get_config()
    assert config["embeddings_regularizer"] is None
    assert config["name"] == "words" and config["mask_zero"]
    twin = KerasEmbedding.from_config(config)
    assert twin.get_config() == Embedding.from_config(config).get_config() == config
    with pytest.raises(TypeError, match="output_dim"):
        Embedding(9)
    with pytest.raises(ValueError, match="positive"):
        Embedding(0, 3)
    with pytest.raises(InvalidArgumentError, match="sum of both"):
        Embedding(9, 3, embeddings_regularizer="l2", activity_regularizer="l1")


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 looks rows up as they are")
@pytest.mark.both_generations
def test_lookups_are_keras_own() -> None:
    layer, theirs = Embedding(9, 3), KerasEmbedding(9, 3)
    theirs.build()
    ragged = tf.ragged.constant([[1], [2, 3]])
    for tokens in (np.array([[-1, 0, 8]]), np.array([[1.0, 2.5]]), ragged):
        found = layer(tokens)
        theirs.set_weights(layer.get_weights())
        expected = theirs(tokens)
        assert type(found) is type(expected)
        if tokens is ragged:
            found, expected = found.to_tensor(), expected.to_tensor()
        assert np.array_equal(found, expected)
    layer.enable_lora(2)
    assert layer(np.array([[3]])).shape == (1, 1, 3)


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 has no quantization")
@pytest.mark.thorough
def test_quantized_as_in_keras() -> None:
    layer, theirs = Embedding(9, 4), KerasEmbedding(9, 4)
    for each in (layer, theirs):
        each.build()
    theirs.set_weights(layer.get_weights())
    for each in (layer, theirs):
        each.quantize("int8")
    tokens = np.array([[1, 3]])
    assert np.array_equal(*(tf.convert_to_tensor(each(tokens)) for each in (layer, theirs)))


class Words(Embedding):
    """A user's layer, which workers rebuild from this class."""

    def __init__(self, words: int, width: int = WIDTH, **kwargs: Any) -> None:
        super().__init__(words, width, embeddings_regularizer="l2", **kwargs)

    def get_config(self) -> dict[str, Any]:
        return {"words": self.input_dim, "width": self.output_dim, "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls(**config)


@pytest.mark.parametrize("layer", [Embedding, Words])
@pytest.mark.parametrize("mask_zero", [False, True])
@pytest.mark.both_generations
def test_the_penalty_with_two_processes(float64: None, layer: Any, mask_zero: bool) -> None:
    if layer is Words and mask_zero:
        pytest.skip("its configuration omits it")
    options = {"mask_zero": mask_zero}
    if layer is Embedding:
        options["embeddings_regularizer"] = "l2"
    x, y = data()
    fit_both(lambda: model_of(SparseAdam(0.01), layer, **options), x=x, y=y, batch_size=16)


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


# ----------------------------------------------------------------------------------- patching
@pytest.fixture
def patched() -> Iterator[None]:
    nanotf.patch_tensorflow(sparse=True)
    yield
    nanotf.unpatch_tensorflow()


@pytest.mark.usefixtures("patched")
def test_patched_names() -> None:
    from tensorflow.keras.layers import Embedding as Named

    assert tf.keras.layers.Embedding is Named is Embedding
    assert issubclass(tf.keras.optimizers.Adam, SparseAdam)
    plain = KerasEmbedding.__new__(KerasEmbedding)
    assert isinstance(plain, tf.keras.layers.Embedding)
    assert not isinstance(L.Dense(1), tf.keras.layers.Embedding)
    assert isinstance(KerasAdam(), SparseAdam)
    assert isinstance(KerasEmbedding(3, 2), Embedding)
    assert not isinstance(tf.keras.optimizers.AdamW(), SparseAdam)
    both = tf.keras.layers.Embedding(3, 2, embeddings_regularizer="l2", activity_regularizer="l1")
    assert both.embeddings_regularizer is not None
    if IS_KERAS_3:
        assert tf.keras.optimizers.Adam(gradient_accumulation_steps=2)


def test_patched_names_can_be_left_out_and_are_restored() -> None:
    before = (vars(KerasAdam)["__init__"], vars(KerasEmbedding)["__init__"])
    nanotf.patch_tensorflow(sparse=True)
    nanotf.patch_tensorflow()
    try:
        assert tf.keras.Model is nanotf.keras.Model
        assert tf.keras.optimizers.Adam is KerasAdam and type(KerasAdam()) is KerasAdam
        assert tf.keras.layers.Embedding is KerasEmbedding
        nanotf.patch_tensorflow(sparse=True)
        assert tf.keras.layers.Embedding is Embedding
    finally:
        nanotf.unpatch_tensorflow()
    assert tf.keras.optimizers.Adam is KerasAdam and tf.keras.layers.Embedding is KerasEmbedding
    assert (vars(KerasAdam)["__init__"], vars(KerasEmbedding)["__init__"]) == before
    assert type(KerasAdam()) is KerasAdam and type(KerasEmbedding(3, 2)) is KerasEmbedding
    assert not nano_models.in_place_of


@pytest.mark.thorough
@pytest.mark.usefixtures("float64", "patched")
@pytest.mark.both_generations
def test_patched_models_train_and_are_saved_as_keras_own(tmp_path: pathlib.Path) -> None:
    x, y = data()

    def make() -> Any:
        return model_of("adam", tf.keras.layers.Embedding, embeddings_regularizer="l2")

    model, _ = fit_both(make, x=x, y=y, batch_size=16)
    assert isinstance(model.optimizer, SparseAdam)
    again = tf.keras.models.clone_model(model)
    again.compile(tf.keras.optimizers.Adam(0.001), "mse")
    model.save(tmp_path / "model.keras")
    assert "nanotf" not in model.to_json()
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, SparseAdam)
    nanotf.unpatch_tensorflow()
    plain = tf.keras.models.load_model(tmp_path / "model.keras")
    assert type(plain.optimizer) is KerasAdam and type(plain.layers[0]) is KerasEmbedding
    for ours, theirs in zip(loaded.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert int(plain.optimizer.iterations.numpy()) == int(model.optimizer.iterations.numpy())


@pytest.mark.thorough
def test_dense_models_are_the_same_when_patched(float64: None) -> None:
    x, y = np.random.default_rng(0).normal(size=(2, 48, 5))

    def trained() -> list[np.ndarray]:
        tf.keras.utils.set_random_seed(5)
        model = tf.keras.Sequential([L.Input((5,)), L.Dense(7, activation="tanh"), L.Dense(5)])
        model.compile("adam", "mse")
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
        return list(model.get_weights())

    expected = trained()
    nanotf.patch_tensorflow(sparse=True)
    try:
        found = trained()
    finally:
        nanotf.unpatch_tensorflow()
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
