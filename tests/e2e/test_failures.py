"""Workers that raise, exit or are killed: one clear error, no leaks, and the next fit works."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest
import tensorflow as tf
from parity import digits, small_cnn
from processes import run_script
from waiting import wait_until

import nanotf
from nanotf.errors import NanoError, WorkerDied, WorkerError
from nanotf.keras import nano
from nanotf.pool import forks, outbox, pool

pytestmark = pytest.mark.own_pool

FIT = {"batch_size": 50, "verbose": 0, "num_processes": 2}


def _next_fit_works(pids: tuple[int, ...]) -> None:
    for pid in pids:
        assert not psutil.pid_exists(pid), f"worker {pid} stayed behind"
    x, y = digits(100)
    history = small_cnn().fit(x, y, **FIT)
    assert np.isfinite(history.history["loss"][0])
    assert len(nanotf.worker_pids()) == 2


def _failing_loss(action: Callable[[], Any]) -> Any:
    """Returns a loss that fails only in workers, while a step runs."""

    def loss(y_true: Any, y_pred: Any) -> Any:
        def fail(value: Any) -> Any:
            if "NANOTF_RANK" in os.environ:
                action()
            return value

        checked = tf.numpy_function(fail, [y_pred], y_pred.dtype)
        checked.set_shape(y_pred.shape)
        return tf.reduce_mean(checked, axis=-1)

    return loss


def _raise_now() -> None:
    raise ArithmeticError("a loss of the user's")


def test_loss_that_raises_in_a_worker() -> None:
    x, y = digits(100)
    small_cnn().fit(x, y, **FIT)
    pids = nanotf.worker_pids()
    model = small_cnn()
    model.compile("sgd", _failing_loss(_raise_now))
    before = model.get_weights()
    with pytest.raises(WorkerError, match="a loss of the user's") as caught:
        model.fit(x, y, **FIT)
    error = caught.value
    assert error.rank in (0, 1)
    assert error.pid in pids
    assert "Traceback in the worker:" in str(error)
    assert "ArithmeticError" in error.remote_traceback
    # TensorFlow raises its own error class, in one process as well.
    assert isinstance(error, tf.errors.OpError)
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)
    _next_fit_works(() if nanotf.worker_pids() == pids else pids)


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
    assert str(error).startswith(str(error.__cause__))
    assert f"Worker {error.rank} (pid {error.pid}" in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, ValueError)
    assert (copy.rank, copy.args, str(copy)) == (error.rank, error.args, str(error))
    _next_fit_works(())


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
    model.compile("sgd", _failing_loss(action))
    with pytest.raises(WorkerDied, match=text) as caught:
        model.fit(x, y, **FIT)
    error = caught.value
    assert (error.exit_code, error.signal) == (exit_code, number)
    assert error.pid == pids[error.rank or 0]
    assert error.cores == tuple(nanotf.plan(2).placements[error.rank or 0].cores)
    assert f"Worker {error.rank}" in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.rank, copy.pid, copy.signal) == (error.rank, error.pid, error.signal)
    _next_fit_works(pids)


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
    _next_fit_works(tuple(pids))


@pytest.mark.thorough
def test_worker_killed_between_fits() -> None:
    x, y = digits(100)
    small_cnn().fit(x, y, **FIT)
    pids = nanotf.worker_pids()
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: not _is_running(pids[1]), "the worker is dead")
    small_cnn().fit(x, y, **FIT)
    assert not set(pids) & set(nanotf.worker_pids())
    _next_fit_works(pids)


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
    model.compile("sgd", _failing_loss(_raise_unpicklable))
    with pytest.raises(WorkerError, match="needs two arguments"):
        model.fit(x, y, **FIT)
    _next_fit_works(())


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
    _next_fit_works(())


def test_keyboard_interrupt() -> None:
    """Ctrl-C reaches the parent alone; the call ends, and the next works."""
    x, y = digits(100)
    pids: list[int] = []

    def interrupt(epoch: int, logs: Any) -> None:
        pids.extend(nanotf.worker_pids())
        os.kill(os.getpid(), signal.SIGINT)

    callback = tf.keras.callbacks.LambdaCallback(on_epoch_begin=interrupt)
    with pytest.raises(KeyboardInterrupt):
        small_cnn().fit(x, y, **FIT, epochs=50, callbacks=[callback])
    _next_fit_works(tuple(pids) if set(pids) != set(nanotf.worker_pids()) else ())


def test_interrupts_of_workers_alone() -> None:
    """Schedulers signal every process: the parent decides, programs in workers get it."""
    x, y = digits(100)

    def interrupt(number: int, logs: Any) -> None:
        for pid in nanotf.worker_pids():
            os.kill(pid, signal.SIGINT)

    callback = tf.keras.callbacks.LambdaCallback(
        on_epoch_begin=interrupt, on_epoch_end=interrupt, on_train_batch_end=interrupt
    )
    history = small_cnn().fit(x, y, **FIT, epochs=3, callbacks=[callback])
    assert history.epoch == [0, 1, 2]

    @nano(num_processes=2)
    def program() -> int:
        assert nanotf.rank() in (0, 1)
        return subprocess.run(["sh", "-c", "kill -INT $$"], check=False).returncode

    assert program() == -signal.SIGINT


@pytest.mark.thorough
def test_shutdown_in_a_callback() -> None:
    x, y = digits(100)
    callback = tf.keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: nanotf.shutdown())
    with pytest.raises(NanoError, match=r"stay until .* Received: nanotf.shutdown\(\)"):
        small_cnn().fit(x, y, **FIT, epochs=2, callbacks=[callback])
    _next_fit_works(())


@pytest.mark.thorough
def test_a_second_interrupt_while_the_first_is_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C does not lose the completed epochs."""
    kill = pool.Pool.kill

    def interrupted_kill(workers: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        kill(workers)

    def interrupt(epoch: int, logs: Any) -> None:
        if epoch == 1:
            monkeypatch.setattr(pool.Pool, "kill", interrupted_kill)
            os.kill(os.getpid(), signal.SIGINT)

    x, y = digits(100)
    model = small_cnn()
    callback = tf.keras.callbacks.LambdaCallback(on_epoch_begin=interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, **FIT, epochs=50, callbacks=[callback])
    monkeypatch.undo()
    assert int(model.optimizer.iterations) == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    _next_fit_works(())


FORK_IN_CALLBACK = """
import os, sys, numpy as np, tensorflow as tf
from nanotf.keras import Sequential

x = np.arange(40.0).reshape(20, 2) / 40

def fit(*callbacks):
    layers = tf.keras.layers
    model = Sequential([layers.Input((2,)), layers.Dense(1, kernel_initializer="ones")])
    model.compile(tf.keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    options = {"epochs": 4, "batch_size": 4, "shuffle": False, "verbose": 0, "num_processes": 2}
    return model.fit(x, x[:, 0], **options, callbacks=list(callbacks)).history["loss"]

class Forks(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        child = os.fork()
        if child == 0:
            sys.exit(0)  # passes through fit() in the child; the parent's job continues
        os.waitpid(child, 0)

expected = fit()
print("RESULT", fit(Forks()) == expected)
"""


@pytest.mark.thorough
def test_a_callback_that_forks(tmp_path: pathlib.Path) -> None:
    done = run_script(tmp_path, FORK_IN_CALLBACK)
    assert [line for line in done.stdout.splitlines() if "RESULT" in line] == ["RESULT True"]


@pytest.mark.thorough
def test_workers_leave_no_temporary_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """AutoGraph writes a file for each function that it converts."""
    nanotf.shutdown()
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    @tf.function
    def loss(y_true: Any, y_pred: Any) -> Any:
        error = tf.reduce_mean(tf.square(tf.cast(y_true, y_pred.dtype) - y_pred[:, 0]))
        if error > 1.0:  # of a tensor
            error = tf.sqrt(error)
        return error

    x, y = digits(50)
    model = small_cnn()
    model.compile("sgd", loss)
    model.fit(x, y, **FIT)
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    nanotf.shutdown()
    assert left == []


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

    model.compile("sgd", _failing_loss(fail_with_its_length))
    with (
        caplog.at_level(logging.DEBUG, logger="nanotf"),
        pytest.raises(WorkerError, match="15 characters") as caught,
    ):
        model.fit(x, y, **FIT)
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in caplog.text
    monkeypatch.delenv("SOME_SERVICE_TOKEN")
    _next_fit_works(())


def test_workers_of_workers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = digits(50)
    model = small_cnn()
    with monkeypatch.context() as patch:
        patch.setenv("NANOTF_RANK", "1")
        with pytest.raises(NanoError, match=r"fit\(num_processes=2\) inside worker 1"):
            model.fit(x, y, **FIT)


def test_a_call_inside_another_is_refused() -> None:
    """The workers wait for the callback that makes the inner call."""
    x, y = digits(100)

    def call(epoch: int, logs: Any) -> None:
        small_cnn().fit(x, y, **FIT)

    callback = tf.keras.callbacks.LambdaCallback(on_epoch_end=call)
    with pytest.raises(NanoError, match="Leave num_processes out there"):
        small_cnn().fit(x, y, **FIT, callbacks=[callback])


FORKED = """
import os, threading, tensorflow as tf, numpy as np, nanotf
from nanotf.pool import warm
from nanotf.keras import Sequential

model = Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(1)])
model.compile("sgd", "mse")
x, y = np.ones((20, 4)), np.ones((20, 1))
model.fit(x, y, verbose=0, num_processes=2)
pids = nanotf.worker_pids()

def run_a_job():
    with warm._lock:
        runs.set()
        forked.wait()

runs, forked = threading.Event(), threading.Event()
thread = threading.Thread(target=run_a_job)
thread.start()
runs.wait()
child = os.fork()
if child == 0:
    seen = nanotf.worker_pids()
    nanotf.shutdown()
    os._exit(len(seen))
print("RESULT", os.waitpid(child, 0)[1])
forked.set()
thread.join()
model.fit(x, y, verbose=0, num_processes=2)
print("RESULT", nanotf.worker_pids() == pids)
"""


@pytest.mark.thorough
def test_forked_process_leaves_the_workers_alone(tmp_path: pathlib.Path) -> None:
    done = run_script(tmp_path, FORKED)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines == ["RESULT 0", "RESULT True"]


FEW_DESCRIPTORS = """
import os, resource, tensorflow as tf, numpy as np, nanotf
from nanotf.keras import Sequential

model = Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(1)])
model.compile("sgd", "mse")
x, y = np.ones((20, 4)), np.ones((20, 1))
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 4, hard))
try:
    model.fit(x, y, verbose=0, num_processes=2)
except nanotf.errors.NanoError as error:
    print("RESULT", error)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
model.fit(x, y, verbose=0, num_processes=2)
print("RESULT", len(nanotf.worker_pids()))
for spare in range(4):  # of warm workers
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + spare, hard))
    try:
        model.predict(x, verbose=0, num_processes=2)
    except nanotf.errors.NanoError as error:
        assert "ulimit -n" in str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    model.predict(x, verbose=0, num_processes=2)
print("RESULT", len(nanotf.worker_pids()))
"""


@pytest.mark.thorough
def test_few_file_descriptors(tmp_path: pathlib.Path) -> None:
    done = run_script(tmp_path, FEW_DESCRIPTORS)
    first, *others = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert "ulimit -n" in first
    assert others == ["RESULT 2", "RESULT 2"]


@pytest.mark.thorough
def test_a_fork_holds_a_workers_stdin_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread may fork while another thread starts workers; the workers' stdin then never ends."""
    held = []

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            if self.stdin is not None:
                held.append(os.dup(self.stdin.fileno()))

    monkeypatch.setattr(forks.subprocess, "Popen", Popen)
    nanotf.shutdown()
    try:
        x, y = digits(100)
        assert small_cnn().fit(x, y, **FIT).epoch == [0]
        assert len(held) == 1, "the zygote's stdin"
    finally:
        for fd in held:
            os.close(fd)


@pytest.mark.thorough
def test_out_of_memory_for_a_workers_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int, fd: int) -> None:
        os.close(fd)
        raise OSError(errno.ENOMEM, "no memory")

    x, _ = digits(100)
    model = small_cnn()
    model.predict(x, verbose=0, num_processes=2)
    pids = nanotf.worker_pids()
    with monkeypatch.context() as patch:
        patch.setattr(pool, "Block", refuse)
        with pytest.raises(OSError, match="no memory"):
            model.predict(x, verbose=0, num_processes=2)
    _next_fit_works(pids)


