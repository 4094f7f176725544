"""Constructor arguments that Keras cannot write into a configuration, and that travel by value.

A layer of a script that is never saved needs no `get_config()`. Where Keras has none of its own for
it, since an argument of `__init__` is a function, an array or an object of the user, the arguments
are looked for among the attributes of the same names, and the configuration refers to them. Layers
among them stand there as their own configurations, since each copy needs layers of its own.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from nanotf.compat import keras_names
from nanotf.compat.versions import require_tensorflow

KEY = "nanotf_arguments"  # in a configuration: the name of an `Arguments` in `custom_objects`


@dataclasses.dataclass(frozen=True)
class _Layer:
    """Stands for a layer among `Arguments`."""

    config: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Stands among the custom objects of a configuration.

    Args:
        values: dict of str to object, what `__init__` takes.
        trainable: bool, of the layer.
    """

    values: dict[str, Any]
    trainable: bool

    def make(self, cls: Any) -> Any:
        """A new layer."""
        made = cls(**_replaced(self.values, _Layer, _made))
        made.trainable = self.trainable
        return made


def _replaced(value: Any, cls: type, replace: Any) -> Any:
    """Replaces the objects of a class in lists and dicts."""
    if isinstance(value, cls):
        return replace(value)
    if isinstance(value, dict):
        return {key: _replaced(item, cls, replace) for key, item in value.items()}
    if type(value) is tuple:
        return tuple(_replaced(item, cls, replace) for item in value)
    if isinstance(value, list):
        return [_replaced(item, cls, replace) for item in value]
    return value


def _made(layer: _Layer) -> Any:
    config = copy.deepcopy(layer.config)  # Keras empties what it is given
    return require_tensorflow().keras.layers.deserialize(config)


def _described(layer: Any) -> Any:
    try:
        config = require_tensorflow().keras.layers.serialize(layer)
    except NotImplementedError:  # a model of the user's, which travels as a recipe
        return layer
    # Built it would be by whatever holds it, once more.
    return _Layer({key: value for key, value in config.items() if key != "build_config"})


def kept_value(obj: Any, parameter: str) -> tuple[bool, Any]:
    """Whether an object has kept an argument of its `__init__`, and the argument.

    Args:
        obj: a layer or metric.
        parameter: str, the argument's name; the attribute's, maybe with an underscore before.
    """
    tf = require_tensorflow()
    for name in (parameter, f"_{parameter}"):
        value = vars(obj).get(name, tf)
        # What belongs to the object, and not to whoever made it.
        own = value is tf or hasattr(value, "assign") or isinstance(value, tf.keras.layers.Layer)
        if not own:
            return True, value
    return False, None


def _layer_in(obj: Any, parameter: str) -> Any:
    """The layer that an object keeps under the name of an argument, or None."""
    value = vars(obj).get(parameter, vars(obj).get(f"_{parameter}"))
    return value if isinstance(value, require_tensorflow().keras.layers.Layer) else None


def _arguments_of(layer: Any) -> Arguments | None:
    """The arguments that make a layer like this one; None if one of them is not kept."""
    values = {}
    for parameter in inspect.signature(type(layer).__init__).parameters.values():
        if parameter.name == "self" or parameter.kind is parameter.VAR_POSITIONAL:
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            values["name"] = layer.name
            continue
        kept, value = kept_value(layer, parameter.name)
        if kept:
            values[parameter.name] = value
        elif (inner := _layer_in(layer, parameter.name)) is not None:
            values[parameter.name] = inner
        elif parameter.default is parameter.empty:
            return None
    return Arguments(values, bool(layer.trainable))


def _describe_layers(layer: Any, arguments: Arguments) -> None:
    """Replaces the layers among a layer's arguments by what makes them.

    A layer under the name of an argument is the argument, or one that `__init__` has made of it,
    as `self.dense = Dense(dense)`: what the default gives as well is left out.
    """
    tf = require_tensorflow()
    values = arguments.values
    values.update(_replaced(values, tf.keras.layers.Layer, _described))
    parameters = inspect.signature(type(layer).__init__).parameters
    inner = {name: _layer_in(layer, name) for name in values if name in parameters}
    optional = [
        name
        for name, found in inner.items()
        if found is not None and parameters[name].default is not inspect.Parameter.empty
    ]
    if not optional:
        return
    others = {name: value for name, value in values.items() if name not in optional}
    try:
        with keras_names.kept_random_states():
            made = Arguments(others, True).make(type(layer))
    except Exception:  # whatever the user's class does without them
        return
    for name in optional:
        if _alike(inner[name], _layer_in(made, name)):
            del values[name]


def _alike(one: Any, other: Any) -> bool:
    """Whether two layers are the same but for their names and weights."""
    if type(one) is not type(other):
        return False
    try:
        configs = [layer.get_config() for layer in (one, other)]
    except NotImplementedError:
        return False
    return bool(_unnamed(configs[0]) == _unnamed(configs[1]))


def _unnamed(config: Any) -> Any:
    if isinstance(config, dict):
        left_out = ("name", "build_config")
        return {key: _unnamed(item) for key, item in config.items() if key not in left_out}
    return [_unnamed(item) for item in config] if isinstance(config, (list, tuple)) else config


@contextlib.contextmanager
def by_value(layers: Sequence[Any], custom_objects: dict[str, Any]) -> Iterator[None]:
    """Lets layers say a configuration that Keras does not know how to write.

    Args:
        layers: sequence of layers of users' classes without a `get_config()`.
        custom_objects: dict, to which the `Arguments` are added that the configuration names.
    """
    named: list[Any] = []
    for layer in layers:
        try:
            layer.get_config()
        except NotImplementedError:
            arguments = _arguments_of(layer)
            if arguments is not None:
                name = f"{KEY}_{len(named)}"
                custom_objects[name] = arguments
                # Of this one object: its class is the user's, and others may use it meanwhile.
                vars(layer)["get_config"] = functools.partial(dict, name=layer.name, **{KEY: name})
                named.append(layer)
    try:
        with require_tensorflow().keras.utils.custom_object_scope(custom_objects):
            for number, layer in enumerate(named):
                _describe_layers(layer, custom_objects[f"{KEY}_{number}"])
        yield
    finally:
        for layer in named:
            del vars(layer)["get_config"]
