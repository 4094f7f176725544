"""Logs that one process writes while others read them."""

from __future__ import annotations

import errno
import os
import pathlib
import subprocess
import sys

import pytest

from nanotf.wire import log_files
from nanotf.wire.log_files import HeldFile, LogFiles, LogTail, last_lines


class _Disk:
    """Takes a number of bytes, as a disk that is nearly full does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room, self.content = 0, b""
        monkeypatch.setattr(log_files.os, "write", self._write)

    def _write(self, _: int, data: bytes) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = bytes(data[: self.room])
        self.content += taken
        self.room -= len(taken)
        return len(taken)


def test_a_full_disk_gets_the_rest_later(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = _Disk(monkeypatch)
    file = HeldFile(lambda: os.open(os.devnull, os.O_WRONLY))
    disk.room = 6
    assert file.append(b"one\ntwo\n") is not None  # half of the second line is written
    assert file.append(b"three\n") is not None
    disk.room = 100
    assert file.catch_up() is None
    assert disk.content == b"one\ntwo\nthree\n"
    file.close()


def test_lines_beyond_what_can_be_held_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "_HELD_BYTES", 8)
    disk = _Disk(monkeypatch)
    file = HeldFile(lambda: os.open(os.devnull, os.O_WRONLY))
    for line in (b"one\n", b"two\n", b"three\n", b"four\n"):
        file.append(line)
    disk.room = 1000
    assert file.append(b"five\n") is None
    assert disk.content.decode().splitlines() == [
        "one",
        "two",
        "nanotf: 3 lines are missing here: there was no room to write them",
    ]
    file.close()


def test_what_a_supervisor_says_never_fails() -> None:
    """Its log is on a disk that is full from the start to the end."""
    program = """
import os, sys
from nanotf.wire.log_files import SpokenLog
spoken = SpokenLog()
spoken.install()
print("to nobody")
print("to nobody", file=sys.stderr, flush=True)
os._exit(0 if spoken.catch_up() is not None else 3)
"""
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        done = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=full)
    assert done.returncode == 0


def test_a_tail_reads_whole_lines(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.log"
    tail, other = LogTail(path), LogTail(path, "host: ")
    assert tail.read() == ""
    path.write_bytes(b"one\ntw")
    assert tail.read() == "one\n"
    path.write_bytes(b"one\ntwo\n")
    assert (tail.read(), tail.read()) == ("two\n", "")
    assert other.read() == "host: one\nhost: two\n"


def test_a_long_log_keeps_its_end_and_its_readers_miss_nothing(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.log"
    logs, tail, read = LogFiles(limit=20), LogTail(path), ""
    for number in range(40):
        logs.write(path, b"line %d\n" % number)
        if number % 2:
            read += tail.read()
    logs.close()
    assert read == "".join(f"line {number}\n" for number in range(40))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 2 * 30
    assert len(list(tmp_path.iterdir())) <= 2


def test_the_end_of_a_log(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.log"
    assert last_lines(path, 10) == ""
    path.write_text("a\n" * 100 + "bcd\nefg\n")
    assert last_lines(path, 9) == "bcd\nefg"
    assert last_lines(path, 2) == "fg"
    assert last_lines(path, 1000).startswith("a\na\n")
