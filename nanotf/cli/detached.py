"""The actions that `nanotf jobs` and `nanotf endpoints` share."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from nanotf.cli.parsers import Parser
from nanotf.console import say
from nanotf.sagemaker.detached import folders
from nanotf.sagemaker.detached.folders import AnyFolder, Kind


def add_output(parser: argparse.ArgumentParser, kind: Kind) -> None:
    """Adds the option `--output` to a command."""
    parser.add_argument(
        "--output",
        metavar="DIR",
        help=f"the folder of {kind.default}; default ${kind.variable}, else {kind.default}",
    )


def add_actions(
    commands: Any, kind: Kind, about: str, description: str
) -> Callable[..., argparse.ArgumentParser]:
    """Adds the command for folders of a kind.

    Returns:
        A function that adds an action, and returns its parser. It takes the action's name, the
        function that runs it, its help, and `named=False` if it is about all folders.
    """
    command = commands.add_parser(
        kind.default, help=about, description=description, allow_abbrev=False
    )
    actions = command.add_subparsers(
        dest="action", metavar="ACTION", title="actions", required=True, parser_class=Parser
    )

    def add(name: str, run: Any, about: str, *, named: bool = True) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = actions.add_parser(
            name, help=about, description=f"{about[0].upper()}{about[1:]}.", allow_abbrev=False
        )
        if named:
            parser.add_argument("name", help=f"the {kind.noun}'s name")
        add_output(parser, kind)
        parser.set_defaults(run=run)
        return parser

    return add


def print_list(
    kind: type[AnyFolder],
    output: str | os.PathLike[str] | None,
    row: Callable[[AnyFolder], dict[str, Any]],
    words: Callable[[dict[str, Any]], str],
    *,
    is_json: bool,
) -> int:
    """Prints one line for each, oldest first. Returns the exit code.

    Args:
        kind: the class of the folders.
        output: the folder that holds them.
        row: returns what to print of one, with "name", "status" and "created".
        words: returns the end of its line.
        is_json: whether to print the rows as JSON instead.
    """
    rows: list[dict[str, Any]] = []
    for each in folders.find_all(kind, output):
        try:
            rows.append(row(each))
        except kind.kind.error as error:  # the others are none the worse
            say(f"warning: {error}", sys.stderr)
    # ISO 8601 in UTC: the texts sort as the times do.
    rows.sort(key=lambda row: str(row["created"]))
    if is_json:
        print(json.dumps(rows, indent=2))
        return 0
    if not rows:
        print(f"No {kind.kind.default} in {kind.kind.folder(output)}.")
    width = max((len(str(row["name"])) for row in rows), default=0)
    for found in rows:
        created = str(found["created"]).partition(".")[0]  # without milliseconds and +00:00
        line = f"{found['name']:<{width}}  {found['status']:<10}  {created}  {words(found)}"
        print(line.rstrip())
    return 0
