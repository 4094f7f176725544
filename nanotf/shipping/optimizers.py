"""Sends optimizers to another process: class, configuration, and the variables to build them with.

An optimizer is sent unbuilt, so that the same bytes describe it before and after training.
`built_optimizers` lists the variables with which the receiver builds it. The values of its own
variables are sent separately (`state`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nanotf.compat import containers, keras_names, keras_optimizers
from nanotf.compat.generation import generation
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import ShippingError
from nanotf.shipping import classes


# --------------------------------------------------------------------- one unbuilt optimizer
@dataclasses.dataclass(frozen=True)
class Configured:
    """Maker of an optimizer.

    Args:
        cls: type.
        config: dict, argument of its `from_config`; includes schedules and inner optimizers.
        attributes: dict of str to object, attributes that the configuration leaves out.
    """

    cls: Any
    config: dict[str, Any]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, optimizer: Any) -> Configured:
        """Returns a maker of optimizers like this one.

        Raises:
            ShippingError: Its class cannot be made from its configuration.
        """
        own = classes.is_foreign(type(optimizer))
        config = _config_of(optimizer)
        if own and not classes.has_own_get_config(type(optimizer)):
            config = _completed(optimizer, config)
        schedule = keras_optimizers.schedule_of(optimizer)
        if schedule is not None:
            config["learning_rate"] = schedule
        if "inner_optimizer" in config:
            config["inner_optimizer"] = optimizer.inner_optimizer
        attributes = keras_optimizers.excluded_by_name(optimizer)
        if own:
            try:
                with keras_names.kept_random_states():
                    twin = cls(type(optimizer), config, {}).make()
            except Exception as error:
                raise _not_configurable(optimizer, f"rebuilding it raised {error!r}") from error
            attributes = _attributes_that_differ(optimizer, twin) | attributes
        return cls(type(optimizer), config, attributes)

    def make(self) -> Any:
        """Makes a new optimizer."""
        # Objects in a configuration are not copied: other objects may refer to them, too.
        known = {id(value): value for value in self.config.values() if _is_object(value)}
        config = copy.deepcopy(self.config, known)
        if isinstance(config.get("inner_optimizer"), keras_optimizers.optimizer_classes()):
            made = self.cls(config.pop("inner_optimizer"), **config)
        else:
            made = self.cls.from_config(config)
        for name, value in self.attributes.items():
            setattr(made, name, value)
        return made


def _is_object(value: Any) -> bool:
    """Returns True if a value of a configuration is an object itself, not its description."""
    schedule = require_tensorflow().keras.optimizers.schedules.LearningRateSchedule
    return isinstance(value, (schedule, *keras_optimizers.optimizer_classes()))


def _config_of(optimizer: Any) -> dict[str, Any]:
    with _mute_schedules(optimizer):
        try:
            config: dict[str, Any] = containers.without_tracking(dict(optimizer.get_config()))
            return config
        except Exception as error:
            raise _not_configurable(optimizer, f"get_config() raised {error!r}") from error


@contextlib.contextmanager
def _mute_schedules(optimizer: Any) -> Iterator[None]:
    """Lets an optimizer return its configuration even if its schedule has none.

    In a single process a schedule needs no `get_config()`. The schedule itself is sent.
    """
    found = map(keras_optimizers.schedule_of, keras_optimizers.with_inner([optimizer]))
    muted = [schedule for schedule in found if schedule is not None]
    for schedule in muted:
        vars(schedule)["get_config"] = dict
    try:
        yield
    finally:
        for schedule in muted:
            del vars(schedule)["get_config"]


def _not_configurable(optimizer: Any, received: str) -> ShippingError:
    return ShippingError(
        f"An object of class {type(optimizer).__name__} cannot be sent to the workers, which "
        f"rebuild it from its configuration. Received: {received}. "
        "Define get_config(), returning the arguments of __init__ as a dict."
    )


def _completed(optimizer: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration for the `__init__` of a user's class without `get_config()`.

    Such an optimizer works in a single process. Keras's configuration lacks the class's own
    arguments, and has Keras's, which the class need not accept.
    """
    parameters = inspect.signature(type(optimizer).__init__).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    completed = {name: v for name, v in config.items() if takes_any or name in parameters}
    for parameter in parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name == "learning_rate":  # Keras 2 leaves it to each class
            completed.setdefault("learning_rate", keras_optimizers.rate_of(optimizer))
        for name in (parameter.name, f"_{parameter.name}"):
            value = vars(optimizer).get(name, inspect.Parameter.empty)
            # A variable belongs to the optimizer itself, so it is not an argument.
            if value is not inspect.Parameter.empty and not hasattr(value, "assign"):
                completed.setdefault(parameter.name, value)
    return completed


_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, types.FunctionType)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(item) for item in value)
    return isinstance(value, _PLAIN)


