"""Tests that workers stand where the user's process stands at the call."""

from __future__ import annotations

import importlib
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import nanotf
from nanotf.compat import keras_runs, process_state
from nanotf.compat.process_state import ROWS, ProcessState
from nanotf.keras import nano
from nanotf.pool import warm

pytestmark = pytest.mark.own_pool

NAME = "NANOTF_TEST_STATE"
POLICIES = tf.keras.mixed_precision


def _limit() -> None:
    keras_runs.set_run_limits(3, keras_runs.run_limits()[1])


# One change of each part of the state, by the name of its row.
CHANGES: dict[str, Callable[[pathlib.Path], Any]] = {
    "environ": lambda folder: os.environ.update({NAME: "1"}),
    "folder": os.chdir,
    "umask": lambda folder: os.umask(0o027),
    "sys.path": lambda folder: sys.path.insert(0, str(folder)),
    "sys.argv": lambda folder: sys.argv.append("--more"),
    "recursion limit": lambda folder: sys.setrecursionlimit(sys.getrecursionlimit() + 7),
    "NumPy's errors": lambda folder: np.seterr(under="raise"),
    "NumPy's print options": lambda folder: np.set_printoptions(precision=3),
    "floatx": lambda folder: tf.keras.backend.set_floatx("float16"),
    "epsilon": lambda folder: tf.keras.backend.set_epsilon(0.125),
    "image data format": lambda f: tf.keras.backend.set_image_data_format("channels_first"),
    "dtype policy": lambda folder: POLICIES.set_global_policy("mixed_bfloat16"),
    "limits of a run": lambda folder: _limit(),
    "deterministic operations": lambda f: tf.config.experimental.enable_op_determinism(),
    "graph options": lambda f: tf.config.optimizer.set_experimental_options({"remapping": False}),
    "checks of numbers": lambda folder: tf.debugging.enable_check_numerics(),
    "eager functions": lambda folder: tf.config.run_functions_eagerly(True),
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before, modules = ProcessState.capture(), set(sys.modules)
    yield
    before.restore()
    for name in set(sys.modules) - modules:
        if name.startswith("state_helper"):
            del sys.modules[name]


def _read(item: int) -> dict[str, Any]:
    found = {row.name: row.read() for row in process_state.ROWS}
    return {**found, "environ": found["environ"].get(NAME)}


read_in_loop = nano(num_processes=2)(_read)


def _here() -> dict[str, Any]:
    return _read(0)


@pytest.mark.every_case
@pytest.mark.both_generations
def test_each_part_of_the_state_travels_with_an_order(tmp_path: pathlib.Path) -> None:
    """Loops and items see it; no worker was started again for it."""
    assert CHANGES.keys() == {row.name for row in ROWS}
    assert read_in_loop(0) == _here()
    workers = warm.worker_pids()
    before = _here()
    for name, change in CHANGES.items():
        change(tmp_path)
        kept = name == "limits of a run" and keras_runs.run_limits() == (None, None)
        assert kept or _here()[name] != before[name], name
        assert read_in_loop(0) == _here(), name
    assert warm.worker_pids() == workers


@pytest.mark.thorough
def test_each_part_of_the_state_is_restored_again_and_again(tmp_path: pathlib.Path) -> None:
    state = ProcessState.capture()
    restore = state.restorer()
    for turn in range(2):
        for row in ROWS:
            restore()
            CHANGES[row.name](tmp_path)
            assert row.read() != state.values[row.name], (turn, row.name)
            restore()
            assert row.read() == state.values[row.name], (turn, row.name)


def test_items_of_a_map_see_the_state(tmp_path: pathlib.Path) -> None:
    nanotf.map(_read, [0], 2, verbose=0)
    workers = warm.worker_pids()
    for change in CHANGES.values():
        change(tmp_path)
    assert nanotf.map(_read, [0, 1], 2, verbose=0) == [_here()] * 2
    assert warm.worker_pids() == workers


class _Writes(tf.keras.layers.Layer):  # type: ignore[misc]
    """A layer that writes a file when it is traced."""

    def call(self, x: Any) -> Any:
        pathlib.Path(f"written-{os.environ[NAME]}").touch()
        return x


def test_files_of_a_layer_are_written_where_the_program_stands(tmp_path: pathlib.Path) -> None:
    """Also after a variable was removed, or the folder the workers started in."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        os.chdir(tmp_path / name)
        os.environ[NAME] = name
        model = nanotf.accelerate(tf.keras.Sequential([_Writes(), tf.keras.layers.Dense(1)]))
        model.compile("sgd", "mse")
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0, num_processes=2)
        assert [path.name for path in (tmp_path / name).iterdir()] == [f"written-{name}"]
    del os.environ[NAME]
    assert read_in_loop(0)["environ"] is None


@nano(num_processes=2)
def moves(folder: pathlib.Path) -> None:
    os.chdir(folder)
    os.environ[NAME] = "moved"
    tf.keras.backend.set_epsilon(0.25)


def test_a_loop_moves_the_program(tmp_path: pathlib.Path) -> None:
    """A function that runs here would move it, too."""
    moves(tmp_path)
    assert (pathlib.Path.cwd(), os.environ[NAME]) == (tmp_path, "moved")
    assert tf.keras.backend.epsilon() == 0.25


PROGRAM = """
import tensorflow as tf
from nanotf.keras import nano
import state_helper

@tf.function
def step(x):
    if tf.reduce_sum(x) > 0:
        return x * {factor}
    else:
        return x

@nano(num_processes=2)
def run(x):
    return float(tf.reduce_sum(step(x))), state_helper.name()

result = run(tf.ones(4))
"""


def _run(folder: pathlib.Path, factor: float) -> Any:
    folder.mkdir()
    (folder / "program.py").write_text(PROGRAM.format(factor=factor))
    (folder / "state_helper.py").write_text(f"def name(): return {folder.name!r}\n")
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.modules.pop("state_helper", None)
    importlib.invalidate_caches()
    names = {"__name__": "__main__"}
    exec(compile(pathlib.Path("program.py").read_text(), "program.py", "exec"), names)
    return names["result"]


def test_two_scripts_of_one_relative_name_keep_their_code(tmp_path: pathlib.Path) -> None:
    """AutoGraph reads a script's text from its relative path. Their modules have one name, too."""
    assert _run(tmp_path / "one", 2.0) == (8.0, "one")
    assert _run(tmp_path / "two", 3.0) == (12.0, "two")


@nano(num_processes=2)
def value_of_helper() -> int:
    import state_helper_edited

    return int(state_helper_edited.VALUE)


def test_a_module_that_was_loaded_again(tmp_path: pathlib.Path) -> None:
    sys.path.insert(0, str(tmp_path))
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    module = tmp_path / "state_helper_edited.py"
    try:
        for value in (1, 22):
            module.write_text(f"VALUE = {value}\n")
            importlib.invalidate_caches()
            importlib.reload(importlib.import_module("state_helper_edited"))
            assert value_of_helper() == value
    finally:
        sys.dont_write_bytecode = before
