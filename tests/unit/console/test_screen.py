"""Rows on a terminal, in a log, and nowhere."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tiny_terminal import TinyScreen
from waiting import wait_until

from nanotf import console
from nanotf.console import screen as module
from nanotf.console.screen import screen


class FixedRow:
    def __init__(self, text: str, last: str = "", done: float | None = None) -> None:
        self.label, self._text, self._last, self._done = "row", text, last, done

    def fraction(self) -> float | None:
        return self._done

    def text(self) -> str:
        return self._text

    def last_text(self) -> str:
        return self._last


class FakeTerminal(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True

    def shown(self) -> list[str]:
        found = TinyScreen()
        found.feed(self.getvalue())
        return found.lines()


Opened = Callable[[], FakeTerminal]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """A function that makes a terminal of both streams; pytest has its own until a test begins."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "DRAW_SECONDS", 0.0)  # drawn at once

    def open_terminal() -> FakeTerminal:
        made = FakeTerminal()
        monkeypatch.setattr(sys, "stdout", made)
        monkeypatch.setattr(sys, "stderr", made)
        return made

    return open_terminal


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The time of the log, which the test sets."""

    class Time:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    made = Time()
    monkeypatch.setattr(module, "time", made)
    return made


def test_prints_appear_above(opened: Opened) -> None:
    terminal = opened()
    row = FixedRow("2/8", "8/8 in 3 s", 0.25)
    screen.add(row)
    assert terminal.shown()[0].startswith("row ━") and terminal.shown()[0].endswith(" 2/8")
    print("one")
    print("two", file=sys.stderr)
    assert terminal.shown()[:2] == ["one", "two"] and terminal.shown()[2].endswith(" 2/8")
    print("begun", end="")
    assert terminal.shown() == ["one", "two", "begun"]  # the line is the program's until it ends
    print(", done")
    assert terminal.shown()[2] == "begun, done" and len(terminal.shown()) == 4
    row._done = 1.0
    screen.remove(row)
    assert terminal.shown()[3] == f"row {'━' * module.BAR_COLUMNS} 8/8 in 3 s"
    assert sys.stdout is terminal and sys.stderr is terminal
    print("after")
    assert terminal.shown()[4:] == ["after"]


def test_a_bar_of_the_program(opened: Opened) -> None:
    """Keras draws its line again and again."""
    terminal = opened()
    row = FixedRow("2/8", "8/8")
    screen.add(row)
    for step in range(3):
        sys.stdout.write("\b" * 4 + f"\r{step}/3")
    assert terminal.shown() == ["2/3"]
    sys.stdout.write("\n")
    screen.remove(row)
    assert terminal.shown()[0] == "2/3" and len(terminal.shown()) == 2


def test_threads_do_not_share_a_line(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = opened()

    def print_in_thread(text: str) -> None:
        thread = threading.Thread(target=print, args=(text,))
        thread.start()
        thread.join()

    row = FixedRow("2/8")
    screen.add(row)
    print("begun", end="")
    print_in_thread("other")
    print(", done")
    assert terminal.shown()[:2] == ["begun, done", "other"] and len(terminal.shown()) == 3
    monkeypatch.setattr(module, "OPEN_SECONDS", 0.0)
    print("a prompt", end="")
    print_in_thread("another")
    wait_until(lambda: "another" in terminal.shown(), "the line is ended")
    print("and more", end="")
    print_in_thread("last")
    screen.remove(row)
    assert terminal.shown()[2:] == ["a prompt", "another", "and more", "last"]


def test_a_narrow_terminal(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    terminal = opened()
    row = FixedRow("2/8, 2 running, and much else", "8/8, and much else", 0.5)
    screen.add(row)
    print("printed " * 10)
    assert terminal.shown()[1].startswith("row ━") and terminal.shown()[1].endswith(
        " 2/8, 2 running,"
    )
    screen.remove(row)
    assert terminal.shown()[1].endswith(" 8/8, and much e")


def test_several_rows(opened: Opened) -> None:
    """One that ends leaves the others, and no line of a row stays between what is printed."""
    terminal = opened()
    first, second = FixedRow("first", "first ended"), FixedRow("second")
    screen.add(first)
    screen.add(second)
    print("printed")
    assert [line.split()[-1] for line in terminal.shown()] == ["printed", "first", "second"]
    screen.remove(second)
    assert [line.split()[-1] for line in terminal.shown()] == ["printed", "first"]
    screen.add(second)
    screen.remove(first)
    assert [line.split()[-1] for line in terminal.shown()] == ["printed", "ended", "second"]
    print("again")
    assert [line.split()[-1] for line in terminal.shown()][2:] == ["again", "second"]
    screen.remove(second)
    assert terminal.shown()[2:] == ["again"]


def test_a_row_is_drawn_again_and_again(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = opened()
    monkeypatch.setattr(module, "TICK_SECONDS", 0.01)
    row = FixedRow("0 s")
    screen.add(row)
    row._text = "1 s"  # nobody says so
    wait_until(lambda: terminal.shown()[0].endswith("1 s"), "a tick")
    screen.remove(row)
    assert terminal.shown() == []
    assert not [t for t in threading.enumerate() if t.name == "nanotf-screen"]


def test_a_terminal_that_goes(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program continues, as one that was started with nohup does."""
    terminal = opened()

    def fail(text: str) -> int:
        raise OSError(5, "Input/output error")

    row = FixedRow("2/8", "8/8")
    screen.add(row)
    monkeypatch.setattr(terminal, "write", fail)
    screen.change(row)
    screen.remove(row)
    assert sys.stderr is terminal


