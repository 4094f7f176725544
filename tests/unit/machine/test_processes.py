"""Programs that a process owns: how they end, and what their numbers name then."""

from __future__ import annotations

import os
import pathlib
import signal
import sys

import psutil
import pytest

from nanotf.machine import processes
from tests.waiting import wait_until

FORK = """
import os, sys, time
if os.fork() == 0:
    open(sys.argv[1], "w").write(str(os.getpid()))
    time.sleep(600)
while not os.path.getsize(sys.argv[1]):
    time.sleep(0.01)
"""


def _begun(*words: str) -> processes.OwnedProcess:
    return processes.begin([sys.executable, *words], "a", "/", os.environ)


@pytest.mark.parametrize(
    ("end", "return_code", "exit_code"),
    [
        ("raise SystemExit(3)", 3, 3),
        ("import os; os.kill(os.getpid(), 9)", -9, 137),
        ("import os; os.abort()", -6, 134),
    ],
)
def test_how_a_program_has_ended(end: str, return_code: int, exit_code: int) -> None:
    program = _begun("-c", end)
    wait_until(lambda: not program.is_running, "the program ends")
    for _ in range(2):
        assert (program.return_code, program.exit_code) == (return_code, exit_code)
        program.reap()


def test_the_number_of_a_program_stays_its_own_until_it_is_reaped(tmp_path: pathlib.Path) -> None:
    (tmp_path / "pid").touch()
    program = _begun("-c", FORK, str(tmp_path / "pid"))
    wait_until(lambda: not program.is_running, "the program ends")
    program.send_signal(signal.SIGTERM)  # to a zombie
    assert os.waitid(os.P_PID, program.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    child = int((tmp_path / "pid").read_text())
    os.kill(child, 0)  # it lives
    program.reap()
    wait_until(lambda: not _lives(child), "what the program has left ends")


def _lives(pid: int) -> bool:
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


def test_a_program_that_is_reaped_gets_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    program = _begun("-c", "")
    program.reap()
    for name in ("kill", "killpg"):  # the number may be somebody else's by now
        monkeypatch.setattr(processes.os, name, lambda *_: pytest.fail("a signal was sent"))
    program.send_signal(signal.SIGTERM)
    program.kill_group()
    program.reap()


def test_a_process_that_ignores_the_end_of_children() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        program = _begun("-c", "")
        wait_until(lambda: not program.is_running, "the program ends")
        program.reap()
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_system_that_allows_no_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError

    before = psutil.Process().num_fds()
    with monkeypatch.context() as patches, pytest.raises(BlockingIOError):
        patches.setattr(processes.os, "fork", refuse)
        processes.Guard()
    assert psutil.Process().num_fds() == before


def test_output_that_cannot_be_watched_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no memory")

    program, output = _begun("-c", ""), processes.Output(lambda *_: None)
    with pytest.raises(OSError, match="no memory"), monkeypatch.context() as patches:
        patches.setattr(output._selector, "register", refuse)
        output.add(program)
    output.drain()
    output.close()
    program.reap()
    for stream in (program.process.stdout, program.process.stderr):
        assert stream is not None
        stream.close()


def test_a_guard_that_somebody_has_killed() -> None:
    guard = processes.Guard()
    os.kill(guard._pid, signal.SIGKILL)
    os.waitid(os.P_PID, guard._pid, os.WEXITED | os.WNOWAIT)
    guard.dismiss()
