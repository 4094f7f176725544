"""The output of items: what they print, `tf.print` and stderr included, as it arrives here.

Items of several workers print at the same time, so their output is shown in whole lines.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

from nanotf.console import STREAMS, pass_on
from nanotf.console.screen import screen

OUTPUT = ("prefix", "keep", "drop")
LONGEST = 1 << 16  # characters of a line; a longer one is shown in pieces
KEPT = 1 << 20  # characters of an item's output, the last ones


class ItemOutput:
    """Drops the output of items. Subclasses do something with it.

    One thread calls the methods, in the order in which the items have written.
    """

    def take(self, index: int, stream: str, text: str) -> None:
        """Takes what an item has written, which may end anywhere.

        Args:
            stream: "stdout" or "stderr".
        """

    def end(self, index: int) -> str:
        """Handles that an item has ended, or its worker; returns its output, if that is kept."""
        return ""

    def end_all(self) -> None:
        """Handles the end of the call: nothing that was printed is lost."""


class PassedOnOutput(ItemOutput):
    """Shows output as it comes."""

    def take(self, index: int, stream: str, text: str) -> None:
        pass_on(stream, text)


class KeptOutput(ItemOutput):
    """Keeps the output of the items that run."""

    def __init__(self) -> None:
        self._pieces: collections.defaultdict[int, list[str]] = collections.defaultdict(list)
        self._sizes: collections.Counter[int] = collections.Counter()  # in characters

    def take(self, index: int, stream: str, text: str) -> None:
        self._pieces[index].append(text)
        self._sizes[index] += len(text)
        if self._sizes[index] > 2 * KEPT:  # to cut at each piece would copy what is kept
            self._pieces[index] = [kept := "".join(self._pieces[index])[-KEPT:]]
            self._sizes[index] = len(kept)

    def end(self, index: int) -> str:
        self._sizes.pop(index, None)
        return "".join(self._pieces.pop(index, ()))[-KEPT:]


class PrefixedOutput(ItemOutput):
    """Shows whole lines, each with its item in front.

    Args:
        name: returns what stands for an item, given its index.
    """

    def __init__(self, name: Callable[[int], object]) -> None:
        self._name = name
        # By an item's index and the stream.
        self._lines: dict[tuple[int, str], WholeLines] = collections.defaultdict(WholeLines)

    def take(self, index: int, stream: str, text: str) -> None:
        self._show(index, stream, self._lines[index, stream].take(text))

    def end(self, index: int) -> str:
        for stream in STREAMS:
            if (lines := self._lines.pop((index, stream), None)) is not None:
                self._show(index, stream, lines.rest())
        return ""

    def end_all(self) -> None:
        for index in sorted({index for index, _ in self._lines}):
            self.end(index)

    def _show(self, index: int, stream: str, lines: list[str]) -> None:
        if lines:
            name = self._name(index)
            text = "".join(f"[{name}] {line}".rstrip() + "\n" for line in lines)
            with screen.above():
                pass_on(stream, text)


def output_of(how: str, name: Callable[[int], object]) -> ItemOutput:
    """Returns what handles the output of a call's items.

    Args:
        how: one of `OUTPUT`.
        name: as in `PrefixedOutput`.
    """
    if how == "prefix":
        return PrefixedOutput(name)
    return KeptOutput() if how == "keep" else ItemOutput()


class WholeLines:
    """Makes whole lines of a text that comes in pieces.

    A carriage return begins a line anew, as on a terminal: of a progress bar, the last state stays.
    """

    def __init__(self) -> None:
        self._part = ""  # of the line that has not ended

    def take(self, text: str) -> list[str]:
        """Adds a piece; returns the lines that have ended."""
        *whole, part = (self._part + text).split("\n")
        lines = [_visible(line) for line in whole]
        # A return at the end stays: a newline may follow.
        part = _visible(part) + ("\r" if part.endswith("\r") else "")
        while len(part) > LONGEST:
            lines.append(part[:LONGEST])
            part = part[LONGEST:]
        self._part = part
        return lines

    def rest(self) -> list[str]:
        """Ends the text; returns the line that has not ended, if there is one."""
        part, self._part = _visible(self._part), ""
        return [part] if part else []


def _visible(line: str) -> str:
    """Returns what was written to a line last, after a carriage return."""
    return line.rstrip("\r").rpartition("\r")[-1]
