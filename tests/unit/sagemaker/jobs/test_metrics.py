"""Metrics: definitions, the numbers in a line, the file."""

from __future__ import annotations

import json
import pathlib

import pytest

from nanotf.errors import InvalidArgumentError
from nanotf.sagemaker.jobs import metrics
from nanotf.sagemaker.jobs.metrics import Finder, Metric

ACCURACY = Metric("val:acc", r"val_accuracy: ([0-9.]+)")


def test_the_name_ends_at_the_first_equals_sign() -> None:
    assert metrics.parse_options(["val:acc=a=([0-9]+)"]) == [Metric("val:acc", "a=([0-9]+)")]


@pytest.mark.parametrize("option", ["name", "=x", "name="])
def test_wrong_options(option: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"NAME=REGEX.*Received: --metric"):
        metrics.parse_options([option])


@pytest.mark.parametrize(
    ("regex", "text"), [("(", "valid regular expression"), ("a: [0-9]", "must have a group")]
)
def test_expressions_that_find_no_number(regex: str, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        Metric("a", regex).check()


def test_the_first_match_of_each_metric_in_a_line() -> None:
    finder = Finder([ACCURACY, Metric("loss", r"loss: (\S+)"), Metric("may", r"x(\d)?")])
    line = "x loss: 1e-3 - val_accuracy: 0.5 val_accuracy: 0.7"
    assert list(finder.find(line)) == [("val:acc", 0.5), ("loss", 0.001)]
    assert list(finder.find("val_accuracy: 1.2.3")) == []


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("plain\n", "plain\n"),
        ("loss: 22.5\rloss: 1.38\n", "loss: 1.38"),
        ("loss: 22.5\b\b\b\b1.38\r\n", "loss: 1.38"),
        ("a long line\rshort", "shortg line"),
        ("a long line\r\x1b[Kshort", "short"),
        ("\x1b[1m 9/10\x1b[0m\b\b\b\b\b\b\b\b\b\r10/10", "10/10"),
        ("\x1b[32m━━\x1b[0m loss: 2", "━━ loss: 2"),
    ],
)
def test_a_line_is_read_as_a_terminal_shows_it(line: str, text: str) -> None:
    assert metrics.shown(line) == text


def test_keras_progress_bar() -> None:
    """It writes over itself; the number that stays is the epoch's."""
    line = "".join(
        f"\r\x1b[1m{step}/3\x1b[0m \x1b[37m━━━━\x1b[0m \x1b[1m0s\x1b[0m - loss: {loss}" + "\b" * 30
        for step, loss in ((1, 22.5), (2, 10.25), (3, "1.38 "))
    )
    assert list(Finder([Metric("loss", "loss: ([0-9.]+)")]).find(line)) == [("loss", 1.38)]


def test_a_line_that_is_not_whole_is_left_out(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert metrics.read(path) == []
    first, second = ({"name": "a", "value": value} for value in (1.0, 2.0))
    path.write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n" + '{"name": "a"')
    assert metrics.read(path) == [first, second]
    assert metrics.last_values(metrics.read(path)) == {"a": 2.0}
