"""A worker's log, read by the parent."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from nanotf.pool import worker_log
from nanotf.pool.worker_log import WorkerLog


@pytest.fixture
def log() -> Iterator[WorkerLog]:
    log = WorkerLog()
    yield log
    log.close()
    log.close()


def _print(log: WorkerLog, text: str) -> None:
    code = f"print({text!r}, end='')"
    subprocess.run([sys.executable, "-c", code], stdout=log.fileno(), check=True, timeout=60)


def test_the_last_lines_are_shown(log: WorkerLog) -> None:
    assert log.tail() == ""
    _print(log, "\n".join(map(str, range(100))))
    assert log.tail().splitlines() == [str(n) for n in range(80, 100)]
    position = log.size()
    _print(log, "more\n")
    assert log.since(position) == "more"


def test_the_startup_output_is_left_out(log: WorkerLog) -> None:
    _print(log, "TensorFlow says much when it starts\n")
    assert log.tail()
    log.begin_here()
    assert log.tail() == ""
    _print(log, "last words\n")
    assert log.tail() == "last words"


def test_a_crash_is_shown_from_its_beginning(log: WorkerLog) -> None:
    _print(log, "\n".join([*"abcdefgh", worker_log.CRASH, *map(str, range(100))]))
    lines = log.tail().splitlines()
    assert lines[:7] == [*"defgh", worker_log.CRASH, "0"]
    assert len(lines) == 5 + worker_log.TAIL_LINES


def test_a_long_log_keeps_its_end(log: WorkerLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_log, "MAX_BYTES", 1000)
    monkeypatch.setattr(worker_log, "KEPT_BYTES", 100)
    _print(log, "x" * 1000)
    log.trim()
    assert log.size() == 1000
    _print(log, "the end\n")
    log.trim()
    assert log.size() == 100
    assert log.tail() == "x" * 92 + "the end"
    _print(log, "and more\n")  # after the kept part, not at the worker's old position
    assert log.tail().splitlines()[-1] == "and more"
    assert log.size() == 109


def test_a_disk_that_takes_nothing_does_not_end_the_call(
    log: WorkerLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def truncate(fd: int, size: int) -> None:
        raise OSError(errno.ESTALE, "stale")

    monkeypatch.setattr(worker_log, "MAX_BYTES", 10)
    _print(log, "x" * 100)
    monkeypatch.setattr(os, "ftruncate", truncate)
    log.trim()
    assert log.tail() == "x" * 100