def test_what_the_program_puts_in_place_of_a_stream_stays(
    opened: Opened,
) -> None:
    terminal = opened()
    row = FixedRow("2/8")
    screen.add(row)
    mine = io.StringIO()
    sys.stdout = mine
    screen.remove(row)
    assert sys.stdout is mine and sys.stderr is terminal


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_fork_leaves_the_rows_to_its_parent(opened: Opened) -> None:
    terminal = opened()
    row = FixedRow("2/8")
    screen.add(row)
    reader, writer = os.pipe()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with screen.lock:
            held.set()
            done.wait()

    drawing = threading.Thread(target=hold)  # which the child does not have
    drawing.start()
    held.wait()
    child = os.fork()
    if child == 0:
        before = terminal.getvalue()
        print("in the child")
        screen.remove(row)
        os.write(writer, terminal.getvalue().removeprefix(before).encode())
        os._exit(0)
    done.set()
    drawing.join()
    os.close(writer)
    assert os.read(reader, 1000) == b"in the child\n"
    os.close(reader)
    os.waitpid(child, 0)
    screen.remove(row)


def test_a_log(log: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """It has the first line, the last, and few between them."""
    row = FixedRow("0/8", "8/8 in 23 s")
    screen.add(row)
    row._text = "1/8"
    for second in range(1, 24):
        log.now = float(second)
        screen.change(row)
        row._text = f"{second}/8"
    screen.remove(row)
    said = capsys.readouterr()
    expected = ["row 0/8", "row 9/8", "row 19/8", "row 8/8 in 23 s"]
    assert (said.out, said.err.splitlines()) == ("", [f"nanotf: {line}" for line in expected])


@pytest.mark.parametrize("why", ["TERM", "rich"])
def test_a_terminal_without_rows(opened: Opened, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = opened()
    if why == "TERM":
        monkeypatch.setenv("TERM", "dumb")
    else:
        monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with console.status("starting 2 workers"):
        print("printed")
    assert terminal.getvalue() == "nanotf: starting 2 workers\nprinted\n"


def test_no_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with console.status("starting 2 workers"):
        assert screen._place is None


def test_a_stderr_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    with console.status("starting 2 workers"):
        pass


def test_silence(capsys: pytest.CaptureFixture[str]) -> None:
    with console.silent(True), console.silent(False), console.status("hidden"):
        pass
    with console.silent(False), console.status("shown"):
        pass
    assert capsys.readouterr().err == "nanotf: shown\n"


def test_a_status_on_a_terminal_goes(opened: Opened) -> None:
    terminal = opened()
    with console.status("starting 2 workers, about 5 s, once"):
        assert terminal.shown()[0].endswith("starting 2 workers, about 5 s, once")
        assert terminal.shown()[0].startswith("nanotf: ")
    assert terminal.shown() == []