def test_idle_seconds_are_checked_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = digits(100)
    model = small_cnn()
    before = model.get_weights()
    monkeypatch.setenv("NANOTF_IDLE_SECONDS", "0")
    with pytest.raises(NanoError, match="NANOTF_IDLE_SECONDS='0'"):
        model.fit(x, y, **FIT)
    assert all((a == b).all() for a, b in zip(before, model.get_weights(), strict=True))


def test_workers_start_in_the_background_and_end_when_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nanotf.warm_up(2)
    wait_until(lambda: len(nanotf.worker_pids()) == 2, "the workers start")
    pids, seen = nanotf.worker_pids(), []
    note = tf.keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(nanotf.worker_pids())
    )
    monkeypatch.setenv("NANOTF_IDLE_SECONDS", "0.1")
    x, y = digits(20)
    small_cnn().fit(x, y, verbose=0, num_processes=2, callbacks=[note])
    assert seen == [pids]
    wait_until(lambda: nanotf.worker_pids() == (), "idle workers end")


def test_workers_get_messages_in_one_order() -> None:
    """The job's thread and one thread per stream of data send messages."""

    class Channel:
        def __init__(self) -> None:
            self.sent: list[int] = []

        def send_packed(self, data: bytes, fds: Any) -> None:
            time.sleep(0.0001)
            self.sent.append(pickle.loads(data))

    channels: list[Any] = [Channel() for _ in range(3)]
    made = object.__new__(pool.Pool)
    made._outboxes = [outbox.Outbox(channel, "nanotf-test", pytest.fail) for channel in channels]
    made._send_lock = threading.Lock()
    threads = [
        threading.Thread(target=lambda n=n: [made.send(100 * n + k) for k in range(100)])  # type: ignore[misc]
        for n in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: all(len(c.sent) == 300 for c in channels), "everything is sent")
    for box in made._outboxes:
        box.end()
    first, second, third = (channel.sent for channel in channels)
    assert first == second == third
    assert sorted(first) == list(range(300))


