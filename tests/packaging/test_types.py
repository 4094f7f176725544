"""Signatures, documentation and types of the public names, as `help` and editors show them."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from release import run

import nanotf
from nanotf.parent.defaults import PRECISIONS
from nanotf.pool.backends import BACKENDS
from nanotf.pool.transports import TRANSPORTS
from nanotf.shipping.data.pipelines import SHARDINGS

PACKAGE = pathlib.Path(nanotf.__file__).parent
NAMES, METHODS = PACKAGE / "__init__.pyi", PACKAGE / "keras/__init__.pyi"
PROGRAM = pathlib.Path(__file__).with_name("typed_program.py")
EXTENDED = ("fit", "evaluate", "predict")
OF_KERAS_2 = {"max_queue_size", "workers", "use_multiprocessing"}

# Prints the signatures and documentation that a process shows with the Keras that it uses.
SHOWN = """
import inspect, json, types
import nanotf
from nanotf.compat.versions import is_keras_3
from nanotf.keras import layers, models, optimizers

class WithOwnFit(models._KerasModel):
    def fit(self, rows, *, patience=3):
        return types.SimpleNamespace(given=(rows, patience))

def shown(function):
    return [(p.name, p.kind.name, repr(p.default), str(p.annotation))
            for p in inspect.signature(function).parameters.values()]

own = nanotf.accelerate(WithOwnFit())
assert own.fit([1], patience=4).given == ([1], 4)
methods = ("fit", "evaluate", "predict", "compile")
functions = {
    **{f"Model.{name}": getattr(nanotf.Sequential, name) for name in methods},
    **{n: f for n in nanotf.__all__ if inspect.isfunction(f := getattr(nanotf, n))},
    "Sequential.__init__": nanotf.Sequential.__init__,
    "Embedding.__init__": layers.Embedding.__init__,
    "SparseAdam.__init__": optimizers.SparseAdam.__init__,
    "own": own.fit,
}
documents = {
    name: [inspect.getdoc(getattr(cls, name)) for cls in (nanotf.Sequential, models._KerasModel)]
    for name in methods
}
signatures = {name: shown(function) for name, function in functions.items()}
print(json.dumps([is_keras_3(), signatures, documents]))
"""

Parameters = dict[str, tuple[str, str, str]]  # kind, default, annotation by name


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("0", id="default"),
        pytest.param(
            "1",
            id="legacy",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("tf_keras") is None, reason="tf_keras is not installed"
            ),
        ),
    ],
)
def shown(request: pytest.FixtureRequest) -> tuple[bool, dict[str, Parameters], Any]:
    """Returns True for Keras 3, signatures by name, and pairs of documentation by name."""
    environment = {**os.environ, "TF_USE_LEGACY_KERAS": request.param}
    output = run(sys.executable, "-c", SHOWN, cwd=PACKAGE.parent, env=environment)
    keras_3, signatures, documents = json.loads(output.splitlines()[-1])
    of_name = {name: {n: tuple(rest) for n, *rest in each} for name, each in signatures.items()}
    return keras_3, of_name, documents


def _declared(path: pathlib.Path) -> dict[str, Parameters]:
    """Returns the parameters of a file's functions, also those that only type checkers read."""
    found = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                visit(child, f"{child.name}.")
            elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                visit(ast.Module(child.body, []), prefix)
            elif isinstance(child, ast.FunctionDef):
                names: dict[str, Any] = {}
                source = f"def function({ast.unparse(child.args)}): ..."
                exec(f"from __future__ import annotations\n{source}", names)
                found[f"{prefix}{child.name}"] = {
                    p.name: (p.kind.name, repr(p.default), str(p.annotation))
                    for p in inspect.signature(names["function"]).parameters.values()
                }

    visit(ast.parse(path.read_text()), "")
    return found


def _of_kind(parameters: Parameters, *kinds: str) -> list[str]:
    return [name for name, (kind, _, _) in parameters.items() if kind in kinds]


def _defaults(parameters: Parameters, names: set[str]) -> dict[str, str]:
    return {name: parameters[name][1] for name in names}


def _check_same(declared: Parameters, real: Parameters) -> None:
    """Compares the defaults of names that both have, and the order of positional ones."""
    both = declared.keys() & real.keys()
    assert _defaults(declared, both) == _defaults(real, both)
    positional = _of_kind(declared, "POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD")
    positional = [name for name in positional if name in real]
    assert positional == list(real)[: len(positional)]


