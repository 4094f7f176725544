"""Wrong command lines: one line with what was meant."""

from __future__ import annotations

import pathlib

import pytest

from nanotf import cli

WRONG = {
    "doctr": "Did you mean `doctor`? See `nanotf --help`.",
    "doctor --tset": "Did you mean `--test`? See `nanotf doctor --help`.",
    "run --num-proceses=2 train.py": "Did you mean `--num-processes`? See `nanotf run --help`.",
    "jobs lists": "Did you mean `list`? See `nanotf jobs --help`.",
    "jobs logs mine --folow": "Did you mean `--follow`? See `nanotf jobs --help`.",
    "train.py": "To run a script, write `nanotf run` before it and its options.",
    "-n 2 train.py": "To run a script, write `nanotf run` before it and its options.",
    "frobnicate": "Received: nanotf frobnicate. See `nanotf --help`.",
}


@pytest.mark.parametrize("line", WRONG)
def test_what_was_meant(
    line: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert cli.main(line.split()) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("nanotf: ")
    assert shown.err.endswith(f"{WRONG[line]}\n")
    assert shown.err.count("\n") == 1


def test_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "doctor" in capsys.readouterr().out
