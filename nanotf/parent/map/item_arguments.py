"""Checks of the arguments of `nanotf.map`, before any worker starts."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from nanotf.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    check_choice,
    check_integer,
)
from nanotf.machine.topology import AUTO
from nanotf.parent.map.item_output import OUTPUT

ON_ERROR = ("raise", "return")
VERBOSE = ("auto", 0, 1, 2)


def label_of(item: Any) -> str:
    """Returns a short description of an item for people."""
    try:
        return reprlib.repr(item)
    except Exception:  # a broken `__repr__` must not end the call
        return f"an object of class {type(item).__qualname__}"


def name_of(function: Any) -> str:
    """Returns the name of a function for people."""
    return getattr(function, "__qualname__", None) or f"a {type(function).__qualname__}"


def check_on_error(on_error: Any) -> None:
    """Rejects what `on_error` does not accept."""
    check_choice("on_error", on_error, ON_ERROR)


def check_output(output: Any) -> None:
    """Rejects what `output` does not accept."""
    check_choice("output", output, OUTPUT)


def check_verbose(verbose: Any) -> None:
    """Rejects what `verbose` does not accept."""
    if isinstance(verbose, bool) or verbose not in VERBOSE:  # True would count as 1
        raise InvalidArgumentError(
            f"`verbose` must be one of {', '.join(repr(v) for v in VERBOSE)}. Received: "
            f"verbose={verbose!r}."
        )


def check_items(items: Any) -> list[Any]:
    """Returns the items; reads an iterator to its end."""
    try:
        iterator = iter(items)
    except TypeError:
        raise InvalidArgumentTypeError(
            "`items` must be iterable: the function is called with each element. Received: "
            f"items={label_of(items)} ({type(items).__name__}). Pass a list or a range."
        ) from None
    found = list(iterator)
    if not found:
        raise InvalidArgumentError(
            f"`items` must have an element. Received: {type(items).__name__} without any. Check "
            "what it was made from."
        )
    return found


def check_shared(function: Any, item: Any, shared: Any) -> dict[str, Any]:
    """Checks that the function takes an item, and the shared objects by name."""
    if not callable(function):
        raise InvalidArgumentTypeError(
            "`function` must be callable. Received: an object of class "
            f"{type(function).__qualname__}. Pass the function itself, without parentheses."
        )
    given = {} if shared is None else shared
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidArgumentTypeError(
            "`shared` must be a dict of names to objects, which the function takes as keyword "
            f"arguments. Received: {type(shared).__name__}. Pass shared={{'x': x}}."
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin that does not describe itself
        return dict(given)
    try:
        signature.bind(item, **given)
    except TypeError as error:
        raise InvalidArgumentTypeError(
            "`function` must take an item, and the names in `shared` as keyword arguments. "
            f"Received: {name_of(function)}{signature}, and shared={sorted(given)}: {error}. "
            "Change the function's parameters, or `shared`."
        ) from None
    return dict(given)


def check_max_restarts(value: Any) -> int:
    """Returns how many times an item may run again."""
    return check_integer("max_restarts", value, "Pass how often an item may run again", least=0)


def check_recycle_after(value: Any) -> int | None:
    """Returns the number of items of a worker, or None."""
    if value is None:
        return None
    return check_integer("recycle_after", value, "Pass the number of items of a worker, or None")


def check_memory_limit(value: Any) -> int | str | None:
    """Returns a number of bytes, `AUTO`, or None."""
    if value is None or (isinstance(value, str) and value == AUTO):
        return value
    return check_integer("memory_limit", value, f"Pass {AUTO!r}, None, or a number of bytes")


def check_seed(seed: Any) -> int:
    """Returns the base of the items' seeds."""
    if seed is None:
        return int(np.random.randint(2**31))
    return check_integer("seed", seed, "Pass a number, or None", least=0)
