"""The lines that nanotf prints unasked: each begins with "nanotf: ".

So a reader tells them from the program's own and from TensorFlow's. There are two ways to print
one, `say` and `logger`. What a user has asked for (a report, a table, `--help`, the output of a
command) has no such prefix, and neither have exceptions.

Where the program has configured logging, its handlers and formats say who speaks. Where it has
not, Python prints the bare text of a warning (`logging.lastResort`); a filter on nanotf's own
logger then adds the prefix. No handler is ever installed.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

PREFIX = "nanotf: "

logger = logging.getLogger("nanotf")


def prefixed(text: str) -> str:
    """A text, which may have several lines, with the prefix before each of them."""
    return "\n".join(f"{PREFIX}{line}".rstrip() for line in text.split("\n"))


def say(text: object, file: TextIO | None = None) -> None:
    """Prints a text.

    Args:
        text: object, printed as its `str`.
        file: text file, default the current `sys.stdout`.
    """
    print(prefixed(str(text)), file=file or sys.stdout, flush=True)


def _prefix_bare_record(record: logging.LogRecord) -> bool:
    if not logger.hasHandlers():
        record.msg, record.args = prefixed(record.getMessage()), ()
    return True


logger.addFilter(_prefix_bare_record)
