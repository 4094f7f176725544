"""Random numbers in layers are those of one process, with a seed of their own and without."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_state

from nanotf.compat import chance
from nanotf.compat.chance import Chance
from nanotf.keras import Sequential

pytestmark = pytest.mark.both_generations

L = tf.keras.layers


def _categories(x: Any) -> Any:
    return tf.cast(tf.random.categorical(tf.math.log(tf.ones_like(x)), 1), x.dtype)


DRAWS: dict[str, Callable[[Any], Any]] = {
    "uniform": lambda x: x + tf.random.uniform(tf.shape(x), dtype=x.dtype),
    "normal": lambda x: x + tf.random.normal(tf.shape(x), dtype=x.dtype),
    "truncated_normal": lambda x: x + tf.random.truncated_normal(tf.shape(x), dtype=x.dtype),
    "gamma": lambda x: x + tf.random.gamma(tf.shape(x), 2.0, dtype=x.dtype),
    "categorical": lambda x: x + _categories(x),
    "of_a_row": lambda x: x * tf.random.uniform([tf.shape(x)[0], 1], dtype=x.dtype),
    "scalar": lambda x: x * tf.random.uniform([], dtype=x.dtype),
    "seeded": lambda x: x + tf.random.normal(tf.shape(x), dtype=x.dtype, seed=4),
    "stateless": lambda x: x + tf.random.stateless_normal(tf.shape(x), [1, 2], dtype=x.dtype),
    "dropout": lambda x: tf.nn.dropout(x, 0.3),
    "dropout_seeded": lambda x: tf.nn.dropout(x, 0.3, seed=5),
    "shuffle": tf.random.shuffle,
}


class Drawing(L.Layer):  # type: ignore[misc]
    def __init__(self, name: str) -> None:
        super().__init__()
        self.draw = DRAWS[name]

    def call(self, x: Any, training: bool | None = None) -> Any:
        return self.draw(x) if training else x


def _drawing(*names: str) -> list[Any]:
    return [L.Dense(4), *map(Drawing, names)]


MODELS: dict[str, Callable[[], list[Any]]] = {
    "draws": lambda: _drawing("uniform", "normal", "truncated_normal", "gamma"),
    "more_draws": lambda: _drawing("categorical", "of_a_row", "scalar", "shuffle"),
    "seeded_draws": lambda: _drawing("seeded", "stateless", "dropout", "dropout_seeded"),
    "layers": lambda: [L.GaussianNoise(0.3), L.Dropout(0.3), L.GaussianDropout(0.3)],
    "layers_seeded": lambda: [
        L.GaussianNoise(0.3, seed=2),
        L.Dropout(0.3, seed=1),
        L.Dropout(0.3, seed=1),
        L.AlphaDropout(0.3, seed=3),
    ],
    "sequences": lambda: [
        L.Reshape((3, 2)),
        L.SpatialDropout1D(0.3),
        L.Bidirectional(L.GRU(3, dropout=0.3)),
    ],
}
CASES = [
    *((name, True, 37) for name in MODELS),
    ("layers_seeded", True, 40),
    ("layers_seeded", False, 37),
    ("layers_seeded", False, 40),
]


@pytest.mark.parametrize(("name", "built", "rows"), CASES)
def test_draws(name: str, built: bool, rows: int) -> None:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(rows, 6)), random.normal(size=(rows, 2))

    def run(**workers: Any) -> tuple[Any, list[float], Any]:
        tf.keras.utils.set_random_seed(3)
        model = Sequential([*([L.Input((6,))] if built else []), *MODELS[name](), L.Dense(2)])
        losses = []
        for _ in range(2):  # the second time, the layers were traced before
            model.compile("sgd", "mse")
            for _ in range(2):  # the second continues the streams of the first
                data = {"x": x, "y": y, "validation_data": (x, y)}
                history = model.fit(**data, batch_size=8, verbose=0, **workers).history
                losses += [*history["loss"], *history["val_loss"]]
        return model, losses, tf.random.uniform([2]).numpy()

    expected, losses, later = run()
    found, our_losses, our_later = run(num_processes=2)
    np.testing.assert_allclose(our_losses, losses, rtol=1e-4)
    np.testing.assert_array_equal(our_later, later)
    assert_same_state(found, expected)


@pytest.mark.parametrize("between", ["a-seed", "the-same-seed", "another-model", "a-stop"])
def test_streams_between_fits(between: str) -> None:
    """Random operations of traced steps continue, or start anew, as in one process."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(37, 6)), random.normal(size=(37, 2))

    class Stopping(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = between == "a-stop"

    def run(**workers: Any) -> list[float]:
        tf.keras.utils.set_random_seed(3)
        losses = []

        def fit(model: Any) -> None:
            history = model.fit(
                x, y, batch_size=8, epochs=2, verbose=0, callbacks=[Stopping()], **workers
            )
            losses.extend(history.history["loss"])

        def made() -> Any:
            model = Sequential([L.Input((6,)), *_drawing("normal"), L.Dropout(0.3), L.Dense(2)])
            model.compile("sgd", "mse")
            return model

        model = made()
        fit(model)
        if between.endswith("seed"):
            tf.keras.utils.set_random_seed(4 if between == "a-seed" else 3)
        elif between == "another-model":
            fit(made())
        fit(model)
        return losses

    np.testing.assert_allclose(run(num_processes=2), run(), rtol=1e-4)


def test_seeds_of_items_are_those_of_set_random_seed() -> None:
    def drawn() -> list[float]:
        layer = tf.keras.layers.Dense(1)
        layer.build((None, 1))
        numbers = random.random(), np.random.normal(), layer.kernel[0, 0], tf.random.normal(())
        return [*map(float, numbers), float(tf.random.normal(()))]

    for seed in (0, 7, 2**32 - 1):
        chance.seed(seed)  # does what the other does, in less time
        ours = Chance.capture(), drawn(), Chance.capture()
        tf.keras.utils.set_random_seed(seed)
        theirs = Chance.capture(), drawn(), Chance.capture()
        assert repr(ours) == repr(theirs)
