"""`tf.summary` in layers and steps: the parent's writers get what one process writes."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import nanotf
from nanotf.keras import nano

pytestmark = pytest.mark.both_generations
X = np.random.default_rng(0).normal(size=(22, 4))
Y = X.sum(1, keepdims=True)


class Noted(tf.keras.layers.Layer):
    def call(self, x: Any) -> Any:
        with tf.summary.experimental.summary_scope("noted", values=[x]) as (tag, _):
            tf.summary.write(tag + "/mean", tf.reduce_mean(x))
            tf.summary.write(tag + "/values", x, metadata=tf.compat.v1.SummaryMetadata())
        return x * 2.0


class Noting(nanotf.keras.Model):
    """Writes to a writer of its own in its step, and to the default one in a layer."""

    def __init__(self, writer: Any = None) -> None:
        super().__init__(name="noting")
        self.first, self.noted, self.last = (
            tf.keras.layers.Dense(3),
            Noted(name="noted"),
            tf.keras.layers.Dense(1),
        )
        self.writer = writer

    def call(self, x: Any) -> Any:
        return self.last(self.noted(self.first(x)))

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        if self.writer is not None:
            with self.writer.as_default():
                tf.summary.write("loss", logs["loss"], step=self.optimizer.iterations)
                tf.summary.write("name", tf.constant(["of", "a step"]), step=5)
        return logs


def _events(folder: pathlib.Path) -> list[tuple[Any, ...]]:
    """Returns what files of a folder hold: step, tag, plugin and numbers of each summary."""
    found = []
    for path in sorted(folder.rglob("events.*")):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                plugin = value.metadata.plugin_data.plugin_name
                array = tf.make_ndarray(value.tensor)
                if value.tag.startswith(("keras", "_")):  # the model's own picture
                    continue
                told = array.tolist() if array.dtype == object else np.round(array, 6).tolist()
                found.append(
                    (path.parent.relative_to(folder).name, event.step, value.tag, plugin, str(told))
                )
    return sorted(found)


def _both(tmp_path: pathlib.Path, train: Callable[[pathlib.Path, dict[str, int]], None]) -> Any:
    found = []
    for number in (0, 2):
        tf.keras.utils.set_random_seed(1)
        folder = tmp_path / f"{number} workers"
        train(folder, {"num_processes": number} if number else {})
        found.append(_events(folder))
    alone, shared = found
    assert shared == alone
    return alone


def _compiled(writer: Any = None) -> Any:
    model = Noting(writer)
    model.compile("sgd", "mse")
    return model


def test_the_callback(tmp_path: pathlib.Path, float64: None) -> None:
    pytest.importorskip("tensorboard")

    def train(folder: pathlib.Path, how: dict[str, int]) -> None:
        board = tf.keras.callbacks.TensorBoard(folder, update_freq=1, write_graph=False)
        arguments = {"batch_size": 5, "epochs": 2, "shuffle": False, "verbose": 0}
        _compiled().fit(X, Y, validation_data=(X[:7], Y[:7]), callbacks=[board], **arguments, **how)

    tags = {tag.rpartition("/")[2] for _, _, tag, *_ in _both(tmp_path, train)}
    assert {"mean", "values", "epoch_loss"} <= tags


@pytest.mark.parametrize("step", ["number", "iterations", "variable"])
def test_a_default_writer_around_the_calls(
    step: str, tmp_path: pathlib.Path, float64: None
) -> None:
    def train(folder: pathlib.Path, how: dict[str, int]) -> None:
        model = _compiled()
        writer = tf.summary.create_file_writer(str(folder))
        steps = {
            "number": 3,
            "iterations": model.optimizer.iterations,
            "variable": tf.Variable(7, dtype=tf.int64),
        }
        with writer.as_default(step=steps[step]):
            model.fit(X, Y, batch_size=5, epochs=2, shuffle=False, verbose=0, **how)
            model.evaluate(X, Y, batch_size=9, verbose=0, **how)
            model.predict(X, batch_size=8, verbose=0, **how)
        writer.close()

    steps = {at for _, at, tag, *_ in _both(tmp_path, train) if tag.endswith("mean")}
    assert len(steps) == {"number": 1, "iterations": 11, "variable": 1}[step]


def test_a_condition(tmp_path: pathlib.Path, float64: None) -> None:
    def train(folder: pathlib.Path, how: dict[str, int]) -> None:
        model = _compiled()
        writer, count = tf.summary.create_file_writer(str(folder)), model.optimizer.iterations
        with writer.as_default(step=count), tf.summary.record_if(lambda: tf.equal(count % 2, 0)):
            model.fit(X, Y, batch_size=5, epochs=2, shuffle=False, verbose=0, **how)
        writer.close()

    steps = {at for _, at, tag, *_ in _both(tmp_path, train) if tag.endswith("mean")}
    assert steps == {0, 2, 4, 6, 8}


@pytest.mark.parametrize("eagerly", [False, True])
def test_a_writer_of_the_model(eagerly: bool, tmp_path: pathlib.Path, float64: None) -> None:
    def train(folder: pathlib.Path, how: dict[str, int]) -> None:
        writer = tf.summary.create_file_writer(str(folder))
        model = Noting(writer)
        model.compile("sgd", "mse", run_eagerly=eagerly)
        for _ in range(2):
            model.fit(X, Y, batch_size=5, shuffle=False, verbose=0, **how)
        writer.close()

    found = _both(tmp_path, train)
    assert sum(tag.endswith("loss") for _, _, tag, *_ in found) == 10


def test_no_writer(tmp_path: pathlib.Path, float64: None) -> None:
    with contextlib.chdir(tmp_path) if hasattr(contextlib, "chdir") else contextlib.nullcontext():
        _compiled().fit(X, Y, batch_size=5, verbose=0, num_processes=2)
    assert not list(tmp_path.rglob("events.*"))


def test_a_loop(tmp_path: pathlib.Path, float64: None) -> None:
    writer, noted = tf.summary.create_file_writer(str(tmp_path)), Noted()
    dense = tf.keras.layers.Dense(3)
    dense.build((None, 4))

    @tf.function
    def step(x: Any) -> Any:
        return tf.reduce_sum(noted(dense(x)))

    @nano(num_processes=2)
    def outside() -> None:
        tf.summary.write("outside", tf.constant(3.0))

    @nano(num_processes=2)
    def loop() -> None:
        for number, rows in enumerate((5, 6, 1)):
            with writer.as_default(step=tf.constant(number, tf.int64)):
                step(tf.constant(X[:rows]))
                tf.summary.write("rows", rows)

    loop()
    with writer.as_default(step=9):
        outside()
    writer.close()
    found = _events(tmp_path)
    assert ("", 9, "outside", "", "3.0") in found
    assert [at for _, at, tag, *_ in found if tag == "rows"] == [0, 1, 2]
    assert sum(tag.endswith("mean") for _, _, tag, *_ in found) == 3
