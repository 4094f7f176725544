"""Workers that raise, exit or are killed: one clear error, no leaks, and the next fit works."""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest
import tensorflow as tf
from failing_losses import FIT, assert_next_fit_works, failing_loss
from parity import digits, small_cnn
from waiting import wait_until

import nanotf
from nanotf.errors import WorkerDied, WorkerError

pytestmark = pytest.mark.own_pool


def _raise_now() -> None:
    raise ArithmeticError("a loss of the user's")


def test_loss_that_raises_in_a_worker() -> None:
    x, y = digits(100)
    small_cnn().fit(x, y, **FIT)
    pids = nanotf.worker_pids()
    model = small_cnn()
    model.compile("sgd", failing_loss(_raise_now))
    before = model.get_weights()
    with pytest.raises(WorkerError, match="a loss of the user's") as caught:
        model.fit(x, y, **FIT)
    error = caught.value
    assert error.rank in (0, 1)
    assert error.pid in pids
    assert "ArithmeticError" in error.remote_traceback
    # TensorFlow raises its own error class, in one process as well.
    assert isinstance(error, tf.errors.OpError)
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)
    assert_next_fit_works(() if nanotf.worker_pids() == pids else pids)


def _loss_that_cannot_be_traced(y_true: Any, y_pred: Any) -> Any:
    if "NANOTF_RANK" in os.environ:
        raise ValueError("while it is traced")
    return tf.reduce_mean(y_pred, axis=-1)


def test_loss_that_raises_while_it_is_traced() -> None:
    x, y = digits(100)
    model = small_cnn()
    model.compile("sgd", _loss_that_cannot_be_traced)
    with pytest.raises(ValueError, match="while it is traced") as caught:
        model.fit(x, y, **FIT)
    error = caught.value
    assert isinstance(error, WorkerError)
    assert str(error).startswith(str(error.original))
    assert f"Worker {error.rank} (pid {error.pid}" in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, ValueError)
    assert (copy.rank, copy.args, str(copy)) == (error.rank, error.args, str(error))
    assert_next_fit_works(())


def test_an_error_found_by_a_step_is_the_one_of_a_single_process() -> None:
    x, y = digits(100)
    y[-1] = 12  # a row that the last worker has
    for method in ("fit", "evaluate"):
        for processes in (None, 2):
            with pytest.raises(tf.errors.InvalidArgumentError, match="label value of 12") as caught:
                getattr(small_cnn(), method)(x, y, verbose=0, num_processes=processes)
            assert isinstance(caught.value, WorkerError) == (processes == 2)


ENDS: dict[str, tuple[Callable[[], Any], int | None, int | None, str]] = {
    "exit": (lambda: os._exit(7), 7, None, "exited with code 7"),
    "segfault": (lambda: os.kill(os.getpid(), signal.SIGSEGV), None, signal.SIGSEGV, "SIGSEGV"),
    "abort": (os.abort, None, signal.SIGABRT, "SIGABRT"),
    "kill": (lambda: os.kill(os.getpid(), signal.SIGKILL), None, signal.SIGKILL, "SIGKILL"),
}


@pytest.mark.parametrize("name", ENDS)
def test_worker_that_ends_in_a_step(name: str) -> None:
    action, exit_code, number, text = ENDS[name]
    x, y = digits(100)
    small_cnn().fit(x, y, **FIT)
    pids = nanotf.worker_pids()
    model = small_cnn()
    model.compile("sgd", failing_loss(action))
    with pytest.raises(WorkerDied, match=text) as caught:
        model.fit(x, y, **FIT)
    error = caught.value
    assert (error.exit_code, error.signal) == (exit_code, number)
    assert error.pid == pids[error.rank or 0]
    assert error.cores == tuple(nanotf.plan(2).placements[error.rank or 0].cores)
    assert f"Worker {error.rank}" in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.rank, copy.pid, copy.signal) == (error.rank, error.pid, error.signal)
    assert_next_fit_works(pids)


