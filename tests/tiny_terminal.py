"""A terminal as its user sees it: a model of the screen, and a real one (pty) for programs."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Callable

COLUMNS = 100
SECONDS = 300.0  # a program prints nothing for so long only if it hangs
_CONTROL = re.compile(r"\x1b\[(\??[0-9;]*)([A-Za-z])")


class TinyScreen:
    """Shows what a program has written to a terminal.

    Args:
        check: called with the lines whenever the cursor leaves a line.
    """

    def __init__(self, check: Callable[[list[str]], None] = lambda lines: None) -> None:
        self._rows: list[list[str]] = [[]]
        self._row = self._column = 0
        self._check = check

    def lines(self) -> list[str]:
        """Returns the lines, without blanks at their ends and empty lines at the end."""
        found = ["".join(row).rstrip() for row in self._rows]
        while found and not found[-1]:
            found.pop()
        return found

    def feed(self, text: str) -> None:
        """Writes text, whose control codes must be among those that this model knows."""
        place = 0
        while place < len(text):
            if (control := _CONTROL.match(text, place)) is not None:
                self._obey(*control.groups())
                place = control.end()
                continue
            self._write(text[place])
            place += 1

    def _write(self, character: str) -> None:
        if character in "\r\n":
            self._check(self.lines())
        if character == "\n":
            self._row += 1
            if self._row == len(self._rows):
                self._rows.append([])
            self._column = 0
        elif character == "\r":
            self._column = 0
        elif character == "\b":
            self._column = max(0, self._column - 1)
        else:
            assert character.isprintable(), repr(character)
            row = self._rows[self._row]
            row += " " * (self._column + 1 - len(row))
            row[self._column] = character
            self._column += 1

    def _obey(self, number: str, letter: str) -> None:
        if letter == "A":
            self._row = max(0, self._row - int(number or 1))
        elif letter == "K":
            assert number == "2", number
            self._rows[self._row].clear()
        else:  # colors; whether the cursor is shown
            assert letter == "m" or (number, letter) in (("?25", "l"), ("?25", "h")), letter


def run_in_terminal(script: str, folder: os.PathLike[str], **variables: str) -> str:
    """Runs a program whose standard streams are a terminal; returns what it has written there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    environ = {**os.environ, "TERM": "xterm-256color", **variables}
    # Of a surrounding run; they change what rich takes for a terminal.
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        environ.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=folder,
        env=environ,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    written = b""
    try:
        while chunk := _read(ours):
            written += chunk
    except TimeoutError:
        process.kill()
        raise
    finally:
        os.close(ours)
        process.wait()
    text = written.decode()
    assert process.returncode == 0, text
    return text


def _read(terminal: int) -> bytes:
    if not select.select([terminal], [], [], SECONDS)[0]:
        raise TimeoutError(f"nothing was written for {SECONDS:g} s")
    try:
        return os.read(terminal, 1 << 16)
    except OSError as error:  # Linux's way to say that the last process has closed it
        if error.errno == errno.EIO:
            return b""
        raise
