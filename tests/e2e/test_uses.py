"""Typical use in scripts and notebooks: real data and models."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_history, assert_same_state, fit_both

from nanotf.compat.versions import is_keras_3
from nanotf.keras import Model, Sequential

pd = pytest.importorskip("pandas")
L = tf.keras.layers
KERAS_3 = is_keras_3()
ROWS = 46


def table(width: int = 4, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(ROWS, width))


def targets(width: int = 1) -> np.ndarray:
    return np.stack([np.tanh(table().sum(1) * (i + 1)) for i in range(width)], axis=1)


def compiled(model: Any, **arguments: Any) -> Any:
    model.compile(**{"optimizer": tf.keras.optimizers.SGD(0.1), "loss": "mse", **arguments})
    return model


# ------------------------------------------------------------------------------ their data
def test_sequential_without_an_input_fitted_with_a_dataset() -> None:
    dataset = tf.data.Dataset.from_tensor_slices((table(), targets())).batch(12)
    models = []
    for processes in (2, None):
        tf.keras.utils.set_random_seed(1)
        model = compiled(Sequential([L.Dense(5, kernel_initializer="ones"), L.Dense(1)]))
        model.layers[1].kernel_initializer = tf.keras.initializers.Ones()
        model.fit(dataset, epochs=2, verbose=0, num_processes=processes)
        models.append(model)
    assert models[0].built
    for ours, theirs in zip(models[0].get_weights(), models[1].get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def two_named_inputs() -> Any:
    tf.keras.utils.set_random_seed(3)
    inputs = [L.Input((4,), name="first"), L.Input((2,), name="second")]
    hidden = L.Concatenate()([inputs[0], L.Dense(3)(inputs[1])])
    outputs = [L.Dense(1, name="a")(hidden), L.Dense(2, name="b")(hidden)]
    return Model(inputs, outputs)


@pytest.mark.both_generations
def test_dicts_by_the_names_of_inputs(float64: None) -> None:
    """A model with a list of inputs takes a dict with their names, in any order."""
    x = {"second": table(2, 1), "first": table()}
    y = [targets(), targets(2)]
    fit_both(
        lambda: compiled(two_named_inputs(), loss=["mse", "mae"]),
        x=x, y=y, batch_size=12, validation_data=(x, y),
    )  # fmt: skip


@pytest.mark.thorough
def test_weights_of_samples_by_output(float64: None) -> None:
    rng = np.random.default_rng(2)
    weights = [rng.integers(0, 4, ROWS).astype("float64") for _ in range(2)]
    fit_both(
        lambda: compiled(two_named_inputs(), loss=["mse", "mae"]),
        x=[table(), table(2, 1)], y=[targets(), targets(2)], sample_weight=weights, batch_size=12,
    )  # fmt: skip


@pytest.mark.thorough
def test_lists_of_one_array(float64: None) -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(3)
        return compiled(Sequential([L.Input((4,)), L.Dense(1)]))

    fit_both(make, x=[table()], y=[targets()], batch_size=12, validation_data=[table(), targets()])


def test_vectors(float64: None) -> None:
    """One number per row; Keras adds a second dimension."""

    def make() -> Any:
        tf.keras.utils.set_random_seed(3)
        return compiled(Sequential([L.Input((1,)), L.Dense(3), L.Dense(1)]))

    x, y = table()[:, 0], targets()[:, 0]
    fit_both(make, x=x, y=y, batch_size=12)
    fit_both(make, x=tf.data.Dataset.from_tensor_slices((x, y)).batch(12))


def test_integers_booleans_and_bytes() -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(3)
        model = Sequential([L.Input((4, 4, 1)), L.Rescaling(1 / 255), L.Flatten(), L.Dense(1)])
        return compiled(model, loss=tf.keras.losses.BinaryCrossentropy(from_logits=True))

    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (ROWS, 4, 4, 1), dtype=np.uint8)
    fit_both(make, x=images, y=images.sum((1, 2, 3)) > 2000, batch_size=12)


def test_a_table_with_columns_of_strings() -> None:
    """Uses a DataFrame as a dict of its columns, through lookups, as in the feature tutorials."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "colour": rng.choice(["red", "green", "blue"], ROWS),
            "size": rng.normal(size=ROWS),
            "rank": rng.integers(0, 3, ROWS),
        }
    )
    target = (frame.pop("rank") + (frame["colour"] == "red")).astype("float32")

    def make() -> Any:
        tf.keras.utils.set_random_seed(3)
        colour = L.Input((1,), dtype="string", name="colour")
        size = L.Input((1,), name="size")
        lookup = L.StringLookup(output_mode="one_hot")
        lookup.adapt(np.array(["red", "green", "blue"]))
        normal = L.Normalization(axis=None)
        normal.adapt(frame["size"].to_numpy())
        joined = L.Concatenate()([lookup(colour), normal(size)])
        return compiled(Model({"colour": colour, "size": size}, L.Dense(1)(joined)))

    columns = {
        "colour": tf.constant(frame["colour"].tolist())[:, None],
        "size": frame["size"].to_numpy("float32")[:, None],
    }
    arrays = {"x": columns, "y": target.to_numpy(), "batch_size": 12, "shuffle": False}
    dataset = {"x": tf.data.Dataset.from_tensor_slices((columns, target)).batch(12)}
    for data in (arrays, dataset):
        found, expected = (
            make().fit(**data, epochs=2, verbose=0, num_processes=processes).history
            for processes in (2, None)
        )
        assert_same_history(found, expected)


