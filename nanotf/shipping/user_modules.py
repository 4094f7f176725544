"""Modules of the user's whose objects a `@nano` function reaches.

A worker that imports such a module anew has a model of its own in it, with other weights. So a
module travels by value if code that is sent leads to a root in it: as `net.model`, or by a
function of the module that refers to one. Only the names that code uses go along.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from typing import Any

from nanotf.compat.versions import require_tensorflow
from nanotf.region.decorators import Step, is_tf_function
from nanotf.shipping import objects

_LIBRARIES = ("nanotf", "tensorflow", "keras", "tf_keras")
_INSTALLED = ("site-packages", "dist-packages")
_LONGEST = 1000  # a longer list holds data


def unwrapped(function: Any) -> Any:
    """The Python function in a step, in a `tf.function` or in a partial one."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, Step):
            function = function.function
        elif is_tf_function(function):
            function = function.python_function
        else:
            return function


def names_in(code: types.CodeType) -> set[str]:
    """The names that a function's code, and that of the functions in it, refers to."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_in(constant)
    return names


def names_of(value: Any) -> set[str]:
    """Same, of a function or of the methods of a class; empty for others."""
    return {name for function in _functions_of(value) for name in names_in(function.__code__)}


def leads_to_root(value: Any, names: set[str]) -> bool:
    """Whether what code refers to has variables or data that must not exist twice.

    Args:
        value: a module, a function or a class.
        names: set of str, those that the code which gets a module refers to.
    """
    return _leads(value, names, set())


def _leads(value: Any, names: set[str], seen: set[int]) -> bool:
    if id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, types.ModuleType):
        return is_users(value) and _any_leads(names, vars(value), seen)
    functions = list(_functions_of(value))
    if functions or isinstance(value, type):
        own = [f for f in functions if is_users(sys.modules.get(f.__module__ or ""))]
        return any(_any_leads(names_in(f.__code__), f.__globals__, seen) for f in own)
    return _holds_root(value)


def _any_leads(names: set[str], space: dict[str, Any], seen: set[int]) -> bool:
    return any(_leads(space[name], names, seen) for name in names if name in space)


def _holds_root(value: Any) -> bool:
    """Whether a value is a root, a container of some, or an object with one as an attribute."""
    inside: Iterable[Any] = ()
    if isinstance(value, (list, tuple, set)):
        inside = value
    elif isinstance(value, dict) or hasattr(value, "__dict__"):
        inside = (value if isinstance(value, dict) else vars(value)).values()
    values = [value, *itertools.islice(inside, _LONGEST)]
    # A loss has no variables.
    loss = require_tensorflow().keras.losses.Loss
    return any(objects.is_root(v) and not isinstance(v, loss) for v in values)


def _functions_of(value: Any) -> Iterator[types.FunctionType]:
    value = unwrapped(value)
    members = vars(value).values() if isinstance(value, type) else [value]
    for member in members:
        member = unwrapped(getattr(member, "__func__", getattr(member, "fget", member)))
        if isinstance(member, types.FunctionType):
            yield member


def is_users(module: Any) -> bool:
    """Whether a module is the user's own, and no installed library's."""
    name = getattr(module, "__name__", "")
    if not isinstance(module, types.ModuleType) or name.split(".")[0] in _LIBRARIES:
        return False
    origin = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    if origin is None:
        return name == "__main__"
    path = pathlib.Path(origin)
    standard = pathlib.Path(sysconfig.get_path("stdlib"))
    return not path.is_relative_to(standard) and not set(_INSTALLED) & set(path.parts)


def by_value(module: types.ModuleType, names: set[str]) -> tuple[Any, ...]:
    """What pickles a module as an empty one that gets what code uses of it."""
    used = {name: value for name, value in vars(module).items() if name in names}
    return _empty, (module.__name__,), used


def _empty(name: str) -> types.ModuleType:
    return types.ModuleType(name)
