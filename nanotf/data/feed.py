"""The command `python -m nanotf.data.feed`: feeds a channel's pipes until SIGTERM.

A thin parser over `sagemaker.pipes.channel_feeder`. Imports no TensorFlow. Exit codes: 0 all epochs
were read, or SIGTERM; 1 a file cannot be read; 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanotf.console import say
from nanotf.errors import InvalidArgumentError, NanoError
from nanotf.sagemaker.pipes.channel_feeder import COMPRESSIONS, RECORD_WRAPPINGS, Feed, feed


class _Stopped(BaseException):
    """SIGTERM or SIGINT has come."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: None for those of the process.

    Returns:
        The exit code.
    """
    given = _parser().parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    try:
        feed(Feed(**vars(given)))
    except _Stopped:
        return 0
    except (NanoError, OSError) as error:
        say(error, sys.stderr)
        return 2 if isinstance(error, InvalidArgumentError) else 1
    return 0


def _stop(number: int, frame: Any) -> None:
    """Ends the wait for a reader, too, in which no Python code runs."""
    signal.signal(number, signal.SIG_IGN)  # a second one would interrupt the cleaning up
    raise _Stopped


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nanotf.data.feed",
        description="Writes a channel's files to FIFOs, <pipe-dir>/<channel>_<n> for epoch n.",
    )
    add = parser.add_argument
    add("--source", type=Path, required=True, help="a file, or a folder with files at any depth")
    add("--pipe-dir", type=Path, required=True, help="the folder of the FIFOs")
    add("--channel", required=True, help="the channel's name")
    add("--shuffle", type=int, metavar="SEED", help="another order of the files in each epoch")
    add("--compression", choices=COMPRESSIONS, default="None", help="Gzip: unzip the files")
    add(
        "--record-wrapping",
        choices=RECORD_WRAPPINGS,
        default="None",
        help="RecordIO: make a record of each file",
    )
    add("--epochs", type=int, metavar="N", help="end after so many epochs (default: never)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