def _attributes_that_differ(optimizer: Any, twin: Any) -> dict[str, Any]:
    theirs = vars(twin)
    return {
        name: value
        for name, value in vars(optimizer).items()
        if _is_plain(value)
        and name not in ("name", "built", "_built")
        and not keras_optimizers.is_own_attribute(optimizer, name)
        # A list of slots is empty in an optimizer that needs no slots of that kind.
        and (_differs(value, theirs[name]) if name in theirs else value not in ([], ()))
    }


def _differs(value: Any, other: Any) -> bool:
    if isinstance(value, types.FunctionType) and isinstance(other, types.FunctionType):
        return value.__code__ != other.__code__  # `__init__` may make one for each object
    return _is_plain(other) and bool(other != value)


# -------------------------------------------------------------------- optimizers among objects
def among(numbered: Sequence[Any]) -> dict[int, Any]:
    """Returns the optimizers among objects, by number."""
    kinds = keras_optimizers.optimizer_classes()
    return {number: obj for number, obj in enumerate(numbered) if isinstance(obj, kinds)}


def variables_at_first(optimizer: Any) -> list[Any]:
    """Returns the variables of an unbuilt optimizer in a fixed order; None for missing ones.

    Returns:
        A list of variables of Keras's or TensorFlow's, then of the `tf.Variable`s in them.
    """
    found = [vars(optimizer).get(name) for name in ("_iterations", "_learning_rate")]
    own = [variable if hasattr(variable, "assign") else None for variable in found]
    return own + [None if v is None else keras_names.tf_variable(v) for v in own]


def variables_by_id(numbered: Sequence[Any]) -> dict[int, tuple[Any, int]]:
    """Returns each variable's optimizer and index in it, by the variable's id."""
    return {
        id(variable): (optimizer, place)
        for optimizer in among(numbered).values()
        for place, variable in enumerate(variables_at_first(optimizer))
        if variable is not None
    }


def _variables(numbered: Sequence[Any]) -> dict[int, Any]:
    kind = require_tensorflow().Variable
    return {number: obj for number, obj in enumerate(numbered) if isinstance(obj, kind)}


def excluded_from_decay(numbered: Sequence[Any]) -> dict[int, tuple[int, ...]]:
    """Returns the numbers of variables that optimizers exclude from weight decay.

    An optimizer knows them by keys that differ in another process.
    """
    variables = _variables(numbered)
    numbers, values = list(variables), list(variables.values())
    found: dict[int, tuple[int, ...]] = {}
    for number, optimizer in among(numbered).items():
        if keras_optimizers.excludes_variables(optimizer):
            places = keras_optimizers.excluded_places(optimizer, values)
            found[number] = tuple(numbers[place] for place in places)
    return found


def exclude_from_decay(numbered: Sequence[Any], excluded: Mapping[int, tuple[int, ...]]) -> None:
    """Makes optimizers exclude the variables that `excluded_from_decay` returned."""
    for number, places in excluded.items():
        keras_optimizers.exclude_places(numbered[number], numbered, places)


def built_optimizers(numbered: Sequence[Any]) -> dict[int, tuple[int, ...] | None]:
    """Returns the variables that the optimizers among objects are built with.

    Returns:
        A dict of the number of a built optimizer to the numbers of the variables; to None if it
        was built with variables that are not among the objects.
    """
    variables = _variables(numbered)
    numbers = {id(variable): number for number, variable in variables.items()}
    candidates = list(variables.values())
    result: dict[int, tuple[int, ...] | None] = {}
    optimizers = among(numbered)
    inner = {id(getattr(optimizer, "inner_optimizer", None)) for optimizer in optimizers.values()}
    for number, optimizer in optimizers.items():
        if id(optimizer) in inner:  # built by the optimizer that wraps it
            continue
        found = [numbers.get(id(v)) for v in keras_optimizers.built_with(optimizer, candidates)]
        if found:
            known = tuple(place for place in found if place is not None)
            result[number] = known if len(known) == len(found) else None
    return result


def build_optimizers(numbered: Sequence[Any], built: Mapping[int, tuple[int, ...] | None]) -> None:
    """Builds the unbuilt optimizers with the variables that `built_optimizers` returned."""
    done, owners = built_optimizers(numbered), _owners(numbered)
    for number, places in built.items():
        if number not in done and places is not None:
            variables = [numbered[place] for place in places]
            generation().build_for(numbered[number], [owners.get(id(v), v) for v in variables])


def _owners(numbered: Sequence[Any]) -> dict[int, Any]:
    """Returns the installed Keras's own variables, by the id of the `tf.Variable` in each."""
    own = generation().variable_classes()
    found = [obj for obj in numbered if isinstance(obj, own)]
    for obj in numbered:
        if own and isinstance(obj, require_tensorflow().keras.layers.Layer):
            found += obj.variables
    return {id(keras_names.tf_variable(variable)): variable for variable in found}
