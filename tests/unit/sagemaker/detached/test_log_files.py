"""Logs that one process writes while others read them."""

from __future__ import annotations

import pathlib

from nanotf.sagemaker.detached.log_files import LogFiles, LogTail, last_lines


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
