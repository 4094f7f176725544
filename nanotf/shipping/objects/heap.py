"""Pickles Keras's objects for another process by their classes and attributes.

Models, layers, variables and Keras's objects between them refer to each other in cycles and long
chains. So each object is sent separately, and others refer to it by number. One stream holds the
top-level value, then the attributes of every object by number. The first reference to an object
tells the receiver how to make it: a bare object, which gets its attributes later.

| object | is sent as |
| --- | --- |
| instance of a Keras class or a class derived from one | class and attributes |
| `tf.Variable` | class, shape, type and attributes; its value separately (`state`) |
| writer of summaries | its number; the parent writes (`summaries`) |
| `tf.train.Checkpoint` | class and the objects that it saves |
| list, dict or set that tracks its items | items and attributes |
| lookup table | its initializer, or its content |
| lock, thread-local data, cache with weak keys | a new one |
| `tf.data.Dataset` | its graph, and the variables that it reads |
| `tf.distribute.Strategy` | the receiver's strategy |
| tensor of a graph | type and shape: a tensor of another graph, which cannot be computed either |
| function that Keras has made for itself | None: useless elsewhere |
| resource | None, which the check of what arrives (`outlines`) refuses in an object's attributes |
"""

from __future__ import annotations

import enum
import functools
import hashlib
import importlib
import io
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanotf.compat import (
    containers,
    graphs,
    keras_common,
    keras_layers,
    keras_models,
    keras_optimizers,
    values,
)
from nanotf.compat.generation import generation
from nanotf.compat.generators import from_generator
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import ShippingError
from nanotf.region.decorators import is_tf_function
from nanotf.shipping import summaries
from nanotf.shipping.objects import outlines, pickling, user_modules

VALUE = "_nanotf_value"  # among a variable's attributes, if its value comes with them
_LOCKS = {type(threading.Lock()): threading.Lock, type(threading.RLock()): threading.RLock}
_ATOMS = frozenset({bool, int, float, str, bytes, type(None), types.CodeType})
_BY_VALUE = (
    type,
    enum.Enum,
    BaseException,
    list,
    dict,
    set,
    tuple,
    str,
    weakref.WeakKeyDictionary,
)


@functools.cache
def _is_numbered(cls: Any) -> bool:
    """Returns True if each object of a class is sent separately, by number."""
    tf = require_tensorflow()
    if issubclass(cls, (tf.Variable, tf.train.Checkpoint, *keras_optimizers.optimizer_classes())):
        return True
    keras = tf.keras
    schedule = keras.optimizers.schedules.LearningRateSchedule  # an optimizer asks it at once
    outside = (keras.callbacks.Callback, keras.utils.Sequence)  # never parts of a model
    if issubclass(cls, (*_BY_VALUE, schedule, *outside)):
        return False
    return hasattr(cls, "__dict__") and any(map(keras_common.is_keras_own, cls.__mro__))


def is_sent_apart(obj: Any) -> bool:
    """Returns True for an object that is sent separately, by number."""
    cls: Any = type(obj)
    return bool(_is_numbered(cls))


# ---------------------------------------------------------------------- makers of bare objects
def _functional(cls: Any) -> Any:
    keras_models.make_functional(cls)
    return pickling.bare(cls)


def _operation(cls: Any, config: dict[str, Any]) -> Any:
    """Makes a layer that is a TensorFlow operation: its class makes its `call`."""
    return cls.from_config(config)


def _maker(obj: Any) -> Any:
    """Returns the maker of a bare object: its class, or else a partial function that makes it."""
    config = generation().operation_config(obj)
    if config is not None:
        return functools.partial(_operation, type(obj), config)
    cls = class_of(obj)
    if isinstance(obj, require_tensorflow().Variable) and values.behind(obj) is obj:
        kind = values.kind_of(obj)
        return functools.partial(values.without_value, cls, obj.shape, obj.dtype.name, kind)
    is_functional = isinstance(obj, keras_models.functional_class())
    return functools.partial(_functional, cls) if is_functional else cls


