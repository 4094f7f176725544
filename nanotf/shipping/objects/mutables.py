"""Sends back the contents of Python objects that a `@nano` function changes.

In a worker the function has copies of the user's objects: lists, dicts, sets and arrays, generators
of random numbers, instances of classes, variables of closures, and globals of modules sent by
value. Both sides number these objects in the same order. After the call rank 0 sends the contents
of the changed copies, and the user's objects get them.

| kind | contents |
| --- | --- |
| list, deque | the items |
| dict, set, bytearray | the items |
| `numpy.ndarray` | the numbers |
| generator of random numbers | its state |
| variable of a closure | its value |
| function sent by value | the globals of its module that it refers to |
| instance that pickle reduces to its attributes | the attributes |
| such an instance of a class of Keras or TensorFlow | those of them that pickle |
"""

from __future__ import annotations

import collections
import copyreg
import operator
import random
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np

from nanotf.compat import containers, keras_models
from nanotf.compat.versions import require_tensorflow
from nanotf.shipping.objects import heap, user_modules

_MISSING = object()
# Of a subclass of the user's, too, nothing but the value is looked at.
_VALUES = (tuple, str, bytes, int, float, complex, frozenset)


class ContentKind(NamedTuple):
    """Operations on the contents of objects of a kind."""

    take: Callable[[Any], Any]  # returns an object's contents
    put: Callable[[Any, Any], None]  # sets an object's contents
    same: Callable[[Any, Any], bool]  # of two marks: whether nothing has changed between them
    mark: Callable[[Any], Any] | None = None  # returns a mark; None if the contents are the mark


