"""The terminal of a user of `nanotf.map`, and the output of items."""

from __future__ import annotations

import os
import pathlib
import re
import sys
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from processes import ROOT
from tiny_terminal import TinyScreen, run_in_terminal

import nanotf
from nanotf import errors

pytestmark = pytest.mark.own_pool


def speak(item: int) -> int:
    """Prints in every way, in pieces and at once."""
    for piece in ("be", "gun ", f"{item}"):
        print(piece, end="", flush=True)
    print("\n1%", end="\r")
    print("2%", end="\r", flush=True)
    print("100%")
    print("ä€😀", end="", flush=True)
    print()
    print("an error", file=sys.stderr)
    tf.print("tensor", item)
    sys.stdout.write("no newline")
    if item == 2:
        raise ValueError("two")
    return item


def test_output_of_items(capfd: pytest.CaptureFixture[str]) -> None:
    def call(output: str) -> Any:
        found = nanotf.map(speak, range(4), 2, on_error="return", verbose=0, output=output)
        assert [value for value in found if isinstance(value, int)] == [0, 1, 3]
        assert isinstance(found[2], ValueError) and isinstance(found[2], errors.WorkerError)
        return found[2], capfd.readouterr()

    error, said = call("prefix")
    assert error.printed == "" and "begun" not in str(error)
    lines, noise = said.out.splitlines(), said.err.splitlines()
    for item in range(4):
        own = [line for line in lines if line.startswith(f"[{item}] ")]
        texts = (f"begun {item}", "100%", "ä€😀", "no newline")
        assert own == [f"[{item}] {text}" for text in texts]
        assert f"[{item}] an error" in noise and f"[{item}] tensor {item}" in noise
    assert len(lines) == 16

    error, said = call("keep")
    assert said == ("", "")
    assert error.printed.startswith("begun 2\n1%\r2%\r100%\nä€😀\nan error\n")
    assert "tensor 2\n" in error.printed and error.printed.endswith("no newline")
    assert str(error).splitlines()[-1] == "no newline" and "tensor 2" in str(error)

    error, said = call("drop")
    assert said == ("", "") and error.printed == ""


def test_output_of_a_worker_that_dies() -> None:
    def die(item: int) -> None:
        print("last words", flush=True)
        os._exit(3)

    with pytest.raises(errors.WorkerDied) as caught:
        nanotf.map(die, [0], 1, verbose=0, output="keep")
    assert caught.value.printed == "last words\n" and "last words" in str(caught.value)


@pytest.mark.both_generations
def test_bars_of_keras(capfd: pytest.CaptureFixture[str]) -> None:
    x = np.ones((8, 2), "float32")

    def train(options: dict[str, Any]) -> None:
        model = tf.keras.Sequential([tf.keras.layers.Input((2,)), tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(x, x[:, :1], epochs=2, **options)
        model.evaluate(x, x[:, :1], **options)
        model.predict(x, **options)

    nanotf.map(train, [{}, {"verbose": "auto"}, {"verbose": 0}], 1, verbose=0)
    assert capfd.readouterr() == ("", "")
    nanotf.map(train, [{"verbose": 1}, {"verbose": 2}], 1, verbose=0)
    shown = capfd.readouterr().out.splitlines()
    for item in range(2):
        own = [line for line in shown if line.startswith(f"[{item}]")]
        assert f"[{item}] Epoch 2/2" in own and any("loss" in line for line in own)


def test_bars_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    assert nanotf.map(abs, [-1, 2], 2) == [1, 2]
    lines = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"nanotf: map 0/2, \d\.\d s", lines[0])
    assert re.fullmatch(r"nanotf: map 2/2 in .* s", lines[-1])
    nanotf.map(abs, [-1, 2], 2, verbose=2)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[1].startswith("nanotf: map 2/2: item ")
    nanotf.map(abs, [-1, 2], 2, verbose=0)
    list(nanotf.imap(abs, [-1, 2], 2))
    assert capfd.readouterr() == ("", "")


IN_A_TERMINAL = """
import sys, time

import nanotf

def train(item):
    for step in range(3):
        print("lap", step, end="", flush=True)
        time.sleep(0.1)
        print(" of", item)
    print("item", item, "has finished", file=sys.stderr)
    return item

with nanotf.imap(train, range(6), 2, verbose=1, ordered=True) as results:
    for result in results:
        sys.stdout.write(f"outcome {result}\\n")
print("the end")
"""
WORDS = re.compile("lap|finished|outcome")
PRINTED = re.compile(r"\[\d\] (lap \d of \d|item \d has finished)|outcome \d")
END = re.compile("map ━+ 6/6 in .* s")
ROW = re.compile("━|importing TensorFlow|starting 2 workers")


def test_a_terminal(tmp_path: pathlib.Path) -> None:
    """Nothing shares a line with the bar."""
    seen = set[str]()

    def check(lines: list[str]) -> None:
        for line in lines:
            assert not WORDS.search(line) or PRINTED.fullmatch(line), line
        is_row = [bool(ROW.search(line) and not END.fullmatch(line)) for line in lines]
        rows = [number for number, found in enumerate(is_row) if found]
        assert rows in ([], [len(lines) - 1], [len(lines) - 2, len(lines) - 1]), lines
        seen.update(lines[number] for number in rows)

    shown = TinyScreen(check)
    variables = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    written = run_in_terminal(IN_A_TERMINAL, tmp_path, TF_CPP_MIN_LOG_LEVEL="3", **variables)
    shown.feed(written)
    lines = shown.lines()
    for item in range(6):
        expected = [f"[{item}] lap {step} of {item}" for step in range(3)]
        assert [line for line in lines if line.startswith(f"[{item}] lap")] == expected
        assert f"[{item}] item {item} has finished" in lines and f"outcome {item}" in lines
    starting = [row for row in seen if "starting 2 workers, some seconds, once" in row]
    assert starting and all(row.startswith("nanotf: ") for row in starting)
    assert any(re.search(r" 0/6, \d", row) for row in seen)
    assert any("/6, 2 running, " in row and " left" in row for row in seen)
    assert sum(bool(END.fullmatch(line)) for line in lines) == 1 and lines[-1] == "the end"
    assert not any("starting 2" in line for line in lines)
    assert (tmp_path / "cache" / "nanotf" / "starts.json").exists()
