"""Own steps on batches whose arrays differ in rows: programs with labelled and unlabelled data."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_history, assert_same_state

import nanotf
from nanotf.compat.versions import is_keras_3
from nanotf.errors import UndividedError
from nanotf.keras import Model

pytestmark = pytest.mark.both_generations

L = tf.keras.layers
KNOWN, UNKNOWN, WIDTH = 100, 87, 4


class TwoStreams(Model):  # type: ignore[misc, valid-type]
    """Learns from rows with labels and without, alone and joined."""

    def __init__(self, noise: bool = False) -> None:
        super().__init__()
        self.noise = noise
        self.hidden = L.Dense(8, activation="relu")
        self.norm = L.BatchNormalization()
        # Keras 2's dropout has a state in each graph.
        self.drop = L.Dropout(0.1 if is_keras_3() else 0.0)
        self.out = L.Dense(3)
        self.mean = tf.keras.metrics.Mean(name="mean")

    @property
    def metrics(self) -> list[Any]:
        return [self.mean]

    def call(self, x: Any, training: bool = False) -> Any:
        hidden = self.norm(self.hidden(x), training=training)
        return self.out(self.drop(hidden, training=training))

    def train_step(self, data: Any) -> dict[str, Any]:
        (x, y), other = data
        if self.noise:
            other += tf.random.normal([WIDTH], dtype=other.dtype)
        rows = tf.shape(x)[0]
        with tf.GradientTape() as tape:
            joined = self(tf.concat([x, other], 0), training=True)
            known = tf.keras.losses.sparse_categorical_crossentropy(y, joined[:rows], True)
            guesses = tf.nn.softmax(self(other, training=True))
            loss = tf.reduce_mean(known) + tf.reduce_mean(guesses**2)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.mean.update_state(loss)
        return {"mean": self.mean.result(), "rows": 1000 * rows + tf.shape(other)[0]}


def _known(batch_size: int) -> Any:
    random = np.random.default_rng(0)
    arrays = random.normal(size=(KNOWN, WIDTH)), random.integers(0, 3, KNOWN)
    return tf.data.Dataset.from_tensor_slices(arrays).shuffle(KNOWN, seed=2).batch(batch_size)


def _unknown(batch_size: int) -> Any:
    rows = np.random.default_rng(1).normal(size=(UNKNOWN, WIDTH))
    return tf.data.Dataset.from_tensor_slices(rows).shuffle(UNKNOWN, seed=4).batch(batch_size)


def _batches() -> Iterator[Any]:
    random = np.random.default_rng(5)
    for rows, others in ((6, 6), (6, 9), (1, 5), (4, 1), (7, 7), (2, 3)):
        labelled = random.normal(size=(rows, WIDTH)), random.integers(0, 3, rows)
        yield labelled, random.normal(size=(others, WIDTH))


def _data(kind: str) -> Any:
    if kind == "generator":
        return _batches()
    if kind == "one of many":
        rows = np.random.default_rng(3).normal(size=(900, WIDTH))
        made = tf.data.Dataset.from_tensor_slices
        others = made(rows[:599]).batch(2).concatenate(made(rows[599:899]).batch(2))
        return tf.data.Dataset.zip((made((rows, np.arange(900) % 3)).batch(2), others))
    sizes = (5, 30) if kind == "each batch" else (16, 16)
    zipped = tf.data.Dataset.zip((_known(sizes[0]), _unknown(sizes[1])))
    if kind == "none":
        return zipped.filter(lambda pair, other: tf.shape(pair[0])[0] == tf.shape(other)[0])
    return zipped


def _trained(kind: str, noise: bool = False, **arguments: Any) -> tuple[Any, list[Any]]:
    tf.keras.utils.set_random_seed(1)
    model = TwoStreams(noise)
    model(np.zeros((2, WIDTH)))
    model.compile(tf.keras.optimizers.Adam(0.001))
    epochs = 1 if kind in ("generator", "one of many") else 2
    histories = [
        model.fit(_data(kind), epochs=epochs, verbose=0, **arguments).history for _ in range(2)
    ]
    return model, histories


@pytest.mark.parametrize("kind", ["the last batch", "each batch", "generator", "one of many"])
def test_streams(float64: None, kind: str) -> None:
    expected, histories = _trained(kind)
    found, with_workers = _trained(kind, num_processes=2)
    for ours, theirs in zip(with_workers, histories, strict=True):
        assert_same_history(ours, theirs)
    assert_same_state(found, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("step", [4, 5, 6])
def test_a_worker_that_dies(float64: None, step: int) -> None:
    """Batch 5 of an epoch is the one that comes whole."""

    class Kill(tf.keras.callbacks.Callback):  # type: ignore[misc]
        left = 1

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == step % 6 and self.left and (step < 6 or self.epoch):
                self.left = 0
                os.kill(nanotf.worker_pids()[1], signal.SIGKILL)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

    kill = Kill()
    expected, histories = _trained("the last batch")
    found, with_workers = _trained(
        "the last batch", num_processes=2, callbacks=[kill], max_restarts=1
    )
    assert kill.left == 0
    assert_same_history(with_workers[1], histories[1])
    assert_same_state(found, expected)


def test_random_numbers_of_two_graphs(float64: None) -> None:
    """Refused, since each graph would begin its own."""
    pids = nanotf.worker_pids()
    with pytest.raises(UndividedError, match=r"draws random numbers.*state.*tf\.random\.Generator"):
        _trained("the last batch", noise=True, num_processes=2)
    assert pids == [] or nanotf.worker_pids() == pids


@pytest.mark.parametrize("kind", ["each batch", "none"])
def test_random_numbers_of_one_graph(float64: None, kind: str) -> None:
    """Keras's graph also draws when the data have ended."""
    expected, histories = _trained(kind, noise=True)
    found, with_workers = _trained(kind, noise=True, num_processes=2)
    assert_same_history(with_workers[0], histories[0])
    assert_same_state(found, expected)


def test_a_pipeline_in_every_worker(float64: None) -> None:
    """Refused, since each worker would divide the batch."""
    with pytest.raises(UndividedError, match="rows"):
        _trained("the last batch", sharding="data", num_processes=2)
