"""After `patch_tensorflow` all models take `num_processes`; unpatching restores everything."""

from __future__ import annotations

import abc
import functools
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import L, assert_same_history, assert_same_state, digits

import nanotf
from nanotf import console
from nanotf.compat import keras_models, keras_optimizers, versions
from nanotf.errors import InvalidArgumentError, UndividedError
from nanotf.keras import patching
from nanotf.parent import defaults

saving = importlib.import_module(versions.keras_module_name()).saving
Before = tf.keras.Model  # like a library that was imported before


@saving.register_keras_serializable(package="library")
class OfLibrary(Before):  # type: ignore[misc, valid-type]
    """Derived before the patch."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.hidden = L.Dense(units, activation="relu")
        self.out = L.Dense(10)

    def call(self, inputs: Any) -> Any:
        return self.out(self.hidden(inputs))

    def get_config(self) -> Any:
        return {"units": self.hidden.units}


@pytest.fixture
def patched() -> Iterator[None]:
    nanotf.patch_tensorflow()
    yield
    nanotf.unpatch_tensorflow()


def _names() -> dict[tuple[str, str], Any]:
    """Returns all attributes of Keras's public modules and of its model classes."""
    root = versions.keras_module_name()
    found: dict[tuple[str, str], Any] = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in (root, "tensorflow") and "keras" in name and module is not None:
            found |= {(name, key): value for key, value in vars(module).items()}
    found |= {("tf.keras", key): value for key, value in vars(tf.keras).items()}
    for cls in (
        keras_models.model_class(),
        keras_models.sequential_class(),
        keras_models.functional_class(),
        keras_models.embedding_class(),
        keras_optimizers.adam_class(),
        L.Layer,
    ):
        found |= {(repr(cls), key): value for key, value in vars(cls).items()}
    return found


def _differences(before: dict[Any, Any], after: dict[Any, Any]) -> list[Any]:
    assert before.keys() == after.keys()
    return [key for key in before if before[key] is not after[key]]


def _train(model: Any, **arguments: Any) -> Any:
    x, y = digits(60)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.SGD(0.1), loss)
    x = x.reshape(len(x), -1)
    return model.fit(x, y, batch_size=20, shuffle=False, verbose=0, **arguments).history


@pytest.mark.both_generations
def test_every_attribute_is_as_before() -> None:
    keras = ("", ".layers", ".models", ".optimizers")
    for module in (*(f"tensorflow.keras{name}" for name in keras), versions.keras_module_name()):
        importlib.import_module(module)
    from tensorflow.keras.models import Sequential  # loads everything that the lines below load

    model = Sequential([L.Input((64,)), L.Dense(10)])
    _train(model, epochs=1)
    tf.keras.mixed_precision.set_global_policy(
        "mixed_bfloat16"
    )  # Keras 2 sets attributes the first time
    tf.keras.mixed_precision.set_global_policy("float32")
    before = _names()
    for _ in range(2):
        nanotf.patch_tensorflow(precision="mixed_bfloat16", sparse=True)
    changed = _differences(before, _names())
    assert ("tf.keras", "Model") in changed
    assert ("tensorflow.keras.models", "Sequential") in changed
    assert {key for _, key in changed} <= {
        *("Adam", "Embedding", "Model", "Sequential"),
        *("__init__", "__new__", "_global_policy"),
    }
    nanotf.unpatch_tensorflow()
    assert _differences(before, _names()) == []
    nanotf.unpatch_tensorflow()
    assert _differences(before, _names()) == []
    with pytest.raises(TypeError, match="num_processes"):
        _train(Sequential([L.Input((64,)), L.Dense(10)]), num_processes=2)


def test_unpatching_without_a_patch_changes_nothing() -> None:
    before = _names()
    nanotf.unpatch_tensorflow()
    assert _differences(before, _names()) == []
    assert not patching.is_patched()


