"""The examples run unchanged, on data that need no network."""

from __future__ import annotations

import os
import pathlib
import re
import sys
import tarfile

import numpy as np
import pytest
from processes import ROOT, run_python
from sklearn.datasets import load_digits

pytestmark = pytest.mark.own_pool

EXAMPLES = ROOT / "examples"
SCRIPTS = ("custom_loop", "custom_loop_strategy", "fashion_mnist")
UNCHANGED = "unchanged"  # knows nothing of nanotf, so `nanotf run` runs it
JOB = "script_mode"  # `nanotf train` runs it
DEMO = "digits"  # `make demo`
MICROBATCHES = "model_parallel"  # in one process
PARTITIONS = "partitions"  # `nanotf run --smp` runs it
SEARCH = "search"  # needs Optuna
FOLDS = "k_fold"  # items of `nanotf.map`
OPTIMIZE = "optimize_model"  # `nanotf.inference`
SERVED = "serve_model"  # starts `nanotf serve`
REPLICAS = "ray_serve"  # test_ray.py runs it
IMPORTED = "images"  # by the others
RANKS = "horovod_digits"  # `nanotf run --ranks` runs it
TRANSFORMERS = "transformers_tiny"  # Keras 2, and a library that need not be here


def _run(directory: pathlib.Path, *command: str | pathlib.Path) -> str:
    output = run_python(directory, *command)
    assert list(directory.iterdir()) == []
    return output


def _accuracy(output: str) -> float:
    last = output.splitlines()[-1]
    found = re.search(r": ([01]\.\d+)$", last)
    assert found is not None, last
    return float(found[1])


@pytest.mark.parametrize("name", SCRIPTS)
def test_example(name: str, tmp_path: pathlib.Path) -> None:
    output = _run(tmp_path, EXAMPLES / f"{name}.py", "digits")
    assert _accuracy(output) > 0.7


@pytest.mark.thorough
def test_ranks(tmp_path: pathlib.Path) -> None:
    path = EXAMPLES / f"{RANKS}.py"
    output = _run(tmp_path, "-m", "nanotf", "run", "--ranks", "-n", "2", path)
    found = re.fullmatch(r"2 ranks: accuracy ([01]\.\d+)", output.splitlines()[-1])
    assert found is not None and float(found[1]) > 0.7, output


@pytest.mark.thorough
def test_unchanged_script(tmp_path: pathlib.Path) -> None:
    """Trains with workers, although it names neither nanotf nor a number of processes."""
    path = EXAMPLES / f"{UNCHANGED}.py"
    assert not re.search(r"import nanotf|from nanotf|num_processes", path.read_text())
    output = _run(tmp_path, "-m", "nanotf", "run", "-n", "2", path, "digits")
    assert _accuracy(output) > 0.7


@pytest.mark.thorough
def test_demo(tmp_path: pathlib.Path) -> None:
    """It ends with an error if the workers' model is wrong for more than 5 % of the digits."""
    output = _run(tmp_path, EXAMPLES / f"{DEMO}.py")
    assert re.search(r"2 worker processes +[\d.]+ s +9\d\.\d+%", output)


@pytest.mark.thorough
def test_microbatches(tmp_path: pathlib.Path) -> None:
    output = _run(tmp_path, EXAMPLES / f"{MICROBATCHES}.py")
    accuracy = re.search(r"accuracy ([01]\.\d+)$", output.strip())
    assert accuracy is not None, output
    assert float(accuracy[1]) > 0.9


@pytest.mark.thorough
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
def test_partitions(tmp_path: pathlib.Path) -> None:
    command = ("-m", "nanotf", "run", "--smp", "-n", "2", EXAMPLES / f"{PARTITIONS}.py")
    output = run_python(tmp_path, *command, "--units", "128", "--picture", tmp_path / "steps.png")
    assert 'in 2 partitions, 4 microbatches, "interleaved"' in output
    assert _accuracy(output) > 0.8
    assert [path.name for path in tmp_path.iterdir()] == ["steps.png"]


@pytest.mark.thorough
def test_search(tmp_path: pathlib.Path) -> None:
    options = ("--trials", "3", "--epochs", "6", "--parallel", "2")
    output = run_python(tmp_path, EXAMPLES / f"{SEARCH}.py", *options)
    assert _accuracy(output) > 0.8
    assert [path.name for path in tmp_path.iterdir()] == ["search.png"]


@pytest.mark.thorough
def test_folds(tmp_path: pathlib.Path) -> None:
    assert _accuracy(_run(tmp_path, EXAMPLES / f"{FOLDS}.py", "--folds", "3")) > 0.9


@pytest.mark.thorough
def test_optimize_model(tmp_path: pathlib.Path) -> None:
    options = ("--engines", "tensorflow,frozen", "--epochs", "8")
    output = _run(tmp_path, EXAMPLES / f"{OPTIMIZE}.py", *options)
    accuracy = re.search(r"accuracy ([01]\.\d+) with the engine (tensorflow|frozen)", output)
    assert accuracy is not None, output
    assert float(accuracy[1]) > 0.8


@pytest.mark.thorough
def test_serve_model(tmp_path: pathlib.Path) -> None:
    for package in ("httptools", "orjson", "uvloop"):
        pytest.importorskip(package)
    output = _run(tmp_path, EXAMPLES / f"{SERVED}.py", "--workers", "1")
    assert _accuracy(output) > 0.8
    difference = re.search(r"difference from predict: (\S+)$", output, re.MULTILINE)
    assert difference is not None, output
    assert float(difference[1]) <= 1e-5


@pytest.mark.thorough
def test_script_mode(tmp_path: pathlib.Path) -> None:
    """A job with workers, data of a channel and a hyperparameter."""
    path = EXAMPLES / f"{JOB}.py"
    assert not re.search(r"import nanotf|from nanotf|num_processes", path.read_text())
    x, y = load_digits(return_X_y=True)
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data/digits.npz", x=x, y=y)
    options = ("--channel", f"train={tmp_path / 'data'}", "-p", "epochs=8", "--name", "a")
    output = run_python(tmp_path, "-m", "nanotf", "train", path, "-n", "2", *options)
    assert "Epoch 8/8" in output
    assert _accuracy(output) > 0.7
    with tarfile.open(tmp_path / "jobs/a/model.tar.gz") as tar:
        assert tar.getnames() == ["model.keras"]


@pytest.mark.thorough
def test_transformers(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("tf_keras")
    folders = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    command = ("-m", "nanotf", "run", "-n", "2", EXAMPLES / f"{TRANSFORMERS}.py")
    assert _accuracy(run_python(tmp_path, *command, HF_HUB_OFFLINE="1", **folders)) > 0.8


def test_every_example_is_run() -> None:
    found = {path.stem for path in EXAMPLES.glob("*.py")}
    other = {UNCHANGED, JOB, DEMO, MICROBATCHES, PARTITIONS, FOLDS, OPTIMIZE}
    other |= {SEARCH, IMPORTED, SERVED, REPLICAS, TRANSFORMERS, RANKS}
    assert found == {*SCRIPTS, *other}
