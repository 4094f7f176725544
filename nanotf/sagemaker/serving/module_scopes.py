"""Loads the code that lies beside models, each model's with modules of its own.

`code/inference.py` imports its neighbors by their bare names (`import features`), and the code of
another model in the same worker may have another module of that name. So only one model's code is
in `sys.path` and `sys.modules` at a time. Where all models share one folder, as in an archive of
several, nothing is ever exchanged.
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

from nanotf.errors import NanoError
from nanotf.sagemaker.serving.code_requirements import installed
from nanotf.serving.repository.model_layouts import SCRIPT

MODULE = "inference"  # the name that the code has in a SageMaker container


class _Scope:
    """The folders and modules of one model's code."""

    def __init__(self, code: pathlib.Path) -> None:
        self.code = code
        lib = code / "lib"
        self.entries = [str(lib), str(code)] if lib.is_dir() else [str(code), *installed(code)]
        self.modules: dict[str, Any] = {}
        self.attributes: list[tuple[types.ModuleType, str, Any]] = []  # of packages of all models

    def holds(self, module: Any) -> bool:
        file = getattr(module, "__file__", None)
        places = [file] if isinstance(file, str) else _folders(module)
        # A namespace package that also has a folder elsewhere, such as `google`, belongs to all.
        return bool(places) and all(
            any(pathlib.Path(place).is_relative_to(entry) for entry in self.entries)
            for place in places
        )

    def enter(self) -> None:
        sys.path[:0] = self.entries
        sys.modules.update(self.modules)
        for package, name, module in self.attributes:
            setattr(package, name, module)

    def leave(self) -> None:
        self.modules = {name: each for name, each in sys.modules.items() if self.holds(each)}
        for name in self.modules:
            del sys.modules[name]
        self.attributes = list(self._in_packages_of_all())
        for package, name, _ in self.attributes:  # `from package import name` would find it
            delattr(package, name)
        for entry in self.entries:
            if entry in sys.path:  # the code may have changed it
                sys.path.remove(entry)

    def _in_packages_of_all(self) -> Iterator[tuple[types.ModuleType, str, Any]]:
        """Yields those of the modules that are attributes of a package of all models."""
        for full, module in self.modules.items():
            parent, _, name = full.rpartition(".")
            package = None if parent in self.modules else sys.modules.get(parent)
            if isinstance(package, types.ModuleType) and vars(package).get(name) is module:
                yield package, name, module


class ModuleScopes:
    """The code of the models of a worker."""

    def __init__(self) -> None:
        self._scopes: dict[pathlib.Path, _Scope] = {}
        self._active: _Scope | None = None

    def load(self, code: pathlib.Path) -> types.ModuleType:
        """Returns the module `inference` of a folder, which is executed at the first call.

        Args:
            code: the folder with `inference.py`.

        Raises:
            Exception: The code has raised it.
        """
        if code not in self._scopes:
            self._activate(_Scope(code))
            _execute(code / SCRIPT)
            assert self._active
            self._scopes[code] = self._active  # only now: it has raised nothing
        self.activate(code)
        module: types.ModuleType = sys.modules[MODULE]
        return module

    def activate(self, code: pathlib.Path) -> None:
        """Makes the modules of a folder importable, and those of the others not."""
        self._activate(self._scopes[code])

    def close(self) -> None:
        """Removes all of them."""
        if self._active:
            self._active.leave()
        self._active = None
        self._scopes.clear()

    def _activate(self, scope: _Scope) -> None:
        if self._active is scope:  # the common case: one model, or one folder for all
            return
        if self._active:
            self._active.leave()
        self._active = scope
        scope.enter()


def _folders(module: Any) -> list[str]:
    """Returns the folders of a namespace package, which has no file. Of other objects, none."""
    # Not by `getattr`, which an object in `sys.modules` may answer with whatever it likes.
    return list(vars(module).get("__path__") or ()) if isinstance(module, types.ModuleType) else []


def _execute(script: pathlib.Path) -> None:
    spec = importlib.util.spec_from_file_location(MODULE, script)
    if spec is None or spec.loader is None:
        raise NanoError(f"Python must be able to load the user's code. Received: {script}.")
    module = importlib.util.module_from_spec(spec)
    # Before it is executed: `dataclasses` and `pickle` look a class's module up by its name.
    sys.modules[MODULE] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(MODULE, None)
        raise