@pytest.mark.usefixtures("patched")
@pytest.mark.both_generations
def test_names_are_nanotfs_and_isinstance_means_keras() -> None:
    from tensorflow.keras import Model
    from tensorflow.keras.models import Sequential

    assert tf.keras.Model is Model is nanotf.keras.Model
    assert tf.keras.Sequential is Sequential is nanotf.keras.Sequential
    keras = importlib.import_module(versions.keras_module_name())
    assert keras.Model is nanotf.keras.Model
    plain = object.__new__(OfLibrary)
    assert isinstance(plain, tf.keras.Model)
    assert issubclass(OfLibrary, tf.keras.Model)
    assert not isinstance(plain, tf.keras.Sequential)
    assert not issubclass(L.Dense, tf.keras.Model)

    class Abstract(tf.keras.Model, abc.ABC):  # type: ignore[misc, name-defined]
        pass

    assert issubclass(Abstract, Before)


def test_existing_models_are_left_alone() -> None:
    model = tf.keras.Sequential([L.Input((64,)), L.Dense(10)])
    kind = type(model)
    nanotf.patch_tensorflow()
    try:
        assert type(model) is kind
        assert isinstance(model, tf.keras.Sequential)
        with pytest.raises(TypeError, match="num_processes"):
            _train(model, num_processes=2)
    finally:
        nanotf.unpatch_tensorflow()


def _sequential() -> Any:
    return tf.keras.Sequential([L.Input((64,)), L.Dense(8, activation="relu"), L.Dense(10)])


def _functional() -> Any:
    inputs = L.Input((64,))
    return Before(inputs, L.Dense(10)(inputs))  # the name was imported before the patch


class OfLibraryBare(Before):  # type: ignore[misc, valid-type]
    """Derived before the patch, without get_config()."""

    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.out = L.Dense(10)
        self.activation = activation

    def call(self, inputs: Any) -> Any:
        return self.activation(self.out(inputs))


def _derived_now() -> Any:
    class Derived(tf.keras.Model):  # type: ignore[misc, name-defined]
        def __init__(self, units: int) -> None:
            super().__init__()
            self.out = L.Dense(units)

        def call(self, inputs: Any) -> Any:
            return self.out(inputs)

    return Derived(10)


def _functional_in_init() -> Any:
    class Wrapped(Before):  # type: ignore[misc, valid-type]
        def __init__(self, units: int) -> None:
            inputs = L.Input((64,))
            super().__init__(inputs, L.Dense(units)(inputs))

    return Wrapped(10)


def _cloned() -> Any:
    return tf.keras.models.clone_model(_functional())


MAKERS = [
    _sequential,
    _functional,
    _derived_now,
    _functional_in_init,
    _cloned,
    lambda: OfLibrary(6),
    lambda: OfLibraryBare(tf.nn.tanh),
]


@pytest.mark.usefixtures("float64", "patched")
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.both_generations
def test_models_of_all_makers_train_as_in_one_process(make: Any) -> None:
    models, histories = [], []
    for arguments in ({}, {"num_processes": 2}):
        tf.keras.utils.set_random_seed(3)
        models.append(make())
        histories.append(_train(models[-1], epochs=2, **arguments))
    assert_same_history(histories[1], histories[0])
    assert_same_state(models[1], models[0])


@pytest.mark.usefixtures("patched")
@pytest.mark.thorough
def test_keras_applications_take_num_processes() -> None:
    model = tf.keras.applications.MobileNetV2(
        weights=None, input_shape=(32, 32, 3), classes=10, alpha=0.35
    )
    model.compile("sgd", "sparse_categorical_crossentropy")
    images = np.random.default_rng(0).random((8, 32, 32, 3), dtype=np.float32)
    model.fit(images, np.arange(8), batch_size=4, verbose=0, num_processes=2)
    assert int(model.optimizer.iterations.numpy()) == 2


