"""The programs of the README and of docs/, and the notebooks, run as they stand."""

from __future__ import annotations

import inspect
import pathlib
import shlex

import pytest
import tensorflow as tf
from documents import (
    DOCS,
    NOTEBOOKS,
    README,
    commands,
    names_in_first_column,
    programs,
    python_blocks,
)
from processes import run_python, run_script

import nanotf

pytestmark = pytest.mark.own_pool

PROGRAMS = programs()
README_PROGRAMS = [code for _, code in python_blocks(README)]
SCRIPT = len(README_PROGRAMS) - 1  # `nanotf run` runs it: test_commands_of_the_readme
NOTEBOOK = """
import sys
import nbclient, nbformat

notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
"""


@pytest.mark.every_case
@pytest.mark.parametrize(
    "number", [*range(SCRIPT), pytest.param(SCRIPT, marks=pytest.mark.thorough)]
)
def test_programs_of_the_readme(number: int, tmp_path: pathlib.Path) -> None:
    run_script(tmp_path, README_PROGRAMS[number])


@pytest.mark.every_case
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=() if "auto" in command else pytest.mark.thorough)
        for command in commands(README, "nanotf run")
    ],
)
def test_commands_of_the_readme(command: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.py").write_text(README_PROGRAMS[SCRIPT])
    cache = str(tmp_path / "cache")
    output = run_python(tmp_path, "-m", *shlex.split(command), XDG_CACHE_HOME=cache)
    assert ('num_processes="auto"' in output) == ("auto" in command)
    assert "Epoch 5/5" in output


# Packages of programs of the pages that no extra of nanotf installs.
OF_USERS = ("mlflow", "wandb")


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_of_the_pages(name: str, tmp_path: pathlib.Path) -> None:
    """A program that is named as tests are is run by pytest."""
    for package in OF_USERS:
        if f"import {package}\n" in PROGRAMS[name]:
            pytest.importorskip(package)
    if name.startswith("test_"):
        (tmp_path / name).write_text(PROGRAMS[name])
        assert " passed" in run_python(tmp_path, "-m", "pytest", "-p", "no:cacheprovider", name)
    else:
        run_script(tmp_path, PROGRAMS[name])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("nbclient")
    folders = ("JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR")
    variables = {name: str(tmp_path / name.lower()) for name in folders}
    run_script(tmp_path, NOTEBOOK, str(path), **variables)


def test_every_argument_of_fit_is_listed() -> None:
    """The reference page lists these arguments and no others."""
    listed = names_in_first_column((DOCS / "reference/fit.md").read_text())
    methods = (tf.keras.Model.fit, nanotf.Model.fit)
    taken = {name for method in methods for name in inspect.signature(method).parameters}
    assert taken - {"self", "args", "kwargs"} <= listed
    of_keras_2 = {"workers", "max_queue_size", "use_multiprocessing"}
    assert listed - of_keras_2 <= taken
