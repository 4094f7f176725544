"""Pickles Keras's objects for another process by their classes and attributes.

Models, layers, variables and Keras's objects between them refer to each other in cycles and long
chains. So each object is sent separately, and others refer to it by number. One stream holds the
top-level value, then the attributes of every object by number. The first reference to an object
tells the receiver how to make it: a bare object, which gets its attributes later.

| object | is sent as |
| --- | --- |
| instance of a Keras class or a class derived from one | class and attributes |
| `tf.Variable` | shape, type, name; its value separately (`state`) |
| optimizer | class and configuration, not built (`optimizers`) |
| variable of an optimizer | its index in the optimizer |
| writer of summaries | its number; the parent writes (`summaries`) |
| `tf.train.Checkpoint` | class and the objects that it saves |
| list, dict or set that tracks its items | items and attributes |
| lookup table | its initializer, or its content |
| lock, thread-local data, cache with weak keys | a new one |
| `tf.distribute.Strategy` | the receiver's strategy |
| symbolic tensor, resource, function that Keras has made for itself | None: useless elsewhere |
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import functools
import importlib
import io
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanotf.compat import containers, keras_names, keras_optimizers
from nanotf.compat.generation import generation
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import ShippingError
from nanotf.region.decorators import is_tf_function
from nanotf.shipping import classes, objects, optimizers, pickling, summaries, user_modules

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
    return hasattr(cls, "__dict__") and any(map(keras_names.is_keras_own, cls.__mro__))


@functools.cache
def _made_by_class(cls: Any) -> frozenset[str]:
    """Returns the function attributes that a class creates for each object."""
    made = vars(cls.__new__(cls))
    return frozenset(name for name, value in made.items() if isinstance(value, types.FunctionType))


# ---------------------------------------------------------------------- makers of bare objects
@dataclasses.dataclass(frozen=True)
class _VariableMaker:
    """Maker of a `tf.Variable`."""

    shape: tuple[int | None, ...]
    dtype: str
    name: str
    trainable: bool
    synchronization: int
    aggregation: int
    constraint: Any

    @classmethod
    def of(cls, variable: Any) -> _VariableMaker:
        return cls(
            tuple(variable.shape),
            variable.dtype.name,
            variable.name.split(":")[0],
            bool(variable.trainable),
            variable.synchronization.value,
            variable.aggregation.value,
            variable.constraint,
        )

    def make(self) -> Any:
        tf = require_tensorflow()
        return tf.Variable(
            tf.zeros([d or 0 for d in self.shape], self.dtype),
            shape=self.shape,
            name=self.name,
            trainable=self.trainable,
            synchronization=tf.VariableSynchronization(self.synchronization),
            aggregation=tf.VariableAggregation(self.aggregation),
            constraint=self.constraint,
        )


@dataclasses.dataclass(frozen=True)
class _CastMaker:
    """Maker of a Keras 2 variable that casts another variable's values."""

    variable: Any

    def make(self) -> Any:
        return generation().casting(self.variable)


@dataclasses.dataclass(frozen=True)
class _OfOptimizer:
    """Finder of a variable that belongs to an optimizer."""

    optimizer: Any
    place: int

    def make(self) -> Any:
        _ = self.optimizer.iterations  # Keras 2's legacy optimizers make it on first access
        return optimizers.variables_at_first(self.optimizer)[self.place]


@dataclasses.dataclass(frozen=True)
class _FunctionalMaker:
    """Maker of a functional model of a user's class."""

    cls: Any

    def make(self) -> Any:
        keras_names.make_functional(self.cls)
        return self.cls.__new__(self.cls)


@dataclasses.dataclass(frozen=True)
class _OperationMaker:
    """Maker of a layer that is a TensorFlow operation."""

    cls: Any
    config: dict[str, Any]

    def make(self) -> Any:
        return self.cls.from_config(self.config)


def _maker(obj: Any) -> Any:
    """Returns the maker of a bare object: its class, or an object with `make()`."""
    if isinstance(obj, keras_optimizers.optimizer_classes()):
        return optimizers.Configured.of(obj)
    if isinstance(obj, require_tensorflow().Variable):
        inner = generation().cast_by(obj)
        return _VariableMaker.of(obj) if inner is None else _CastMaker(inner)
    config = generation().operation_config(obj)
    if config is not None:
        return _OperationMaker(type(obj), config)
    is_functional = isinstance(obj, keras_names.functional_class())
    return _FunctionalMaker(type(obj)) if is_functional else type(obj)


def _travels(name: str) -> bool:
    return not name.startswith("_nanotf") or name == keras_names.DECLARED


def _attributes(obj: Any) -> dict[str, Any]:
    """Returns an object's attributes, in an order that does not depend on when they were set."""
    tf = require_tensorflow()
    if isinstance(obj, (tf.Variable, *keras_optimizers.optimizer_classes())):
        return {}
    if isinstance(obj, tf.train.Checkpoint):
        return {name: value for name, value in vars(obj).items() if not name.startswith("_")}
    cls: Any = type(obj)
    if summaries.is_writer_class(cls):
        return {}
    left_behind = _made_by_class(cls) if hasattr(cls, "call") else ()
    found = {n: v for n, v in vars(obj).items() if n not in left_behind and _travels(n)}
    found = generation().for_another_process(obj, containers.as_new(found))
    return dict(sorted(found.items()))


