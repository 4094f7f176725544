"""Keras's own callbacks do what they do in one process, and write their files once."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from callback_parts import FIT, Watch, losing, run_both, three_digits
from parity import assert_same_history, assert_same_state, digits, small_cnn

from nanotf.compat.versions import is_keras_3


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


@pytest.mark.thorough
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


@pytest.mark.thorough
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
