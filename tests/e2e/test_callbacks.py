"""Callbacks and `History` run once, in the parent, as in Keras."""

from __future__ import annotations

import os
import pathlib
import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_history, assert_same_state, digits, small_cnn

import nanotf
from nanotf.compat.versions import is_keras_3
from nanotf.keras import Sequential
from nanotf.parent.callbacks import ParentCallbacks
from nanotf.shipping import orders

L = tf.keras.layers
FIT = {"batch_size": 50, "shuffle": False}
# Errors that the program keeps, with the frames of the calls that raised them. `conftest` checks
# that no shared memory of these calls stays open.
KEPT: list[BaseException] = []


@pytest.mark.both_generations
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


def test_lambda_callback_appends_to_the_users_list() -> None:
    x, y = digits(100)
    seen: list[int] = []
    callback = tf.keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(epoch)
    )
    small_cnn().fit(x, y, **FIT, epochs=3, verbose=0, callbacks=[callback], num_processes=2)
    assert seen == [0, 1, 2]


@pytest.mark.both_generations
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


@pytest.mark.thorough
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


@pytest.mark.skipif(is_keras_3(), reason="Keras 2 alone has tf.keras.optimizers.legacy")
@pytest.mark.both_generations
def test_a_legacy_optimizer_follows_its_schedule(float64: None) -> None:
    (plain, _), (model, _) = run_both(
        lambda: losing(optimizer=tf.keras.optimizers.legacy.SGD(0.1, momentum=0.5)),
        lambda: [tf.keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (1 + 9 * epoch))],
        epochs=3,
    )
    assert_same_history(model.history.history, plain.history.history)
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-10)


def test_reduce_on_plateau(float64: None) -> None:
    x, y = digits(200)

    results = []
    for processes in (None, 2):
        model = small_cnn()
        plateau = tf.keras.callbacks.ReduceLROnPlateau("loss", factor=0.1, min_delta=9, patience=1)
        model.fit(x, y, **FIT, epochs=3, verbose=0, callbacks=[plateau], num_processes=processes)
        results.append(model)
    assert_same_state(results[1], results[0])


@pytest.mark.both_generations
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


def losing(*metrics: Any, optimizer: Any = None) -> Any:
    """Returns a small compiled model with stateful metrics, the same at every call."""
    tf.keras.utils.set_random_seed(5)
    model = Sequential(
        [L.Input((8, 8, 1)), L.Flatten(), L.Dense(3, activation="softmax", name="last")],
        name="small",
    )
    model.compile(
        optimizer if optimizer is not None else tf.keras.optimizers.Adam(0.01),
        "sparse_categorical_crossentropy",
        metrics=list(metrics),
    )
    return model