def class_of(obj: Any) -> Any:
    """Returns the class that an object has in a worker, whatever strategy it was made under."""
    if not isinstance(obj, require_tensorflow().Variable):
        return type(obj)
    is_own = values.behind(obj) is obj
    return values.class_of(obj) if is_own else generation().class_of_wrapper(obj)


def _outlined_class(maker: Any, obj: Any) -> Any:
    """Returns the class that an outline names: the maker's if the receiver makes another object."""
    return class_of(obj) if isinstance(maker, (type, functools.partial)) else type(maker)


def _travels(name: str) -> bool:
    return not name.startswith("_nanotf") or name == keras_layers.DECLARED


def attributes_of(obj: Any) -> dict[str, Any]:
    """Returns an object's attributes, in an order that does not depend on when they were set."""
    tf = require_tensorflow()
    if isinstance(obj, tf.train.Checkpoint):
        return {name: value for name, value in vars(obj).items() if not name.startswith("_")}
    cls: Any = type(obj)
    if summaries.is_writer_class(cls):
        return {}
    is_variable = isinstance(obj, tf.Variable)
    # A copy at once: a thread of the user's may add some.
    found = values.attributes(obj) if is_variable else dict(vars(obj))
    found = {name: value for name, value in found.items() if _travels(name)}
    found = generation().for_another_process(obj, containers.as_new(found))
    inside = values.kept_inside(obj) if is_variable else None
    return dict(sorted(found.items())) | ({} if inside is None else {VALUE: inside})


def _without_value(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if name != VALUE}


def set_attributes(obj: Any, attributes: Mapping[str, Any]) -> None:
    """Sets what `attributes_of` has returned in another process."""
    found = _without_value(attributes)
    if isinstance(obj, require_tensorflow().Variable):
        values.set_attributes(obj, found)
    else:
        vars(obj).update(found)
    if VALUE in attributes:
        values.share(obj, attributes[VALUE])


# -------------------------------------------------------------------------------- the stream
class HeapPickler(pickling.TensorPickler):
    """Pickler that writes Keras's objects as numbers, and keeps them for `dump_attributes`.

    Args:
        buffer_callback: as in `pickle.Pickler`.
        known: by id, the objects that the receiver has: a key of its `Unpickler`'s `known`, and the
            place there.
        modules: takes the modules with variables or data among their globals, which a worker would
            import with others. None takes none.

    Attributes:
        numbered: list of the objects, by number.
    """

    def __init__(
        self,
        file: io.BytesIO,
        buffer_callback: Any = None,
        known: Mapping[int, tuple[str, int]] | None = None,
        modules: user_modules.ModulesByValue | None = None,
    ) -> None:
        super().__init__(file, buffer_callback)
        self.modules = modules
        self.numbered: list[Any] = []
        self._ids: dict[int, Any] = dict(known or {})
        # Of an object whose class may refer to it, as in a method that names a global: the object
        # may be asked for before its class is complete, so each reference says how to make it.
        self._classes: dict[int, tuple[int, Any]] = {}
        self._makers: list[Any] = []
        self._written: list[dict[str, Any]] = []

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) in _ATOMS:  # most of what is pickled; nothing more to ask
            return None
        found = self._ids.get(id(obj))
        if found is None and (maker := self.maker(obj)) is not None:
            number = self._ids[id(obj)] = len(self.numbered)
            self.numbered.append(obj)
            self._makers.append(maker)
            if isinstance(maker, type) and user_modules.is_foreign(maker):
                self._classes[number] = number, maker
            return number, maker
        return self._classes.get(found, found) if isinstance(found, int) else found

    def is_new(self) -> bool:
        """Returns True if, without its memo, it is as it was made: it has met plain objects."""
        return not self.numbered and not self.globals_ref  # cloudpickle's, of functions by value

    def maker(self, obj: Any) -> Any:
        """Returns the maker of an object that is sent by number, see `_maker`; else None."""
        cls: Any = type(obj)
        if summaries.is_writer_class(cls):
            return summaries.WriterMaker(len(self.numbered))
        return _maker(obj) if _is_numbered(cls) else None

    def attributes(self, obj: Any) -> dict[str, Any]:
        """Returns the attributes to write, after everything that refers to the object."""
        return attributes_of(obj)

    def dump_attributes(self) -> None:
        """Writes the attributes of all objects found so far, and of all reachable from them."""
        while len(self._written) < len(self.numbered):  # it grows in this loop
            obj = self.numbered[len(self._written)]
            self._written.append(self.attributes(obj))
            pickling.dump(self, self._written[-1], functools.partial(outlines.title, obj))

    def for_trial(self) -> pickling.TensorPickler:
        return HeapPickler(io.BytesIO(), lambda _: False, self._ids)

    def outline(self) -> str:
        """Returns the outline of the objects, as they were written."""
        kinds = map(_outlined_class, self._makers, self.numbered)
        written = map(_without_value, self._written)
        return outlines.outline_of(zip(self.numbered, kinds, written, strict=True))

    def reducer_override(self, obj: Any) -> Any:
        if self.modules is not None and isinstance(obj, (type, types.FunctionType)):
            self.modules.take_holder(obj)
        reduced = containers.described(obj) or _replaced(obj)
        return super().reducer_override(obj) if reduced is None else reduced


