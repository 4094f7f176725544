"""Describes the variables that code in a worker has made, and makes the same ones in the parent.

The sender describes the variables that a layer has made, and the receiver builds the same layer
and sets the values. Both sides number the objects alike, see `heap`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from nanotf.compat import keras_build, keras_optimizers, values
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import ModelError
from nanotf.shipping import objects


@dataclasses.dataclass(frozen=True)
class Built:
    """Description of built objects, by number.

    Args:
        layers: dict of int to tuple, the `keras_build.build_configs` of layers and models.
        variables: tuple of tuples of int, for each new variable, the number of its holder and the
            place there; see `objects.variables_of`.
        values: list of `numpy.ndarray`, their values.
        identities: list of dicts, the `values.identity` of each.
    """

    layers: dict[int, Any]
    variables: tuple[tuple[int, int], ...]
    values: list[Any]
    identities: list[dict[str, Any]]


def describe(objs: Sequence[Any], known: Collection[int], layers: Iterable[int] = ()) -> Built:
    """Describes what was built in objects.

    Args:
        objs: sequence of objects, by number.
        known: collection of int, the ids of variables that the receiver has, or gets otherwise.
        layers: iterable of int, numbers of layers to describe even without a new variable.
    """
    optimizers = keras_optimizers.optimizer_classes()
    seen, chosen = set(known), list(layers)
    new: list[Any] = []
    places: list[tuple[int, int]] = []

    for number, obj in enumerate(objs):
        if not objects.holds_variables(obj) or isinstance(obj, optimizers):
            continue
        for place, found in enumerate(objects.variables_of(obj)):
            if id(found) not in seen:
                seen.add(id(found))
                new.append(found)
                places.append((number, place))
    layer = require_tensorflow().keras.layers.Layer
    holding = {number for number, _ in places}
    chosen += [n for n in holding - {*chosen} if isinstance(objs[n], layer)]
    configs = {number: keras_build.build_configs(objs[number]) for number in chosen}
    identities = [values.identity(found) for found in new]
    return Built(configs, tuple(places), [found.numpy() for found in new], identities)


def build_layers(objs: Sequence[Any], built: Built) -> None:
    """Builds the layers and models that `describe` has described."""
    for number, configs in built.layers.items():
        keras_build.build_layers(objs[number], configs)


def fill(objs: Sequence[Any], built: Built) -> None:
    """Sets the values and the identities of all new variables.

    Raises:
        ModelError: An object has other variables here.
    """
    described = zip(built.variables, built.values, built.identities, strict=True)
    for place, value, identity in described:
        found = variable(objs, place)
        if tuple(found.shape) != value.shape:
            raise _unlike(objs[place[0]])
        found.assign(value)
        vars(found).update(identity)


def variable(objs: Sequence[Any], at: tuple[int, int]) -> Any:
    """Returns a built variable, by the number of its holder and its place there.

    Raises:
        ModelError: The holder has fewer variables here.
    """
    number, place = at
    variables = objects.variables_of(objs[number])
    if place >= len(variables):
        raise _unlike(objs[number])
    return variables[place]


def _unlike(holder: Any) -> ModelError:
    return ModelError(
        "An object that is built in a worker must have the same variables in your process. "
        f"Received: an object of class {type(holder).__name__}, which has others in the workers. "
        "Build it before the call: call the model on a batch."
    )