def three_digits(rows: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = digits(rows)
    return x, y % 3


class Watch(tf.keras.callbacks.Callback):
    """Records logs, weights and step count at every batch hook."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[dict[str, float]] = []
        self.state: list[tuple[int, float]] = []

    def _note(self, logs: Any) -> None:
        steps = int(self.model.optimizer.iterations.numpy())
        self.state.append((steps, float(sum(np.sum(w) for w in self.model.get_weights()))))
        if logs:
            self.logs.append(dict(logs))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._note(logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._note(logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._note(logs)


def run_both(make: Any, callbacks: Any, rows: int = 110, **arguments: Any) -> list[Any]:
    """Trains two equal models, with one process and with two.

    Args:
        make: makes a compiled model.
        callbacks: makes the list of callbacks.
        rows: int.
        **arguments: of `fit`.

    Returns:
        A list of both models, each with its callbacks in the attribute `callbacks`.
    """
    x, y = three_digits(rows)
    arguments = {"batch_size": 20, "shuffle": False, "epochs": 2, "verbose": 0, **arguments}
    results = []
    for processes in (None, 2):
        model = make()
        mine = callbacks()
        model.fit(x, y, **arguments, callbacks=mine, num_processes=processes)
        results.append((model, mine))
    return results


def metric_values(model: Any) -> list[np.ndarray]:
    return [np.asarray(v) for metric in model.metrics for v in metric.variables]


@pytest.mark.both_generations
def test_batch_hooks_see_the_state_and_the_logs_of_all_workers(float64: None) -> None:
    x, y = three_digits(50)

    def make() -> Any:
        return losing("accuracy", tf.keras.metrics.MeanIoU(3, name="iou", sparse_y_pred=False))

    (plain, (theirs,)), (model, (ours,)) = run_both(
        make, lambda: [Watch()], validation_data=(x, y), validation_batch_size=20
    )
    assert [sorted(logs) for logs in ours.logs] == [sorted(logs) for logs in theirs.logs]
    assert len(ours.logs) == 2 * (6 + 3)
    for mine, other in zip(ours.logs, theirs.logs, strict=True):
        for name, value in other.items():
            assert isinstance(mine[name], float)
            np.testing.assert_allclose(mine[name], value, rtol=1e-10, err_msg=name)
    np.testing.assert_allclose(ours.state, theirs.state, rtol=1e-10, atol=1e-10)
    # After fit: the metrics of the last validation.
    for mine, other in zip(metric_values(model), metric_values(plain), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-10)


@pytest.mark.thorough
def test_metrics_after_fit_are_those_of_plain_fit(float64: None) -> None:
    def make() -> Any:
        return losing("accuracy", tf.keras.metrics.MeanIoU(3, name="iou", sparse_y_pred=False))

    (plain, _), (model, _) = run_both(make, lambda: None)
    assert len(metric_values(model)) == len(metric_values(plain)) > 3
    for mine, other in zip(metric_values(model), metric_values(plain), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-10)
    for metric, other in zip(model.metrics, plain.metrics, strict=True):
        np.testing.assert_allclose(np.asarray(_result(metric)), np.asarray(_result(other)))


def _result(metric: Any) -> Any:
    result = metric.result()
    return list(result.values()) if isinstance(result, dict) else result


class ChangeAtBatch(tf.keras.callbacks.Callback):
    """Halves the weights, then lowers the rate, then stops, in three separate batches."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        steps = int(self.model.optimizer.iterations.numpy())
        if steps == 2:
            self.model.set_weights([w / 2 for w in self.model.get_weights()])
        if steps == 4:
            self.model.optimizer.learning_rate = 0.001
        if steps == 9:
            self.model.stop_training = True


@pytest.mark.both_generations
def test_changes_by_a_batch_hook_hold_from_the_next_step(float64: None) -> None:
    (plain, _), (model, _) = run_both(
        lambda: losing("accuracy"), lambda: [ChangeAtBatch()], epochs=5
    )
    assert int(model.optimizer.iterations.numpy()) == 9
    assert_same_state(model, plain)
    assert_same_history(model.history.history, plain.history.history)
    assert float(model.optimizer.learning_rate.numpy()) == pytest.approx(0.001)


@pytest.mark.both_generations
def test_evaluating_in_a_batch_hook_affects_metrics_as_in_keras(
    float64: None,
) -> None:
    x, y = three_digits(30)

    class Evaluate(Watch):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            super().on_train_batch_end(batch, logs)
            if batch == 1:
                self.model.evaluate(x, y, verbose=0)
                self.seen = self.model.predict(x[:3], verbose=0)

    (_, (theirs,)), (_, (ours,)) = run_both(lambda: losing("accuracy"), lambda: [Evaluate()])
    for mine, other in zip(ours.logs, theirs.logs, strict=True):
        np.testing.assert_allclose(list(mine.values()), list(other.values()), rtol=1e-10)
    np.testing.assert_allclose(ours.seen, theirs.seen, rtol=1e-9)


@pytest.mark.thorough
def test_lambda_callback_at_batches(float64: None) -> None:
    seen: dict[int, list[tuple[int, float]]] = {}

    def callbacks() -> Any:
        mine = seen.setdefault(len(seen), [])
        return [
            tf.keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: mine.append((batch, logs["loss"]))
            )
        ]

    run_both(lambda: losing(), callbacks)
    np.testing.assert_allclose(seen[1], seen[0], rtol=1e-10)
    assert len(seen[1]) == 12


def _needs(*callbacks: Any, verbose: Any = 1) -> ParentCallbacks:
    return ParentCallbacks(list(callbacks), losing(), verbose, 1, 6)


