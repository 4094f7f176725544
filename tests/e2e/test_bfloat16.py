"""bfloat16 with two processes: sums in float32, and no more rounding than in one process.

bfloat16 has 8 bits. Where a test's sums are exact in 8 bits, one process and two give equal results
to the last bit. Elsewhere a sum of two parts is rounded where one process rounds once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from parity import digits, optimizer_state

import nanotf
from nanotf import console
from nanotf.compat import keras_layers, keras_optimizers
from nanotf.compat.versions import is_keras_3
from nanotf.keras import Model, Sequential, nano, nano_bf16, nano_multiprocessing
from nanotf.machine import processor
from nanotf.region.sharded_update import OptimizerShards

L = tf.keras.layers
BFLOAT16 = ml_dtypes.bfloat16
POLICIES = ["mixed_bfloat16", "bfloat16"]
HALF_ULP = 2.0**-9  # relative, of one rounding
FEATURES, BATCH, ROWS = 660, 11, 26


def _set_policy(policy: str) -> None:
    tf.keras.mixed_precision.set_global_policy(policy)


# ----------------------------------------------------------------------------- exact sums
def _exact_data() -> tuple[np.ndarray, np.ndarray]:
    """Returns data with each feature nonzero in only one row of a batch, so that no sum is rounded.

    A batch of eleven rows gives six rows to one worker and five to the other: rounded to bfloat16,
    these shares would give other gradients. The last batch has four rows.
    """
    random = np.random.default_rng(3)
    x = 2.0 ** random.integers(-3, 4, (ROWS, FEATURES))
    x[np.arange(ROWS)[:, None] % BATCH != np.arange(FEATURES) % BATCH] = 0
    return x.astype("float32"), random.choice([-1.0, 1.0], (ROWS, 2)).astype("float32")


def product(y_true: Any, y_pred: Any) -> Any:
    """Computes a loss whose gradient is independent of the weights, and so of their rounding."""
    return tf.reduce_sum(tf.cast(y_true, y_pred.dtype) * y_pred, axis=-1)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: tf.keras.optimizers.SGD(2.0**-7),
    "momentum": lambda: tf.keras.optimizers.SGD(2.0**-7, momentum=0.5),
    "Adam": lambda: tf.keras.optimizers.Adam(2.0**-7),
}


def _linear(optimizer: str = "momentum") -> Any:
    tf.keras.utils.set_random_seed(5)
    model = Sequential([L.Input((FEATURES,)), L.Dense(2, use_bias=False)])
    model.compile(OPTIMIZERS[optimizer](), product)
    return model


def _fit(model: Any, *data: Any, **arguments: Any) -> Any:
    arguments = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0, **arguments}
    return model.fit(*data, **arguments)


def _assert_equal(found: Any, expected: Any) -> None:
    """Asserts that weights and optimizers are equal, to the last bit."""
    for a, b in zip(found.get_weights(), expected.get_weights(), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a.astype("f4"), b.astype("f4"))
    for a, b in zip(optimizer_state(found), optimizer_state(expected), strict=True):
        np.testing.assert_array_equal(a.astype("f4"), b.astype("f4"))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_exact_sums(policy: str, optimizer: str) -> None:
    _set_policy(policy)
    expected, found = _linear(optimizer), _linear(optimizer)
    before = expected.get_weights()[0].astype("f4")
    data = _exact_data()
    theirs, ours = _fit(expected, *data), _fit(found, *data, num_processes=2)
    dtype = "float32" if policy == "mixed_bfloat16" else BFLOAT16
    assert found.get_weights()[0].dtype == dtype
    _assert_equal(found, expected)
    if (policy, optimizer) != (
        "bfloat16",
        "Adam",
    ):  # 1 - 0.999 is 0 in bfloat16: the optimizer does nothing
        assert np.any(expected.get_weights()[0].astype("f4") != before)
    np.testing.assert_allclose(
        ours.history["loss"], theirs.history["loss"], rtol=4 * HALF_ULP, atol=0.1
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_updates_are_divided_as_with_other_dtypes(policy: str) -> None:
    _set_policy(policy)
    for name in OPTIMIZERS:
        model = _linear(name)
        keras_optimizers.build_optimizer(model)
        assert OptimizerShards.of(model, keras_optimizers.training_variables(model)) is not None


def _tensors(x: Any, y: Any) -> Any:
    return tf.cast(x, tf.bfloat16), tf.cast(y, tf.bfloat16)


def _arrays(x: Any, y: Any) -> Any:
    return x.astype(BFLOAT16), y.astype(BFLOAT16)


def _dataset(x: Any, y: Any) -> Any:
    return (tf.data.Dataset.from_tensor_slices(_tensors(x, y)).batch(BATCH),)


def _read_here(x: Any, y: Any) -> Any:
    def batches() -> Iterator[Any]:
        for begin in range(0, ROWS, BATCH):
            yield _arrays(x[begin : begin + BATCH], y[begin : begin + BATCH])

    spec = tf.TensorSpec([None, FEATURES], tf.bfloat16), tf.TensorSpec([None, 2], tf.bfloat16)
    return (tf.data.Dataset.from_generator(batches, output_signature=spec),)


@pytest.mark.parametrize("make", [_tensors, _arrays, _dataset, _read_here])
@pytest.mark.parametrize("sharding", ["parent", "data"])
def test_data_in_bfloat16(make: Callable[..., Any], sharding: str) -> None:
    if (make, sharding) == (_read_here, "data"):
        pytest.skip("a Python generator is read in the user's process")
    _set_policy("mixed_bfloat16")
    expected, found = _linear(), _linear()
    options = {} if make in (_tensors, _arrays) else {"batch_size": None}
    _fit(expected, *make(*_exact_data()), **options)
    _fit(found, *make(*_exact_data()), **options, num_processes=2, sharding=sharding)
    _assert_equal(found, expected)
    kept = make(*_exact_data())
    ours = found.predict(kept[0], verbose=0, num_processes=2)
    theirs = expected.predict(kept[0], verbose=0)
    assert ours.dtype == theirs.dtype == BFLOAT16
    np.testing.assert_array_equal(ours.astype("f4"), theirs.astype("f4"))


class OwnStep(Model):
    """A subclass whose layers follow the global policy; its step weighs the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = L.Dense(2, use_bias=False)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            # float32, so that no mean over rows is rounded before weighing
            loss = tf.reduce_mean(product(y, tf.cast(self(x, training=True), tf.float32)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"own": loss}


@pytest.mark.thorough
@pytest.mark.parametrize("policy", POLICIES)
def test_own_steps(policy: str) -> None:
    _set_policy(policy)

    def make() -> Any:
        tf.keras.utils.set_random_seed(5)
        model = OwnStep()
        model(np.zeros((1, FEATURES)))
        model.compile(OPTIMIZERS["momentum"]())
        return model

    expected, found = make(), make()
    data = _exact_data()
    theirs, ours = _fit(expected, *data), _fit(found, *data, num_processes=2)
    assert found.dense.compute_dtype == "bfloat16"
    for a, b in zip(found.get_weights(), expected.get_weights(), strict=True):
        # A worker's gradient is rounded before weighing.
        np.testing.assert_allclose(a.astype("f4"), b.astype("f4"), rtol=0, atol=2 * HALF_ULP)
    assert list(ours.history) == list(theirs.history) == ["own"]


# ----------------------------------------------------------------------- sums that are rounded
def _cnn(policy: str) -> Any:
    tf.keras.utils.set_random_seed(11)
    # Keras 3 cannot add a regularizer of bfloat16 weights to a loss.
    regularizer = "l2" if policy == "mixed_bfloat16" else None
    model = Sequential(
        [
            L.Input((8, 8, 1)),
            L.Conv2D(4, 3, activation="relu"),
            L.Flatten(),
            L.Dense(16, activation="tanh", kernel_regularizer=regularizer),
            L.Dense(10),
        ]
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.SGD(0.05), loss, metrics=["accuracy"])
    return model


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.both_generations
def test_training_validation_and_evaluation(policy: str) -> None:
    _set_policy(policy)
    x, y = digits(110)
    data = {"x": x, "y": y, "batch_size": 20, "validation_data": (x[:30], y[:30])}
    expected, found = _cnn(policy), _cnn(policy)
    theirs, ours = _fit(expected, **data).history, _fit(found, **data, num_processes=2).history
    assert list(ours) == list(theirs)
    for name in ("loss", "val_loss"):
        # Some roundings in each of twelve steps; they differ by a fifth of their sum.
        np.testing.assert_allclose(ours[name], theirs[name], rtol=16 * HALF_ULP)
    for a, b in zip(found.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(a.astype("f4"), b.astype("f4"), rtol=0, atol=8 * HALF_ULP)
    # Makes the weights equal, so that no differences accumulate.
    one = found.evaluate(x, y, verbose=0, return_dict=True)
    two = found.evaluate(x, y, verbose=0, return_dict=True, num_processes=2)
    assert list(one) == list(two)
    for name, value in one.items():
        np.testing.assert_allclose(two[name], value, rtol=4 * HALF_ULP)
    assert found.predict(x, verbose=0, num_processes=2).dtype == BFLOAT16


# ------------------------------------------------------------------------------------ files
@pytest.mark.thorough
@pytest.mark.parametrize("policy", POLICIES)
def test_checkpoints(policy: str, tmp_path: Any) -> None:
    if policy == "bfloat16" and not is_keras_3():
        pytest.skip("Keras 2 cannot read the bfloat16 weights that it saves")
    _set_policy(policy)
    model, path = _cnn(policy), tmp_path / "model.keras"
    x, y = digits(60)
    checkpoint = tf.keras.callbacks.ModelCheckpoint(str(path))
    _fit(model, x, y, callbacks=[checkpoint], num_processes=2)
    loaded = tf.keras.models.load_model(path)
    assert loaded.layers[0].compute_dtype == "bfloat16"
    for a, b in zip(loaded.get_weights(), model.get_weights(), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a.astype("f4"), b.astype("f4"))


# -------------------------------------------------------------------- loops, patch_tensorflow
@pytest.mark.parametrize("policy", POLICIES)
def test_loops(policy: str) -> None:
    _set_policy(policy)

    @nano_multiprocessing
    @nano_bf16
    @tf.function
    def step(x: Any, y: Any, model: Any, optimizer: Any) -> Any:
        with tf.GradientTape() as tape:
            found = model(x, training=True)
            loss = tf.reduce_mean(product(y, found))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return tf.constant(x.dtype == tf.bfloat16), found

    def train(model: Any, data: Any, optimizer: Any) -> Any:
        return [step(x, y, model, optimizer) for x, y in data]

    x, y = _exact_data()
    even = ROWS // 2 * 2  # two rows in each batch: half of it has no fraction to round
    data = tf.data.Dataset.from_tensor_slices((x[:even], y[:even])).batch(2)
    models, results = [], []
    for run in (train, nano(num_processes=2)(train)):
        models.append(_linear())
        results.append(run(models[-1], data, OPTIMIZERS["momentum"]()))
    assert all(bool(was_cast) for was_cast, _ in results[1])
    for (_, ours), (_, theirs) in zip(results[1], results[0], strict=True):
        assert ours.dtype == tf.bfloat16
        np.testing.assert_array_equal(ours.numpy().astype("f4"), theirs.numpy().astype("f4"))
    for a, b in zip(models[1].get_weights(), models[0].get_weights(), strict=True):
        np.testing.assert_array_equal(a.astype("f4"), b.astype("f4"))


def test_gathers_and_variables() -> None:
    @nano(num_processes=2)
    def run(data: Any) -> Any:
        strategy, rank = nanotf.get_strategy(), nanotf.rank()
        with strategy.scope():  # equal on both, though they draw different numbers
            made = tf.Variable(tf.cast(tf.random.normal([1, 2]), tf.bfloat16))

        @tf.function
        def gathered() -> Any:
            rows = strategy.run(lambda: tf.fill([1 + rank, 2], tf.cast(rank, tf.bfloat16)))
            of_variable = strategy.run(lambda: tf.identity(made))
            return strategy.gather(rows, axis=0), strategy.gather(of_variable, axis=0)

        return gathered()

    rows, of_variable = run(tf.data.Dataset.range(2).batch(2))
    assert rows.dtype == of_variable.dtype == tf.bfloat16
    np.testing.assert_array_equal(rows.numpy().astype("f4"), [[0, 0], [1, 1], [1, 1]])
    np.testing.assert_array_equal(of_variable[0].numpy(), of_variable[1].numpy())


@pytest.mark.thorough
def test_embedding() -> None:
    """Its gradients are rows, which workers gather."""
    _set_policy("bfloat16")
    tokens = np.arange(24).reshape(6, 4)  # each once, so that no sum is rounded
    found = []
    for num_processes in (None, 2):
        tf.keras.utils.set_random_seed(1)
        model = Sequential([L.Input((4,), dtype="int32"), L.Embedding(24, 3), L.Flatten()])
        model.compile(tf.keras.optimizers.SGD(2.0**-3), product)
        y = np.ones((6, 12), "float32")
        model.fit(tokens, y, batch_size=4, verbose=0, shuffle=False, num_processes=num_processes)
        found.append(model.get_weights()[0].astype("f4"))
    np.testing.assert_allclose(found[1], found[0], rtol=2 * HALF_ULP, atol=2.0**-9)


def test_patch_tensorflow() -> None:
    data = _exact_data()
    nanotf.patch_tensorflow(precision="mixed_bfloat16")
    try:
        models = []
        for arguments in ({}, {"num_processes": 2}):
            tf.keras.utils.set_random_seed(5)
            model = tf.keras.Sequential([L.Input((FEATURES,)), L.Dense(2, use_bias=False)])
            model.compile(OPTIMIZERS["Adam"](), product)
            _fit(model, *data, **arguments)
            models.append(model)
        assert models[1].layers[-1].compute_dtype == "bfloat16"
        _assert_equal(models[1], models[0])
    finally:
        nanotf.unpatch_tensorflow()


# -------------------------------------------------------------------------------- the warning
@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Describes this machine's processor by its flags, with no warnings given yet."""

    def describe(*flags: str) -> None:
        found = processor.Processor("A Processor", frozenset(flags))
        monkeypatch.setattr(processor, "read_processor", lambda: found)
        monkeypatch.setattr(console.lines, "_warned", set())

    return describe


def _patch() -> None:
    nanotf.patch_tensorflow(precision="mixed_bfloat16")
    nanotf.unpatch_tensorflow()


def _fit_mixed() -> None:
    _set_policy("mixed_bfloat16")
    _fit(_linear(), *_exact_data(), epochs=1, num_processes=2)


def _fit_one_layer() -> None:
    model = Sequential([L.Input((FEATURES,)), L.Dense(2, dtype="bfloat16"), L.Dense(2)])
    model.compile("sgd", product)
    _fit(model, *_exact_data(), epochs=1, num_processes=2)


def _decorate() -> None:
    nano_bf16(lambda x: x)


WAYS = [_patch, _fit_mixed, _fit_one_layer, _decorate]


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "bfloat16 instructions" in r.getMessage()]


@pytest.mark.parametrize("way", WAYS)
def test_a_processor_without_bfloat16_gives_one_warning(
    machine: Callable[..., None], caplog: pytest.LogCaptureFixture, way: Callable[[], None]
) -> None:
    machine("avx2", "avx512f")
    with caplog.at_level(logging.WARNING, logger="nanotf"):
        way()
        way()
        _decorate()
    (said,) = _warnings(caplog)
    assert "(AVX-512 BF16 or AMX)" in said
    assert "slower than float32" in said


@pytest.mark.parametrize("flags", [("avx512f", "avx512_bf16"), ("amx_tile", "amx_bf16"), ()])
def test_other_processors_give_no_warning(
    machine: Callable[..., None], caplog: pytest.LogCaptureFixture, flags: tuple[str, ...]
) -> None:
    machine(*flags)  # none: a machine that does not report them
    _patch()
    _fit_mixed()
    _decorate()
    assert _warnings(caplog) == []


def test_float32_gives_no_warning(
    machine: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    machine("avx2")
    assert not keras_layers.computes_in_bfloat16(_linear())
    _fit(_linear(), *_exact_data(), epochs=1, num_processes=2)
    assert _warnings(caplog) == []


@pytest.mark.both_generations
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_layers_are_divided_where_sums_cannot_overflow(
    policy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Scaled float16 gradients of a whole batch overflow where those of a part do not."""
    x = np.random.default_rng(0).random((20, 5)).astype("float32")

    def run(**workers: Any) -> tuple[list[float], int]:
        tf.keras.utils.set_random_seed(1)
        _set_policy(policy)
        model = Sequential([L.Input((5,)), L.Dense(4), L.Dense(1, dtype="float32")])
        model.compile("sgd", "mse")
        losses = model.fit(x, x.sum(1), batch_size=8, epochs=3, verbose=0, **workers)
        optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        return losses.history["loss"], int(optimizer.iterations.numpy())

    plain, ours = run(), run(num_processes=2)
    assert ours[1] == plain[1]
    np.testing.assert_allclose(ours[0], plain[0], rtol=1e-5 if policy == "mixed_float16" else 1e-2)
    assert ("undivided" in capfd.readouterr().err) is (policy == "mixed_float16")
