"""Parsers whose errors are one line: rule, received arguments, remedy."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import NoReturn

from nanotf.cli.shell import printable


class ArgumentError(Exception):
    """A wrong command line. Its text is one line without the final period."""


class Parser(argparse.ArgumentParser):
    """A parser that raises instead of printing its usage: sourced scripts print one clear line."""

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(message)


def explain(error: ArgumentError, command: str, arguments: Sequence[str]) -> str:
    """Writes an error of the command line as rule, received arguments, remedy."""
    text = f"{error}"
    text = text[:1].upper() + text[1:]
    if "Received: " not in text:
        text += f". Received: {printable(shlex.join([*command.split(), *arguments]))}"
    return f"{text}. See `{command} --help`."


def whole_number(text: str) -> int:
    """Parses an option's number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number. Received: {text!r}") from None


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--json` to a command."""
    parser.add_argument(
        "--json", action="store_true", help="print the same as one JSON object, and nothing else"
    )