# -------------------------------------------------------------------------------- the stream
class Pickler(pickling.Pickler):
    """Pickler that writes Keras's objects as numbers, and keeps them for `dump_attributes`.

    Args:
        file: `io.BytesIO`.
        buffer_callback: as in `pickle.Pickler`.
        known: mapping of int to tuple of str and int, by id, of the objects that the receiver has:
            a key of its `Unpickler`'s `known`, and the place there.

    Attributes:
        numbered: list of the objects, by number.
    """

    def __init__(
        self,
        file: io.BytesIO,
        buffer_callback: Any = None,
        known: Mapping[int, tuple[str, int]] | None = None,
    ) -> None:
        super().__init__(file, buffer_callback)
        self.numbered: list[Any] = []
        self.of_optimizers: Mapping[int, tuple[Any, int]] = {}  # see `optimizers.variables_by_id`
        self._ids: dict[int, Any] = dict(known or {})
        # Of an object whose class may refer to it, as in a method that names a global: the object
        # may be asked for before its class is complete, so each reference says how to make it.
        self._classes: dict[int, tuple[int, Any]] = {}
        self._written = 0

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) in _ATOMS:
            return None
        found = self._ids.get(id(obj))
        if found is None and (maker := self.maker(obj)) is not None:
            number = self._ids[id(obj)] = len(self.numbered)
            self.numbered.append(obj)
            if isinstance(maker, type) and classes.is_foreign(maker):
                self._classes[number] = number, maker
            return number, maker
        return self._classes.get(found, found) if isinstance(found, int) else found

    def maker(self, obj: Any) -> Any:
        """Returns the maker of an object that is sent by number, see `_maker`; else None."""
        cls: Any = type(obj)
        if summaries.is_writer_class(cls):
            return summaries.WriterMaker(len(self.numbered))
        if not _is_numbered(cls):
            return None
        place = self.of_optimizers.get(id(obj))
        return _maker(obj) if place is None else _OfOptimizer(*place)

    def attributes(self, obj: Any) -> dict[str, Any]:
        """Returns the attributes to write, after everything that refers to the object."""
        return {} if id(obj) in self.of_optimizers else _attributes(obj)

    def dump_attributes(self) -> None:
        """Writes the attributes of all objects found so far, and of all reachable from them."""
        while self._written < len(self.numbered):  # it grows in this loop
            obj = self.numbered[self._written]
            self._written += 1
            with pickling.naming(f"An object of class {type(obj).__name__}"):
                pickling.dump(self, self.attributes(obj))

    def reducer_override(self, obj: Any) -> Any:
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
        return copyreg.__newobj__, (cls,), vars(obj)  # type: ignore[attr-defined]
    if isinstance(obj, tf.Module) and cls.__reduce_ex__ is object.__reduce_ex__:
        return copyreg.__newobj__, (cls,), containers.as_new(vars(obj))  # type: ignore[attr-defined]
    if isinstance(obj, tf.DType):
        return tf.as_dtype, (obj.name,)
    if hasattr(obj, "dtype") and not hasattr(obj, "assign") and tf.is_tensor(obj):
        of_resource = obj.dtype in (tf.resource, tf.variant)
        if of_resource or (isinstance(obj, tf.Tensor) and not hasattr(obj, "numpy")):
            return _none, ()
    if is_tf_function(obj) and keras_names.is_keras_own(obj.python_function):
        return _none, ()
    return None


def _library_function(function: types.FunctionType) -> Any:
    """Reduces a function of TensorFlow's or Keras's that needs more than a name.

    A function that is defined in another is made from its code and the receiver's module.
    """
    if (function.__module__ or "").startswith("tensorflow"):
        name = containers.public_name(function)
        return None if name is None else (containers.by_public_name, (name,))
    if keras_names.is_keras_own(function) and "<locals>" in function.__qualname__:
        options = function.__name__, function.__defaults__, function.__closure__
        return _local_function, (function.__module__, function.__code__, *options)
    return None


def _local_function(module: str, code: types.CodeType, *options: Any) -> types.FunctionType:
    return types.FunctionType(code, vars(importlib.import_module(module)), *options)