@pytest.mark.parametrize("name", EXTENDED)
def test_declared_arguments_are_those_at_run_time(name: str, shown: Any) -> None:
    """Arguments of the installed Keras and of nanotf, with defaults; nanotf's also with types."""
    keras_3, signatures, _ = shown
    declared, real = _declared(METHODS)[f"Model.{name}"], signatures[f"Model.{name}"]
    _check_same(declared, real)
    assert declared.keys() - real.keys() == (OF_KERAS_2 if keras_3 else set())
    assert real.keys() - declared.keys() <= {"kwargs"}
    ours = _of_kind(real, "KEYWORD_ONLY")
    assert {"num_processes", "transport", "cores", "backend"} <= set(ours)
    assert [(each, declared[each]) for each in ours] == [(each, real[each]) for each in ours]


def test_declared_arguments_of_the_rest(shown: Any) -> None:
    keras_3, signatures, _ = shown
    stub = _declared(METHODS) | _declared(NAMES)
    functions = [name for name in stub if "." not in name]
    assert {"nano", "warm_up", "whole"} <= set(functions)
    for name in functions:
        assert list(stub[name]) == list(signatures[name])
        _check_same(stub[name], signatures[name])
    for file in ("layers", "optimizers"):
        for name, declared in _declared(PACKAGE / f"keras/{file}.py").items():
            if name in ("Embedding.__init__", "SparseAdam.__init__"):
                _check_same(declared, signatures[name])
                assert declared.keys() <= signatures[name].keys()
    _check_same(stub["Sequential.__init__"], signatures["Sequential.__init__"])
    if keras_3:  # its order and defaults differ from Keras 2's
        _check_same(stub["Model.compile"], signatures["Model.compile"])
        assert stub["Model.compile"].keys() == signatures["Model.compile"].keys()


def test_class_with_its_own_fit_keeps_its_arguments(shown: Any) -> None:
    _, signatures, _ = shown
    assert list(signatures["own"])[:3] == ["rows", "patience", "num_processes"]


def test_help_shows_the_arguments_of_nanotf_and_of_keras(shown: Any) -> None:
    _, signatures, documents = shown
    for name in EXTENDED:
        ours, of_keras = documents[name]
        assert ours.endswith(f"\n\nKeras's `{name}`:\n\n{of_keras}")
    described = documents["fit"][0].split("Keras's `fit`:")[0]
    for name in _of_kind(signatures["Model.fit"], "KEYWORD_ONLY"):
        assert f"\n    {name}: " in described


def test_declared_words_are_those_that_are_accepted() -> None:
    accepted = {
        "transport": TRANSPORTS,
        "backend": BACKENDS,
        "sharding": SHARDINGS,
        "precision": PRECISIONS,
    }
    seen = set()
    for name, parameters in (_declared(METHODS) | _declared(NAMES)).items():
        for argument in parameters.keys() & accepted.keys():
            words = set(re.findall(r"'(\w+)'", parameters[argument][2]))
            assert words == set(accepted[argument]), (name, argument)
            seen.add(argument)
    assert seen == accepted.keys()


def _marked() -> set[int]:
    lines = PROGRAM.read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if "# wrong: " in line}


def _check(command: list[str], directory: pathlib.Path) -> str:
    """Runs a type checker over the program; returns its output."""
    pytest.importorskip(command[0], reason=f"{command[0]} is not installed")
    done = subprocess.run(
        [sys.executable, "-m", *command, str(PROGRAM)],
        cwd=directory,
        env={**os.environ, "MYPYPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 1, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.skipif(
    np.__version__ < "2", reason="nanotf is checked with the types of NumPy 2, see Makefile"
)
def test_mypy_finds_the_mistakes_of_a_program() -> None:
    """With this project's settings, strict ones, and the cache of `make lint`: 0.5 s, not 20."""
    report = _check(["mypy", "--output=json"], PACKAGE.parent)
    errors = [json.loads(line) for line in report.splitlines() if line.startswith("{")]
    found = {each["line"] for each in errors if each["severity"] == "error"}
    assert found == _marked(), report


def test_pyright_finds_the_mistakes_of_a_program(tmp_path: pathlib.Path) -> None:
    """In basedpyright, the pyright that installs from PyPI alone."""
    settings = {"typeCheckingMode": "standard", "extraPaths": [str(PACKAGE.parent)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    arguments = ["--project", str(tmp_path), "--pythonpath", sys.executable, "--outputjson"]
    report = _check(["basedpyright", *arguments], tmp_path)
    errors = json.loads(report)["generalDiagnostics"]
    found = {each["range"]["start"]["line"] + 1 for each in errors if each["severity"] == "error"}
    assert found == _marked(), report
