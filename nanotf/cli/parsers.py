"""Parsers whose errors are one line: rule, received arguments, remedy."""

from __future__ import annotations

import argparse
import pathlib
import shlex
from collections.abc import Iterator, Sequence
from typing import NoReturn

from nanotf.cli.shell import printable
from nanotf.errors import meant
from nanotf.machine import topology


class ArgumentError(Exception):
    """A wrong command line. Its text is one line without the final period."""


class Parser(argparse.ArgumentParser):
    """A parser that raises instead of printing its usage: sourced scripts print one clear line."""

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(message)

    def words(self) -> Iterator[str]:
        """Yields the options and commands that this parser and those of its commands know."""
        for action in self._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):  # argparse has no public way to them
                yield from action.choices
                for parser in action.choices.values():
                    yield from parser.words()


def explain(error: ArgumentError, command: str, arguments: Sequence[str], parser: Parser) -> str:
    """Writes an error of the command line as rule, received arguments, remedy.

    Args:
        command: the words before the arguments.
        parser: that of the command.
    """
    text = f"{error}"
    text = text[:1].upper() + text[1:]  # argparse's messages begin in lower case
    if "Received: " not in text:
        text += f". Received: {printable(shlex.join([*command.split(), *arguments]))}"
    known = set(parser.words())
    given = (argument.partition("=")[0] for argument in arguments)
    # A script's path may resemble an option or a command, but is no typo of one.
    wrong = (word for word in given if word not in known and not pathlib.Path(word).is_file())
    rights = (meant(word, known) for word in wrong)
    right = next(filter(None, rights), None)
    hint = f" Did you mean `{right}`?" if right else ""
    return f"{text}.{hint} See `{command} --help`."


def whole_number(text: str) -> int:
    """Parses an option's number."""
    try:
        return int(text)
    except ValueError:  # argparse's own message would name this function
        raise argparse.ArgumentTypeError(f"must be a whole number. Received: {text!r}") from None


def number_or_auto(text: str) -> int | str:
    """Parses an option's number of processes."""
    if text == topology.AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a whole number, or {topology.AUTO!r}. Received: {text!r}"
        ) from None


def add_script(parser: argparse.ArgumentParser) -> None:
    """Adds the script of a command, or with `-m` the module, and its own arguments."""
    parser.add_argument(
        "-m",
        dest="is_module",
        action="store_true",
        help="the next argument names a module or package, as in `python -m`",
    )
    parser.add_argument("script", help="the Python file, or with -m the module")
    # Options behind the script are the script's, even those that nanotf has, too.
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="the script's own arguments (sys.argv)"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--json` to a command."""
    parser.add_argument(
        "--json", action="store_true", help="print the same as JSON, and nothing else"
    )
