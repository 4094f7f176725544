"""Unrequested lines of nanotf, in programs with and without logging configured."""

from __future__ import annotations

import subprocess
import sys

import pytest

WARN = """
import logging, sys
{before}
from nanotf.console import logger, say
assert logging.root.handlers == {handlers} and logger.handlers == []
logger.info("not to be seen")
logger.warning("%d %% of\\nit", 5)
say("two\\n\\n  lines", sys.stderr)
"""
SAID = ["nanotf: two", "nanotf:", "nanotf:   lines"]
OWN_FORMAT = "logging.basicConfig(format='%(levelname)s %(filename)s %(name)s|%(message)s')"
PROGRAMS = {
    "bare": ("", "[]", ["nanotf: 5 % of", "nanotf: it"]),
    "configured": (OWN_FORMAT, "logging.root.handlers", ["WARNING <string> nanotf|5 % of", "it"]),
    "not_propagated": ("logging.getLogger('nanotf').propagate = False", "[]", None),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_line_has_the_prefix(name: str) -> None:
    before, handlers, expected = PROGRAMS[name]
    code = WARN.format(before=before, handlers=handlers)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert done.stderr.splitlines() == [*(expected or PROGRAMS["bare"][2]), *SAID]
