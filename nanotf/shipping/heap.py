"""Keras's objects on their way to another process, as they are: classes and attributes.

Models, layers, variables and what Keras keeps between them refer to each other in circles and in
long chains. So each travels by itself, and stands in the others as a number. In one stream there
are, after what is sent, the attributes of every object by number; the class of each is told where
it is first referred to, so that the receiver has a bare object, which gets its attributes later.

| object | travels as |
| --- | --- |
| of a class of Keras's, or of one derived from it | class and attributes |
| `tf.Variable` | shape, type, name; its value apart (`state`) |
| optimizer | class and configuration, not built (`pickling`) |
| list, dict or set that tracks what it holds | content and attributes |
| lookup table | its initializer, or its content |
| lock, thread's data, cache with weak keys | a new one |
| `tf.distribute.Strategy` | the receiver's |
| symbolic tensor, resource, function that Keras has made for itself | None: of no use elsewhere |
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import io
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Sequence
from typing import Any, cast

from nanotf.compat import containers, keras_names, keras_optimizers
from nanotf.compat.generation import generation
from nanotf.compat.versions import require_tensorflow
from nanotf.region.decorators import is_tf_function
from nanotf.shipping import classes, models, pickling, user_modules

_LOCKS = {type(threading.Lock()): threading.Lock, type(threading.RLock()): threading.RLock}


@functools.cache
def _is_numbered(cls: Any) -> bool:
    """Whether objects of a class travel each by itself."""
    tf = require_tensorflow()
    if issubclass(cls, tf.Variable):
        return True
    schedule = tf.keras.optimizers.schedules.LearningRateSchedule  # an optimizer asks it at once
    others = (
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
    if issubclass(cls, (*others, schedule, *keras_optimizers.optimizer_classes())):
        return False
    return hasattr(cls, "__dict__") and any(map(keras_names.is_keras_own, cls.__mro__))


@functools.cache
def _made_by_class(cls: Any) -> frozenset[str]:
    """The attributes that are functions which a class makes anew for each object."""
    made = vars(cls.__new__(cls))
    return frozenset(name for name, value in made.items() if isinstance(value, types.FunctionType))


@dataclasses.dataclass(frozen=True)
class _VariableMaker:
    """What makes a `tf.Variable`."""

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
    """What makes a variable of Keras 2's that casts another one's values."""

    variable: Any

    def make(self) -> Any:
        return generation().casting(self.variable)


@dataclasses.dataclass(frozen=True)
class _FunctionalMaker:
    """What makes a model of inputs and outputs, of a class of the user's."""

    cls: Any

    def make(self) -> Any:
        keras_names.make_functional(self.cls)
        return self.cls.__new__(self.cls)


@dataclasses.dataclass(frozen=True)
class _OperationMaker:
    """What makes a layer that is an operation of TensorFlow's."""

    cls: Any
    config: dict[str, Any]

    def make(self) -> Any:
        return self.cls.from_config(self.config)


class Pickler(pickling.Pickler):
    """Writes objects of Keras's as numbers, and keeps them for `dump_attributes`.

    Args:
        file: `io.BytesIO`.

    Attributes:
        numbered: list of the objects, by number.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.numbered: list[Any] = []
        self._ids: dict[int, Any] = {}
        self._modules = user_modules.ModulesByValue()
        self._seen: set[str] = set()

    def persistent_id(self, obj: Any) -> Any:
        found, cls = self._ids.get(id(obj)), cast(Any, type(obj))
        if found is None and _is_numbered(cls):
            found = self._ids[id(obj)] = len(self.numbered), _maker(obj)
            self.numbered.append(obj)
        return found

    def dump_attributes(self) -> None:
        """Writes the attributes of all objects that were found, and of those that they lead to."""
        for obj in self.numbered:  # which grows
            with pickling.naming(f"An object of class {type(obj).__name__}"):
                pickling.dump(self, _attributes(obj))

    def release(self) -> None:
        """Lets modules that travelled by value travel by name again."""
        self._modules.release()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType)):
            self._take_module(obj)
        reduced = containers.described(obj) or _replaced(obj)
        return super().reducer_override(obj) if reduced is None else reduced

    def _take_module(self, obj: Any) -> None:
        """Makes a module whose globals are variables travel by value."""
        module = sys.modules.get(obj.__module__ or "")
        if module is None or module.__name__ in self._seen or not classes.is_foreign(obj):
            return
        self._seen.add(module.__name__)
        if any(map(_is_variable, list(vars(module).values()))):
            self._modules.take(module)


def _is_variable(value: Any) -> bool:
    """Whether something is a variable of numbers, and of a known shape."""
    own = isinstance(value, generation().variable_classes())
    return own or keras_names.holds_numbers(value)


def _maker(obj: Any) -> Any:
    """What makes an object bare: its class, or what has `make()`."""
    if not isinstance(obj, require_tensorflow().Variable):
        config = generation().operation_config(obj)
        if config is not None:
            return _OperationMaker(type(obj), config)
        is_functional = isinstance(obj, keras_names.functional_class())
        return _FunctionalMaker(type(obj)) if is_functional else type(obj)
    inner = generation().cast_by(obj)
    return _VariableMaker.of(obj) if inner is None else _CastMaker(inner)


def _attributes(obj: Any) -> dict[str, Any]:
    """An object's attributes, in an order that does not tell which were set anew."""
    if isinstance(obj, require_tensorflow().Variable):
        return {}
    cls = cast(Any, type(obj))
    left_behind = _made_by_class(cls) if hasattr(cls, "call") else ()
    found = {n: v for n, v in vars(obj).items() if n not in left_behind and n[:7] != "_nanotf"}
    return dict(sorted(generation().for_another_process(obj, found).items()))