def _none(*_: Any) -> None:
    """Replaces objects that are useless in another process."""


def _new_cache(cls: Any) -> Any:
    cache = cls.__new__(cls)
    weakref.WeakKeyDictionary.__init__(cache)
    return cache


def _set_factory(cache: Any, factory: Any) -> None:
    if factory is not None:
        cache.default_factory = factory


def _replaced(obj: Any) -> Any:
    """Returns the result of `reducer_override` for an object that the receiver must remake."""
    if isinstance(obj, types.FunctionType):
        return _library_function(obj)
    tf = require_tensorflow()
    cls: Any = type(obj)
    if cls is type:
        return None
    if cls in _LOCKS:
        return _LOCKS[cls], ()
    if isinstance(obj, threading.local):
        return threading.local, ()
    if isinstance(obj, weakref.ref):
        return weakref.ref, (obj(),)
    if isinstance(obj, weakref.WeakKeyDictionary):
        factory = getattr(obj, "default_factory", None)
        return _new_cache, (cls,), factory, None, None, _set_factory
    if isinstance(obj, tf.distribute.Strategy):
        return tf.distribute.get_strategy, ()
    if isinstance(obj, tf.keras.optimizers.schedules.LearningRateSchedule):
        # Keras 3 would pickle it through a saved model, which loses local classes.
        return pickling.bare, (cls,), vars(obj)
    if isinstance(obj, tf.Module) and cls.__reduce_ex__ is object.__reduce_ex__:
        return pickling.bare, (cls,), containers.as_new(vars(obj))
    if isinstance(obj, tf.data.Dataset):
        return _described_dataset(obj)
    if isinstance(obj, tf.DType):
        return tf.as_dtype, (obj.name,)
    if hasattr(obj, "dtype") and isinstance(obj, tf.Tensor):
        if not hasattr(obj, "numpy"):
            return graphs.elsewhere, (obj.dtype, obj.shape)
        if obj.dtype in (tf.resource, tf.variant):
            return _none, ()
    if is_tf_function(obj) and keras_common.is_keras_own(obj.python_function):
        return _none, ()
    return None


def _described_dataset(dataset: Any) -> Any:
    from nanotf.compat import dataset_graphs

    description = dataset_graphs.describe(dataset)
    if description is None:
        return _unreadable, (dataset.element_spec,)
    return _made, (description,)


def _made(description: Any) -> Any:
    return description.make()


def _unreadable(element_spec: Any) -> Any:
    """Returns a dataset that says why this process cannot read it."""

    def refuse() -> Any:
        raise ShippingError(
            "A dataset that a model refers to must not run Python functions to be read in its "
            "steps. Received: one that does, or whose graph TensorFlow cannot write. Map it with "
            "TensorFlow's operations, or keep its elements in a tensor."
        )

    return from_generator(refuse, element_spec)


