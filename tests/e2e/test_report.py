"""`history.nanotf` and `last_report()`: the parts add up, and describe the call."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import digits, fit_both, small_cnn

import nanotf
from nanotf.compat.versions import is_keras_3
from nanotf.keras import nano, nano_multiprocessing
from nanotf.pool import warm
from nanotf.report.call_report import Report
from nanotf.report.timeline import COLUMNS, slices_of_worker
from nanotf.wire.timing import HOOK_COLUMNS


def _check_sums(report: Report) -> None:
    """Asserts that every part is a time, and that the parts add up to the whole."""
    parts = [report.preparing, report.start_up, report.shipping, report.running, report.finishing]
    assert min(parts) >= 0
    np.testing.assert_allclose(sum(parts), report.total, rtol=1e-9)
    assert report.hooks <= report.running
    assert [worker.rank for worker in report.workers] == list(range(report.size))
    for worker in report.workers:
        values = [getattr(worker, field) or 0.0 for field, _ in COLUMNS]
        assert min(values) >= 0, worker
        np.testing.assert_allclose(sum(values), worker.total, rtol=1e-9)


def test_fit(tmp_path: pathlib.Path) -> None:
    x, y = digits(200)
    warm.end_pool()
    model = small_cnn()
    arguments = {"batch_size": 50, "epochs": 3, "verbose": 0, "num_processes": 2}
    history = model.fit(x, y, validation_data=(x[:100], y[:100]), **arguments)
    report = history.nanotf
    assert nanotf.last_report() is report
    _check_sums(report)
    assert report.shipped_bytes > x.nbytes
    for worker in report.workers:
        assert worker.executions == 3 * (4 + 2)
        assert worker.first_steps > 0
        assert worker.compute > 0
        assert worker.communication > 0
        assert worker.input > 0
    for text in ("fit on 2 workers", "start-up", "compute", "imbalance"):
        assert text in str(report)
    # The workers' times use this process's clock: all of them are within the call.
    for times in report.times:
        assert report.call.lent <= times.began <= times.ready <= times.ended <= report.call.done
        assert [p.kind for p in times.passes] == ["train", "test"] * 3
        assert [p.index for p in times.passes[::2]] == [0, 1, 2]

    events = json.loads(pathlib.Path(report.to_chrome_trace(tmp_path / "t.json")).read_text())
    found = {(e["tid"], e["name"]) for e in events["traceEvents"] if e["ph"] == "X"}
    assert {(1, "epoch 3"), (2, "train step"), (1, "evaluation"), (0, "on_epoch_end")} <= found
    picture = pathlib.Path(report.plot(tmp_path / "report.png"))
    assert picture.read_bytes().startswith(b"\x89PNG")

    # Warm, with the functions traced: the same steps, counted again, and a hook after each.
    assert [worker.hooks for worker in report.workers] == [0, 0]
    callback = tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    arguments["callbacks"] = [callback]
    again = model.fit(x, y, validation_data=(x[:100], y[:100]), **arguments).nanotf
    _check_sums(again)
    assert [w.executions for w in again.workers] == [18, 18]
    for times, worker in zip(again.times, again.workers, strict=True):
        assert len(times.hooks) == 12 * HOOK_COLUMNS
        assert worker.hooks > 0
        slices = list(slices_of_worker(times))
        assert [piece.name for piece in slices].count("hook") == 12
        assert all(piece.began <= piece.ended for piece in slices)


@pytest.mark.both_generations
def test_one_process() -> None:
    x, y = digits(60)
    ours, theirs = small_cnn(), small_cnn()
    said: list[str] = []
    told = tf.keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: said.append(f"epoch {epoch}")
    )
    arguments = {"epochs": 2, "verbose": 0, "validation_split": 0.2, "shuffle": False}
    last = nanotf.last_report()

    def whole_list(model: Any) -> Any:
        return tf.keras.callbacks.CallbackList([told], add_history=True, model=model)

    for number, make in ((None, lambda _: None), (1, lambda _: told), (1, whole_list)):
        callbacks = make(ours)
        listed = list(getattr(callbacks, "callbacks", ()))
        history = ours.fit(x, y, callbacks=callbacks, num_processes=number, **arguments)
        assert list(getattr(callbacks, "callbacks", ())) == listed
        report = history.nanotf
        assert report.size == 1
        kinds = [one.kind for one in report.times[0].passes]
        assert kinds == ["train", "test"] * 2
        assert 0 < report.workers[0].compute < report.total
        before = theirs.fit(x, y, callbacks=make(theirs), **arguments)
        assert history.history == before.history
    assert said == ["epoch 0", "epoch 1"] * 4
    assert nanotf.last_report() is last


@pytest.mark.thorough
def test_several_steps_per_execution() -> None:
    x, y = digits(200)
    model = small_cnn()
    model.compile("sgd", model.loss, steps_per_execution=2)
    report = model.fit(x, y, batch_size=50, epochs=2, verbose=0, num_processes=2).nanotf
    _check_sums(report)
    assert [worker.executions for worker in report.workers] == [4, 4]


@pytest.mark.thorough
def test_run_eagerly(float64: None) -> None:
    def make() -> Any:
        model = small_cnn()
        model.compile("sgd", model.loss, run_eagerly=True)
        return model

    x, y = digits(30)
    found, _ = fit_both(make, x=x, y=y, batch_size=10, epochs=1)
    assert [worker.executions for worker in found.history.nanotf.workers] == [3, 3]


@pytest.mark.thorough
def test_data_read_by_this_process() -> None:
    x, y = digits(80)

    def batches() -> Iterator[Any]:
        for begin in range(0, 80, 10):
            yield x[begin : begin + 10], y[begin : begin + 10]

    report = small_cnn().fit(batches(), steps_per_epoch=8, verbose=0, num_processes=2).nanotf
    _check_sums(report)
    assert report.reading > 0
    assert "your data, beside the steps" in str(report)
    assert [reading.batches for reading in report.call.readings] == [8]


def test_evaluate_and_predict() -> None:
    x, y = digits(100)
    model = small_cnn()
    model.evaluate(x, y, batch_size=25, verbose=0, num_processes=2)
    report = nanotf.last_report()
    assert report is not None and report.method == "evaluate"
    _check_sums(report)
    assert [worker.executions for worker in report.workers] == [4, 4]
    model.predict(x, batch_size=50, verbose=0, num_processes=2)
    report = nanotf.last_report()
    assert report is not None and report.method == "predict"
    _check_sums(report)
    assert [worker.executions for worker in report.workers] == [2, 2]


@nano_multiprocessing
@tf.function
def _step(inputs: Any, model: Any, loss_object: Any, optimizer: Any) -> Any:
    x, y = inputs
    with tf.GradientTape() as tape:
        loss = loss_object(y, model(x, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


@nano(num_processes=2)
def _train(model: Any, dataset: Any, loss_object: Any, optimizer: Any, step: Any) -> float:
    loss = 0.0
    for inputs in dataset:
        loss = step(inputs, model, loss_object, optimizer)
    return float(loss)


def test_custom_loop() -> None:
    dataset = tf.data.Dataset.from_tensor_slices(digits(64)).batch(16)
    model = small_cnn()
    _train(model, dataset, model.loss, tf.keras.optimizers.SGD(0.1), _step)
    report = nanotf.last_report()
    assert report is not None and report.method == "@nano"
    _check_sums(report)
    for worker in report.workers:
        assert worker.rebuilding > 0
        assert worker.communication > 0
        assert worker.input is worker.first_steps is worker.executions is None
    assert "Not measured here: first step, input, between" in str(report)


def test_a_call_that_fails_leaves_the_last_report() -> None:
    x, y = digits(20)
    before = small_cnn().fit(x, y, verbose=0, num_processes=2).nanotf

    def broken() -> Iterator[Any]:
        yield x, y
        raise ArithmeticError("no more")

    with pytest.raises(ArithmeticError, match="no more"):
        small_cnn().fit(broken(), steps_per_epoch=2, verbose=0, num_processes=2)
    assert nanotf.last_report() is before


@pytest.mark.thorough
def test_transport_grpc() -> None:
    x, y = digits(20)
    report = small_cnn().fit(x, y, verbose=0, num_processes=2, transport="grpc").nanotf
    _check_sums(report)
    assert all(worker.communication_wait is None for worker in report.workers)
    assert "Not measured here: input, comm., comm. wait." in str(report)


class _Centre(tf.keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return x - tf.reduce_max(x, 0)


def test_parts_that_were_divided_and_one_that_was_not() -> None:
    layers = tf.keras.layers
    inner = [layers.LSTM(8, name="lstm"), _Centre(name="centre"), layers.Dense(3, name="dense")]
    model = nanotf.keras.Sequential([layers.Input((6, 4)), *inner])
    model.compile("sgd", "mse")
    x, y = np.random.rand(10, 6, 4), np.random.rand(10, 3)
    for _ in range(2):  # the second call traces nothing
        report = model.fit(x, y, batch_size=5, verbose=0, num_processes=2).nanotf
        found = {part.name: part for part in report.parts}
        assert {name for name, part in found.items() if part.is_divided} >= {"lstm", "dense"}
        assert not found["centre"].is_divided
        assert "Max" in found["centre"].why
        assert "test_report.py" in found["centre"].why
        # 6 steps of (4 + 8) x 32 products, 2 operations each. Keras 2's loop names no maximum.
        steps = 6 if is_keras_3() else 1
        assert found["lstm"].operations > steps * 12 * 32 * 2
        assert found["dense"].operations >= 2 * 8 * 3
    text = str(report).partition("Divided:")[2]
    assert "lstm" in text.partition("Undivided")[0]
    assert "centre: " in text.partition("Undivided")[2]


def test_parts_of_a_loop() -> None:
    dense = tf.keras.layers.Dense(2, name="outermost")
    dense.build((None, 4))

    @nano(num_processes=2)
    def loop() -> float:
        return float(tf.reduce_sum(dense(tf.ones((5, 4)))))

    loop()
    report = nanotf.last_report()
    assert report is not None
    assert [(part.name, part.is_divided, part.why) for part in report.parts] == [
        ("outermost", True, "")
    ]
