"""The README and the pages in docs/, as the tests read them."""

from __future__ import annotations

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))

_PYTHON = re.compile(r'^```python(?: title="([\w.]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def python_blocks(page: pathlib.Path) -> list[tuple[str, str]]:
    """Returns the title, empty for a fragment, and the code of each Python block of a page."""
    return _PYTHON.findall(page.read_text())


def programs() -> dict[str, str]:
    """Returns the complete programs of docs/, which have a file name as title, by that name."""
    found = [block for page in PAGES for block in python_blocks(page) if block[0]]
    assert len({name for name, _ in found}) == len(found), "two programs have the same name"
    return dict(found)


def commands(page: pathlib.Path, start: str) -> list[str]:
    """Returns the lines of a page's console blocks that begin with `$ START`, without the `$`."""
    lines = [line for block in _CONSOLE.findall(page.read_text()) for line in block.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith(f"$ {start}")]


def names_in_first_column(text: str) -> set[str]:
    """Returns the names in backquotes in the first cells of all tables of a text."""
    cells = re.findall(r"^\| (.*?) \|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
