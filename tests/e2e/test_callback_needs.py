"""Workers wait only for callbacks that need every batch, and send only what these need."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import tensorflow as tf
from callback_parts import losing
from parity import digits, small_cnn

import nanotf
from nanotf.parent.callbacks import ParentCallbacks
from nanotf.shipping import orders


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
