"""What users set on models and layers, and what those hold that Keras does not know of.

A worker's copy has what the user's `__init__` gives it. What was set later, plain data, arrays and
variables, is found by a second copy in this process, and set on the worker's. Variables in
attributes that are not among Keras's (in Keras 3 a `tf.Variable`) are known by where they stand.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from nanotf.compat import keras_names
from nanotf.compat.generation import generation
from nanotf.compat.versions import require_tensorflow
from nanotf.shipping import classes, objects

_DEPTH = 4  # of objects in the attributes of a layer
_LONGEST = 1000  # a longer list holds data
_DATA = (bool, int, float, complex, str, bytes, type(None), np.generic, np.ndarray)

Path = tuple[tuple[str, Any], ...]  # ("attribute", name) and ("item", key or index)
Place = tuple[int, Path]  # a layer, in the order of `classes.with_layers`, and where in it


def is_variable(value: Any) -> bool:
    """Whether something is a variable that can travel: of numbers, and of a known shape."""
    own = isinstance(value, generation().variable_classes())
    return own or keras_names.holds_numbers(value)


def _is_tensor(value: Any) -> bool:
    """Whether something is a tensor that has a value here."""
    return (
        require_tensorflow().is_tensor(value)
        and hasattr(value, "numpy")
        and not hasattr(value, "assign")
    )


def _is_data(value: Any) -> bool:
    if isinstance(value, dict):
        return _is_data(list(value)) and _is_data(list(value.values()))
    if isinstance(value, (tuple, list)):
        return all(map(_is_data, value))
    return isinstance(value, _DATA) or _is_tensor(value) or is_variable(value)


def _equal(one: Any, other: Any) -> bool:
    """Whether two copies of an attribute hold the same; variables do if they are alike."""
    if is_variable(one) or is_variable(other):
        return is_variable(one) and is_variable(other) and _kind(one) == _kind(other)
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if any(_is_tensor(value) or isinstance(value, np.ndarray) for value in (one, other)):
        one, other = np.asarray(one), np.asarray(other)
        return one.dtype == other.dtype and np.array_equal(one, other)
    return bool(one == other)


def _kind(variable: Any) -> Any:
    variable = keras_names.tf_variable(variable)
    return tuple(variable.shape), variable.dtype, variable.trainable


def changed(model: Any, twin: Any) -> tuple[dict[str, Any], ...]:
    """The attributes of users' classes that are not as `__init__` alone leaves them.

    Args:
        model: the user's model.
        twin: a copy, as a worker makes it.

    Returns:
        A tuple of dict of str to object, see `models.ModelRecipe.changed`.
    """
    pairs = zip(classes.with_layers(model), classes.with_layers(twin), strict=False)
    below = {
        id(v) for layer in classes.with_layers(model)[1:] for v in objects.own_variables(layer)
    }
    found = tuple(_differences(ours, theirs, below) for ours, theirs in pairs)
    return found if any(found) else ()


def _differences(ours: Any, theirs: Any, weights: set[int]) -> dict[str, Any]:
    """One layer's; `weights` are those of layers, of which an attribute may be another name."""
    cls, others, found = classes.original_class(type(ours)), vars(theirs), {}
    for name, value in _of_user(ours).items():
        known = name in others
        if not _is_data(value) or id(value) in weights:
            continue
        if (name.startswith("_") and not known) or isinstance(getattr(cls, name, None), property):
            continue  # what Keras's functions note down
        if not known or (_is_data(others[name]) and not _equal(value, others[name])):
            found[name] = classes.plain(value)
    return found


def _of_user(layer: Any) -> dict[str, Any]:
    """The attributes of a layer of a user's class, without those that Keras sets."""
    if not classes.is_foreign(classes.original_class(type(layer))):
        return {}  # Keras's own have all that they use in their configuration
    return {
        name: value
        for name, value in vars(layer).items()
        if name not in names_of_keras() and not name.startswith(("_nanotf", "_self_"))
    }  # "_self_": what TensorFlow tracks


@functools.cache
def names_of_keras() -> frozenset[str]:
    """The attributes that Keras itself gives every layer, and models in a program's course."""
    tf = require_tensorflow()

    class Plain(keras_names.model_class()):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return x

    model, zeros = Plain(name="nanotf"), tf.zeros([1, 1])
    optimizer = tf.keras.optimizers.SGD(name="nanotf")
    model.compile(optimizer, "mse", metrics=["mse"], run_eagerly=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has no weights to train
        model.fit(zeros, zeros, shuffle=False, verbose=0, validation_data=(zeros, zeros))
    model.predict(zeros, verbose=0)
    given = tf.keras.Input((1,), name="nanotf")
    functional = keras_names.functional_class()(given, given, name="nanotf")
    start = tf.keras.layers.InputLayer((1,), name="nanotf")
    sequential = keras_names.sequential_class()([start], name="nanotf")
    bare = (tf.keras.layers.Layer(name="nanotf"), model, functional, sequential)
    return frozenset().union(*map(vars, bare))


# ------------------------------------------------------------------- variables in attributes
def held(model: Any, twin: Any) -> tuple[Place, ...]:
    """Where variables stand in the attributes of users' classes, alike in both copies."""
    own = {id(variable) for variable in objects.own_variables(model)}
    layers = zip(classes.with_layers(model), classes.with_layers(twin), strict=False)
    found = []
    for number, (ours, theirs) in enumerate(layers):
        seen = {id(ours)}
        for name, value in _of_user(ours).items():
            for path, variable in _variables_in(value, (("attribute", name),), seen):
                if id(variable) not in own and _has_variable(theirs, path, variable):
                    found.append((number, path))
    return tuple(found)


def _variables_in(value: Any, path: Path, seen: set[int]) -> Iterator[tuple[Path, Any]]:
    if id(value) in seen or len(path) > _DEPTH:
        return
    seen.add(id(value))
    if is_variable(value):
        yield path, value
        return
    steps: list[tuple[tuple[str, Any], Any]] = []
    if objects.is_root(value) or isinstance(value, type) or inspect.isroutine(value):
        return
    if isinstance(value, dict):
        steps = [(("item", k), v) for k, v in value.items() if isinstance(k, (str, int))]
    elif isinstance(value, (list, tuple)):
        steps = [(("item", place), item) for place, item in enumerate(value[:_LONGEST])]
    elif classes.is_foreign(type(value)) and type(value).__module__ != "builtins":
        steps = [(("attribute", k), v) for k, v in getattr(value, "__dict__", {}).items()]
    for step, inner in steps:
        yield from _variables_in(inner, (*path, step), seen)


def _has_variable(layer: Any, path: Path, like: Any) -> bool:
    try:
        found = _at(layer, path)
    except (LookupError, AttributeError, TypeError):
        return False
    return is_variable(found) and _kind(found) == _kind(like)


def at(model: Any, place: Place) -> Any:
    """What stands at a place in a model."""
    number, path = place
    return _at(classes.with_layers(model)[number], path)


def _at(value: Any, path: Path) -> Any:
    for kind, key in path:
        value = vars(value)[key] if kind == "attribute" else value[key]
    return value