def _same_items(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def same_names(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    return list(one) == list(other) and all(map(operator.is_, one.values(), other.values()))


def _put_items(target: Any, items: Collection[Any]) -> None:
    # Leaves alone a layer's list whose parts were built here: it has these items already.
    if isinstance(target, list) and _same_items(target, list(items)):
        return
    target.clear()
    (target.update if hasattr(target, "update") else target.extend)(items)


def _put_value_at(target: Any, value: Any) -> None:
    target[...] = value


def _value_of(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # it is empty
        return []


def _put_value(cell: types.CellType, values: Sequence[Any]) -> None:
    if values:
        cell.cell_contents = values[0]
    else:
        del cell.cell_contents


def _globals_of(function: types.FunctionType) -> dict[str, Any]:
    """Returns a function's globals; {} if its module is sent by name."""
    module = sys.modules.get(function.__module__ or "")
    if module is not None and vars(module) is function.__globals__:
        return {}
    return {n: v for n, v in function.__globals__.items() if not n.startswith("__")}


def attributes_of(instance: Any) -> dict[str, Any]:
    """Returns an instance's attributes, including those in `__slots__`."""
    slots = {n: getattr(instance, n, _MISSING) for n in copyreg._slotnames(type(instance))}  # type: ignore[attr-defined]
    slots = {name: value for name, value in slots.items() if value is not _MISSING}
    return {**getattr(instance, "__dict__", {}), **slots}


def _put_attributes(instance: Any, values: Mapping[str, Any]) -> None:
    before = attributes_of(instance)
    # A class may forbid setting attributes; TensorFlow's `__setattr__` must track them.
    is_tracked = isinstance(instance, require_tensorflow().__internal__.tracking.Trackable)
    put = setattr if is_tracked else object.__setattr__
    for name in before.keys() - values.keys():
        object.__delattr__(instance, name)
    for name, value in values.items():
        if before.get(name, _MISSING) is not value:
            put(instance, name, value)


def _set_attributes(instance: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        object.__setattr__(instance, name, value)


def users_attributes(obj: Any) -> dict[str, Any]:
    """Returns the attributes of an object of a user's class that are not Keras's."""
    is_layer = isinstance(obj, require_tensorflow().keras.layers.Layer)
    return keras_models.users_attributes(obj) if is_layer else dict(vars(obj))


def _take_both(container: Any) -> tuple[Any, Any]:
    return _base_of(container)(container), attributes_of(container)


def _put_both(container: Any, both: tuple[Any, Any]) -> None:
    _put_items(container, both[0])
    _put_attributes(container, both[1])


def _same_both(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    return _BY_TYPE[type(one[0])].same(one[0], other[0]) and same_names(one[1], other[1])


def _base_of(container: Any) -> Any:
    return next(base for base in (list, dict, set) if isinstance(container, base))


def _equal(one: Any, other: Any) -> bool:
    return bool(one == other)


# For states with arrays inside, which `==` does not compare to a bool.
def _as_text(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)


_LIST = ContentKind(list, _put_items, _same_items)
_DICT = ContentKind(dict, _put_items, same_names)
_INSTANCE = ContentKind(attributes_of, _put_attributes, same_names)
_OF_LIBRARY = ContentKind(attributes_of, _set_attributes, same_names)
_CONTAINER = ContentKind(_take_both, _put_both, _same_both)
_FUNCTION = ContentKind(_globals_of, lambda f, values: f.__globals__.update(values), same_names)
_CELL = ContentKind(_value_of, _put_value, _same_items)

_BY_TYPE: dict[type, ContentKind] = {
    list: _LIST,
    collections.deque: _LIST,
    dict: _DICT,
    collections.OrderedDict: _DICT,
    collections.defaultdict: _DICT,
    collections.Counter: _DICT,
    set: ContentKind(set, _put_items, lambda one, other: set(map(id, one)) == set(map(id, other))),
    bytearray: ContentKind(
        bytes, lambda target, value: target.__setitem__(slice(None), value), _equal
    ),
    # Its mark is a digest: a copy would take as much memory again.
    np.ndarray: ContentKind(
        np.copy, _put_value_at, _equal, lambda array: sha256(array.tobytes()).digest()
    ),
    np.random.Generator: ContentKind(
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, "state", state),
        _as_text,
    ),
    np.random.RandomState: ContentKind(
        lambda generator: generator.get_state(legacy=False),
        lambda generator, state: generator.set_state(state),
        _as_text,
    ),
    random.Random: ContentKind(
        lambda generator: generator.getstate(),
        lambda generator, state: generator.setstate(state),
        _equal,
    ),
    types.CellType: _CELL,
    types.FunctionType: _FUNCTION,
    types.SimpleNamespace: _INSTANCE,
}


def _of_object(cls: type, name: str) -> bool:
    return getattr(cls, name, None) is getattr(object, name, None)


def kind_of(value: Any) -> ContentKind | None:
    """Returns the kind of an object whose contents can be compared and sent; else None."""
    cls = type(value)
    if cls in _BY_TYPE:
        return _BY_TYPE[cls]
    if containers.is_tracking(value):
        return _BY_TYPE[_base_of(value)]
    if heap.is_sent_apart(value):  # its attributes come home by themselves
        return None
    if not (user_modules.is_foreign(cls) and _is_by_attributes(value)):
        return None
    if isinstance(value, (list, dict, set)):
        return _CONTAINER
    return None if isinstance(value, _VALUES) else _INSTANCE


def _is_by_attributes(value: Any) -> bool:
    """Returns True if pickle reduces an object to its attributes, and its class is no built-in."""
    cls = type(value)
    if cls.__module__ == "builtins":
        return False
    if isinstance(value, (type, types.ModuleType, BaseException)):
        return False
    return (
        _of_object(cls, "__reduce_ex__")
        and _of_object(cls, "__reduce__")
        and _of_object(cls, "__getstate__")  # Python 3.11 has it in all classes
        and not hasattr(cls, "__setstate__")
        and not hasattr(cls, "__getnewargs__")
        and cls not in copyreg.dispatch_table
    )


def kind_in_call(value: Any) -> ContentKind | None:
    """Returns the kind of an object that a call refers to; else None.

    Not only of the user's own classes: a loop may call Keras's callbacks, or save by a
    `tf.train.CheckpointManager`. Those in layers belong to Keras.
    """
    cls = type(value)
    if user_modules.is_foreign(cls) or cls in _BY_TYPE or containers.is_tracking(value):
        return kind_of(value)
    if heap.is_sent_apart(value) or isinstance(value, (list, dict, set, *_VALUES)):
        return None
    tf = require_tensorflow()
    # The state of the first is in variables and tables, the second is the receiver's own.
    if isinstance(value, (tf.__internal__.tracking.Trackable, tf.distribute.Strategy)):
        return None
    return _OF_LIBRARY if _is_by_attributes(value) else None


def is_users(value: Any) -> bool:
    """Returns True for objects of a user's class derived from a Keras class with attributes."""
    keras = require_tensorflow().keras
    kinds = (keras.layers.Layer, keras.metrics.Metric, keras.losses.Loss)
    return isinstance(value, kinds) and user_modules.is_foreign(type(value))


def held_by(numbered: Iterable[Any]) -> list[Any]:
    """Returns the objects in the attributes of users' objects in a heap.

    Returns:
        Mutable objects, each once, in the order of both sides.
    """
    found: dict[int, Any] = {}
    for obj in filter(is_users, numbered):
        for _, value in sorted(users_attributes(obj).items()):
            _hold(value, found)
    return list(found.values())


def _hold(value: Any, found: dict[int, Any]) -> None:
    if isinstance(value, (int, float, str, bytes, type(None))):
        return
    kind = None if id(value) in found else kind_of(value)
    is_container = isinstance(value, (list, dict, set, collections.deque, np.ndarray))
    if kind is _INSTANCE or (kind is not None and is_container):
        found[id(value)] = value
    elif type(value) is not tuple:
        return
    inside: Iterable[Any] = ()
    if kind is _INSTANCE:
        inside = attributes_of(value).values()
    elif isinstance(value, dict):
        inside = value.values()
    elif isinstance(value, (list, tuple, collections.deque)):
        inside = value
    for item in list(inside):
        _hold(item, found)


def is_mutable(value: Any) -> bool:
    """Returns True if a value's contents can be sent back."""
    return kind_in_call(value) is not None


def is_instance(value: Any) -> bool:
    """Returns True if a value consists only of its attributes."""
    return kind_in_call(value) in (_INSTANCE, _OF_LIBRARY)


def is_data(value: Any, depth: int = 20) -> bool:
    """Returns True if a value holds only numbers and texts: no code, no objects with identity."""
    if isinstance(value, (bool, int, float, complex, str, bytes, bytearray, type(None))):
        return True
    if isinstance(value, (np.generic, np.random.Generator, np.random.RandomState, random.Random)):
        return True
    if isinstance(value, np.ndarray):
        return bool(value.dtype.kind != "O")
    if require_tensorflow().is_tensor(value):
        return hasattr(value, "numpy") and not hasattr(value, "assign")
    if depth and type(value) in _BY_TYPE and isinstance(value, dict):
        return all(is_data(k, depth) and is_data(v, depth - 1) for k, v in value.items())
    if depth and (type(value) in (tuple, frozenset) or type(value) in _BY_TYPE):
        is_container = isinstance(value, (list, tuple, set, frozenset, collections.deque))
        return is_container and all(is_data(item, depth - 1) for item in value)
    return False


class ContentsSnapshot:
    """Contents of a worker's copies before the call.

    Args:
        mutables: the copies, in the order of both sides.
    """

    def __init__(self, mutables: Sequence[Any]) -> None:
        self._mutables = mutables
        self._before = [_mark(value) for value in mutables]

    def changed(self, pickles: Callable[[Any], bool]) -> dict[int, Any]:
        """Returns the contents of the copies that have changed, by number.

        Args:
            pickles: returns True if a value can be sent. It is asked for what Keras's and
                TensorFlow's objects hold, such as an open file, which they may keep to themselves.
        """
        found: dict[int, Any] = {}
        modules: set[int] = set()  # ids of their globals, which functions share
        for number, (value, before) in enumerate(zip(self._mutables, self._before, strict=True)):
            kind = _of(value)
            if kind is _OF_LIBRARY:
                held = attributes_of(value)
                new = {n: v for n, v in held.items() if before.get(n, _MISSING) is not v}
                if sent := {name: each for name, each in new.items() if pickles(each)}:
                    found[number] = sent
            elif kind is not _FUNCTION:
                if not kind.same(before, _mark(value)):
                    found[number] = kind.take(value)
            elif id(value.__globals__) not in modules:
                modules.add(id(value.__globals__))
                now = _globals_of(value)
                set_here = {n: v for n, v in now.items() if before.get(n, _MISSING) is not v}
                found.update({number: set_here} if set_here else {})
        return found


def put(mutables: Sequence[Any], changed: Mapping[int, Any]) -> None:
    """Gives the user's objects the contents of the copies, see `ContentsSnapshot.changed`."""
    for number, contents in changed.items():
        value = mutables[number]
        _of(value).put(value, contents)


def _of(value: Any) -> ContentKind:
    kind = kind_in_call(value)
    assert kind is not None, value
    return kind


def _mark(value: Any) -> Any:
    kind = _of(value)
    return (kind.mark or kind.take)(value)