@pytest.mark.thorough
def test_logs_on_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    nanotf.shutdown()
    x, y = digits(100)
    model = small_cnn()
    model.compile("sgd", _failing_loss(_print_and_exit))
    with pytest.raises(WorkerDied, match="exited with code 3") as caught:
        model.fit(x, y, **FIT)
    assert "last words of a worker" in caught.value.log_tail


def _print_and_exit() -> None:
    print("last words of a worker", file=sys.stderr, flush=True)
    os._exit(3)


@pytest.mark.thorough
def test_segfault_leaves_its_python_stack_in_the_log() -> None:
    x, y = digits(100)
    model = small_cnn()
    model.compile("sgd", _failing_loss(_segfault))
    with pytest.raises(WorkerDied, match="SIGSEGV") as caught:
        model.fit(x, y, **FIT)
    assert "Fatal Python error: Segmentation fault" in str(caught.value)
    assert "_segfault" in str(caught.value)


def _segfault() -> None:
    ctypes.string_at(0)


def _named_segments() -> list[pathlib.Path]:
    return list(pathlib.Path("/dev/shm").glob("*nanotf*"))


def test_shared_memory_without_names_or_sockets() -> None:
    """Shared memory has no name in /dev/shm, and with transport "shm" no socket listens."""
    from nanotf.pool.transports import DEFAULT_TRANSPORT

    x, y = digits(100)
    before = set(_named_segments())
    small_cnn().fit(x, y, **FIT)
    assert set(_named_segments()) == before
    if DEFAULT_TRANSPORT == "shm":
        for pid in nanotf.worker_pids():
            listening = [
                c
                for c in psutil.Process(pid).net_connections(kind="inet")
                if c.status == psutil.CONN_LISTEN
            ]
            assert listening == []


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