# ------------------------------------------------------------------------------- their models
@pytest.mark.thorough
def test_a_layer_that_is_called_twice(float64: None) -> None:
    """A Siamese model; the shared layer's losses and gradients come from both calls."""

    def make() -> Any:
        tf.keras.utils.set_random_seed(3)
        left, right = L.Input((4,)), L.Input((4,))
        shared = L.Dense(5, activation="tanh", kernel_regularizer="l2", activity_regularizer="l2")
        encoder = Sequential([L.Input((4,)), shared, L.Dense(2)])
        difference = L.Subtract()([encoder(left), encoder(right)])
        return compiled(Model([left, right], L.Dense(1)(difference)), metrics=["mae"])

    fit_both(make, x=[table(), table(seed=1)], y=targets(), batch_size=12)


@pytest.mark.thorough
@pytest.mark.both_generations
def test_masked_words(float64: None) -> None:
    words = np.random.default_rng(0).integers(0, 9, (ROWS, 6))
    words[:, 4:] *= np.arange(ROWS)[:, None] % 2  # every other row is short

    def make() -> Any:
        tf.keras.utils.set_random_seed(3)
        layers = [L.Embedding(9, 3, mask_zero=True), L.Bidirectional(L.LSTM(4)), L.Dense(1)]
        return compiled(Sequential([L.Input((6,)), *layers]), optimizer="adam")

    fit_both(make, x=words, y=targets(), batch_size=12)


def test_recurrent_layer_with_a_state_of_its_own(float64: None) -> None:
    """Its state has one row for each row of a batch, so each worker computes all rows."""

    def make() -> Any:
        tf.keras.utils.set_random_seed(3)
        inputs = {"batch_shape" if KERAS_3 else "batch_input_shape": (8, 3, 2)}
        layers = [L.Input(**inputs)] if KERAS_3 else [L.InputLayer(**inputs)]
        return compiled(Sequential([*layers, L.LSTM(4, stateful=True), L.Dense(1)]))

    x = np.random.default_rng(5).normal(size=(32, 3, 2))
    fit_both(make, x=x, y=x[:, 0, :1], batch_size=8, shuffle=False)


def test_inputs_of_a_fixed_batch_size(float64: None) -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(3)
        inputs = L.Input((4,), batch_size=8)
        hidden = L.Reshape((2, 2))(L.Dense(4, activation="tanh")(inputs))
        return compiled(Model(inputs, L.Dense(1)(L.Flatten()(hidden))))

    fit_both(make, x=table()[:40], y=targets()[:40], batch_size=8)


@pytest.mark.thorough
def test_image_model_of_the_tutorials() -> None:
    """Augmentation, rescaling, a frozen application, pooling, dropout: it trains and saves."""
    tf.keras.utils.set_random_seed(3)
    base = tf.keras.applications.MobileNetV2(
        weights=None, input_shape=(32, 32, 3), include_top=False
    )
    base.trainable = False
    augment = tf.keras.Sequential([L.RandomFlip("horizontal"), L.RandomRotation(0.2)])
    inputs = tf.keras.Input((32, 32, 3))
    x = tf.keras.applications.mobilenet_v2.preprocess_input(augment(inputs))
    x = L.Dropout(0.2)(L.GlobalAveragePooling2D()(base(x, training=False)))
    model = compiled(Model(inputs, L.Dense(1)(x)), optimizer="adam")
    images = np.random.default_rng(0).integers(0, 256, (10, 32, 32, 3)).astype("float32")
    frozen, trained = base.get_weights(), model.layers[-1].get_weights()
    history = model.fit(images, np.ones(10), batch_size=4, epochs=2, verbose=0, num_processes=2)
    assert np.isfinite(history.history["loss"]).all()
    for now, then in zip(base.get_weights(), frozen, strict=True):
        np.testing.assert_array_equal(now, then)
    assert not np.array_equal(model.layers[-1].get_weights()[0], trained[0])


