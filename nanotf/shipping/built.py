"""Describes the variables that code in a worker has made, and makes the same ones in the parent.

A layer travels by its class and attributes, an optimizer by its configuration. Neither brings the
variables that it makes when it is built. So the sender describes them, and the receiver builds the
same objects and sets the values. Both sides number the objects alike, see `heap`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from nanotf.compat import keras_build, keras_optimizers
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import ModelError
from nanotf.shipping import objects, optimizers


@dataclasses.dataclass(frozen=True)
class Built:
    """Description of built objects, by number.

    Args:
        layers: dict of int to tuple, the `keras_build.build_configs` of layers and models.
        optimizers: dict, see `optimizers.built_optimizers`.
        variables: tuple of tuples of int, for each new variable, the number of its holder and the
            place there; see `objects.variables_of`.
        values: list of `numpy.ndarray`, their values.
    """

    layers: dict[int, Any]
    optimizers: dict[int, Any]
    variables: tuple[tuple[int, int], ...]
    values: list[Any]


def describe(objs: Sequence[Any], known: Collection[int], layers: Iterable[int] = ()) -> Built:
    """Describes what was built in objects.

    Args:
        objs: sequence of objects, by number.
        known: collection of int, the ids of variables that the receiver has, or gets otherwise.
        layers: iterable of int, numbers of layers to describe even without a new variable.
    """
    kinds = keras_optimizers.optimizer_classes()
    seen, chosen = set(known), list(layers)
    new: list[Any] = []
    places: list[tuple[int, int]] = []

    def look(number: int) -> None:
        for place, found in enumerate(objects.variables_of(objs[number])):
            if id(found) not in seen:
                seen.add(id(found))
                new.append(found)
                places.append((number, place))

    holders = [n for n, obj in enumerate(objs) if objects.holds_variables(obj)]
    for number in holders:
        if not isinstance(objs[number], kinds):
            look(number)
    layer = require_tensorflow().keras.layers.Layer
    holding = {number for number, _ in places}
    chosen += [n for n in holding - {*chosen} if isinstance(objs[n], layer)]
    configs = {number: keras_build.build_configs(objs[number]) for number in chosen}
    built = optimizers.built_optimizers([*objs, *new])
    for number in holders:
        # An optimizer's state stays behind if its variables do not travel.
        if isinstance(objs[number], kinds) and built.get(number, ()) is not None:
            look(number)
    return Built(configs, built, tuple(places), [found.numpy() for found in new])


def build_layers(objs: Sequence[Any], built: Built) -> None:
    """Builds the layers and models that `describe` has described."""
    for number, configs in built.layers.items():
        keras_build.build_layers(objs[number], configs)


def fill(objs: Sequence[Any], built: Built) -> None:
    """Builds the optimizers, and sets the values of all new variables.

    Raises:
        ModelError: An object has other variables here.
    """
    kinds = keras_optimizers.optimizer_classes()
    new = [place for place in built.variables if not isinstance(objs[place[0]], kinds)]
    optimizers.build_optimizers([*objs, *(variable(objs, at) for at in new)], built.optimizers)
    for place, value in zip(built.variables, built.values, strict=True):
        found = variable(objs, place)
        if tuple(found.shape) != value.shape:
            raise _unlike(objs[place[0]])
        found.assign(value)


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
        "Build it before the call: call the model on a batch, or the optimizer's build()."
    )
