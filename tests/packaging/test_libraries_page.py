"""The page "Works with" names each program in tests/libraries, and no other."""

from __future__ import annotations

import pathlib
import re

REPOSITORY = pathlib.Path(__file__).parent.parent.parent
LIBRARIES = REPOSITORY / "tests" / "libraries"


def test_each_program_is_run_and_named() -> None:
    programs = {path.stem for path in (LIBRARIES / "programs").glob("*.py")}
    page = (REPOSITORY / "docs" / "reference" / "libraries.md").read_text()
    assert sorted(re.findall(r"\(`(\w+)`\)", page)) == sorted(programs)
    run = re.findall(r'^    "(\w+)": Program', (LIBRARIES / "test_libraries.py").read_text(), re.M)
    assert sorted(run) == sorted(programs)