# ------------------------------------------------------------------------------- their scripts
def test_classes_and_functions_of_a_function(float64: None) -> None:
    factor = 0.5

    class Twice(L.Layer):  # type: ignore[misc]
        def __init__(self, units: int) -> None:
            super().__init__()
            self.inner = L.Dense(units)

        def call(self, inputs: Any) -> Any:
            return self.inner(inputs) * 2 * factor

    class Local(Model):
        def __init__(self, units: int) -> None:
            super().__init__()
            self.twice, self.out = Twice(units), L.Dense(1)

        def call(self, inputs: Any) -> Any:
            return self.out(self.twice(inputs))

    class Off(tf.keras.metrics.Mean):  # type: ignore[misc]
        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            return super().update_state(tf.abs(y_true - y_pred) * factor)

    def loss(y_true: Any, y_pred: Any) -> Any:
        return tf.reduce_mean(tf.square(y_true - y_pred) * factor, axis=-1)

    def make() -> Any:
        tf.keras.utils.set_random_seed(3)
        model = compiled(Local(3), loss=loss, metrics=[Off(name="off")])
        model(table()[:1])
        return model

    fit_both(make, x=table(), y=targets(), batch_size=12)


CELLS = [
    """
import numpy as np
import tensorflow as tf
from nanotf.keras import Model, Sequential
L = tf.keras.layers
scale = 0.5
""",
    """
class Scaled(L.Layer):
    def __init__(self, units):
        super().__init__()
        self.dense = L.Dense(units)
    def call(self, inputs):
        return self.dense(inputs) * scale

def loss(y_true, y_pred):
    return tf.reduce_mean(tf.square(y_true - y_pred), axis=-1) * scale

def train(processes):
    tf.keras.utils.set_random_seed(3)
    inputs = L.Input((4,))
    model = Model(inputs, Scaled(1)(L.Lambda(lambda v: v * scale)(inputs)))
    model.compile(tf.keras.optimizers.SGD(0.1), loss)
    x = np.arange(48).reshape(12, 4) / 48
    history = model.fit(x, x[:, :1], batch_size=5, shuffle=False, epochs=2, verbose=0,
                        num_processes=processes)
    return history.history["loss"]
""",
    "plain, two = train(None), train(2)",
    """
class Scaled(L.Layer):  # the cell is edited and run again
    def __init__(self, units):
        super().__init__()
        self.dense = L.Dense(units)
    def call(self, inputs):
        return self.dense(inputs) * scale + 1.0
scale = 0.25
""",
    "edited_plain, edited_two = train(None), train(2)",
]


def _as_a_console(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Runs the cells in a `__main__` without a file, so their source is not on disk."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    for cell in CELLS:
        exec(compile(cell, "<cell>", "exec"), vars(main))
    return vars(main)


def _as_a_notebook(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    shells = pytest.importorskip("IPython.core.interactiveshell")
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    config = {"HistoryManager": {"enabled": False}}  # it would keep a thread
    shell = shells.InteractiveShell(config=pytest.importorskip("traitlets.config").Config(config))
    for cell in CELLS:
        shell.run_cell(cell).raise_error()
    namespace: dict[str, Any] = shell.user_ns
    return namespace


@pytest.mark.parametrize("run", [_as_a_console, _as_a_notebook])
def test_cells(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    found = run(monkeypatch)
    np.testing.assert_allclose(found["two"], found["plain"], rtol=1e-4)
    np.testing.assert_allclose(found["edited_two"], found["edited_plain"], rtol=1e-4)
    assert not np.allclose(found["two"], found["edited_two"])


@pytest.mark.thorough
def test_grid_search_of_settings(float64: None) -> None:
    """Many small models in a loop, each with another width and rate; the best model is kept."""
    best = {}
    for processes in (2, None):
        losses = {}
        for width, rate in ((2, 0.1), (3, 0.01)):
            tf.keras.backend.clear_session()
            tf.keras.utils.set_random_seed(3)
            model = Sequential([L.Input((4,)), L.Dense(width), L.Dense(1)])
            compiled(model, optimizer=tf.keras.optimizers.Adam(rate))
            history = model.fit(
                table(), targets(), batch_size=12, verbose=0, validation_split=0.3,
                shuffle=False, num_processes=processes,
            )  # fmt: skip
            losses[width, rate] = history.history["val_loss"][-1]
        best[processes] = losses
    assert_same_history(
        {str(k): v for k, v in best[2].items()}, {str(k): v for k, v in best[None].items()}
    )


@pytest.mark.thorough
def test_cross_validation_with_restored_weights(float64: None) -> None:
    models = []
    for processes in (2, None):
        tf.keras.utils.set_random_seed(3)
        model = compiled(Sequential([L.Input((4,)), L.Dense(3), L.Dense(1)]))
        start, scores = model.get_weights(), []
        for fold in range(3):
            held_out = np.arange(ROWS) % 3 == fold
            model.set_weights(start)
            compiled(model, optimizer="adam")
            model.fit(
                table()[~held_out], targets()[~held_out], batch_size=12, verbose=0, shuffle=False,
                num_processes=processes,
            )  # fmt: skip
            arguments = {"verbose": 0, "num_processes": processes}
            scores.append(model.evaluate(table()[held_out], targets()[held_out], **arguments))
        models.append((model, scores))
    np.testing.assert_allclose(models[0][1], models[1][1], rtol=1e-9)
    assert_same_state(models[0][0], models[1][0])
