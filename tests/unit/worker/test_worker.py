"""A worker's work before it imports TensorFlow."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import threading

import pytest
from waiting import wait_until

from nanotf.collectives.native_engine import NativeEngine
from nanotf.collectives.spec import create_group
from nanotf.machine import time_slices
from nanotf.worker import process


def test_cores_that_cannot_be_pinned_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, cores: tuple[int, ...]) -> None:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    (warning,) = process.pin((0, 1))
    assert "could not be pinned to cores [0, 1]" in warning
    assert "Operation not permitted" in warning


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_worker_whose_parent_is_already_gone() -> None:
    """Without a check, it would wait for a signal that was already sent."""
    code = (
        "from nanotf.machine import own_exit; own_exit.end_with_parent(1); print('still running')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (1, ""), done.stderr


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_full_disk_is_no_reason_to_stop() -> None:
    code = (
        "from nanotf.worker import process; process.write_log(); "
        "print('x' * 100_000); print('y', file=__import__('sys').stderr); raise SystemExit(3)"
    )
    with pathlib.Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=full, timeout=60, check=False
        )
    assert done.returncode == 3


def test_a_limit_on_the_size_of_files_is_no_reason_to_stop(tmp_path: pathlib.Path) -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9, 9)); "
        "from nanotf.worker import process; process.write_log(); "
        "print('first'); print('x' * 100_000)"
    )
    log = tmp_path / "log"
    with log.open("wb") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, timeout=60, check=True)
    assert log.read_text() == "first\nxxx"


def test_lines_are_written_before_a_process_is_killed() -> None:
    code = (
        "from nanotf.worker import process; process.write_log(); print('last words'); "
        "process.os._exit(0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "last words\n"


def test_batches_that_arrive_before_their_job_begins() -> None:
    """A rank that started sooner requests them."""
    code = """
import os, socket
from nanotf.wire import messages
from nanotf.worker.inbox import Inbox
from nanotf.wire.channel import Channel

ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
parent, inbox = Channel(ours), Inbox(Channel(theirs))
for number in (1, 2):
    parent.send(messages.Order(number, b""))
    parent.send(messages.EndOfStream(stream=0, turn=0))
parent.send(messages.Stop())
received = [inbox.next_order() for _ in range(3)]
for message, _, reader in received[:2]:
    print(message.order, list(reader.iterate(stream=0, rank=0, size=2)), flush=True)
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "1 []\n2 []\n", done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="SCHED_BATCH is Linux's")
def test_only_a_thread_that_waits_for_another_rank_preempts_when_it_wakes() -> None:
    owner = create_group(2, spin_seconds=0.0)
    first, second = (NativeEngine(owner.spec, rank, owner.fd) for rank in range(2))
    policies = []

    def wait() -> None:
        time_slices.finish_slices()
        policies.append(os.sched_getscheduler(0))
        first.barrier(0)
        policies.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=wait)
    thread.start()
    number = thread.native_id or 0
    wait_until(
        lambda: policies and os.sched_getscheduler(number) == os.SCHED_OTHER,
        "the thread to wait for the other rank",
    )
    second.barrier(0)
    thread.join(60)
    assert policies == [os.SCHED_BATCH, os.SCHED_BATCH]
