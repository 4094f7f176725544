"""Workers start, get messages and end within the machine's limits, and leave nothing behind."""

from __future__ import annotations

import errno
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import psutil
import pytest
import tensorflow as tf
from failing_losses import FIT, assert_next_fit_works, failing_loss
from parity import digits, small_cnn
from processes import run_script
from waiting import wait_until

import nanotf
from nanotf.errors import NanoError, WorkerDied
from nanotf.pool import forks, outbox, pool, warm

pytestmark = pytest.mark.own_pool


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
    assert_next_fit_works(pids)


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
    with warm._lock:
        pass  # the thread that has started them has set the timer by now, of the usual time
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

        def takes_at_once(self, data: bytes) -> bool:
            return len(self.sent) % 3 > 0

        def send_packed(self, data: bytes, fds: Any) -> None:
            time.sleep(0.0001)
            self.sent.append(pickle.loads(data))

    channels: list[Any] = [Channel() for _ in range(3)]
    made = object.__new__(pool.Pool)
    made._outboxes = {
        rank: outbox.Outbox(channel, "nanotf-test", pytest.fail)
        for rank, channel in enumerate(channels)
    }
    for box in made._outboxes.values():
        box.begin()
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
    for box in made._outboxes.values():
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
    model.compile("sgd", failing_loss(_print_and_exit))
    with pytest.raises(WorkerDied, match="exited with code 3") as caught:
        model.fit(x, y, **FIT)
    assert "last words of a worker" in caught.value.log_tail


def _print_and_exit() -> None:
    print("last words of a worker", file=sys.stderr, flush=True)
    os._exit(3)


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
