"""The first exchange with a new process."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import AuthenticationError

import pytest

from nanotf.errors import WorkerDied, WorkerError
from nanotf.pool.handles import Worker
from nanotf.pool.handshake import greet
from nanotf.pool.worker_log import WorkerLog
from nanotf.wire.channel import KEY_NBYTES, Channel

KEY = secrets.token_bytes(KEY_NBYTES)


class Program(Worker):
    """A worker that is a Python program; the test holds the other end of its channel."""

    def __init__(self, code: str) -> None:
        self.rank, self.cores = 3, (0,)
        ours, theirs = socket.socketpair()
        self.channel, self.other = Channel(ours), Channel(theirs)
        self.log = WorkerLog()
        self.process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)

    def end(self) -> None:
        self.process.communicate()  # closes its standard input, on which it waits
        self.other.close()
        self.close()


@pytest.fixture
def waiting() -> Iterator[Program]:
    program = Program("import sys; sys.stdin.read()")
    yield program
    program.end()


def test_both_show_the_key(waiting: Program) -> None:
    thread = threading.Thread(target=waiting.other.show_key_first, args=(KEY,))
    thread.start()
    greet(waiting, KEY, time.monotonic() + 60)
    thread.join()


def test_another_key_is_rejected(waiting: Program) -> None:
    errors: list[Exception] = []

    def show() -> None:
        try:
            waiting.other.show_key_first(secrets.token_bytes(KEY_NBYTES))
        except AuthenticationError as error:
            errors.append(error)

    thread = threading.Thread(target=show)
    thread.start()
    with pytest.raises(AuthenticationError):
        greet(waiting, KEY, time.monotonic() + 60)
    thread.join()
    assert errors


def test_no_answer(waiting: Program) -> None:
    with pytest.raises(WorkerError, match=r"Workers \[3\] did not finish starting"):
        greet(waiting, KEY, time.monotonic())


def test_a_process_that_ends() -> None:
    program = Program("import sys; sys.exit(5)")
    with pytest.raises(WorkerDied, match=r"Worker 3 .*while starting") as error:
        greet(program, KEY, time.monotonic() + 60)
    program.end()
    assert error.value.exit_code == 5
