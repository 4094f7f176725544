"""Compares the objects in a worker with the user's own: both sides make the same short description.

An outline lists, for each object that is sent by number, its attributes and what each is: a number
or a text itself, another object's number, a container's class and items, or a class. It does not
see values of variables and arrays, attributes of objects that are not sent by number, nor anything
deeper than `_DEEPEST` containers or behind their first `_LONGEST` items.
"""

from __future__ import annotations

import itertools
import pickle
import types
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nanotf.compat import containers, keras_names
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import ShippingError
from nanotf.region.decorators import is_tf_function
from nanotf.shipping import classes, heap, summaries

_DEEPEST = 4
_LONGEST = 32
_SHOWN = 80  # characters of a difference, and as many before it
_ATOMS = (bool, int, float, complex, str, bytes, type(None))

Outline = list[tuple[str, dict[str, str]]]  # of each object: its class, and what its attributes are


def outline_of(numbered: Sequence[Any]) -> bytes:
    """Returns the outline of objects that are sent by number."""
    outlines: Outline = list(_outlines(numbered))
    return zlib.compress(pickle.dumps(outlines), 1)


def _outlines(numbered: Sequence[Any]) -> Iterator[tuple[str, dict[str, str]]]:
    numbers = {id(obj): number for number, obj in enumerate(numbered)}
    for obj in numbered:
        cls: Any = heap.class_of(obj)
        if summaries.is_writer_class(cls):
            yield "a writer of summaries", {}
            continue
        found = heap.attributes_of(obj)
        found.pop(heap.VALUE, None)
        yield _name_of(cls), {name: _kind(value, numbers, 0) for name, value in found.items()}


def _kind(value: Any, numbers: Mapping[int, int], depth: int) -> str:
    if id(value) in numbers:
        return f"object {numbers[id(value)]}"
    cls: Any = type(value)
    if cls in _ATOMS:
        text = repr(value)
        mark = f"... ({len(text)}, {zlib.crc32(text.encode())})"
        return text if len(text) < 100 else text[:80] + mark
    if isinstance(value, (list, tuple, set, frozenset, dict)) or containers.is_tracking(value):
        return _of_container(value, numbers, depth)
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}, {value.shape}"
    return _of_object(value, cls)


def _of_container(value: Any, numbers: Mapping[int, int], depth: int) -> str:
    head = f"{_name_of(type(value))} of {len(value)}"
    if depth == _DEEPEST or isinstance(value, (set, frozenset)):
        return head
    if isinstance(value, dict):  # a subclass may load what it lists; a proxy is no subclass
        value = dict.items(value) if issubclass(type(value), dict) else value.items()
    items = list(itertools.islice(value, _LONGEST))
    kinds = ", ".join(_kind(item, numbers, depth + 1) for item in items)
    return f"{head}: {kinds}"


def _of_object(value: Any, cls: Any) -> str:
    tf = require_tensorflow()
    if isinstance(value, type):
        return f"the class {classes.original_class(value).__qualname__}"
    if isinstance(value, types.FunctionType):
        return "a function"
    if isinstance(value, tf.Tensor):
        return f"a tensor of {value.dtype.name}, {value.shape}"
    if isinstance(value, weakref.ref):
        return "a reference"
    if is_tf_function(value) and keras_names.is_keras_own(value.python_function):
        return "None"
    # What else pickle makes may be of another class: a worker's strategy, a proxy's content.
    return "an object"


def _name_of(cls: Any) -> str:
    return str(classes.original_class(cls).__qualname__)


def check(own: bytes, theirs: bytes, rank: int) -> None:
    """Raises `ShippingError` if a worker's outline is not the user's."""
    if own == theirs:
        return
    ours, others = (pickle.loads(zlib.decompress(each)) for each in (own, theirs))
    for number, (one, other) in enumerate(zip(ours, others, strict=False)):
        if one != other:
            raise _unlike(number, one, other, rank)
    if len(ours) != len(others):
        raise _error(f"{len(ours)} objects, of which worker {rank} has {len(others)}")


def _unlike(
    number: int, one: tuple[str, dict[str, str]], other: tuple[str, dict[str, str]], rank: int
) -> ShippingError:
    (cls, ours), (their_cls, theirs) = one, other
    named = ours.get("_name", ours.get("name", ""))
    what = f"object {number}, of class {cls}, {named}".rstrip(", ")
    if cls != their_cls:
        return _error(f"{what}, which is of class {their_cls} in worker {rank}")
    name = next(n for n in [*ours, *theirs] if ours.get(n) != theirs.get(n))
    here, there = (each.get(name, "missing") for each in (ours, theirs))
    pairs = enumerate(zip(here, there, strict=False))
    same = next((place for place, (a, b) in pairs if a != b), 0)
    begin = max(same - _SHOWN, 0)
    here, there = (each[begin : same + _SHOWN] for each in (here, there))
    return _error(f"`{name}` of {what}: {here} here, {there} in worker {rank}")


def _error(received: str) -> ShippingError:
    return ShippingError(
        "What a model or a program refers to must arrive in its workers as it is. Received: "
        f"{received}. Keep it out of the object, or make it when it is used."
    )