def test_workers_wait_only_for_batch_hooks_with_code(
    tmp_path: pathlib.Path,
) -> None:
    k = tf.keras.callbacks
    path = str(tmp_path / "x.weights.h5")

    class OwnEpochs(k.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            pass

    class OwnCheckpoint(k.ModelCheckpoint):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            super().on_epoch_end(epoch, logs)

    idle = [
        k.ModelCheckpoint(path, save_weights_only=True),
        OwnCheckpoint(path, save_weights_only=True),
        k.BackupAndRestore(str(tmp_path)),
        k.TensorBoard(str(tmp_path), profile_batch=0),
        k.CSVLogger(str(tmp_path / "x.csv")),
        k.EarlyStopping(),
        k.ReduceLROnPlateau(),
        k.LearningRateScheduler(lambda epoch: 0.1),
        k.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
        OwnEpochs(),
    ]
    idle += [k.SwapEMAWeights()] if hasattr(k, "SwapEMAWeights") else []
    needs = _needs(*idle)
    assert not needs.waits & set(orders.BATCH_HOOKS)
    assert needs.events & set(orders.BATCH_HOOKS) <= {
        "on_train_batch_end",
        "on_test_batch_end",
        "on_predict_batch_end",
    }
    assert not (_needs(*idle, verbose=0).events & set(orders.BATCH_HOOKS))


def test_callbacks_that_wait_and_callbacks_that_get_the_state(tmp_path: pathlib.Path) -> None:
    k = tf.keras.callbacks
    path = str(tmp_path / "x.weights.h5")

    class Own(k.TerminateOnNaN):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            pass

    needs = _needs(k.TerminateOnNaN())
    assert needs.waits & set(orders.BATCH_HOOKS) == {"on_train_batch_end"}
    assert not needs.asks
    needs = _needs(k.TensorBoard(str(tmp_path), update_freq=2, write_steps_per_second=True))
    assert "on_train_batch_end" in needs.waits
    assert not needs.asks
    assert _needs(Own()).asks == {"on_train_batch_begin"}
    needs = _needs(k.LambdaCallback(on_train_batch_end=lambda batch, logs: None))
    assert needs.asks == {"on_train_batch_end"}

    saver = k.ModelCheckpoint(path, save_weights_only=True, save_freq=3)
    needs = _needs(saver)
    assert not needs.asks
    asked = []
    for batch in range(7):
        asked.append(needs.needs_state("on_train_batch_end", batch))
        saver._should_save_on_batch(batch)
    assert asked == [False, False, True, False, False, True, False]


# ------------------------------------------------------------------- Keras's own callbacks
def saved_weights(path: pathlib.Path) -> list[np.ndarray]:
    model = losing("accuracy")
    model.load_weights(str(path))
    return model.get_weights()


@pytest.mark.parametrize("best_only", [False, True])
def test_checkpoints_of_batches_hold_the_weights_of_that_batch(
    float64: None, tmp_path: pathlib.Path, best_only: bool
) -> None:
    directories = iter([tmp_path / "plain", tmp_path / "ours"])

    def callbacks() -> Any:
        name = str(next(directories) / ("{epoch}-{batch}.weights.h5"))
        return [
            tf.keras.callbacks.ModelCheckpoint(
                name, save_freq=4, save_weights_only=True, save_best_only=best_only,
                monitor="loss",
            )
        ]  # fmt: skip

    run_both(lambda: losing("accuracy"), callbacks)
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == names
    assert len(names) >= 2
    for name in names:
        theirs = saved_weights(tmp_path / "plain" / name)
        for a, b in zip(saved_weights(tmp_path / "ours" / name), theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.thorough
def test_best_checkpoint_of_epochs(float64: None, tmp_path: pathlib.Path) -> None:
    x, y = three_digits(40)
    paths = [tmp_path / "plain.keras", tmp_path / "ours.keras"]
    todo = iter(paths)

    def callbacks() -> Any:
        return [
            tf.keras.callbacks.ModelCheckpoint(
                str(next(todo)), save_best_only=True, monitor="val_accuracy"
            )
        ]

    rate = 0.5  # so high that the loss grows in later epochs
    run_both(
        lambda: losing("accuracy", optimizer=tf.keras.optimizers.Adam(rate)),
        callbacks,
        epochs=4,
        validation_data=(x, y),
    )
    theirs, ours = (tf.keras.models.load_model(str(path)) for path in paths)
    assert_same_state(ours, theirs)


def test_csv_logger_writes_one_line_per_epoch(float64: None, tmp_path: pathlib.Path) -> None:
    paths = [tmp_path / "plain.csv", tmp_path / "ours.csv"]
    todo = iter(paths)
    run_both(lambda: losing("accuracy"), lambda: [tf.keras.callbacks.CSVLogger(str(next(todo)))])
    theirs, ours = (path.read_text().split() for path in paths)
    assert ours[0] == theirs[0]
    assert len(ours) == len(theirs) == 3
    numbers = [[float(v) for v in line.split(",") if v != "NA"] for line in ours[1:]]
    expected = [[float(v) for v in line.split(",") if v != "NA"] for line in theirs[1:]]
    np.testing.assert_allclose(numbers, expected, rtol=1e-10)


@pytest.mark.parametrize("update_freq", ["epoch", "batch", 2])
def test_tensorboard_writes_the_same_scalars_once(tmp_path: pathlib.Path, update_freq: Any) -> None:
    pytest.importorskip("tensorboard")  # TensorFlow 2.21 does not include it
    x, y = three_digits(40)
    directories = [tmp_path / "plain", tmp_path / "ours"]
    todo = iter(directories)

    def callbacks() -> Any:
        return [
            # Keras 2 writes at batches only if it must also write steps per second.
            tf.keras.callbacks.TensorBoard(
                str(next(todo)),
                update_freq=update_freq,
                histogram_freq=1,
                profile_batch=0,
                write_steps_per_second=update_freq != "epoch",
            )
        ]

    run_both(lambda: losing("accuracy"), callbacks, validation_data=(x, y))
    theirs, ours = (scalars(directory) for directory in directories)
    assert ours.keys() == theirs.keys()
    assert any("epoch_accuracy" in key for key, _, _ in ours)
    assert any("batch_loss" in key for key, _, _ in ours) == (update_freq != "epoch")
    for key, value in theirs.items():
        if "per_second" not in key[0]:
            np.testing.assert_allclose(ours[key], value, rtol=1e-4, err_msg=str(key))
    assert sorted(p.name for p in directories[1].iterdir()) == ["train", "validation"]
    for what in ("train", "validation"):
        assert len(list((directories[1] / what).glob("*.tfevents.*"))) == 1


def scalars(directory: pathlib.Path) -> dict[tuple[str, str, int], float]:
    """Maps (train or validation, tag, step) of event files to values; "" for histograms."""
    found = {}
    for path in directory.glob("*/*.tfevents.*"):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                key = (f"{path.parent.name} {value.tag}", value.metadata.display_name, event.step)
                assert key not in found, "written twice"
                tensor = tf.make_ndarray(value.tensor)
                found[key] = float(tensor) if tensor.size == 1 and tensor.dtype.kind == "f" else 0.0
    return found


class Interrupt(tf.keras.callbacks.Callback):
    """Raises at a step, once."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if int(self.model.optimizer.iterations.numpy()) == self.step:
            raise InterruptedError("enough")


@pytest.mark.parametrize("save_freq", ["epoch", 2])
@pytest.mark.both_generations
def test_backup_and_restore_resumes_at_the_interruption(
    float64: None, tmp_path: pathlib.Path, save_freq: Any
) -> None:
    x, y = three_digits(100)
    results = []
    for processes in (None, 2):
        directory = str(tmp_path / f"backup{processes}")
        fit = {**FIT, "batch_size": 20, "epochs": 4, "verbose": 0, "num_processes": processes}
        backup = tf.keras.callbacks.BackupAndRestore(directory, save_freq=save_freq)
        with pytest.raises(InterruptedError):
            losing("accuracy").fit(x, y, **fit, callbacks=[backup, Interrupt(8)])
        model = losing("accuracy")
        watch = Watch()
        backup = tf.keras.callbacks.BackupAndRestore(directory, save_freq=save_freq)
        history = model.fit(x, y, **fit, callbacks=[backup, watch])
        assert not list(pathlib.Path(directory).rglob("*weights*")), "deleted at the end"
        results.append((model, history, watch))
    (plain, theirs, their_watch), (model, ours, our_watch) = results
    assert ours.epoch == theirs.epoch
    assert ours.epoch[0] == 1
    np.testing.assert_allclose(our_watch.state, their_watch.state, rtol=1e-9, atol=1e-10)
    assert_same_state(model, plain)


@pytest.mark.both_generations
def test_terminate_on_nan_stops_all_workers_at_that_batch() -> None:
    x, y = three_digits(110)
    x[47] = np.nan  # in the third batch, and in the rows of one worker only
    steps = []
    for processes in (None, 2):
        model = losing("accuracy")
        model.fit(
            x, y, batch_size=20, epochs=3, verbose=0, shuffle=False,
            callbacks=[tf.keras.callbacks.TerminateOnNaN()], num_processes=processes,
        )  # fmt: skip
        steps.append((int(model.optimizer.iterations.numpy()), model.history.epoch))
    assert steps == [(3, [0])] * 2


@pytest.mark.skipif(
    not hasattr(tf.keras.callbacks, "SwapEMAWeights"), reason="Keras 2 has no SwapEMAWeights"
)
@pytest.mark.thorough
def test_swap_ema_weights(float64: None) -> None:
    x, y = three_digits(40)
    (plain, _), (model, _) = run_both(
        lambda: losing(
            "accuracy", optimizer=tf.keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
        ),
        lambda: [tf.keras.callbacks.SwapEMAWeights(swap_on_epoch=True)],
        epochs=3,
        validation_data=(x, y),
    )
    assert_same_history(model.history.history, plain.history.history)
    assert_same_state(model, plain)


# ------------------------------------------------------------------------- order of the hooks
class Recorder(tf.keras.callbacks.Callback):
    """Records every hook, its index, and the names in its logs."""

    def __init__(self, stop_at: tuple[str, int] | None = None) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any, tuple[str, ...]]] = []
        self.pids: set[int] = set()
        self.stop_at = stop_at


def _recording(name: str, takes_index: bool) -> Any:
    def call(self: Recorder, *arguments: Any, logs: Any = None) -> None:
        self.pids.add(os.getpid())
        values = list(arguments)
        index = values.pop(0) if takes_index else None
        logs = values[0] if values else logs
        self.calls.append((name, index, tuple(sorted(logs or {}))))
        if (name, index) == self.stop_at:
            self.model.stop_training = True

    return call


for _when in ("begin", "end"):
    for _what in ("train", "test", "epoch", "train_batch", "test_batch"):
        _hook = f"on_{_what}_{_when}"
        setattr(Recorder, _hook, _recording(_hook, _what not in ("train", "test")))


@pytest.mark.parametrize(
    ("arguments", "stop_at"),
    [
        ({"epochs": 2, "validation_split": 0.3}, None),
        ({"epochs": 4, "initial_epoch": 1, "validation_split": 0.3, "validation_freq": 2}, None),
        ({"epochs": 4, "validation_split": 0.3, "validation_freq": [1, 3]}, None),
        ({"epochs": 3, "initial_epoch": 3}, None),
        ({"epochs": 3}, ("on_train_begin", None)),
        ({"epochs": 3}, ("on_epoch_begin", 1)),
        ({"epochs": 3}, ("on_train_batch_begin", 1)),
        ({"epochs": 3, "validation_split": 0.3}, ("on_train_batch_end", 0)),
        ({"epochs": 3, "validation_split": 0.3}, ("on_test_batch_end", 0)),
        ({"epochs": 3}, ("on_epoch_end", 1)),
    ],
)
@pytest.mark.both_generations
def test_hooks_are_called_here_in_keras_own_order(
    arguments: dict[str, Any], stop_at: tuple[str, int] | None
) -> None:
    """Checks Keras's order, indices and log names, for every hook."""
    (_, (theirs,)), (_, (ours,)) = run_both(
        lambda: losing("accuracy"), lambda: [Recorder(stop_at)], rows=90, **arguments
    )
    assert ours.calls == theirs.calls
    assert ours.pids == {os.getpid()}


def test_end_of_a_separate_evaluation() -> None:
    """Keras 3 counts the pairs of begin and end, also of hooks without code."""

    class Ends(tf.keras.callbacks.Callback):
        def on_test_end(self, logs: Any = None) -> None:
            ends.append(sorted(logs))

    ends: list[Any] = []
    run_both(lambda: losing("accuracy"), lambda: [Ends()], rows=60, epochs=2, validation_split=0.5)
    assert len(ends) == 4
    assert ends[:2] == ends[2:]


@pytest.mark.thorough
def test_callback_list_object() -> None:
    def callbacks() -> Any:
        recorder = Recorder()
        made = tf.keras.callbacks.CallbackList([recorder], add_history=True, model=model)
        return made, recorder

    x, y = three_digits(60)
    calls = []
    for processes in (None, 2):
        model = losing("accuracy")
        made, recorder = callbacks()
        model.fit(x, y, **FIT, epochs=2, callbacks=made, num_processes=processes)
        calls.append(recorder.calls)
        assert list(model.history.history) == list(made.callbacks[-1].history)
    assert calls[1] == calls[0]


# --------------------------------------------------------------- callbacks that raise
@pytest.mark.parametrize(
    "hook", ["on_train_begin", "on_epoch_begin", "on_train_batch_begin", "on_train_batch_end",
             "on_test_batch_end", "on_epoch_end", "on_train_end"]
)  # fmt: skip
def test_exception_arrives_unchanged_with_the_model_as_the_callback_left_it(hook: str) -> None:
    x, y = three_digits(60)
    error = KeyError("from the callback", {"a": 1})
    KEPT.append(error)

    def fail(self: Any, *_: Any, **__: Any) -> None:
        self.model.set_weights([np.full_like(w, 7) for w in self.model.get_weights()])
        raise error

    callback = type("Failing", (tf.keras.callbacks.Callback,), {hook: fail})()
    model = losing("accuracy")
    with pytest.raises(KeyError) as caught:
        model.fit(
            x, y, **FIT, epochs=2, verbose=0, validation_split=0.2, callbacks=[callback],
            num_processes=2,
        )  # fmt: skip
    assert caught.value is error
    assert all((w == 7).all() for w in model.get_weights())
    if hook == "on_epoch_end":  # once is enough: it costs new workers
        model.fit(x, y, **FIT, epochs=1, verbose=0, num_processes=2)
        assert len(nanotf.worker_pids()) == 2


def test_two_threads_wait_for_each_other() -> None:
    x, y = three_digits(60)
    recorders = [Recorder(), Recorder()]
    order: list[Recorder] = []

    class Order(tf.keras.callbacks.Callback):
        def __init__(self, recorder: Recorder) -> None:
            super().__init__()
            self.recorder = recorder

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            order.append(self.recorder)

    def train(recorder: Recorder) -> None:
        model = losing("accuracy")
        model.fit(
            x, y, **FIT, epochs=2, verbose=0, callbacks=[recorder, Order(recorder)],
            num_processes=2,
        )  # fmt: skip

    threads = [threading.Thread(target=train, args=(r,)) for r in recorders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(order) == 4
    assert order[0] is order[1]
    assert order[2] is order[3]
    assert recorders[0].calls == recorders[1].calls


def test_a_callback_declares_its_needs_at_batches() -> None:
    class Bar(tf.keras.callbacks.Callback):
        nanotf_needs = "progress"

        def __init__(self) -> None:
            super().__init__()
            self.batches: list[int] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.batches.append(batch)

    needs = _needs(Bar())
    assert not needs.waits & set(orders.BATCH_HOOKS) and not needs.look_at_model
    assert "on_train_batch_end" in needs.events
    bar = Bar()
    x, y = digits(60)
    small_cnn().fit(x, y, batch_size=20, verbose=0, callbacks=[bar], num_processes=2)
    assert bar.batches and bar.batches[-1] == 2, "the last is always reported"
    bar.nanotf_needs = "logs"
    needs = _needs(bar)
    assert "on_train_batch_end" in needs.waits and not needs.asks
    bar.nanotf_needs = "everything"
    with pytest.raises(nanotf.errors.InvalidArgumentError, match=r"nanotf_needs=.everything"):
        _needs(bar)