def _none(*_: Any) -> None:
    """What stands for objects that are of no use in another process."""


def _new_cache(cls: Any) -> Any:
    cache = cls.__new__(cls)
    weakref.WeakKeyDictionary.__init__(cache)
    return cache


def _set_factory(cache: Any, factory: Any) -> None:
    if factory is not None:
        cache.default_factory = factory


def _replaced(obj: Any) -> Any:
    """What a pickler's `reducer_override` returns for an object that has to be made anew."""
    tf = require_tensorflow()
    cls = type(obj)
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
    if isinstance(obj, tf.DType):
        return tf.as_dtype, (obj.name,)
    if tf.is_tensor(obj) and not hasattr(obj, "assign"):
        of_resource = getattr(obj, "dtype", None) in (tf.resource, tf.variant)
        if of_resource or (isinstance(obj, tf.Tensor) and not hasattr(obj, "numpy")):
            return _none, ()
    if is_tf_function(obj) and keras_names.is_keras_own(obj.python_function):
        return _none, ()
    if isinstance(obj, types.FunctionType) and (obj.__module__ or "").startswith("tensorflow"):
        name = containers.public_name(obj)
        if name is not None:
            return containers.by_public_name, (name,)
    return None


class Unpickler(pickle.Unpickler):
    """Undoes what a `Pickler` has done.

    Args:
        file: `io.BytesIO`.

    Attributes:
        numbered: dict of int to object, the objects by number.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.numbered: dict[int, Any] = {}

    def persistent_load(self, pid: Any) -> Any:
        number, maker = pid
        if number not in self.numbered:
            is_class, cls = isinstance(maker, type), maker
            self.numbered[number] = cls.__new__(cls) if is_class else maker.make()
        return self.numbered[number]

    def load_attributes(self) -> None:
        """Gives all objects that were met, and those that they lead to, their attributes."""
        number = 0
        while number < len(self.numbered):  # which grows
            vars(self.numbered[number]).update(self.load())
            number += 1
        generation().mend(list(self.numbered.values()))


# --------------------------------------------------------------------------------- models
def dump(model: Any) -> tuple[bytes, list[Any]]:
    """Pickles a model, with all that it and its code refer to.

    Args:
        model: a built model.

    Returns:
        A tuple of bytes, for `load`, and of the objects that travel by number.

    Raises:
        ShippingError: Something in it cannot be sent.
    """
    file = io.BytesIO()
    pickler = Pickler(file)
    try:
        policy = require_tensorflow().keras.mixed_precision.global_policy().name
        pickling.dump(pickler, (policy, models.excluded_from_decay(model)))
        pickling.dump(pickler, model)
        pickler.dump_attributes()
    finally:
        pickler.release()
    return file.getvalue(), pickler.numbered


def load(data: bytes) -> tuple[Any, list[Any]]:
    """Makes the model that `dump` has pickled; its variables have no values yet.

    Returns:
        A tuple of the model, its optimizers not built, and of the objects by number.
    """
    mixed_precision = require_tensorflow().keras.mixed_precision
    unpickler = Unpickler(io.BytesIO(data))
    policy, excluded = unpickler.load()
    if mixed_precision.global_policy().name != policy:
        mixed_precision.set_global_policy(policy)
    model = unpickler.load()
    unpickler.load_attributes()
    models.exclude_from_decay(model, excluded)
    return model, [unpickler.numbered[number] for number in range(len(unpickler.numbered))]


def captured_beside(numbered: Sequence[Any], own: Sequence[Any]) -> tuple[int, ...]:
    """The numbers of variables that have values to send, and are not among a model's own.

    Args:
        numbered: sequence of objects, of `dump`.
        own: sequence of `tf.Variable`.
    """
    variable, known = require_tensorflow().Variable, set(map(id, own))
    return tuple(
        number
        for number, obj in enumerate(numbered)
        if isinstance(obj, variable) and id(obj) not in known and _has_value(obj)
    )


def _has_value(variable: Any) -> bool:
    is_whole = generation().cast_by(variable) is None
    return is_whole and keras_names.holds_numbers(variable)