def _library_function(function: types.FunctionType) -> Any:
    """Reduces a function of an installed library that needs more than a name.

    A function that its name does not lead to, as it is defined in another, is made from its code
    and the receiver's module.
    """
    if (function.__module__ or "").startswith("tensorflow"):
        name = containers.public_name(function)
        if name is not None:
            return containers.by_public_name, (name,)
    module = sys.modules.get(function.__globals__.get("__name__", ""))
    if module is None or vars(module) is not function.__globals__:
        return None
    if user_modules.is_users(module) or is_found(function):
        return None
    options = function.__name__, function.__defaults__, function.__closure__
    made = module.__name__, function.__code__, *options
    attributes = {**vars(function), **_named(function)}
    return _local_function, made, attributes, None, None, _set_attributes


def is_found(definition: Any) -> bool:
    """Returns True if the name of a function or class leads to it."""
    found: Any = sys.modules.get(definition.__module__ or "")
    for name in definition.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is definition


def _named(function: types.FunctionType) -> dict[str, Any]:
    found = {
        "__module__": function.__module__,
        "__qualname__": function.__qualname__,
        "__kwdefaults__": function.__kwdefaults__,
    }
    return {name: value for name, value in found.items() if value is not None}


def _local_function(module: str, code: types.CodeType, *options: Any) -> types.FunctionType:
    return types.FunctionType(code, vars(importlib.import_module(module)), *options)


