"""Compares the objects that arrive in a process with the sender's: both make the same outline.

An outline lists, for each object that is sent by number (`heap`), its class, its attributes, and
what each attribute is: a number or a text itself, another object's number, a container's class and
items, or a class. It does not see values of variables and arrays, attributes of objects that are
not sent by number, nor what is deeper than `_DEEPEST` containers or behind their first `_LONGEST`
items.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import types
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from nanotf.compat import containers, keras_common
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import ShippingError
from nanotf.region.decorators import is_tf_function
from nanotf.shipping.objects import user_modules

_DEEPEST = 4
_LONGEST = 1000
_TEXT = 100  # characters
_PART = 100_000  # characters of a text that are compared
_BITS = 10_000  # of an integer that is compared: Python refuses to print longer ones
ATOMS = (bool, int, float, complex, str, bytes, type(None))


def outline_of(described: Iterable[tuple[Any, Any, Mapping[str, Any]]]) -> str:
    """Returns the outline of objects, as JSON.

    Args:
        described: an object, its class and its attributes, by number.
    """
    found = list(described)
    kinds = kinds_of([obj for obj, _, _ in found], [attributes for _, _, attributes in found])
    return json.dumps([(_name_of(cls), of) for (_, cls, _), of in zip(found, kinds, strict=True)])


def kinds_of(
    numbered: Sequence[Any], attributes: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Returns what each attribute of each object is, see `_kind`."""
    numbers = {id(obj): number for number, obj in enumerate(numbered)}
    return [{name: _kind(value, numbers, 0) for name, value in of.items()} for of in attributes]


def _kind(value: Any, numbers: Mapping[int, int], depth: int) -> Any:
    """Returns an object's number, a text, or a list of a container's text and its items."""
    if id(value) in numbers:
        return numbers[id(value)]
    cls: Any = type(value)
    if cls in ATOMS:
        return _of_atom(value)
    if isinstance(value, (list, tuple, set, frozenset, dict)) or containers.is_tracking(value):
        return _of_container(value, numbers, depth)
    return _of_object(value)


def _of_atom(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > _BITS:
        return f"an integer of {value.bit_length()} bits"
    if not isinstance(value, (str, bytes)):
        return repr(value)
    part = value[:_PART]
    if len(part) <= _TEXT:
        return repr(value)
    code = part if isinstance(part, bytes) else part.encode(errors="surrogatepass")
    return f"{value[:_TEXT]!r}... ({len(value)}, {zlib.crc32(code):x})"


def _of_container(value: Any, numbers: Mapping[int, int], depth: int) -> Any:
    head = f"{_name_of(type(value))} of {len(value)}"
    if depth == _DEEPEST or isinstance(value, (set, frozenset)):
        return head  # the order of a set's items differs between processes
    if isinstance(value, dict):  # a subclass may load what it lists; a proxy is no subclass
        items = dict.items(value) if issubclass(type(value), dict) else value.items()
        found = [each for item in itertools.islice(items, _LONGEST) for each in item]
    else:
        found = list(itertools.islice(value, _LONGEST))
    return [head, *(_kind(item, numbers, depth + 1) for item in found)]


def _of_object(value: Any) -> str:
    tf = require_tensorflow()
    if isinstance(value, type):
        return f"the class {_name_of(value)}"
    if isinstance(value, types.FunctionType):
        return "a function"
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}, {value.shape}"
    if isinstance(value, tf.Tensor):
        return f"a tensor of {value.dtype.name}, {value.shape}"
    if is_tf_function(value) and keras_common.is_keras_own(value.python_function):
        return "None"
    # What else pickle makes may be of another class: a worker's strategy, a proxy's content.
    return "an object"


def _name_of(cls: Any) -> str:
    return str(user_modules.original_class(cls).__qualname__)


def check(sent: str, arrived: str, numbered: Sequence[Any]) -> None:
    """Checks that what has arrived is what was sent.

    Args:
        sent, arrived: the sender's outline and the receiver's.
        numbered: the objects that have arrived.

    Raises:
        ShippingError: They differ; names the attribute.
    """
    if sent == arrived:
        return
    pairs = list(zip(numbered, json.loads(sent), json.loads(arrived), strict=True))
    for obj, (here, _), (there, _) in pairs:
        if here != there:
            raise _error(title(obj), here, there)
    for obj, (_, ours), (_, theirs) in pairs:
        for name in {**ours, **theirs}:
            here, there = (attributes.get(name, "missing") for attributes in (ours, theirs))
            if here != there:
                kinds = (_words(kind, numbered) for kind in _first_difference(here, there))
                raise _error(f"the attribute {name!r} of {title(obj)}", *kinds)


def title(obj: Any) -> str:
    """Returns an object's class, and its name if it has one."""
    name = None
    with contextlib.suppress(Exception):  # a property of the user's
        name = obj.name
    return f"{_name_of(type(obj))} {name!r}" if isinstance(name, str) else _name_of(type(obj))


def _first_difference(here: Any, there: Any) -> tuple[Any, Any]:
    if isinstance(here, list) and isinstance(there, list) and here[0] == there[0]:
        pairs = zip(here, there, strict=True)
        return _first_difference(*next(pair for pair in pairs if pair[0] != pair[1]))
    return here, there


def _words(kind: Any, numbered: Sequence[Any]) -> str:
    if isinstance(kind, int):
        return title(numbered[kind])
    return str(kind[0] if isinstance(kind, list) else kind)


def _error(what: str, here: str, there: str) -> ShippingError:
    return ShippingError(
        "What a model or a program refers to must arrive in its workers as it is. Received: "
        f"{what}, which is {here} in your process and {there} in a worker. Keep it out of the "
        "object, or make it when it is used."
    )
