"""Sends the user's modules to the workers, by name if a worker can import them.

A worker that imports a module with a model gets its own model, with other weights. So a `@nano`
call sends functions and classes of such a module by value, with everything that they refer to. The
module itself is rejected.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections.abc import Iterable
from typing import Any

import cloudpickle

from nanotf.compat import process_state
from nanotf.errors import ShippingError
from nanotf.region.decorators import Step, is_tf_function
from nanotf.shipping.objects import identities

_LONGEST = 1000  # a longer list holds data
_KERAS_PACKAGES = ("keras", "tf_keras", "tensorflow", "nanotf")


class ModulesByValue:
    """Modules whose functions and classes are sent with their globals until `release`."""

    def __init__(self) -> None:
        self._taken: list[types.ModuleType] = []
        self._roots: dict[types.ModuleType, str | None] = {}
        self._rootless: set[str] = set()

    def __enter__(self) -> ModulesByValue:
        return self

    def __exit__(self, *_: Any) -> None:
        self.release()

    def take_holder(self, found: Any) -> None:
        """Takes the module of a function or class if it holds a root."""
        module = module_of(found)
        if module is not None and self.root_of(module) is not None:
            self.take(module)

    def root_of(self, module: types.ModuleType) -> str | None:
        """Returns `root_in`; looks into each module once."""
        if module not in self._roots:
            seen = set(self._rootless)
            self._roots[module] = root_in(module, seen)
            if self._roots[module] is None:  # then none that it leads to has one
                self._rootless = seen
        return self._roots[module]

    def take(self, module: types.ModuleType) -> None:
        """Makes a module's definitions be sent by value, if they are not already."""
        # cloudpickle sends the code of `__main__` by value anyway.
        if module.__name__ not in {"__main__", *cloudpickle.list_registry_pickle_by_value()}:
            cloudpickle.register_pickle_by_value(module)
            self._taken.append(module)

    def is_users_wish(self, module: types.ModuleType) -> bool:
        """Returns True if the user made cloudpickle pickle a module, or its package, by value."""
        told = cloudpickle.list_registry_pickle_by_value() - {m.__name__ for m in self._taken}
        return any(f"{module.__name__}.".startswith(f"{name}.") for name in told)

    def release(self) -> None:
        """Makes all modules be sent by name again, and forgets what is in them."""
        while self._taken:
            cloudpickle.unregister_pickle_by_value(self._taken.pop())
        self._roots.clear()
        self._rootless.clear()


def check_importable(name: str) -> None:
    """Raises `ShippingError` if no finder finds the package of a module."""
    package = name.partition(".")[0]
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
    if not any(finder.find_spec(package, None) for finder in finders):
        raise ShippingError(
            "Workers must be able to import the modules of functions and classes, except the "
            f"script. Received: module {name!r}, which is not on sys.path. Put its folder there, "
            f"or call cloudpickle.register_pickle_by_value(sys.modules[{name!r}]) first."
        )


def unwrapped(function: Any) -> Any:
    """Returns the Python function inside a step, a `tf.function` or a partial function."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, Step):
            function = function.function
        elif is_tf_function(function):
            function = function.python_function
        else:
            return function


def module_of(value: Any) -> types.ModuleType | None:
    """Returns a module itself, else the module of a function, a class, or an object's class."""
    if process_state.is_module(value):
        module: types.ModuleType = value
        return module
    name = getattr(unwrapped(value), "__module__", None)
    return sys.modules.get(name) if isinstance(name, str) else None


def root_in(module: types.ModuleType, seen: set[str]) -> str | None:
    """Returns the name of a module's root: an object with variables or data, not to be duplicated.

    Args:
        module: only a user's module is searched.
        seen: names of the modules that have none; gets those that this one leads to.

    Returns:
        A global of the module, or of a module that it imports something from; None if there is no
        root.
    """
    values = _globals_of(module)
    module_name = values["__name__"]
    if module_name in seen or not is_users(module):
        return None
    seen.add(module_name)
    found = (f"{module_name}.{name}" for name, value in values.items() if _holds_root(value))
    inner = filter(None, map(module_of, values.values()))
    below = (root_in(other, seen) for other in inner)
    return next(itertools.chain(found, filter(None, below)), None)


def _globals_of(module: types.ModuleType) -> dict[str, Any]:
    """Returns a copy of what a module holds now.

    A lazy module (`importlib.util.LazyLoader`, or with `__getattr__`) imports itself when an
    attribute is read, which takes long, or fails if an optional package is missing.
    """
    name = object.__getattribute__(module, "__name__")
    return {"__name__": name, **object.__getattribute__(module, "__dict__")}


def _holds_root(value: Any) -> bool:
    """Returns True if a value is a root, contains one, or has one as an attribute."""
    if isinstance(
        value, types.ModuleType
    ):  # first, since other checks read a lazy one's attributes
        return False
    inside: Iterable[Any] = ()
    if isinstance(value, (list, tuple, set)):
        inside = value
    elif isinstance(value, dict):
        inside = dict.values(value)  # a subclass may load what it lists
    elif not isinstance(value, type):
        inside = getattr(value, "__dict__", {}).values()
    return any(map(identities.is_root, [value, *itertools.islice(inside, _LONGEST)]))


def is_users(module: types.ModuleType) -> bool:
    """Returns True if a module is the user's own, not an installed library's."""
    found = _globals_of(module)
    if found["__name__"].split(".")[0] in process_state.LIBRARIES:
        return False
    origin = found.get("__file__") or next(iter(found.get("__path__", ())), None)
    if origin is None:
        return bool(found["__name__"] == "__main__")
    return process_state.is_users_file(origin)


def original_class(cls: type) -> type:
    """Returns the user's or Keras's class behind a class that `accelerate` made."""
    original: type = vars(cls).get("_nanotf_original", cls)
    return original


def is_foreign(value: Any) -> bool:
    """Returns True if Keras in another process would not know a class or function."""
    package = (getattr(value, "__module__", None) or "").split(".")[0]
    return package not in _KERAS_PACKAGES
