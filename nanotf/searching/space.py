"""The space of a search: names of parameters, and the values that each may take."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import optuna

from nanotf.errors import InvalidArgumentError, InvalidArgumentTypeError

LOG = "log"
FORMS = (
    f"a pair (low, high) of numbers, (low, high, {LOG!r}) for a logarithmic scale, a list of "
    "choices, or a distribution of Optuna"
)


def distributions(space: Any) -> dict[str, Any]:
    """Makes the short forms of a space distributions of Optuna.

    Args:
        space: the user's: one of `FORMS` by each parameter's name.

    Returns:
        `optuna.distributions.BaseDistribution` by name, in the order of `space`.

    Raises:
        InvalidArgumentError, InvalidArgumentTypeError: The space cannot be used; names the
            parameter.
    """
    if not isinstance(space, Mapping):
        raise InvalidArgumentTypeError(
            "`space` must be a dict of each parameter's name to its values. Received: "
            f"space={space!r}. Pass a dict such as {{'units': (16, 256)}}."
        )
    if not space:
        raise InvalidArgumentError(
            "`space` must have a parameter. Received: space={}. Pass a dict such as "
            "{'units': (16, 256)}, or train a single model with fit."
        )
    for name in space:
        if not isinstance(name, str):
            raise InvalidArgumentTypeError(
                f"The names in `space` must be strings. Received: {name!r}. Use the names of the "
                "parameters of `build`."
            )
    return {name: _distribution(name, values) for name, values in space.items()}


def _distribution(name: str, values: Any) -> Any:
    known = optuna.distributions
    kinds = (known.FloatDistribution, known.IntDistribution, known.CategoricalDistribution)
    if isinstance(values, kinds):
        return values
    if isinstance(values, list):
        return _choices(name, values)
    if not isinstance(values, tuple):
        raise InvalidArgumentTypeError(_rule(name, values))
    is_log = len(values) == 3 and values[2] == LOG
    if not (len(values) == 2 or is_log) or not all(map(_is_number, values[:2])):
        raise InvalidArgumentError(_rule(name, values))
    low, high = values[:2]
    integers = all(isinstance(value, numbers.Integral) for value in (low, high))
    kind = known.IntDistribution if integers else known.FloatDistribution
    try:
        return kind(int(low), int(high), log=is_log) if integers else kind(low, high, log=is_log)
    except ValueError as error:
        raise InvalidArgumentError(f"{_rule(name, values)} Optuna says: {error}") from error


def _choices(name: str, values: list[Any]) -> Any:
    # Optuna stores other objects as an index alone, and warns; a resumed study would misread them.
    plain = all(value is None or isinstance(value, (bool, int, float, str)) for value in values)
    if not values or not plain:
        raise InvalidArgumentError(
            "A list of choices must have an element, and only None, bool, int, float and str, "
            f"which a study can store. Received: space[{name!r}]={values!r}. Name the choices, and "
            "look the objects up in `build`."
        )
    return optuna.distributions.CategoricalDistribution(values)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)  # a bool is an int, too


def _rule(name: str, values: Any) -> str:
    return (
        f"Each parameter in `space` must be {FORMS}. Received: space[{name!r}]={values!r}. Use one "
        "of these forms."
    )


def suggest(trial: Any, space: Mapping[str, Any]) -> dict[str, Any]:
    """Asks a trial for its parameters.

    Args:
        trial: `optuna.trial.Trial`.
        space: distributions by name, see `distributions`.

    Returns:
        The values by name.
    """
    known = optuna.distributions
    found: dict[str, Any] = {}
    for name, values in space.items():
        if isinstance(values, known.CategoricalDistribution):
            found[name] = trial.suggest_categorical(name, values.choices)
            continue
        integers = isinstance(values, known.IntDistribution)
        ask = trial.suggest_int if integers else trial.suggest_float
        found[name] = ask(name, values.low, values.high, step=values.step, log=values.log)
    return found
