#!/usr/bin/env python3
"""Checks that docstrings and comments of the package say what is true, and what code does not.

An entry under `Args` that says no more than the argument's name and annotation is refused: it is
read for nothing, and is wrong after the next change. So is a name in backticks that no code of the
package has: it was renamed, or never existed. Prints one line for each finding; exits with 1 if
there are any.
"""

from __future__ import annotations

import ast
import builtins
import io
import keyword
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterator

PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "nanotf"
TENSORFLOW_NAMES = pathlib.Path(__file__).with_name("tensorflow_names.txt")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)
# fmt: off
FILLERS = {
    "a", "an", "and", "any", "default", "for", "in", "is", "it", "its", "of", "one", "or", "that",
    "the", "these", "this", "to", "with", "optional",
}
# Words of docstrings, and those of annotations that say the same.
SYNONYMS = {
    "callable": "Callable", "boolean": "bool", "integer": "int", "string": "str",
    "sequence": "Sequence", "mapping": "Mapping", "iterable": "Iterable", "iterator": "Iterator",
    "collection": "Collection", "tensor": "Any", "object": "Any", "array": "Array",
    "arrays": "Array", "path": "Path", "strings": "str", "integers": "int", "ints": "int",
    "dicts": "dict", "lists": "list", "tuples": "tuple", "floats": "float", "paths": "Path",
}
# fmt: on
# Of other packages: prose may name them where code does not.
FOREIGN = {
    *("tf", "keras", "tf_keras", "np", "numpy", "ray", "optuna", "tensorflow", "sagemaker", "smp"),
    *("smdistributed", "joblib", "psutil", "cloudpickle", "s3fs", "gcsfs"),
    *sys.stdlib_module_names,
}


def entries(docstring: str) -> Iterator[tuple[int, str, str]]:
    """Yields the line, the names and the text of each entry under `Args`."""
    lines = docstring.splitlines()
    try:
        start = lines.index("Args:") + 1
    except ValueError:
        return
    found: list[tuple[int, str, str]] = []
    for number, line in enumerate(lines[start:], start):
        if line.strip() and not line.startswith("    "):
            break
        entry = re.match(r"    ([*\w, ]+): (.*)", line)
        if entry:
            found.append((number, entry[1], entry[2]))
        elif found and line.strip():
            number, names, text = found[-1]
            found[-1] = number, names, f"{text} {line.strip()}"
    yield from found


def says_nothing(name: str, text: str, annotation: str) -> bool:
    """Returns True if all words of an entry are in the argument's name or annotation."""
    known = {word.lower() for word in re.findall(r"\w+", annotation)}
    known |= {part.rstrip("s") for part in name.lower().strip("_").split("_")} | {name.lower()}
    known |= {part for word in known for part in word.split("_")}
    words = re.findall(r"\w+", text)
    return all(
        word.lower() in FILLERS
        or word.lower() in known
        or SYNONYMS.get(word.lower(), word).lower() in known
        or word.lower().rstrip("s") in known
        for word in words
    )


def repetitions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each entry that says nothing."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.ClassDef, *FUNCTIONS)):
            continue
        docstring = ast.get_docstring(node)
        if docstring is None:
            continue
        annotations = _annotations(node)
        for line, names, text in entries(docstring):
            for name in re.findall(r"\w+", names):
                if name in annotations and says_nothing(name, text, annotations[name]):
                    yield node.body[0].lineno + line, f"{names}: {text}"
                    break


def _annotations(node: ast.AST) -> dict[str, str]:
    """Returns the annotations of a function's arguments, or of a class's fields or `__init__`."""
    if isinstance(node, FUNCTIONS):
        given = node.args
        every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        return {
            arg.arg: ast.unparse(arg.annotation)
            for arg in every
            if arg is not None and arg.annotation is not None
        }
    assert isinstance(node, ast.ClassDef)
    fields = {
        part.target.id: ast.unparse(part.annotation)
        for part in node.body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }
    for part in node.body:
        if isinstance(part, FUNCTIONS) and part.name == "__init__":
            fields |= _annotations(part)
    return fields


class Names:
    """All names that code of the package has."""

    def __init__(self, sources: dict[pathlib.Path, str]) -> None:
        self.all = {*keyword.kwlist, *dir(builtins), *FOREIGN}
        self.all |= set(re.findall(r"\w+", TENSORFLOW_NAMES.read_text(encoding="utf-8")))
        self.files = {path.name for path in PACKAGE.rglob("*")}
        self.modules: dict[str, set[str]] = {}  # by a module's or package's own name: its names
        for path, text in sources.items():
            parts = path.relative_to(PACKAGE).with_suffix("").parts
            own = {
                token.string
                for token in tokenize.generate_tokens(io.StringIO(text).readline)
                if token.type == tokenize.NAME
            }
            for node in ast.walk(ast.parse(text)):
                # Names of attributes, variables of the environment, commands and keys.
                value = node.value if isinstance(node, ast.Constant) else None
                if isinstance(value, str) and len(value) < 80 and not value[:1].isspace():
                    own |= set(re.findall(r"\w+", value))
            self.all |= own | set(parts)
            for depth, part in enumerate(parts):
                inner = {parts[depth + 1]} if depth + 1 < len(parts) else own
                inner = own if inner == {"__init__"} else inner
                self.modules.setdefault(part, set()).update(inner)

    def lack(self, dotted: str) -> bool:
        """Returns True if no code has a name, or no module of the package has it."""
        if dotted in self.files:
            return False
        first, *rest = dotted.removeprefix("nanotf.").split(".")
        if first in FOREIGN:
            return False
        if first not in self.all:
            return True
        for name in rest:
            if first in self.modules and name not in self.modules[first]:
                return True
            if name not in self.all:
                return True
            first = name
        return False


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each docstring and comment."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False):
            statement = node.body[0]
            assert isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            for number, line in enumerate(str(statement.value.value).splitlines()):
                yield statement.lineno + number, line
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def main() -> int:
    """Checks the package. Returns the exit code."""
    sources = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    names, count = Names(sources), 0
    for path, text in sources.items():
        found = [
            (line, f"{entry!r} repeats the annotation")
            for line, entry in repetitions(ast.parse(text))
        ]
        for line, said in prose(text):
            if said.lstrip().startswith("|") and "compat" in path.parts:
                continue  # a table of private names, which tests/e2e/test_compat*.py look up
            for name in re.findall(r"`([A-Za-z_]\w*(?:\.\w+)*)(?:\(\))?`", said):
                if names.lack(name):
                    found.append((line, f"`{name}` does not exist"))
        for line, finding in sorted(found):
            print(f"{path.relative_to(PACKAGE.parent)}:{line}: {finding}")
        count += len(found)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
