"""Programs on top of libraries: each prints the same numbers alone and under `nanotf run -n 2`.

`make test-libraries` installs the libraries and runs them. The page docs/reference/libraries.md
names each. `pytest -s` prints a row for each: the difference, what was divided, and the seconds.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any, NamedTuple

import pytest

HERE = pathlib.Path(__file__).parent
REPOSITORY = HERE.parent.parent


class Program(NamedTuple):
    """A program.

    Args:
        package: str, the library's package.
        bound: float, of the relative difference; of float32 unless the program computes in float64.
        divides: bool, whether something in its last call of nanotf's methods is divided; None if
            it calls none in its own process.
        is_legacy: bool, whether its library needs Keras 2.
    """

    package: str
    bound: float = 1e-5
    divides: bool | None = True
    is_legacy: bool = True


PROGRAMS = {
    "autokeras_regression": Program("autokeras", is_legacy=False),
    "bayesflow_posterior": Program("bayesflow", is_legacy=False),
    "deepctr_click": Program("deepctr"),
    "deepxde_equation": Program("deepxde", divides=None),
    "keras_hub_causal_lm": Program("keras_hub", is_legacy=False),
    "keras_hub_classifier": Program("keras_hub", is_legacy=False),
    "keras_rs_ranking": Program("keras_rs", 1e-9, is_legacy=False),
    "keras_tcn_sequence": Program("tcn", 1e-9, is_legacy=False),
    "keras_tuner_search": Program("keras_tuner", 1e-9, is_legacy=False),
    "larq_binary": Program("larq"),
    "scikeras_jobs": Program("scikeras", divides=None, is_legacy=False),
    "scikeras_search": Program("scikeras", is_legacy=False),
    "spektral_graphs": Program("spektral"),
    "structured_learning_adversary": Program("neural_structured_learning"),
    "tensorflow_ranking_lists": Program("tensorflow_ranking"),
    "tf_agents_dqn": Program("tf_agents", divides=None),
    "tfmot_models": Program("tensorflow_model_optimization"),
    "tfp_flow": Program("tensorflow_probability"),
    "tfp_inference": Program("tensorflow_probability", divides=None),
    "tfp_layers": Program("tensorflow_probability"),
    "tfrs_models": Program("tensorflow_recommenders"),
    "transformers_bert": Program("transformers"),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.timeout(600)
def test_library(name: str, tmp_path: pathlib.Path) -> None:
    program = PROGRAMS[name]
    if not _is_installed(program.package):
        pytest.skip(f"{program.package} is not installed: run `make test-libraries`")
    path = str(HERE / "programs" / f"{name}.py")
    (expected,), alone = _run(program, [path], tmp_path, 1)
    (found, told), divided = _run(program, [str(HERE / "report.py"), path], tmp_path, 2)
    difference = _difference(expected, found)
    parts = [f"{part}: {why}" if why else part for part, _, why in told["parts"]]
    print(f"\n{name}: {difference:.1e}, {alone:.0f} s, {divided:.0f} s, {'; '.join(parts)}")
    assert difference <= program.bound
    assert told["has_workers"] == (program.divides is not None)
    if program.divides is not None:
        assert any(is_divided for _, is_divided, _ in told["parts"]) == program.divides


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _run(
    program: Program, arguments: list[str], folder: pathlib.Path, lines: int
) -> tuple[list[Any], float]:
    """Returns what a program prints in its last lines, from JSON, and its seconds."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        # TensorFlow 2.15 has Keras 2 without tf_keras.
        "TF_USE_LEGACY_KERAS": str(int(program.is_legacy and _is_installed("tf_keras"))),
    }
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=folder
    )
    assert done.returncode == 0, done.stderr[-5000:]
    printed = done.stdout.strip().splitlines()[-lines:]
    return list(map(json.loads, printed)), time.monotonic() - begin


def _difference(one: Any, other: Any) -> float:
    """Returns the largest relative difference of the numbers in two structures."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        one, other = list(one.values()), list(other.values())
    if isinstance(one, list):
        assert len(one) == len(other)
        return max(map(_difference, one, other), default=0.0)
    if isinstance(one, str):
        assert one == other
        return 0.0
    return abs(one - other) / max(abs(one), 1e-3)