def _set_attributes(function: types.FunctionType, attributes: Mapping[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(function, name, value)


class Unpickler(pickle.Unpickler):
    """Unpickler for the stream of a `HeapPickler`.

    Args:
        buffers: as in `pickle.Unpickler`.
        known: the objects that the sender knows to be here, by the kinds that it names.

    Attributes:
        numbered: list of the objects, by number.
    """

    def __init__(
        self,
        file: io.BytesIO,
        buffers: Sequence[Any] = (),
        known: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        super().__init__(file, buffers=buffers)
        self._made: dict[int, Any] = {}
        self._makers: list[Any] = []
        self._checkpoints: list[tuple[Any, dict[str, Any]]] = []
        self._known = known or {}
        self._read = 0

    @property
    def numbered(self) -> list[Any]:
        return [self._made[number] for number in range(len(self._made))]

    @property
    def has_objects(self) -> bool:
        """Returns True if it has made any object that was sent by number."""
        return bool(self._made)

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, int):
            return self._made[pid]
        if isinstance(pid[0], str):
            kind, number = pid
            return self._known[kind][number]
        number, maker = pid
        if number not in self._made:  # a maker may come several times, see `HeapPickler`
            self._made[number] = self.make(maker)
            self._makers.append(maker)
        return self._made[number]

    def make(self, maker: Any) -> Any:
        """Makes a bare object from the result of `HeapPickler.maker`."""
        return pickling.bare(maker) if isinstance(maker, type) else maker()

    def load_attributes(self) -> None:
        """Sets the attributes of all objects read so far, and of all reachable from them."""
        if self._read == len(self._made):
            return
        tf = require_tensorflow()
        while self._read < len(self._made):  # it grows in this loop
            obj, attributes = self._made[self._read], self.load()
            self._read += 1
            if isinstance(obj, tf.train.Checkpoint):
                self._checkpoints.append((obj, attributes))
            else:
                set_attributes(obj, attributes)

    def complete(self) -> None:
        """Makes what depends on the identity of all objects."""
        generation().restore_identities(self.numbered)
        for checkpoint, attributes in self._checkpoints:
            checkpoint.__init__(**attributes)  # last, since it looks at what it saves

    def outline(self) -> str:
        """Returns the outline of the objects, as they are now."""
        kinds = [_outlined_class(*each) for each in zip(self._makers, self.numbered, strict=True)]
        made = zip(self.numbered, kinds, strict=True)
        return outlines.outline_of(
            (obj, cls, _without_value(attributes_of(obj)) if cls is class_of(obj) else {})
            for obj, cls in made
        )


def dump(parts: Mapping[str, Any], make: Callable[[io.BytesIO], HeapPickler]) -> tuple[bytes, Any]:
    """Pickles objects and everything reachable from them.

    Args:
        parts: the objects, by their names in errors.
        make: returns a new pickler that writes to a file.

    Returns:
        The bytes, for `load`, and the pickler.

    Raises:
        ShippingError: Something cannot be sent; names the part.
    """
    file = io.BytesIO()
    pickler = make(file)
    dump_with(pickler, file, parts)
    return file.getvalue(), pickler


def dump_with(pickler: HeapPickler, file: io.BytesIO, parts: Mapping[str, Any]) -> None:
    """Pickles objects with a pickler that writes to `file`; raises as `dump`."""
    file.write(pickle.dumps(len(parts)))
    for name, part in parts.items():
        try:
            pickling.dump(pickler, part)
            pickler.dump_attributes()
        except ShippingError as error:
            raise pickling.named(name, error) from error.__cause__
    file.write(pickle.dumps(_outline(file, pickler)) if pickler.numbered else _PICKLED_NONE)


_NO_OBJECTS = "[]"  # the outline of none
_PICKLED_NONE = pickle.dumps(_NO_OBJECTS)
_PICKLED_ONE = pickle.dumps(1)
_outlines: dict[bytes, str] = {}  # by the bytes in front of them; the oldest first
_OUTLINES_KEPT = 8


def _outline(file: io.BytesIO, pickler: HeapPickler) -> str:
    """Returns a pickler's outline, most often an earlier one's: equal bytes are equal objects."""
    key = hashlib.sha256(file.getbuffer()).digest()
    _outlines[key] = found = _outlines.pop(key, None) or pickler.outline()
    while len(_outlines) > _OUTLINES_KEPT:
        del _outlines[next(iter(_outlines))]
    return found


def plain_part(data: bytes) -> memoryview | None:
    """Returns the pickle in what `dump` has made of one part, if any unpickler can read it.

    It can unless the part has objects that are sent by number. An `Unpickler` takes ten times as
    long for a number as `pickle.loads`.
    """
    if data.startswith(_PICKLED_ONE) and data.endswith(_PICKLED_NONE):
        return memoryview(data)[len(_PICKLED_ONE) :]
    return None


def load(
    unpickler: Unpickler,
    is_checked: bool = True,
    put: Callable[[Sequence[Any]], None] = lambda _: None,
) -> list[Any]:
    """Undoes `dump`; variables of the sender's heap have no values yet.

    Args:
        is_checked: whether to compare the objects with the sender's.
        put: called with what `dump` pickled, gives objects of the receiver's own what they need of
            it. Objects may be complete only then: a new one may be known by its place in theirs.

    Returns:
        The objects that `dump` pickled.

    Raises:
        ShippingError: An object is not as it was.
    """
    parts = []
    for _ in range(unpickler.load()):
        parts.append(unpickler.load())
        unpickler.load_attributes()
    sent = unpickler.load()
    put(parts)
    if sent == _NO_OBJECTS and not unpickler.has_objects:
        return parts
    unpickler.complete()
    if is_checked:
        outlines.check(sent, unpickler.outline(), unpickler.numbered)
    return parts


# --------------------------------------------------------------------------------- models
def dump_model(model: Any) -> tuple[bytes, list[Any]]:
    """Pickles a model, with everything that it and its code refer to.

    Args:
        model: a built model.

    Returns:
        The bytes, for `load_model`, and the objects that are sent by number.

    Raises:
        ShippingError: Something in it cannot be sent.
    """
    with user_modules.ModulesByValue() as modules:
        named = {f"The model {model.name!r}": model}
        data, pickler = dump(named, lambda file: HeapPickler(file, modules=modules))
    return data, pickler.numbered


def load_model(data: bytes, is_checked: bool = True) -> tuple[Any, list[Any]]:
    """Makes the model that `dump_model` pickled. Its variables have no values yet.

    Args:
        is_checked: as in `load`.

    Returns:
        The model, and the objects by number.
    """
    unpickler = Unpickler(io.BytesIO(data))
    return load(unpickler, is_checked)[0], unpickler.numbered
