"""Replaces attributes of TensorFlow and Keras for the life of a process.

The table of attributes that a worker replaces is `nanotf.region.overrides.TABLE`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import operator
import pkgutil
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanotf.compat.versions import keras_module_name, keras_version

Versions = tuple[tuple[int, ...], tuple[int, ...]]
ANY: Versions = ((2,), (4,))
KERAS_2: Versions = ((2,), (3,))
KERAS_3: Versions = ((3,), (4,))


@dataclasses.dataclass(frozen=True)
class Override:
    """An attribute to replace for the life of the process."""

    # "module:attribute". `keras.src` is the package of the installed generation. A module's
    # function is replaced in all modules that have imported it.
    target: str
    why: str
    # Takes the stock attribute, as its class or module holds it, and the `given` of `install`;
    # returns the new attribute.
    replacement: Callable[[Any, Any], Any]
    # Two versions of Keras: the first that needs the override, and the first that no longer does.
    versions: Versions = ANY
    adds: bool = False  # whether Keras lacks the attribute; the stock one is then None

    def applies(self) -> bool:
        """Returns True if the installed Keras needs the override."""
        first, end = self.versions
        return first <= keras_version() < end

    def place(self) -> tuple[Any, str]:
        """Returns the class or module of the attribute, and the attribute's name.

        Raises:
            ImportError, AttributeError: There is no such class or module.
        """
        module, _, path = self.target.partition(":")
        if module.startswith("keras.src"):
            module = keras_module_name() + module.removeprefix("keras")
        *owners, name = path.split(".")
        return pkgutil.resolve_name(f"{module}:{'.'.join(owners)}"), name

    def found(self) -> Any:
        """Returns the attribute as its class or module holds it now.

        Raises:
            ImportError, AttributeError: There is no such class, module or attribute.
        """
        owner, name = self.place()
        look_up = getattr if isinstance(owner, types.ModuleType) else inspect.getattr_static
        return look_up(owner, name, *([None] if self.adds else []))

    def is_installed(self) -> bool:
        """Returns True if the replacement is in place."""
        return self.target in _installed and self.found() is _installed[self.target]


_stock: dict[str, Any] = {}  # by target
_installed: dict[str, Any] = {}


# Of functions in modules, by target: the namespaces that hold it, with its name there, and the last
# module that was looked through.
_places: dict[str, list[tuple[dict[str, Any], str]]] = {}
_looked: dict[str, str] = {}


def find(table: Sequence[Override]) -> None:
    """Looks through all modules for what a table replaces, so that `install` need not in a fork.

    That takes time, and a copy of every page that holds an object.
    """
    _look({id(row.found()): row.target for row in table if row.applies() and _is_function(row)})


def _is_function(row: Override) -> bool:
    """Returns True if modules may hold the attribute under names of their own."""
    return not row.adds and isinstance(row.place()[0], types.ModuleType)


def _look(targets: Mapping[int, str]) -> None:
    """Looks for attributes in the modules that were imported since the last look for each.

    Args:
        targets: by identity of the attribute.
    """
    for last in {_looked.get(target) for target in targets.values()}:
        wanted = {key: target for key, target in targets.items() if _looked.get(target) == last}
        # A module that is loaded becomes the last. If the last one was dropped, all count as new.
        new = list(itertools.takewhile(functools.partial(operator.ne, last), reversed(sys.modules)))
        for module in [sys.modules[name] for name in reversed(new)]:
            names = getattr(module, "__dict__", {})  # entries of sys.modules need not be modules
            # Under any name, since TensorFlow API modules imported later copy it from there.
            for name, value in list(names.items()):
                if id(value) in wanted:
                    _places.setdefault(wanted[id(value)], []).append((names, name))
    _looked.update(dict.fromkeys(targets.values(), next(reversed(sys.modules))))


def install(table: Sequence[Override], given: Any) -> None:
    """Replaces the attributes of a table that apply to the installed Keras.

    A second call replaces the replacements of the first. If two rows have the same target, the
    second replaces the result of the first.

    Args:
        given: passed to each replacement, such as the worker's strategy.
    """
    before_by_target: dict[str, Any] = {}  # of functions
    ours_by_target: dict[str, Any] = {}
    for row in table:
        if not row.applies():
            continue
        (owner, name), before = row.place(), row.found()
        stock = _stock.setdefault(row.target, before)
        ours = row.replacement(ours_by_target.get(row.target, stock), given)
        ours_by_target[row.target] = ours
        if _is_function(row):
            before_by_target.setdefault(row.target, before)
        setattr(owner, name, ours)
        _installed[row.target] = ours
    _look({id(before): target for target, before in before_by_target.items()})
    for target, before in before_by_target.items():
        for names, name in _places.get(target, ()):
            if names.get(name) is before:
                names[name] = ours_by_target[target]
