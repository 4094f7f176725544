"""Runs the trials of a search in a worker: trains their models and reports their epochs.

A trial is Optuna's own: `optimize` with one trial, on a study in a storage that all workers open.
So samplers, pruners, enqueued trials and the log are those of Optuna's parallel studies.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import pathlib
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import optuna

from nanotf.compat.versions import require_tensorflow
from nanotf.errors import InvalidArgumentError, InvalidArgumentTypeError
from nanotf.searching import studies
from nanotf.searching.space import suggest


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Makes a model from parameters and trains it."""

    build: Callable[..., Any]  # takes parameters by name, returns a compiled model
    data: Callable[..., Any] | None  # the same, returns data; None if all trials share them
    metric: str  # a name in the logs of an epoch

    def model(self, parameters: Mapping[str, Any]) -> Any:
        """Builds the model.

        Raises:
            InvalidArgumentTypeError: `build` returns something else.
        """
        model = self.build(**taken(self.build, parameters))
        if not isinstance(model, require_tensorflow().keras.Model):
            raise InvalidArgumentTypeError(
                "`build` must return a compiled Keras model. Received: an object of class "
                f"{type(model).__qualname__}. Add `return model`."
            )
        return model

    def fit_arguments(
        self, parameters: Mapping[str, Any], fit: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns the arguments of `fit` for parameters; callbacks are copies.

        Args:
            parameters: by name.
            fit: the arguments that all trials share.
        """
        found = dict(fit)
        if self.data is not None:
            found |= as_arguments(self.data(**taken(self.data, parameters)))
        # The worker keeps its arguments from trial to trial; a callback has a state.
        found["callbacks"] = copy.deepcopy(_listed(found.get("callbacks")))
        return found

    def train(self, parameters: Mapping[str, Any], fit: Mapping[str, Any], trial: Any) -> Any:
        """Builds and trains a model.

        Args:
            parameters, fit: as in `fit_arguments`.
            trial: `optuna.trial.Trial`, which gets the epochs' values; or None.

        Returns:
            A tuple of the model and the reporting callback.
        """
        model = self.model(parameters)
        arguments = self.fit_arguments(parameters, fit)
        reporter = _reporter(self.metric, trial)
        arguments["callbacks"] = [*arguments["callbacks"], reporter]
        model.fit(**arguments)
        return model, reporter


def taken(function: Callable[..., Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those parameters that a function takes by name: all, if it takes any name."""
    kinds = {p.name: p.kind for p in inspect.signature(function).parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds.values():
        return dict(parameters)
    return {name: value for name, value in parameters.items() if name in kinds}


def as_arguments(data: Any) -> dict[str, Any]:
    """Returns data as arguments of `fit`: a dict as it is, a tuple as x, y and sample weights.

    Raises:
        InvalidArgumentError: A tuple has another length.
    """
    if isinstance(data, dict):
        return dict(data)
    if not isinstance(data, tuple):
        return {"x": data}
    if len(data) not in (2, 3):
        raise InvalidArgumentError(
            "`data` must be (x, y), (x, y, sample_weight), a dict of arguments of fit, or a "
            f"function that returns one of them. Received: a tuple of {len(data)}. Use one of "
            "these forms."
        )
    return dict(zip(("x", "y", "sample_weight"), data, strict=False))


def _listed(callbacks: Any) -> list[Any]:
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]


def _reporter(metric: str, trial: Any) -> Any:
    """Returns a callback that reports each epoch's metric, and stops a pruned trial's training.

    Its `value` is the last epoch's metric; `is_pruned` tells whether Optuna's pruner stopped it.
    """

    class Reporter(require_tensorflow().keras.callbacks.Callback):  # type: ignore[misc]
        value = math.nan
        epochs = 0
        is_pruned = False

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if metric not in (logs or {}):
                raise InvalidArgumentError(
                    "`metric` must be a name in the logs of an epoch. Received: "
                    f"metric={metric!r}; the logs have {sorted(logs or {})}. Pass one of these, or "
                    "compile the model with the metric. Names with val_ need validation data."
                )
            self.value, self.epochs = float(logs[metric]), epoch + 1
            if trial is None:
                return
            trial.report(self.value, epoch)
            if trial.should_prune():
                self.is_pruned = True
                self.model.stop_training = True  # lets other callbacks end their training

    return Reporter()


@dataclasses.dataclass
class TrialFunction:
    """The function of `nanotf.imap` in a search: runs one trial."""

    recipe: Recipe
    space: dict[str, Any]  # distribution of Optuna by the parameter's name
    study: bytes  # the pickled arguments of `optuna.load_study`
    seed: int  # of the search
    reseed: bool  # whether each worker's sampler draws its own random numbers
    catch: tuple[type[Exception], ...]  # with which a trial fails, and the search continues
    max_restarts: int  # how often a trial whose worker died is tried again
    log_level: int  # of Optuna's logger
    lock: pathlib.Path  # the file for `studies.beginning`
    items: str  # what the items of one call, and no others, have in common

    def __post_init__(self) -> None:
        self.__qualname__ = "nanotf.search"  # errors name the function so
        self._study: Any = None  # a worker opens it once

    def __call__(self, slot: int, fit: Mapping[str, Any]) -> tuple[int, Any]:
        """Runs a trial.

        Args:
            slot: the item of `nanotf.imap`; Optuna gives the trial its number.
            fit: the arguments of `fit` that all trials share.

        Returns:
            A tuple of the trial's number, and of its model if it is the best so far, or None.
        """
        study, item = self._opened(), self.item(slot)
        # A worker that died may have ended the trial before its result arrived.
        done = studies.ended_for(study, item)
        if done is not None:
            return done, None
        # Enqueues parameters of a worker that died: this trial may take them.
        with studies.beginning(study, self.lock, item, self.max_restarts) as begun:
            run = _OneTrial(self, fit, begun)
            study.optimize(run.objective, n_trials=1, catch=self.catch)
        best = studies.best_of(study)
        is_best = best is not None and best.number == run.number
        return run.number, run.model if is_best else None

    def item(self, slot: int) -> str:
        """Returns the value of `studies.ITEM` for an item of `nanotf.imap`."""
        return f"{self.items} {slot}"

    def _opened(self) -> Any:
        if self._study is None:
            optuna.logging.set_verbosity(self.log_level)
            self._study = optuna.load_study(**pickle.loads(self.study))
            if self.reseed:
                self._study.sampler.reseed_rng()
        return self._study


@dataclasses.dataclass
class BestModel:
    """The function of `nanotf.map` that trains the model of an ended trial again."""

    recipe: Recipe
    parameters: dict[str, Any]  # by name
    seed: int  # of the trial, see `studies.training_seed`

    def __post_init__(self) -> None:
        self.__qualname__ = "nanotf.search"

    def __call__(self, number: int, fit: Mapping[str, Any]) -> Any:
        """Returns the trained model.

        Args:
            number: of the trial; not used.
            fit: the arguments of `fit` that all trials share.
        """
        require_tensorflow().keras.utils.set_random_seed(self.seed)
        model, _ = self.recipe.train(self.parameters, fit, None)
        return model


class _OneTrial:
    """One trial in a worker.

    Args:
        begun: see `studies.beginning`.

    Attributes:
        number: int, of the trial; -1 before it begins.
        model: its trained model or None.
    """

    def __init__(
        self, function: TrialFunction, fit: Mapping[str, Any], begun: Callable[[Any], None]
    ) -> None:
        self._function, self._fit, self._begun = function, fit, begun
        self.number, self.model = -1, None

    def objective(self, trial: Any) -> float:
        """Optuna's objective: trains the trial's model and returns its metric."""
        self._begun(trial)
        self.number = trial.number
        parameters = suggest(trial, self._function.space)
        trial.set_user_attr(studies.SUGGESTED, True)
        seed = studies.training_seed(self._function.seed, trial.study, trial)
        require_tensorflow().keras.utils.set_random_seed(seed)
        try:
            self.model, reporter = self._function.recipe.train(parameters, self._fit, trial)
        except self._function.catch as error:
            trial.set_user_attr(studies.ERROR, f"{type(error).__name__}: {error}")
            raise
        if reporter.is_pruned:
            raise optuna.TrialPruned(f"after epoch {reporter.epochs}")
        if math.isnan(reporter.value):
            # Optuna fails such a trial, and `studies.ended` counts only failures that have this.
            trial.set_user_attr(studies.ERROR, "the metric is not a number")
        return float(reporter.value)
