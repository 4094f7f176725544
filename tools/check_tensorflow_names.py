#!/usr/bin/env python3
"""Checks that nanotf uses no public name of TensorFlow that the oldest supported version lacks.

nanotf/compat is not checked: names that only some versions have belong there, as private ones do.
Follows `tf`, and variables that hold TensorFlow's modules (`keras = require_tensorflow().keras`),
through the syntax tree of each file. Members of classes and objects are not checked. Prints one
line for each finding; exits with 1 if there are any.

`--list` prints the names of the installed TensorFlow. tools/tensorflow_names.txt is that list, made
with the oldest supported version:

    make venv TF=intel
    .venv-intel/bin/python tools/check_tensorflow_names.py --list >tools/tensorflow_names.txt
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIST = ROOT / "tools" / "tensorflow_names.txt"
INTERNAL = "__internal__"  # the only name of the API that begins with an underscore
ENDS = ("tf.compat.v1", "tf.compat.v2")  # the modules in these repeat those of `tf`

Known = dict[str, set[str]]  # the names in each module: "tf.math" has "abs"


class Uses(ast.NodeVisitor):
    """Collects the names in a file that TensorFlow lacks.

    Args:
        known: dict, the names that TensorFlow has.
    """

    def __init__(self, known: Known) -> None:
        self.known = known
        self.lacking: list[tuple[int, str]] = []  # line, name
        self._held: dict[str, str] = {}  # variable -> the path of its value, such as "tf.data"

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer = self._held
        arguments = {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
        self._held = {name: path for name, path in outer.items() if name not in arguments}
        self.generic_visit(node)
        self._held = outer

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Import(self, node: ast.Import) -> None:
        for each in node.names:
            if each.name == "tensorflow":
                self._held[each.asname or each.name] = "tf"

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for variable, value in pairs:
                self._bind(variable, value)

    def visit_AnnAssign(self, node: ast.AnnAssign | ast.NamedExpr) -> None:
        self.generic_visit(node)
        self._bind(node.target, node.value)

    visit_NamedExpr = visit_AnnAssign

    def _bind(self, variable: ast.expr, value: ast.expr | None) -> None:
        self._held.pop(ast.unparse(variable), None)
        path = self._path(value)
        if path:
            self._held[ast.unparse(variable)] = path

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self._path(node)
        if path is None:
            self.generic_visit(node)
        elif name := self._first_lacking(path):
            self.lacking.append((node.lineno, name))

    def _path(self, node: ast.expr | None) -> str | None:
        """Returns the path of an expression like `tf.math.abs`, None for other expressions."""
        if isinstance(node, ast.Call) and not (node.args or node.keywords):
            return "tf" if ast.unparse(node.func).endswith("require_tensorflow") else None
        if isinstance(node, ast.Attribute):
            base = self._path(node.value)
            return f"{base}.{node.attr}" if base else self._held.get(ast.unparse(node))
        return self._held.get(node.id) if isinstance(node, ast.Name) else None

    def _first_lacking(self, path: str) -> str | None:
        module, *names = path.split(".")
        for name in names:
            names_there = self.known.get(module)
            if names_there is None or (name.startswith("_") and name != INTERNAL):
                return None  # the module is a class or an object, or Python defines the name
            module = f"{module}.{name}"
            if name not in names_there:
                return module
        return None


def lacking(source: str, known: Known) -> list[tuple[int, str]]:
    """Returns the line and the name of each use in a Python file of a name that is not known."""
    uses = Uses(known)
    uses.visit(ast.parse(source))
    return uses.lacking


def known_names() -> Known:
    """Returns the names of the oldest supported TensorFlow."""
    lines = LIST.read_text(encoding="utf-8").splitlines()
    split = (line.partition(": ") for line in lines if not line.startswith("#"))
    return {module: set(names.split()) for module, _, names in split}


def installed_names(module: Any, path: str = "tf") -> Iterator[str]:
    """Yields a line for a module of the installed TensorFlow, and for each module in it."""
    names = [name for name in dir(module) if name == INTERNAL or not name.startswith("_")]
    yield f"{path}: {' '.join(names)}"
    for name in names if path not in ENDS else ():
        value = getattr(module, name)
        # TensorFlow's own code is visible, too: it lies in modules of other names.
        if inspect.ismodule(value) and re.search(r"\b(_?api|compat|summary)\b", value.__name__):
            yield from installed_names(value, f"{path}.{name}")


def main() -> int:
    """Checks the package, or prints the list. Returns the exit code."""
    if sys.argv[1:] == ["--list"]:
        tf = importlib.import_module("tensorflow")
        print(
            f"# The public names of TensorFlow {tf.__version__}, made by check_tensorflow_names.py"
        )
        print(*installed_names(tf), sep="\n")
        return 0
    known, count = known_names(), 0
    for path in sorted((ROOT / "nanotf").rglob("*.py")):
        if "compat" not in path.parts:
            for line, name in lacking(path.read_text(encoding="utf-8"), known):
                print(f"{path.relative_to(ROOT)}:{line}: {name}: not in TensorFlow 2.14")
                count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
