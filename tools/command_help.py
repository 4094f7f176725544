"""MkDocs hook: shows what `nanotf COMMAND --help` prints, below that line of a console block.

So the options of the command line are in one place, the parsers in nanotf/cli.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from typing import Any
from unittest import mock

from nanotf.cli import main

WIDTH = 96  # of the text, in characters
_LINE = re.compile(r"^\$ nanotf (.*--help)$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Adds the text of each command to a page."""
    return _LINE.sub(lambda line: f"{line[0]}\n{_printed(line[1])}", markdown)


def _printed(arguments: str) -> str:
    # argparse leaves two columns of the terminal's width free.
    width = mock.patch.dict(os.environ, COLUMNS=str(WIDTH + 2))
    with contextlib.redirect_stdout(io.StringIO()) as text, width:
        try:
            main(arguments.split())
        except SystemExit:
            return text.getvalue().rstrip()
    raise ValueError(f"A page must name commands that exist. Received: nanotf {arguments}.")
