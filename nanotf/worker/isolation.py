"""Keeps the items of `nanotf.map` apart: each finds the function as it was at the call.

    the sent function --load--> item 0 gets it    it wrote to nothing: item 1 gets the same objects
                      --load--> item 2 gets it    item 1 wrote to a list: item 2 gets new ones

What an item wrote to is found by comparison, see `Contents`. Objects whose contents nobody can
compare, such as models, are loaded anew for each item. Arrays are read-only. The user's modules
are imported anew if an item has changed one; modules of libraries keep their state.
"""

from __future__ import annotations

import builtins
import contextlib
import datetime
import decimal
import enum
import fractions
import functools
import importlib
import importlib.machinery
import logging
import pathlib
import re
import sys
import types
import uuid
from abc import ABC
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.compat import process_state
from nanotf.shipping import orders
from nanotf.shipping.objects import heap, mutables, user_modules, whole
from nanotf.wire.blocks import Block

# Nobody can write to such values, or they belong to a library, and they lead to nothing.
_ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, enum.Enum),
    *(types.CodeType, types.BuiltinFunctionType, types.GenericAlias, types.GetSetDescriptorType),
    *(types.MemberDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType),
    *(type(...), type(NotImplemented), type(vars(ABC)["_abc_impl"]), logging.Logger, re.Pattern),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal),
    *(fractions.Fraction, uuid.UUID, pathlib.PurePath, np.generic, np.dtype, np.ufunc),
    *(tf.DType, tf.TensorShape, tf.TypeSpec),
)
# The attributes of which such objects consist; nobody can set them.
_INSIDE: Mapping[type, tuple[str, ...]] = {
    types.MethodType: ("__func__", "__self__"),
    functools.partial: ("func", "args", "keywords"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
}
_OF_FUNCTIONS = ("__code__", "__closure__", "__defaults__", "__kwdefaults__")
_DEFINITIONS = (type, types.FunctionType)


class Contents:
    """The contents of everything to which one can write, and to which some objects lead.

    Args:
        is_own: returns True for a module, class or function whose contents are of interest.

    Attributes:
        is_known: bool, whether all contents can be compared.
    """

    def __init__(self, roots: Iterable[Any], is_own: Callable[[Any], bool]) -> None:
        self.is_known = True
        self._is_own = is_own
        # By id; the objects must live while their ids are used. All globals hold `builtins`.
        self._seen: dict[int, Any] = {id(vars(builtins)): vars(builtins)}
        self._before: list[tuple[Any, Callable[[Any], Any], Callable[[Any, Any], bool], Any]] = []
        waiting = list(roots)
        while waiting:
            value = waiting.pop()
            if not isinstance(value, _ATOMS) and id(value) not in self._seen:
                self._seen[id(value)] = value
                try:
                    waiting.extend(self._parts(value))
                except Exception:  # a class of the user's that does not let itself be read
                    self.is_known = False

    def have_changed(self) -> bool:
        """Returns True if something has been written to, or can no longer be compared."""
        try:
            return any(not same(mark, read(value)) for value, read, same, mark in self._before)
        except Exception:  # an item may have written anything, such as an attribute without ==
            return True

    def _parts(self, value: Any) -> Iterable[Any]:
        """Notes the contents of an object; returns what it leads to."""
        if type(value) is np.ndarray and not (value.dtype.hasobject or value.flags.writeable):
            return ()
        if type(value) in (tuple, frozenset):
            return list(value)
        if type(value) in _INSIDE:
            return [getattr(value, name) for name in _INSIDE[type(value)]]
        if isinstance(value, _DEFINITIONS) or process_state.is_module(value):
            if not self._is_own(value):
                return ()
            has_globals = isinstance(value, types.FunctionType) and _is_of_user(value)
            names_of = _names_and_globals_of if has_globals else _names_of
            return self._noted(value, names_of, mutables.same_names)
        if (kind := mutables.kind_of(value)) is not None:
            return [type(value), *self._noted(value, kind.mark or kind.take, kind.same)]
        # An eager tensor cannot be written to. A variable can: only it has `assign`.
        if not (tf.is_tensor(value) and hasattr(value, "numpy") and not hasattr(value, "assign")):
            self.is_known = False
        return ()

    def _noted(self, value: Any, read: Callable[[Any], Any], same: Any) -> Iterable[Any]:
        mark = read(value)
        self._before.append((value, read, same, mark))
        if isinstance(mark, dict):
            return [*mark, *mark.values()]
        if isinstance(value, np.ndarray):
            return list(value.flat)
        return mark if isinstance(mark, (list, tuple, set)) else ()


def _names_of(value: Any) -> dict[str, Any]:
    """Returns what belongs to a module, a class or a function, by name."""
    found = dict(object.__getattribute__(value, "__dict__"))  # a lazy module stays so
    if isinstance(value, types.FunctionType):
        found.update({name: getattr(value, name) for name in _OF_FUNCTIONS})
    return found


def _names_and_globals_of(function: types.FunctionType) -> dict[str, Any]:
    return {**_names_of(function), "__globals__": function.__globals__}


def _is_of_user(definition: Any) -> bool:
    """Returns True for a function or a class that the user's code defines."""
    name = definition.__module__ or "__main__"
    module = sys.modules.get(name)
    return name == "__main__" or module is None or user_modules.is_users(module)


def _is_sent(value: Any) -> bool:
    """Returns True for a function or a class that has arrived by value."""
    return isinstance(value, _DEFINITIONS) and not heap.is_found(value)


def _is_imported(value: Any) -> bool:
    """Returns True for a module of the user's, and for what it defines."""
    if process_state.is_module(value):
        return user_modules.is_users(value)
    return _is_of_user(value)


def _modules() -> dict[str, types.ModuleType]:
    """Returns the user's modules that can be imported anew: those in Python."""
    source = importlib.machinery.SourceFileLoader
    found = process_state.users_modules()
    return {n: m for n, m in found.items() if isinstance(getattr(m, "__loader__", None), source)}


class Modules:
    """The user's modules in a worker, which the items of a call import."""

    def __init__(self) -> None:
        self._names: list[str] = []  # to import before an item, in this order
        self._contents = Contents((), _is_imported)
        self._loaded: dict[str, types.ModuleType] = {}
        self._seen: Mapping[str, types.ModuleType] | None = None  # all of which those are some

    def begin(self) -> None:
        """Imports what items before have imported, and notes what is there."""
        for name in self._names:
            if name not in sys.modules:
                with contextlib.suppress(Exception):  # the item finds out
                    importlib.import_module(name)
        if process_state.users_modules() is self._seen:
            return
        self._seen, found = process_state.users_modules(), _modules()
        if found != self._loaded:
            self._loaded = found
            self._contents = Contents(found.values(), _is_imported)

    def end(self) -> bool:
        """Drops all if an item has changed one, or imported another; returns True if so."""
        found = self._loaded if process_state.users_modules() is self._seen else _modules()
        if found == self._loaded and not self._contents.have_changed():
            return False
        self._seen = None
        self._names = list(found)
        for name in found:
            del sys.modules[name]
        self._loaded, self._contents = {}, Contents((), _is_imported)
        return True


class IsolatedFunction:
    """The function of a call in a worker.

    Args:
        block: holds its arrays; None if it has none.
    """

    def __init__(self, shipment: orders.TaskShipment, block: Block | None) -> None:
        self._shipment, self._block, self._modules = shipment, block, Modules()
        self._loaded: tuple[Any, dict[str, Any]] | None = None
        self._contents: Contents | None = None

    def begin(self) -> tuple[Any, dict[str, Any]]:
        """Returns the function and its keyword arguments, as they were at the call."""
        if self._loaded is None:
            found = whole.load(self._shipment.whole, self._block, in_place=True)
            self._contents = Contents(found, _is_sent)
            function, *values = found
            self._loaded = function, dict(zip(self._shipment.names, values, strict=True))
        self._modules.begin()
        function, arguments = self._loaded
        return function, dict(arguments)

    def end(self) -> bool:
        """Forgets after an item what the next must not find; returns True if there was anything.

        Garbage must then be collected: a class that is still there would be used again.
        """
        # If modules go, so does the function, which may hold their objects.
        is_touched = self._modules.end() or self._is_touched()
        if is_touched:
            self._loaded = self._contents = None
        return is_touched

    def _is_touched(self) -> bool:
        if self._contents is None:
            return self._loaded is not None
        return not self._contents.is_known or self._contents.have_changed()