@pytest.mark.usefixtures("patched")
def test_saved_models_are_keras_own_and_loaded_ones_take_num_processes(tmp_path: Any) -> None:
    for number, make in enumerate((_sequential, _functional)):
        model = make()
        _train(model, epochs=1)
        path = tmp_path / f"{number}.keras"
        model.save(path)
        assert "nanotf" not in model.to_json()
        loaded = tf.keras.models.load_model(path)
        _train(loaded, epochs=1, num_processes=2)
        nanotf.unpatch_tensorflow()
        plain = tf.keras.models.load_model(path)
        assert type(plain).__module__.split(".")[0] == versions.keras_module_name()
        with pytest.raises(TypeError, match="num_processes"):
            _train(plain, num_processes=2)
        nanotf.patch_tensorflow()


def test_a_librarys_registered_class_keeps_its_name() -> None:
    def names() -> list[str]:
        config = saving.serialize_keras_object(OfLibrary(6))
        return [config[key] for key in ("module", "class_name", "registered_name")]

    before = names()
    nanotf.patch_tensorflow()
    try:
        assert names() == before
        assert before[2] == "library>OfLibrary"
    finally:
        nanotf.unpatch_tensorflow()


@pytest.mark.parametrize("before", ["float32", "float64"])
def test_precision_sets_keras_policy_and_restores_the_old_one(before: str) -> None:
    policy = tf.keras.mixed_precision
    policy.set_global_policy(before)
    nanotf.patch_tensorflow()
    assert policy.global_policy().name == before, "the default leaves it alone"
    nanotf.patch_tensorflow(precision="mixed_bfloat16")
    assert policy.global_policy().name == "mixed_bfloat16"
    layer = L.Dense(1)
    assert layer.compute_dtype == "bfloat16"
    nanotf.patch_tensorflow()
    assert policy.global_policy().name == before
    nanotf.patch_tensorflow(precision="mixed_bfloat16")
    nanotf.unpatch_tensorflow()
    assert policy.global_policy().name == before
    nanotf.patch_tensorflow()
    nanotf.unpatch_tensorflow(precision="mixed_bfloat16")
    assert policy.global_policy().name == "mixed_bfloat16"
    nanotf.unpatch_tensorflow(precision="float32")
    assert policy.global_policy().name == "float32"


def test_a_policy_set_since_is_kept() -> None:
    policy = tf.keras.mixed_precision
    nanotf.patch_tensorflow(precision="mixed_bfloat16")
    policy.set_global_policy("float64")
    nanotf.unpatch_tensorflow()
    assert policy.global_policy().name == "float64"


@pytest.mark.parametrize("precision", ["float16", "bfloat16", None, 32])
def test_unknown_precision(precision: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"'float32', .*Received: precision="):
        nanotf.patch_tensorflow(precision=precision)
    if precision is not None:
        with pytest.raises(InvalidArgumentError, match=r"'float32', .*Received: precision="):
            nanotf.unpatch_tensorflow(precision=precision)
    assert not patching.is_patched()


# ------------------------------------------------- calls of an unchanged script, undivided
class TwoStreams(nanotf.keras.Model):  # type: ignore[misc, valid-type]
    """Learns from many rows without labels and few with, as contrastive programs do."""

    def __init__(self) -> None:
        super().__init__()
        self.out = L.Dense(3)

    def call(self, x: Any) -> Any:
        return self.out(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        many, (few, y) = data
        with tf.GradientTape() as tape:
            known = tf.keras.losses.sparse_categorical_crossentropy(y, self(few), True)
            loss = tf.reduce_mean(known) + tf.reduce_mean(self(many) ** 2)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}

    def get_config(self) -> Any:
        return {}


class OwnFunction(TwoStreams):
    """Its step's graph is the user's, so it cannot get batches whose arrays differ in rows."""

    def make_train_function(self, force: bool = False) -> Any:
        return super().make_train_function(force=force)


def _floats(*shape: int) -> Any:
    return np.random.default_rng(len(shape)).normal(size=shape)


def _unlike_rows() -> Any:
    few = tf.data.Dataset.from_tensor_slices((_floats(12, 4), np.arange(12) % 3))
    few = few.shuffle(12, seed=3).repeat().batch(6)
    many = tf.data.Dataset.from_tensor_slices(_floats(180, 4)).shuffle(180, seed=5).batch(60)
    return tf.data.Dataset.zip((many, few))


