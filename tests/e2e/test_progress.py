"""The terminal shows Keras's own progress bar, once, and no output of workers."""

from __future__ import annotations

import os
import pathlib
import re
import sys
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import nanotf
from nanotf.keras import Sequential
from nanotf.pool import forks

L = tf.keras.layers


def make() -> Any:
    tf.keras.utils.set_random_seed(3)
    model = Sequential([L.Input((4,)), L.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def data(rows: int = 100) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(rows, 4)).astype(tf.keras.backend.floatx())
    return x, x.sum(axis=1, keepdims=True)


def lines(text: str) -> list[str]:
    """Returns the lines that remain on the screen, without colors and times.

    A line drawn over itself counts once, in its last form.
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", text).replace("\x08", "\r")
    text = re.sub(r"\d+(ms|us|s)(/(step|epoch))?|\d+:\d\d", "TIME", text)
    found: list[str] = []
    for line in re.split(r"[\r\n]+", text):
        line = re.sub(r"\s+", " ", line).strip()
        if not line:
            continue
        is_bar = re.match(r"\S+/\S+ ", line)
        if found and is_bar and re.match(r"\S+/\S+ ", found[-1]):
            found.pop()
        found.append(line)
    return found


def shown_by_both(
    capfd: pytest.CaptureFixture[str], x: Any, y: Any = None, **arguments: Any
) -> tuple[list[str], list[str]]:
    """Returns the output of plain `fit` and of `fit` with two processes."""
    printed = []
    for processes in (None, 2):
        model = make()
        capfd.readouterr()
        model.fit(x, y, shuffle=False, **arguments, num_processes=processes)
        printed.append(lines(capfd.readouterr().out))
    return printed[0], printed[1]


@pytest.mark.every_case  # 0 alone shows nothing
@pytest.mark.parametrize("verbose", [0, 1, 2, "auto"])
@pytest.mark.both_generations
def test_the_bar_is_keras_own(
    float64: None, capfd: pytest.CaptureFixture[str], verbose: Any
) -> None:
    x, y = data()
    theirs, ours = shown_by_both(
        capfd, x, y, batch_size=20, epochs=2, verbose=verbose, validation_split=0.2
    )
    assert ours == theirs
    assert [line for line in ours if line.startswith("Epoch")] == (
        [] if verbose == 0 else ["Epoch 1/2", "Epoch 2/2"]
    )
    if verbose != 0:
        assert len(ours) == 4
        assert ours[-1].startswith("4/4")
        assert "val_mae" in ours[-1]


@pytest.mark.parametrize("verbose", [1, 2])
@pytest.mark.thorough
def test_the_bar_learns_the_number_of_steps(
    float64: None, capfd: pytest.CaptureFixture[str], verbose: int
) -> None:
    """The dataset does not know its length: Keras counts batches in the first epoch."""
    dataset = tf.data.Dataset.from_tensor_slices(data()).batch(15).filter(lambda *_: True)
    theirs, ours = shown_by_both(capfd, dataset, epochs=3, verbose=verbose)
    assert ours == theirs
    assert [line.split()[0] for line in ours if "mae" in line] == ["7/7"] * 3


def test_one_epoch_prints_one_line(float64: None, capfd: pytest.CaptureFixture[str]) -> None:
    x, y = data()
    theirs, ours = shown_by_both(capfd, x, y, batch_size=20, steps_per_epoch=3, verbose=1)
    assert ours == theirs
    assert len(ours) == 1


def test_noise_of_workers_stays_in_their_logs(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Loud(tf.keras.layers.Dense):
        def call(self, inputs: Any) -> Any:
            print("traced in", os.environ.get("NANOTF_RANK"))
            return super().call(inputs)

    x, y = data()
    make().fit(x, y, verbose=0)  # TensorFlow writes its messages of this process now
    nanotf.shutdown()
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    capfd.readouterr()
    model = Sequential([L.Input((4,)), Loud(1)])
    model.compile("sgd", "mse")
    capfd.readouterr()
    model.fit(x, y, verbose=0, num_processes=2)
    shown = capfd.readouterr()
    assert "traced in 0" in shown.out  # as in one process, which prints "None" again
    assert "traced in 1" not in shown.out
    assert not re.search(r"oneDNN|cpu_feature_guard|cuda", shown.out + shown.err)
    logs = [pathlib.Path(f"/proc/{pid}/fd/2").read_text() for pid in nanotf.worker_pids()]
    if forks._zygote is not None:  # workers of a TensorFlow that cannot be forked have none
        assert re.search(r"oneDNN|cpu_feature_guard|cuda", forks._zygote.log.since(0))
    assert "traced in 1" in logs[1]
    nanotf.shutdown()  # the next test must not get workers with this environment


class Prints(L.Layer):
    """Prints in its call, by TensorFlow and, in eager steps, by Python."""

    def call(self, inputs: Any) -> Any:
        tf.print("a TensorFlow print")
        tf.print("to stdout", output_stream=sys.stdout)
        if tf.executing_eagerly():
            print("a Python print of", len(inputs), "rows")
        return inputs


@pytest.mark.parametrize("eager", [False, True])
def test_prints_of_the_model_are_rank_0s(capsys: pytest.CaptureFixture[str], eager: bool) -> None:
    x, y = data(20)
    model = Sequential([L.Input((4,)), Prints(), L.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=eager)
    for method, arguments in (("fit", {"y": y}), ("evaluate", {"y": y}), ("predict", {})):
        capsys.readouterr()
        getattr(model, method)(x, **arguments, batch_size=10, verbose=0, num_processes=2)
        out, err = capsys.readouterr()
        found = (out + err).splitlines()
        assert found.count("a TensorFlow print") == 2
        assert found.count("to stdout") == 2
        assert found.count("a Python print of 5 rows") == (2 if eager else 0)
        # Rank 0's standard error, full of start-up messages, is not relayed.
        assert len(found) == (6 if eager else 4)


class Summarizes(L.Layer):
    """Writes a summary in its call."""

    def call(self, inputs: Any) -> Any:
        tf.summary.write("mean_of_a_call", tf.reduce_mean(inputs), step=0)
        return inputs


def test_summaries_of_a_call_are_written(tmp_path: pathlib.Path) -> None:
    x, y = data(20)
    written = []
    for processes in (None, 2):
        model = Sequential([L.Input((4,)), Summarizes(), L.Dense(1)])
        model.compile("sgd", "mse")
        folder = tmp_path / str(processes)
        with tf.summary.create_file_writer(str(folder)).as_default():
            model.fit(x, y, verbose=0, num_processes=processes)
        found = b"".join(path.read_bytes() for path in folder.iterdir())
        written.append(b"mean_of_a_call" in found)
    assert written == [True, True]
