"""Checks the arguments of `nanotf.search`, before any process starts."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import optuna

from nanotf.compat.versions import require_tensorflow
from nanotf.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    check_choice,
    check_integer,
)
from nanotf.machine import topology
from nanotf.parent.map import item_arguments
from nanotf.searching.sampling import SeededSampler, default_sampler
from nanotf.searching.space import distributions
from nanotf.searching.trials import Recipe, as_arguments

DIRECTIONS = ("minimize", "maximize")
LOSSES = ("loss", "val_loss")  # what training minimizes


@dataclasses.dataclass(frozen=True)
class SearchArguments:
    """The checked arguments of a search."""

    recipe: Recipe
    space: dict[str, Any]  # distribution of Optuna by the parameter's name
    fit: dict[str, Any]  # the arguments of `fit` that all trials share
    direction: str  # one of `DIRECTIONS`
    trials: int  # how many the study shall have, earlier ones included
    parallel: int | str  # how many run at a time, or "auto"
    cores_per_process: int | None  # None for equal shares
    cores: Any  # logical CPUs, a sequence of int; None for all that are usable
    catch: tuple[type[Exception], ...]  # with which a trial fails, and the search continues
    max_restarts: int  # how often a trial whose worker died is tried again
    output: str  # as in `nanotf.map`


def check(
    build: Any, space: Any, data: Any, metric: Any, trials: Any, parallel: Any, **other: Any
) -> SearchArguments:
    """Checks the arguments of `search`.

    Args:
        build, space, data, metric, trials, parallel: as in `search`.
        **other: its direction, cores_per_process, cores, catch, max_restarts, verbose, output and
            `fit`.

    Raises:
        NanoError: One of them cannot be used.
    """
    # A model can be called, too.
    if not callable(build) or isinstance(build, require_tensorflow().keras.Model):
        raise InvalidArgumentTypeError(
            "`build` must be a function that returns a compiled Keras model. Received: an object "
            f"of class {type(build).__qualname__}. Pass the function itself, without parentheses."
        )
    if not isinstance(metric, str) or not metric:
        raise InvalidArgumentTypeError(
            "`metric` must be a name in the logs of an epoch. Received: "
            f"metric={metric!r}. Pass a name such as 'val_loss'."
        )
    found = distributions(space)
    fit, source = _data(data, other["fit"])
    item_arguments.check_verbose(other["verbose"])
    item_arguments.check_output(other["output"])
    _check_parameters({"build": build, "data": source}, set(found))
    return SearchArguments(
        Recipe(build, source, metric),
        found,
        fit,
        _direction(metric, other["direction"]),
        check_integer("trials", trials, "Pass how many trials the study shall have"),
        _parallel(parallel),
        topology.check_cores_per_process(other["cores_per_process"]),
        other["cores"],
        _catch(other["catch"]),
        item_arguments.check_max_restarts(other["max_restarts"]),
        other["output"],
    )


def _parallel(parallel: Any) -> int | str:
    if isinstance(parallel, str):
        check_choice("parallel", parallel, (topology.AUTO,))
        return parallel
    return check_integer("parallel", parallel, "Pass how many trials run at a time, or 'auto'")


def _direction(metric: str, direction: Any) -> str:
    if direction is None and metric in LOSSES:
        return "minimize"
    if direction is None:
        raise InvalidArgumentError(
            f"`direction` must be given for a metric that is none of {', '.join(LOSSES)}. "
            f"Received: metric={metric!r} without it. Pass direction='maximize' if more is better, "
            "else direction='minimize'."
        )
    check_choice("direction", direction, DIRECTIONS)
    return str(direction)


def _catch(catch: Any) -> tuple[type[Exception], ...]:
    kinds = catch if isinstance(catch, tuple) else (catch,)
    if not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds):
        raise InvalidArgumentTypeError(
            "`catch` must be a tuple of exception classes, with which a trial fails and the search "
            f"continues. Received: catch={catch!r}. Pass classes such as (ValueError,)."
        )
    return kinds


def _data(data: Any, fit: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[..., Any] | None]:
    """Returns the arguments of `fit` that all trials share, and the function that makes others."""
    tf = require_tensorflow()
    if isinstance(data, tf.data.Dataset) or inspect.isgenerator(data):
        raise InvalidArgumentTypeError(
            "A dataset or a generator as `data` stays in the process that made it. Received: "
            f"data of class {type(data).__name__}. Pass a function that makes it from arrays or "
            "file names: each worker calls it."
        )
    if data is None or isinstance(data, list):
        raise InvalidArgumentTypeError(
            "`data` must be (x, y), a dict of arguments of fit, or a function that returns one of "
            f"them. Received: {type(data).__name__}. Pass a tuple such as (x, y)."
        )
    is_source = callable(data) and not isinstance(data, tf.keras.utils.Sequence)
    given = {} if is_source else as_arguments(data)
    twice = sorted(given.keys() & fit.keys())
    if twice:
        raise InvalidArgumentError(
            f"An argument of fit may be given once. Received: {', '.join(twice)}, in `data` and as "
            "a keyword argument. Remove one."
        )
    accepted = set(inspect.signature(tf.keras.Model.fit).parameters) - {"self"}
    unknown = sorted({**given, **fit}.keys() - accepted)
    if unknown:
        raise InvalidArgumentTypeError(
            "Keyword arguments of `search`, and the keys of `data`, must be arguments of Keras's "
            f"fit. Received: {', '.join(unknown)}. Parameters of a model belong in `space`."
        )
    return {**given, **fit}, data if is_source else None


def _check_parameters(functions: Mapping[str, Any], names: set[str]) -> None:
    """Checks that `build` and a function `data` take the parameters, and need no others."""
    left, takes_all = set(names), False
    for what, function in functions.items():
        if function is None:
            continue
        parameters = _parameters(what, function)
        takes_all |= any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        left -= {p.name for p in named}
        needed = [p.name for p in named if p.default is p.empty and p.name not in names]
        # `taken` passes parameters by name, and so never these.
        needed += [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
        if needed:
            raise InvalidArgumentTypeError(
                f"`{what}` must take its parameters by name from `space`. Received: "
                f"{what}{inspect.signature(function)} and space with {sorted(names)}. Add "
                f"{', '.join(needed)} to `space`, or give a default."
            )
    if left and not takes_all:
        raise InvalidArgumentTypeError(
            "Each parameter in `space` must be one of `build`, or of a function `data`. Received: "
            f"{', '.join(sorted(left))}, which neither takes. Add it to the function's parameters."
        )


def _parameters(what: str, function: Any) -> Iterable[inspect.Parameter]:
    try:
        return inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise InvalidArgumentTypeError(
            f"`{what}` must have a signature, which says the parameters that it takes. Received: "
            f"an object of class {type(function).__qualname__}. Wrap it in a function."
        ) from error


def check_study(storage: Any, study_name: Any) -> None:
    """Checks how a study is stored and named."""
    if storage is not None and not isinstance(storage, (str, optuna.storages.BaseStorage)):
        raise InvalidArgumentTypeError(
            "`storage` must be the address of a database, a storage of Optuna, or None. Received: "
            f"an object of class {type(storage).__qualname__}. Pass storage='sqlite:///study.db'."
        )
    if study_name is not None and not isinstance(study_name, str):
        raise InvalidArgumentTypeError(
            f"`study_name` must be a string. Received: study_name={study_name!r}. Pass a name."
        )
    if (storage is None) != (study_name is None):
        raise InvalidArgumentError(
            "`storage` and `study_name` belong together: they let the same call find its study "
            f"again. Received: storage={storage!r}, study_name={study_name!r}. Pass both or "
            "neither."
        )


def check_pruner(pruner: Any) -> None:
    """Checks that a pruner is Optuna's."""
    if pruner is not None and not isinstance(pruner, optuna.pruners.BasePruner):
        raise InvalidArgumentTypeError(
            "`pruner` must be a pruner of Optuna, or None. Received: an object of class "
            f"{type(pruner).__qualname__}. Pass one such as optuna.pruners.MedianPruner()."
        )


def check_sampler(sampler: Any, seed: int) -> Any:
    """Returns the sampler to use.

    Args:
        sampler: as in `search`: a sampler of Optuna, a function of `seed`, or None.
        seed: that of the search; makes one sampler, which shows whether the function works.
    """
    base = optuna.samplers.BaseSampler
    if isinstance(sampler, base):
        return sampler
    make = default_sampler if sampler is None else sampler
    problem = None
    if not callable(make):
        problem = f"an object of class {type(sampler).__qualname__}"
    else:
        try:
            made = SeededSampler(make, seed)
            if not isinstance(made._sampler, base):
                problem = f"a function that returns {type(made._sampler).__qualname__}"
        except TypeError as error:
            problem = f"{make!r}, which fails when it is called with a seed: {error}"
    if problem is not None:
        raise InvalidArgumentTypeError(
            "`sampler` must be a sampler of Optuna, or a function of `seed` that returns one. "
            f"Received: {problem}. Pass a class such as optuna.samplers.TPESampler."
        )
    return made


def check_seed(seed: Any) -> int | None:
    """Checks a seed."""
    if seed is None:
        return None
    return check_integer("seed", seed, "Pass a number, or None", least=0)