def _sparse() -> Any:
    def sparse(x: Any) -> Any:
        return x, (tf.sparse.from_dense(x), tf.ones((tf.shape(x)[0],), tf.int64))

    return tf.data.Dataset.from_tensor_slices(_floats(12, 4)).batch(4).map(sparse)


UNDIVIDED: dict[str, tuple[Any, Any, int, str]] = {
    "unlike rows": (OwnFunction, _unlike_rows, 3, "same number of rows"),
    "sparse": (TwoStreams, _sparse, 3, "dense tensors"),
}


def _logging(cls: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces `fit` of a class, as MLflow's `autolog` does; the list gets what it logs."""
    stock, logged = cls.fit, list[str]()

    @functools.wraps(stock)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        history = stock(self, *args, **kwargs)
        logged.extend(history.history)
        return history

    monkeypatch.setattr(cls, "fit", fit)
    return logged


@pytest.mark.both_generations
@pytest.mark.parametrize("is_patched", [True, False])
@pytest.mark.every_case
def test_libraries_that_replace_fit(
    is_patched: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They log what workers train if nanotf has the public names; else a line says that not."""
    monkeypatch.setattr(console.lines, "_warned", set())
    model = nanotf.keras.Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = _floats(12, 4)
    if is_patched:
        nanotf.patch_tensorflow()
    try:
        logged = _logging(tf.keras.Model, monkeypatch)
        model.fit(x, x[:, :1], verbose=0, num_processes=2)
    finally:
        nanotf.unpatch_tensorflow()
        monkeypatch.undo()
    assert logged == (["loss"] if is_patched else [])
    assert ("test_patching has replaced Keras's `fit`" in caplog.text) != is_patched


@pytest.mark.skipif(not versions.is_keras_3(), reason="Keras 2 refuses empty data")
def test_data_without_rows(float64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keras takes an empty dataset as validation data: under `nanotf run`, nanotf does so, too."""
    x, y = _floats(12, 4), np.arange(12) % 3
    none = tf.data.Dataset.from_tensor_slices((x, y)).batch(4).take(0)

    def train(**arguments: Any) -> Any:
        tf.keras.utils.set_random_seed(1)
        model = nanotf.keras.Sequential([tf.keras.layers.Dense(3)])
        model.compile("sgd", "mse")
        return model.fit(x, y[:, None], validation_data=none, verbose=0, **arguments).history

    history = train()
    with pytest.raises(UndividedError, match="validation_data must have at least one batch"):
        train(num_processes=2)
    monkeypatch.setattr(defaults, "current", defaults.RunDefault(2))
    assert_same_history(train(), history)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", UNDIVIDED)
@pytest.mark.every_case
def test_a_call_that_cannot_be_divided(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Under `nanotf run` it trains in one process, with one line. Asked for, it is refused."""
    kind, data, steps, why = UNDIVIDED[name]

    def train(**arguments: Any) -> Any:
        tf.keras.utils.set_random_seed(1)
        begun: list[Any] = []
        model, hook = kind(), tf.keras.callbacks.LambdaCallback(on_train_begin=begun.append)
        model.compile(tf.keras.optimizers.Adam(0.01))
        x, epochs = data(), 2
        callbacks = [hook]
        for _ in range(2):  # the second continues in the data
            history = model.fit(
                x, epochs=epochs, steps_per_epoch=steps, callbacks=callbacks, verbose=0, **arguments
            ).history
        assert len(begun) == 2 * len(callbacks)
        return model, history

    expected, history = train()
    with pytest.raises(InvalidArgumentError, match=why):
        train(num_processes=2)
    monkeypatch.setattr(defaults, "current", defaults.RunDefault(2))
    pids = nanotf.worker_pids()
    caplog.clear()
    found, history_of_run = train()
    assert_same_history(history_of_run, history)
    assert_same_state(found, expected)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2, lines  # one for each call
    assert all("trains in one process" in line and why in line for line in lines)
    assert nanotf.worker_pids() == pids
