"""Callbacks, the progress bar and History: once, in the parent, as Keras's own."""

from __future__ import annotations

import os
import pathlib
import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_history, assert_same_state, digits, small_cnn

import nanotf

FIT = {"batch_size": 50, "shuffle": False}


def test_history_is_that_of_the_model() -> None:
    x, y = digits(200)
    model = small_cnn()
    history = model.fit(x, y, **FIT, initial_epoch=2, epochs=4, verbose=0, num_processes=2)
    assert history is model.history
    assert isinstance(history, tf.keras.callbacks.History)
    assert history.model is model
    assert history.epoch == [2, 3]
    for values in history.history.values():
        assert all(isinstance(value, float) for value in values)


@pytest.mark.parametrize("verbose", [0, 1, 2, "auto"])
def test_progress_is_printed_once(capfd: pytest.CaptureFixture[str], verbose: Any) -> None:
    x, y = digits(200)
    shown = []
    for processes in (None, 2):
        model = small_cnn()
        capfd.readouterr()
        model.fit(x, y, **FIT, epochs=2, verbose=verbose, num_processes=processes)
        out = capfd.readouterr().out
        out = re.sub(r"\x1b\[[0-9;]*m|\x08", "", out)
        shown.append(
            {
                "epochs": re.findall(r"Epoch \d/\d", out),
                "ends": sorted(set(re.findall(r"^4/4", out, re.MULTILINE))),
                "final": re.findall(r"accuracy: [\d.e-]+", out)[-1:],
            }
        )
    assert shown[1] == shown[0]
    assert shown[1]["epochs"] == ([] if verbose == 0 else ["Epoch 1/2", "Epoch 2/2"])


def test_hooks_are_called_here_in_keras_own_order() -> None:
    """Keras's order, indices and log names, for every hook there is."""

    class Recorder(tf.keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[tuple[str, Any, tuple[str, ...]]] = []
            self.pids: set[int] = set()

    def hook(name: str, takes_index: bool) -> Any:
        def call(self: Recorder, *arguments: Any, logs: Any = None) -> None:
            self.pids.add(os.getpid())
            values = list(arguments)
            index = values.pop(0) if takes_index else None
            logs = values[0] if values else logs
            self.calls.append((name, index, tuple(sorted(logs or {}))))

        return call

    for when in ("begin", "end"):
        for what in ("train", "test"):
            setattr(Recorder, f"on_{what}_{when}", hook(f"on_{what}_{when}", False))
            setattr(Recorder, f"on_{what}_batch_{when}", hook(f"on_{what}_batch_{when}", True))
        setattr(Recorder, f"on_epoch_{when}", hook(f"on_epoch_{when}", True))

    x, y = digits(120)
    recorders = [Recorder(), Recorder()]
    for recorder, processes in zip(recorders, (None, 2), strict=True):
        small_cnn().fit(
            x, y, **FIT, epochs=2, verbose=0, validation_data=(x[:60], y[:60]),
            callbacks=[recorder], num_processes=processes,
        )  # fmt: skip
    assert recorders[1].calls == recorders[0].calls
    assert recorders[1].pids == {os.getpid()}


def test_lambda_callback_appends_to_the_users_list() -> None:
    x, y = digits(100)
    seen: list[int] = []
    callback = tf.keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(epoch)
    )
    small_cnn().fit(x, y, **FIT, epochs=3, verbose=0, callbacks=[callback], num_processes=2)
    assert seen == [0, 1, 2]


def test_early_stopping_restores_the_best_weights() -> None:
    x, y = digits(200)
    models, stops = [], []
    for processes in (None, 2):
        model = small_cnn(tf.keras.optimizers.SGD(0.1))
        stop = tf.keras.callbacks.EarlyStopping(
            "accuracy", patience=1, min_delta=1.0, restore_best_weights=True, mode="max"
        )
        history = model.fit(
            x, y, **FIT, epochs=9, verbose=0, callbacks=[stop], num_processes=processes
        )
        models.append(model)
        stops.append((stop.stopped_epoch, len(history.epoch)))
    assert stops[1] == stops[0]
    assert stops[1][1] < 9
    for ours, theirs in zip(models[1].get_weights(), models[0].get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)


