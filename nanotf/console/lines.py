"""Prints unrequested lines, each of which begins with "nanotf: ".

The prefix tells them from the program's own lines and from TensorFlow's. There are two ways to
print one, `say` and `logger`. Requested output (a report, a table, `--help`, the output of a
command) has no prefix, and neither have exceptions.

If the program has configured logging, its handlers and formats name the logger. If it has not,
Python prints the bare text of a warning (`logging.lastResort`), and a filter on nanotf's own
logger adds the prefix. No handler is ever installed.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any, TextIO

PREFIX = "nanotf: "
STREAMS = ("stdout", "stderr")

logger = logging.getLogger("nanotf")
# The loggers of Keras 2 and of TensorFlow, by name; nanotf passes on what they say in workers.
LIBRARIES = {name: logging.getLogger(name) for name in ("absl", "tensorflow")}


def prefixed(text: str) -> str:
    """Puts the prefix before each line of a text."""
    return "\n".join(f"{PREFIX}{line}".rstrip() for line in text.split("\n"))


def say(text: object, file: TextIO | None = None) -> None:
    """Prints a text.

    Args:
        text: printed as its `str`; each line gets the prefix.
        file: None for the current `sys.stdout`.
    """
    print(prefixed(str(text)), file=file or sys.stdout, flush=True)


def pass_on(name: str, text: str) -> None:
    """Prints what a worker has printed.

    Args:
        name: of the stream, one of `STREAMS`.
    """
    stream = getattr(sys, name)
    if stream is None:  # as in a daemon, where `print` does nothing
        return
    try:
        stream.write(text)
    except UnicodeEncodeError:  # a worker's streams take any text
        encoding = stream.encoding
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


_warned: set[str] = set()


def warn_once(text: str, *arguments: object) -> None:
    """Logs a warning, the first time in this process.

    Args:
        text: a format; it tells warnings apart.
        *arguments: of the format.
    """
    if text not in _warned:
        _warned.add(text)
        logger.warning(text, *arguments)


class Quiet:
    """A stream that drops what the thread that created it writes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        """Writes what other threads print."""
        ours = threading.get_ident() == self._thread
        return len(text) if ours else int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _prefix_bare_record(record: logging.LogRecord) -> bool:
    # Looked up for each record: the program may configure logging after importing nanotf.
    if not logger.hasHandlers():
        record.msg, record.args = prefixed(record.getMessage()), ()
    return True


logger.addFilter(_prefix_bare_record)
