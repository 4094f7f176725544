"""Replaces attributes of TensorFlow and Keras for the life of a process.

The table of those that a worker replaces is `nanotf.region.overrides.TABLE`.
"""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from nanotf.compat.versions import keras_module_name, keras_version

Versions = tuple[tuple[int, ...], tuple[int, ...]]
ANY: Versions = ((2,), (4,))
KERAS_2: Versions = ((2,), (3,))
KERAS_3: Versions = ((3,), (4,))


@dataclasses.dataclass(frozen=True)
class Override:
    """An attribute that is replaced for the life of the process.

    Args:
        target: str, "module:attribute". The module `keras.src` is that of the installed generation.
            A function of a module is replaced in all modules that have imported it.
        why: str.
        replacement: callable of the stock attribute, as its class or module holds it, and of what
            `install` is given; returns what takes its place.
        versions: tuple of two versions of Keras, the first that needs it and the first that does
            not.
        adds: bool, whether neither TensorFlow nor Keras has the attribute; the stock one is None.
    """

    target: str
    why: str
    replacement: Callable[[Any, Any], Any]
    versions: Versions = ANY
    adds: bool = False

    def applies(self) -> bool:
        """Whether the installed Keras needs it."""
        first, end = self.versions
        return first <= keras_version() < end

    def place(self) -> tuple[Any, str]:
        """The class or module of the attribute, and its name.

        Raises:
            ImportError, AttributeError: There is no such class or module.
        """
        module, _, path = self.target.partition(":")
        if module.startswith("keras.src"):
            module = keras_module_name() + module.removeprefix("keras")
        *owners, name = path.split(".")
        return pkgutil.resolve_name(f"{module}:{'.'.join(owners)}"), name

    def found(self) -> Any:
        """The attribute as its class or module holds it now.

        Raises:
            ImportError, AttributeError: There is no such class, module or attribute.
        """
        owner, name = self.place()
        look_up = getattr if isinstance(owner, types.ModuleType) else inspect.getattr_static
        return look_up(owner, name, *([None] if self.adds else []))

    def is_installed(self) -> bool:
        """Whether the replacement is in place."""
        return self.target in _installed and self.found() is _installed[self.target]


_stock: dict[str, Any] = {}  # by target
_installed: dict[str, Any] = {}


def install(table: Sequence[Override], given: Any) -> None:
    """Replaces the attributes of a table, those that the installed Keras needs replaced.

    A second call replaces the replacements of the first. Of two rows with the same target the second
    replaces what the first has made.

    Args:
        table: sequence of `Override`.
        given: what the replacements are made for, a worker.
    """
    in_modules: dict[int, tuple[Any, Any]] = {}  # by identity of the attribute before
    ours_by_target: dict[str, Any] = {}
    for row in table:
        if not row.applies():
            continue
        (owner, name), before = row.place(), row.found()
        stock = _stock.setdefault(row.target, before)
        ours = row.replacement(ours_by_target.get(row.target, stock), given)
        ours_by_target[row.target] = ours
        if isinstance(owner, types.ModuleType) and not row.adds:
            in_modules[id(before)] = before, ours
        setattr(owner, name, ours)
        _installed[row.target] = ours
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})  # what stands there need be no module
        # Under any name: a module of TensorFlow's API that is imported later takes it from there.
        for name, value in list(names.items()):
            if id(value) in in_modules:
                names[name] = in_modules[id(value)][1]
