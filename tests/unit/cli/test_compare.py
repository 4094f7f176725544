"""`nanotf compare`: where two records part, and arguments that it cannot take."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from nanotf.cli import main
from nanotf.cli.compare import first_part
from nanotf.region import recording


def _lines(*losses: float) -> list[dict]:
    return [
        {
            "where": f"step {n}",
            "values": {"loss": recording.summary(loss), "w": [2.0, 1.0, 1.5, 0.5]},
        }
        for n, loss in enumerate(losses, 1)
    ]


def test_equal_records() -> None:
    part, largest = first_part(_lines(1.0, 2.0), _lines(1.0, 2.0 + 1e-12), 1e-9)
    assert part is None
    assert 0 < largest < 1e-9


def test_the_first_difference_is_named() -> None:
    part, _ = first_part(_lines(1.0, 2.0, 3.0), _lines(1.0, 2.1, 9.0), 1e-9)
    assert part is not None
    assert (part.where, part.what) == ("step 2", "loss")
    assert part.gap == pytest.approx(0.1 / 2.1)


@pytest.mark.parametrize("missing", ["first", "second"])
def test_one_run_is_longer(missing: str) -> None:
    runs = [_lines(1.0, 2.0), _lines(1.0)]
    part, _ = first_part(*(runs if missing == "second" else runs[::-1]), 1e-9)
    assert part is not None
    assert part.where == "step 2"


def test_other_names() -> None:
    other = [{**line, "where": "elsewhere"} for line in _lines(1.0)]
    part, _ = first_part(_lines(1.0), other, 1e-9)
    assert part is not None
    assert "elsewhere" in part.what


@pytest.mark.parametrize("value", [None, "text", object(), [[1], [1, 2]], {"a": 1}])
def test_no_numbers(value: object) -> None:
    assert recording.summary(value) == []


def test_summaries_see_order_sign_and_missing_numbers() -> None:
    of = recording.summary
    assert recording.gap(of([1.0, 2.0]), of([1.0, 2.0])) == 0
    assert recording.gap(of([1.0, 2.0]), of([2.0, 1.0])) > 0.1
    assert recording.gap(of([1.0, -1.0]), of([-1.0, 1.0])) > 0.1
    assert recording.gap(of([np.nan]), of([np.nan])) == 0
    assert recording.gap(of([np.nan]), of([1.0])) == np.inf


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-n", "1", "script.py"], "two workers"),
        (["--steps", "0", "script.py"], "one step"),
        (["no-such-script.py"], "must be a Python file"),
    ],
)
def test_bad_arguments(
    arguments: list[str],
    text: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("")
    assert main(["compare", *arguments]) == 2
    assert text in capsys.readouterr().err