class Unpickler(pickle.Unpickler):
    """Unpickler for the stream of a `Pickler`.

    Args:
        file: `io.BytesIO`.
        buffers: list of buffers, as in `pickle.Unpickler`.
        known: mapping of str to sequence of objects that the sender knows to be here.

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
        self._known = known or {}
        self._read = 0

    @property
    def numbered(self) -> list[Any]:
        return [self._made[number] for number in range(len(self._made))]

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, int):
            return self._made[pid]
        if isinstance(pid[0], str):
            kind, number = pid
            return self._known[kind][number]
        number, maker = pid
        if number not in self._made:
            self._made[number] = self.make(maker)
        return self._made[number]

    def make(self, maker: Any) -> Any:
        """Makes a bare object from the result of `Pickler.maker`."""
        cls: Any = maker
        return cls.__new__(cls) if isinstance(maker, type) else maker.make()

    def load_attributes(self) -> None:
        """Sets the attributes of all objects read so far, and of all reachable from them."""
        tf = require_tensorflow()
        begin, checkpoints = self._read, []
        while self._read < len(self._made):  # it grows in this loop
            obj, attributes = self._made[self._read], self.load()
            self._read += 1
            if isinstance(obj, tf.train.Checkpoint):
                checkpoints.append((obj, attributes))
            elif isinstance(obj, tf.Variable):
                for value in attributes.values():
                    obj.assign(value)
            else:
                vars(obj).update(attributes)
        generation().restore_identities(self.numbered[begin:])
        for checkpoint, attributes in checkpoints:
            checkpoint.__init__(**attributes)  # last, since it looks at what it saves


def dump(top: Any, make: Callable[[io.BytesIO], Pickler]) -> tuple[bytes, Any]:
    """Pickles an object and everything reachable from it.

    Args:
        top: any object.
        make: callable of a file, returns a new pickler.

    Returns:
        A tuple of bytes, for `load`, and of the pickler.

    Raises:
        ShippingError: Something cannot be sent.
    """
    of_optimizers: dict[int, tuple[Any, int]] = {}
    while True:
        file = io.BytesIO()
        pickler = make(file)
        pickler.of_optimizers = of_optimizers
        pickling.dump(pickler, top)
        pickler.dump_attributes()
        of_optimizers = optimizers.variables_by_id(pickler.numbered)
        if pickler.of_optimizers or not any(id(obj) in of_optimizers for obj in pickler.numbered):
            break
    _check_slots(pickler.numbered, of_optimizers)
    pickling.dump(pickler, optimizers.excluded_from_decay(pickler.numbered))
    return file.getvalue(), pickler


def _check_slots(numbered: Sequence[Any], of_optimizers: Mapping[int, Any]) -> None:
    """Raises `ShippingError` if something refers to a variable of a built optimizer."""
    slots = {
        id(variable): optimizer
        for optimizer in optimizers.among(numbered).values()
        for variable in keras_optimizers.optimizer_variables(optimizer)
        if id(variable) not in of_optimizers
    }
    for obj in numbered:
        if id(obj) in slots:
            raise ShippingError(
                "Only an optimizer's step count and learning rate can be sent by themselves, since "
                "workers rebuild the optimizer's other variables. Received: the variable "
                f"{obj.name!r} of an optimizer of class {type(slots[id(obj)]).__name__}. Take it "
                "from the optimizer's `variables` where it is used."
            )


def load(unpickler: Unpickler) -> Any:
    """Undoes `dump`; variables have no values yet, and optimizers are not built.

    Returns:
        The object that `dump` pickled.
    """
    top = unpickler.load()
    unpickler.load_attributes()
    optimizers.exclude_from_decay(unpickler.numbered, unpickler.load())
    return top


# --------------------------------------------------------------------------------- models
class _ModelPickler(Pickler):
    """Pickler of a user's model."""

    def __init__(self, file: io.BytesIO, modules: user_modules.ModulesByValue) -> None:
        super().__init__(file)
        self._modules = modules
        self._seen: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType)):
            self._take_module(obj)
        return super().reducer_override(obj)

    def _take_module(self, obj: Any) -> None:
        """Makes a module with variables among its globals be sent by value."""
        module = sys.modules.get(obj.__module__ or "")
        if module is None or module.__name__ in self._seen or not classes.is_foreign(obj):
            return
        self._seen.add(module.__name__)
        if any(map(_is_variable, list(vars(module).values()))):
            self._modules.take(module)


def _is_variable(value: Any) -> bool:
    """Returns True if a value is a variable of numbers with a known shape."""
    own = isinstance(value, generation().variable_classes())
    return own or keras_names.holds_numbers(value)


def dump_model(model: Any) -> tuple[bytes, list[Any]]:
    """Pickles a model, with everything that it and its code refer to.

    Args:
        model: a built model.

    Returns:
        A tuple of bytes, for `load_model`, and of the objects that are sent by number.

    Raises:
        ShippingError: Something in it cannot be sent.
    """
    modules = user_modules.ModulesByValue()
    try:
        data, pickler = dump(model, lambda file: _ModelPickler(file, modules))
    finally:
        modules.release()
    return data, pickler.numbered


def load_model(data: bytes) -> tuple[Any, list[Any]]:
    """Makes the model that `dump_model` pickled. Its variables have no values yet.

    Returns:
        A tuple of the model, its optimizers not built, and of the objects by number.
    """
    unpickler = Unpickler(io.BytesIO(data))
    return load(unpickler), unpickler.numbered


def captured_beside(numbered: Sequence[Any], own: Sequence[Any]) -> tuple[int, ...]:
    """Returns the numbers of variables whose values are sent but that are not the model's own.

    Args:
        numbered: sequence of objects, of `dump_model`.
        own: sequence of `tf.Variable`.
    """
    known = set(map(id, own))
    return tuple(
        number
        for number, obj in enumerate(numbered)
        if objects.has_value(obj) and id(obj) not in known
    )
