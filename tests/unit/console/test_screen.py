"""Rows on a terminal, in a log, and nowhere."""

from __future__ import annotations

import io
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tiny_terminal import TinyScreen

from nanotf import console
from nanotf.console import progress_rows
from nanotf.console import screen as module
from nanotf.console.progress_rows import ItemBar
from nanotf.console.screen import screen


class FixedRow:
    def __init__(self, text: str, done: float | None = None) -> None:
        self.label, self.words, self.done = "row", text, done
        self.logged: float | None = None

    def fraction(self) -> float | None:
        return self.done

    def text(self) -> str:
        return self.words


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

    def open_terminal() -> FakeTerminal:
        made = FakeTerminal()
        monkeypatch.setattr(sys, "stdout", made)
        monkeypatch.setattr(sys, "stderr", made)
        return made

    return open_terminal


class Time:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Time:
    """The time of the log, which the test sets."""
    made = Time()
    monkeypatch.setattr(module, "time", made)
    return made


def test_a_row_while_it_is_shown(opened: Opened) -> None:
    terminal = opened()
    row = FixedRow("2/8", 0.25)
    with screen.showing(row):
        assert terminal.shown()[0].startswith("row ━") and terminal.shown()[0].endswith(" 2/8")
        with screen.above():
            print("one")
            print("two", file=sys.stderr)
        assert terminal.shown()[:2] == ["one", "two"] and terminal.shown()[2].endswith(" 2/8")
        row.words = "3/8"
        assert terminal.shown()[2].endswith(" 2/8")
        screen.tick()
        assert terminal.shown()[2].endswith(" 3/8") and len(terminal.shown()) == 3
        with screen.showing(row):
            pass
        assert len(terminal.shown()) == 3  # it stays with the first context
    assert terminal.shown() == ["one", "two"]
    row.done = 1.0
    screen.print_last(row, "8/8 in 3 s")
    print("after")
    last = f"row {'━' * module.BAR_COLUMNS} 8/8 in 3 s"
    assert terminal.shown() == ["one", "two", last, "after"]
    assert sys.stdout is terminal and sys.stderr is terminal


def test_a_record_of_nanotfs_logger(opened: Opened) -> None:
    terminal = opened()
    with screen.showing(FixedRow("2/8")):
        console.logger.warning("worker 0 died")
        assert not any("2/8" in line for line in terminal.shown())
        screen.tick()
        assert terminal.shown()[-1].endswith(" 2/8")


def test_a_narrow_terminal(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    terminal = opened()
    with screen.showing(FixedRow("2/8, 2 running, and much else", 0.5)):
        (shown,) = terminal.shown()
        assert shown.startswith("row ━") and shown.endswith(" 2/8, 2 running,")


def test_several_rows(opened: Opened) -> None:
    """One that ends leaves the others."""
    terminal = opened()
    with screen.showing(FixedRow("first")):
        with screen.showing(FixedRow("second")):
            with screen.above():
                print("printed")
            words = [line.split()[-1] for line in terminal.shown()]
            assert words == ["printed", "first", "second"]
        assert [line.split()[-1] for line in terminal.shown()] == ["printed", "first"]
    assert terminal.shown() == ["printed"]


def test_an_exception_takes_the_row_away(opened: Opened) -> None:
    terminal = opened()
    with pytest.raises(KeyboardInterrupt), screen.showing(FixedRow("2/8")):
        raise KeyboardInterrupt
    screen.tick()
    assert terminal.shown() == []


def test_a_terminal_that_goes(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program continues, as one that was started with nohup does."""
    terminal = opened()

    def fail(text: str) -> int:
        raise OSError(5, "Input/output error")

    row = FixedRow("2/8")
    with screen.showing(row):
        monkeypatch.setattr(terminal, "write", fail)
        screen.tick()
        screen.print_above("a line")
    screen.print_last(row, "8/8")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_fork_leaves_the_rows_to_its_parent(opened: Opened) -> None:
    terminal = opened()
    reader, writer = os.pipe()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with screen.above():
            held.set()
            done.wait()

    with screen.showing(FixedRow("2/8")):
        drawing = threading.Thread(target=hold)  # which the child does not have
        drawing.start()
        held.wait()
        child = os.fork()
        if child == 0:
            before = terminal.getvalue()
            screen.tick()
            print("in the child")
            os.write(writer, terminal.getvalue().removeprefix(before).encode())
            os._exit(0)
        done.set()
        drawing.join()
    os.close(writer)
    assert os.read(reader, 1000) == b"in the child\n"
    os.close(reader)
    os.waitpid(child, 0)


def test_a_log(log: Time, capsys: pytest.CaptureFixture[str]) -> None:
    """It has the first line, the last, and few between them."""
    row = FixedRow("0/8")
    for second in range(24):  # a program that waits again and again
        log.now = float(second)
        row.words = f"{second}/8"
        with screen.showing(row):
            screen.tick()
    screen.print_last(row, "8/8 in 23 s")
    said = capsys.readouterr()
    expected = ["row 0/8", "row 10/8", "row 20/8", "row 8/8 in 23 s"]
    assert (said.out, said.err.splitlines()) == ("", [f"nanotf: {line}" for line in expected])


@pytest.mark.parametrize("why", ["TERM", "rich"])
def test_a_terminal_without_rows(opened: Opened, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "TERM":
        monkeypatch.setenv("TERM", "dumb")
    else:
        monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    terminal = opened()
    with console.status("starting 2 workers"):
        print("printed")
    assert terminal.getvalue() == "nanotf: starting 2 workers\nprinted\n"


@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_no_stderr(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if stream is not None:
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    with console.status("starting 2 workers"):
        screen.tick()
        screen.print_above("a line")


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


def test_a_bar_is_shown_while_somebody_waits(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = opened()
    monkeypatch.setattr(progress_rows, "TICK_SECONDS", 0.001)
    monkeypatch.setattr(progress_rows, "DRAW_SECONDS", 0.0)
    outcomes: queue.SimpleQueue[int] = queue.SimpleQueue()
    bar = ItemBar("map", 1, note=lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    bar.begin(2)
    ticks = iter(range(3))
    tick = screen.tick

    def work() -> None:
        tick()
        assert terminal.shown()[-1].startswith("map ━")
        if next(ticks, None) is None and outcomes.empty():
            bar.item_ends(0, 1.0)
            outcomes.put(7)

    monkeypatch.setattr(screen, "tick", work)
    bar.item_begins(0)
    assert bar.wait_for(outcomes) == 7
    assert terminal.shown() == []  # the program may print
    bar.end()
    bar.end()
    (line,) = terminal.shown()
    assert line.startswith("map ━") and " 1/2 after " in line