@pytest.mark.parametrize("rank", [0, 1])
def test_worker_killed_from_outside(rank: int) -> None:
    """Sends SIGKILL during a fit, like the kernel's OOM killer."""
    x, y = digits(100)
    killed = threading.Event()

    def kill(epoch: int, logs: Any) -> None:
        if epoch == 1:
            os.kill(nanotf.worker_pids()[rank], signal.SIGKILL)
            killed.set()

    pids: list[int] = []
    note = tf.keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: pids.extend(nanotf.worker_pids()),
        on_epoch_end=kill,
    )
    model = small_cnn()
    with pytest.raises(WorkerDied, match="SIGKILL") as caught:
        model.fit(x, y, **FIT, epochs=50, callbacks=[note])
    assert killed.is_set()
    assert caught.value.rank == rank
    assert caught.value.signal == signal.SIGKILL
    assert_next_fit_works(tuple(pids))


@pytest.mark.thorough
def test_worker_killed_between_fits() -> None:
    x, y = digits(100)
    small_cnn().fit(x, y, **FIT)
    pids = nanotf.worker_pids()
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: not _is_running(pids[1]), "the worker is dead")
    small_cnn().fit(x, y, **FIT)
    assert not set(pids) & set(nanotf.worker_pids())
    assert_next_fit_works(pids)


def _is_running(pid: int) -> bool:
    """Returns True if a process runs; False for a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class _Unpicklable(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__("needs two arguments")
        self.lock = threading.Lock()


def _raise_unpicklable() -> None:
    raise _Unpicklable(1, 2)


@pytest.mark.thorough
def test_exception_that_cannot_be_pickled() -> None:
    x, y = digits(100)
    model = small_cnn()
    model.compile("sgd", failing_loss(_raise_unpicklable))
    with pytest.raises(WorkerError, match="needs two arguments"):
        model.fit(x, y, **FIT)
    assert_next_fit_works(())


def test_dataset_that_raises_in_the_parent() -> None:
    x, y = digits(100)

    def fail(value: Any) -> Any:
        raise ValueError("from the dataset")

    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(50)
    data = data.map(
        lambda a, b: (tf.ensure_shape(tf.numpy_function(fail, [a], a.dtype), a.shape), b)
    )
    with pytest.raises(Exception, match="from the dataset"):
        small_cnn().fit(data, verbose=0, num_processes=2)
    assert_next_fit_works(())


@pytest.mark.thorough
def test_secrets_reach_workers_but_no_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SOME_SERVICE_TOKEN", "hunter2-hunter2")
    nanotf.shutdown()
    x, y = digits(100)
    model = small_cnn()

    def fail_with_its_length() -> None:
        raise ArithmeticError(f"{len(os.environ['SOME_SERVICE_TOKEN'])} characters")

    model.compile("sgd", failing_loss(fail_with_its_length))
    with (
        caplog.at_level(logging.DEBUG, logger="nanotf"),
        pytest.raises(WorkerError, match="15 characters") as caught,
    ):
        model.fit(x, y, **FIT)
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in caplog.text
    monkeypatch.delenv("SOME_SERVICE_TOKEN")
    assert_next_fit_works(())


@pytest.mark.thorough
def test_segfault_leaves_its_python_stack_in_the_log() -> None:
    x, y = digits(100)
    model = small_cnn()
    model.compile("sgd", failing_loss(_segfault))
    with pytest.raises(WorkerDied, match="SIGSEGV") as caught:
        model.fit(x, y, **FIT)
    assert "Fatal Python error: Segmentation fault" in str(caught.value)
    assert "_segfault" in str(caught.value)


def _segfault() -> None:
    ctypes.string_at(0)


def test_model_keeps_the_last_completed_epoch() -> None:
    x, y = digits(100)
    model, after_each = small_cnn(), []

    class KillInThirdEpoch(tf.keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            after_each.append([np.array(w) for w in self.model.get_weights()])
            if epoch == 1:
                os.kill(nanotf.worker_pids()[1], signal.SIGKILL)

    with pytest.raises(WorkerDied):
        model.fit(x, y, **FIT, epochs=50, callbacks=[KillInThirdEpoch()])
    assert len(after_each) == 2
    for now, then in zip(model.get_weights(), after_each[1], strict=True):
        np.testing.assert_array_equal(now, then)
    assert int(model.optimizer.iterations.numpy()) == 4
