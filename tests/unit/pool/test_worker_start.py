"""Start and end of a worker, seen from its parent, before TensorFlow is imported."""

from __future__ import annotations

import os
import resource
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from waiting import SECONDS, wait_until

from nanotf.errors import NanoError
from nanotf.machine import topology
from nanotf.pool import forks, warm
from nanotf.pool.local import LocalWorker
from nanotf.pool.pool import Pool
from nanotf.wire import messages
from nanotf.wire.channel import KEY_NBYTES

UNPINNED = topology.Placement(0, (), pin=False)
KEY = secrets.token_bytes(KEY_NBYTES)


def test_a_pool_that_does_not_start_leaves_its_helpers_to_the_idle_timer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(plan: topology.Plan, transport: str) -> Pool:
        raise NanoError("no pool")

    monkeypatch.setattr(warm, "_start", start)
    with pytest.raises(NanoError), warm.pool_for(topology.Plan((UNPINNED,)), "shm"):
        pass
    assert warm._idle_timer is not None
    warm._stop_idle_timer()


class Started:
    """Workers started by a test; the fixture ends them."""

    def __init__(self) -> None:
        self.workers: list[LocalWorker] = []
        self.zygotes: list[forks.Zygote] = []

    def __call__(self) -> LocalWorker:
        self.zygotes.append(forks.Zygote(os.environ, imports=False))
        worker = LocalWorker(UNPINNED, KEY, "shm", os.environ, self.zygotes[-1])
        self.workers.append(worker)
        return worker


@pytest.fixture
def start() -> Iterator[Started]:
    started = Started()
    yield started
    for worker in started.workers:
        worker.process.kill()
        worker.wait_killed()
        worker.close()
    for each in started.zygotes:
        each.close()


def _is_there(worker: LocalWorker) -> bool:
    """Returns True if the worker sends `Hello`."""
    worker.channel.show_key_second(KEY)
    return isinstance(worker.channel.receive(), messages.Hello)


def test_only_the_parent_gets_interrupts_from_the_first_moment(
    start: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedulers send SIGINT to every process, at any time."""

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.send_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(forks.subprocess, "Popen", Interrupted)
        worker = start()
    assert _is_there(worker), worker.log_tail()
    worker.process.send_signal(signal.SIGINT)
    worker.channel.close()
    assert worker.process.wait(SECONDS) == 1, "it ends only with its channel"


def test_a_parent_that_ignores_sigchld_learns_how_a_worker_ended(start: Started) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        worker = start()
        assert _is_there(worker)
        os.kill(worker.process.pid, signal.SIGKILL)
        error = worker.died("starting")
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert (error.exit_code, error.signal) == (None, signal.SIGKILL)


def test_a_signal_to_a_worker_that_was_reaped_but_not_reported_is_dropped() -> None:
    """The zygote reaps a worker, then reports its exit code; a caller may kill it in between."""
    reaped = subprocess.Popen([sys.executable, "-c", ""])
    reaped.wait(SECONDS)
    reader, writer = os.pipe()
    worker = forks.Forked(reaped.pid, reader)
    try:
        worker.send_signal(0)  # sends none, but looks for the process as every signal does
        assert worker.poll() is None
        os.write(writer, messages.STATUS.pack(-signal.SIGSEGV))
        assert worker.wait(SECONDS) == -signal.SIGSEGV
        worker.kill()
    finally:
        os.close(writer)


def test_worker_ends_with_its_parent_though_a_fork_holds_the_channels(start: Started) -> None:
    """A data loader's processes, forked in between, hold the channels."""
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        worker = start()
        holder = os.fork()
        if holder == 0:
            signal.pause()
        os.write(writer, f"{worker.process.pid} {holder}".encode())
        os._exit(0 if _is_there(worker) else 1)
    assert os.waitpid(parent, 0)[1] == 0
    worker_pid, holder = map(int, os.read(reader, 100).split())
    os.close(reader)
    os.close(writer)
    wait_until(lambda: not psutil.pid_exists(worker_pid), "the worker ends")
    os.kill(holder, signal.SIGKILL)


@pytest.fixture
def no_child() -> Iterator[None]:
    children = psutil.Process().children()
    yield
    assert psutil.Process().children() == children


@pytest.mark.usefixtures("no_child")
def test_the_limit_on_the_size_of_files_is_found_before_a_worker_starts() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(NanoError, match=r"a limit of 10000 bytes, .* `ulimit -f unlimited`"):
            Pool(topology.Plan((UNPINNED,)), "shm")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("no_child")
def test_a_missing_interpreter_fails_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(NanoError, match=r"Received: sys\.executable=''"):
        Pool(topology.Plan((UNPINNED,)), "shm")
