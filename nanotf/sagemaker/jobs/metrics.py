"""Metrics that regular expressions find in a job's log."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from nanotf.console import logger
from nanotf.errors import InvalidArgumentError
from nanotf.wire import files


@dataclass(frozen=True)
class Metric:
    """The definition of a metric."""

    name: str  # for instance "val:acc"
    regex: str  # with a group around the number; it is searched in every line

    def check(self) -> None:
        """Rejects an expression that finds no number. Raises `InvalidArgumentError`."""
        try:
            groups = re.compile(self.regex).groups
        except re.error as error:
            raise InvalidArgumentError(
                "A metric must have a valid regular expression. Received: "
                f"{self.name}={self.regex} ({error})."
            ) from None
        if groups == 0:
            raise InvalidArgumentError(
                "A metric's regular expression must have a group around the number, for instance "
                f"'accuracy: ([0-9.]+)'. Received: {self.name}={self.regex}."
            )


def parse_options(options: Iterable[str]) -> list[Metric]:
    """Reads the options `--metric NAME=REGEX`. The name ends at the first "=".

    Raises:
        InvalidArgumentError: A text has no name or no "=".
    """
    metrics = []
    for option in options:
        name, equals, regex = option.partition("=")
        if not name or not equals or not regex:
            raise InvalidArgumentError(
                "A metric must be written as NAME=REGEX, for instance "
                f"'val:acc=val_accuracy: ([0-9.]+)'. Received: --metric {option}."
            )
        metrics.append(Metric(name, regex))
    return metrics


# What moves the cursor of a terminal; other sequences, such as colors, show nothing.
_CONTROLS = re.compile(r"(\r|\x08+|\x1b\[[0-9;?]*[A-Za-z])")


def shown(line: str) -> str:
    """Returns what a terminal shows of a line in the end: later text covers earlier text."""
    if not _CONTROLS.search(line):
        return line
    found, column = "", 0
    for part in _CONTROLS.split(line.rstrip("\r\n")):
        if part == "\r":
            column = 0
        elif part.startswith("\x08"):
            column = max(column - len(part), 0)
        elif part == "\x1b[K":  # ECMA-48, EL: erases from the cursor to the end of the line
            found = found[:column]
        elif not part.startswith("\x1b"):
            found = found[:column].ljust(column) + part + found[column + len(part) :]
            column += len(part)
    return found


class Finder:
    """Finds metrics in lines."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._expressions = [(metric.name, re.compile(metric.regex)) for metric in metrics]

    def find(self, line: str) -> Iterator[tuple[str, float]]:
        """Yields the name and the value of each metric in a line; the first match of each.

        The line is read as a terminal shows it: Keras's progress bar writes over itself.
        """
        line = shown(line)
        for name, expression in self._expressions:
            found = expression.search(line)
            if found is None or found[1] is None:  # the group may be in a branch that did not match
                continue
            try:
                yield name, float(found[1])
            except ValueError:  # "1.2.3", or an expression that finds words
                continue


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the metrics that a job has found so far: name, value, time, host.

    The last line may be written at this moment; it is left out until it is whole. Damaged lines
    are left out as well.
    """
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text[: text.rfind("\n") + 1].split("\n")[:-1]
    found = [each for line in lines if (each := _metric_in(line, path)) is not None]
    if len(found) < len(lines):
        logger.warning("%d lines of %s are damaged.", len(lines) - len(found), path)
    return found


def _metric_in(line: str, path: pathlib.Path) -> dict[str, Any] | None:
    try:
        with files.doubting(path):
            found: dict[str, Any] = json.loads(line)
            float(found["value"])
            return found if isinstance(found["name"], str) else None
    except files.Damaged:
        return None


def last_values(found: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Returns the last value of each metric."""
    return {each["name"]: each["value"] for each in found}
