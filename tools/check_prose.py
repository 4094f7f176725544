#!/usr/bin/env python3
"""Checks the countable rules of nanotf's English, in every file that git tracks.

A docstring opens with a verb or a noun, not with a subordinate clause ("Whether ...", "How ...").
Phrases that readers stumble over appear nowhere: docstrings, comments, messages, docs, names of
tests. There is no list of exceptions. Prints one line for each finding; exits with 1 if there are
any.
"""

from __future__ import annotations

import ast
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

KINDS = {".py", ".md", ".cc", ".h", ".sh", ".toml", ".yaml", ".yml", ".ipynb", ""}
# fmt: off
OPENERS = {
    "although", "and", "as", "because", "but", "how", "like", "likewise", "same", "since", "so",
    "such", "those", "though", "what", "whatever", "when", "where", "whether", "which", "while",
    "who", "whom", "whose", "why",
}
# fmt: on
PHRASES = {
    r"\b(go|goes|going|went|gone)[ _]on\b": "continue, proceed, make progress",
    r"\b(stand|stands|stood|standing)[ _]in\b": "replace, be in, padding",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\b(in|out)side[ _]of\b": "inside, outside",
    r"\bPython's lock\b": "the GIL",
    r"\bfor ever\b": "forever",
    r"\bnow and then\b": "from time to time",
    r"\bsuch that\b": "so that",
    r"\bthe (former|latter)\b": "the noun itself",
    r"\b(there|where)(of|upon|by)\b": "a full sentence",
    r"\bunasked\b": "unrequested",
    r"\btowards\b": "toward",
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def findings(path: pathlib.Path) -> Iterator[str]:
    """Yields one line for each place in a file that breaks a rule."""
    text = path.read_text(encoding="utf-8")
    for pattern, better in PHRASES.items():
        for found in re.finditer(pattern, text, re.IGNORECASE):
            line = text.count("\n", 0, found.start()) + 1
            yield f"{path}:{line}: {found[0]!r}: write {better}"
    if path.suffix != ".py":
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)):
            first = re.match(r"\w*", docstring.lower())
            if first and first[0] in OPENERS:
                line = node.body[0].lineno
                opening = docstring.partition("\n")[0][:60]
                yield f"{path}:{line}: a docstring opens with a clause: {opening!r}"


def main() -> int:
    """Checks all files, or the files of the command line. Returns the exit code."""
    tracked = sys.argv[1:] or subprocess.check_output(["git", "ls-files"], text=True).splitlines()
    count = 0
    for name in tracked:
        path = pathlib.Path(name)
        if path.suffix in KINDS and path.is_file() and path.name != "LICENSE":
            for line in findings(path):
                print(line)
                count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