def test_learning_rate_schedule_takes_effect(float64: None) -> None:
    x, y = digits(200)
    histories, models = [], []
    for processes in (None, 2):
        model = small_cnn(tf.keras.optimizers.SGD(0.1, momentum=0.5))
        schedule = tf.keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (1 + 5 * epoch))
        history = model.fit(
            x, y, **FIT, epochs=3, verbose=0, callbacks=[schedule], num_processes=processes
        )
        histories.append(history.history)
        models.append(model)
    assert_same_history(histories[1], histories[0])
    assert_same_state(models[1], models[0])
    assert float(models[1].optimizer.learning_rate.numpy()) == pytest.approx(0.1 / 11)


def test_reduce_on_plateau_and_stop_training_in_a_batch(float64: None) -> None:
    x, y = digits(200)

    class StopAtBatch(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1 and int(self.model.optimizer.iterations.numpy()) > 0:
                self.model.stop_training = True

    results = []
    for processes in (None, 2):
        model = small_cnn()
        plateau = tf.keras.callbacks.ReduceLROnPlateau("loss", factor=0.1, min_delta=9, patience=1)
        model.fit(x, y, **FIT, epochs=3, verbose=0, callbacks=[plateau], num_processes=processes)
        results.append(model)
    assert_same_state(results[1], results[0])
    model = small_cnn()
    history = model.fit(
        x, y, **FIT, epochs=5, verbose=0, callbacks=[StopAtBatch()], num_processes=2
    )
    assert len(history.epoch) < 5


def test_checkpoints_are_written_once(tmp_path: pathlib.Path) -> None:
    x, y = digits(100)
    model = small_cnn(tf.keras.optimizers.Adam(0.01))
    written = []
    checkpoint = tf.keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras"))
    save = checkpoint._save_model
    checkpoint._save_model = lambda *a, **k: (written.append(1), save(*a, **k))
    model.fit(x, y, **FIT, epochs=2, verbose=0, callbacks=[checkpoint], num_processes=2)
    assert len(written) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1.keras", "2.keras"]
    loaded = tf.keras.models.load_model(tmp_path / "2.keras")
    for ours, theirs in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert int(loaded.optimizer.iterations.numpy()) == 4


def test_callback_that_sets_weights(float64: None) -> None:
    x, y = digits(100)

    class Halve(tf.keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.set_weights([w / 2 for w in self.model.get_weights()])

    models = []
    for processes in (None, 2):
        model = small_cnn()
        model.fit(x, y, **FIT, epochs=2, verbose=0, callbacks=[Halve()], num_processes=processes)
        models.append(model)
    assert_same_state(models[1], models[0])


def test_callback_that_raises_leaves_the_model_usable() -> None:
    x, y = digits(100)

    def fail(epoch: int, logs: Any) -> None:
        raise KeyError("from the callback")

    callback = tf.keras.callbacks.LambdaCallback(on_epoch_end=fail)
    model = small_cnn()
    with pytest.raises(KeyError, match="from the callback"):
        model.fit(x, y, **FIT, epochs=2, verbose=0, callbacks=[callback], num_processes=2)
    model.fit(x, y, **FIT, epochs=1, verbose=0, num_processes=2)
    assert len(nanotf.worker_pids()) == 2


def test_callback_that_predicts_and_evaluates() -> None:
    x, y = digits(100)
    seen = []

    def look(epoch: int, logs: Any) -> None:
        loss, _ = model.evaluate(x, y, verbose=0)
        seen.append((loss, model.predict(x[:5], verbose=0).shape))

    model = small_cnn()
    callback = tf.keras.callbacks.LambdaCallback(on_epoch_end=look)
    model.fit(x, y, **FIT, epochs=2, verbose=0, callbacks=[callback], num_processes=2)
    assert [shape for _, shape in seen] == [(5, 10)] * 2
    assert seen[1][0] < seen[0][0]
