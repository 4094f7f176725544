"""Constructor arguments that Keras cannot write into a configuration, and that travel by value.

A layer of a script that is never saved needs no `get_config()`. Where Keras has none of its own for
it, since an argument of `__init__` is a function, an array or an object of the user, the arguments
are looked for among the attributes of the same names, and the configuration refers to them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from nanotf.compat.versions import require_tensorflow

KEY = "nanotf_arguments"  # in a configuration: the name of an `Arguments` in `custom_objects`


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
        made = cls(**self.values)
        made.trainable = self.trainable
        return made


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
        elif parameter.default is parameter.empty:
            return None
    return Arguments(values, bool(layer.trainable))


@contextlib.contextmanager
def by_value(layers: Sequence[Any], custom_objects: dict[str, Any]) -> Iterator[None]:
    """Lets layers say a configuration that Keras does not know how to write.

    Args:
        layers: sequence of layers of users' classes without a `get_config()`.
        custom_objects: dict, to which the `Arguments` are added that the configuration names.
    """
    names: dict[int, str] = {}
    changed: dict[type, Any] = {}
    for layer in layers:
        try:
            layer.get_config()
        except NotImplementedError:
            arguments = _arguments_of(layer)
            if arguments is not None:
                names[id(layer)] = f"{KEY}_{len(names)}"
                custom_objects[names[id(layer)]] = arguments
                changed[type(layer)] = type(layer).get_config
    for cls, stock in changed.items():

        def get_config(self: Any, stock: Any = stock) -> Any:
            name = names.get(id(self))
            return stock(self) if name is None else {"name": self.name, KEY: name}

        cls.get_config = get_config  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for cls in changed:
            del cls.get_config  # type: ignore[attr-defined]
