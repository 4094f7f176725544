"""`nanotf.search`: hyperparameters of a Keras model, on warm workers with their own cores.

    search                arguments.check   everything wrong is found before a process starts
      _Search.run         studies           opens the study; enqueues the trials of dead processes
        measure.choose    parallel="auto"
        mapping.imap      one item a trial; `trials.TrialFunction` runs in the workers
      SearchResult

Optuna's storage connects the processes: each worker opens the study, asks Optuna for a trial's
parameters, reports its epochs and writes its value, as in Optuna's own parallel studies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle

from nanotf.console import logger
from nanotf.errors import InvalidArgumentError, WorkerDied
from nanotf.parent import mapping
from nanotf.tuning.requirement import require_optuna
from nanotf.tuning.result import SearchResult


def search(
    build: Callable[..., Any],
    space: Mapping[str, Any],
    data: Any,
    metric: str,
    trials: int,
    parallel: int | str = "auto",
    sampler: Any = None,
    pruner: Any = None,
    *,
    direction: str | None = None,
    storage: Any = None,
    study_name: str | None = None,
    cores_per_process: int | None = None,
    cores: Sequence[int] | None = None,
    seed: int | None = None,
    max_restarts: int = 1,
    catch: Any = (),
    verbose: Any = "auto",
    **fit: Any,
) -> SearchResult:
    """Searches hyperparameters of a Keras model with Optuna, several trials side by side.

    Each trial builds and trains a model in a warm worker with its own cores, see `nanotf.map`. Its
    value is the metric of its last epoch. The best model comes back built, compiled and trained.

    Args:
        build: callable. It takes parameters by name and returns a compiled Keras model. It is
            called in the workers.
        space: dict of each parameter's name to its values: a pair (low, high) of two int, for
            integers, or of numbers; (low, high, "log") for a logarithmic scale; a list of choices;
            or a distribution of Optuna. Parameters go to `build`, and to `data` if it is a
            function, by the names that each takes.
        data: (x, y), (x, y, sample_weight), a dict of arguments of `fit`, or a function that takes
            parameters by name and returns one of these or a `tf.data.Dataset`. Arrays, those that a
            function refers to included, lie in memory that all workers map. A function is called
            for each trial in the worker.
        metric: str, a name in the logs of an epoch, such as "val_loss".
        trials: int, how many trials the study shall have. Those that it has already count, unless
            they failed or were interrupted.
        parallel: int, how many trials run at a time, or "auto", the default: measures once in a
            study whether many trials with few cores each or few with many end first.
        sampler: None, the default, for Optuna's `TPESampler`; a function of `seed` that returns a
            sampler, such as a sampler's class; or a sampler. nanotf calls a function for each
            trial, with a seed that follows from `seed` and the trial's number. Of a sampler, each
            worker has a copy, which draws its own random numbers if several work.
        pruner: pruner of Optuna or None, the default, for Optuna's `MedianPruner`. It is asked
            after each epoch.
        direction: "minimize" or "maximize". It may be left out for "loss" and "val_loss".
        storage: str, the address of a database such as "sqlite:///study.db"; a storage of Optuna;
            or None, the default: the study is kept for this call and in its result.
        study_name: str, needed with `storage`. The same call in a new process continues the study.
        cores_per_process: int or None, the default: equal shares of the usable cores.
        cores: sequence of int or None, logical CPUs to divide, as in `fit`.
        seed: int or None. Fixes the parameters that are drawn before the sampler uses results, and
            each trial's weights and random numbers. None draws one, which the study keeps.
        max_restarts: int, default 1, how often a trial whose worker died is tried again. Then
            another trial takes its place.
        catch: exception class or tuple of classes. A trial that raises one fails, and the search
            continues. By default any exception ends the search.
        verbose: "auto", 0, 1 or 2. 0 shows nothing, 2 Optuna's line for each trial, others a
            progress bar.
        **fit: arguments of Keras's `fit` for all trials, such as `epochs` and `validation_split`.
            Each trial has copies of `callbacks`.

    Returns:
        `SearchResult`, with `best_model`, `best_params`, `best_value`, `table` and `study`.

    Raises:
        UnavailableError: Optuna is not installed.
        InvalidArgumentError, InvalidArgumentTypeError: An argument cannot be used.
        PlacementError: There are fewer cores than workers need.
        ShippingError: `build`, `data` or an argument of `fit` cannot be sent to workers.
        WorkerError: A trial raised an exception that is not in `catch`. It can also be caught as
            the exception's own class.

    Example:
        >>> def build(units, rate):
        ...     model = keras.Sequential([layers.Dense(units, "relu"), layers.Dense(10)])
        ...     model.compile(keras.optimizers.Adam(rate), loss=loss, metrics=["accuracy"])
        ...     return model
        >>> space = {"units": (16, 256), "rate": (1e-4, 1e-1, "log")}
        >>> result = nanotf.search(
        ...     build, space, (x, y), "val_accuracy", trials=30,
        ...     direction="maximize", epochs=10, validation_split=0.2,
        ... )
        >>> result.best_model.save("best.keras")
    """
    require_optuna()
    from nanotf.tuning import arguments, studies  # they import Optuna

    request = arguments.check(
        build,
        space,
        data,
        metric,
        trials,
        parallel,
        direction=direction,
        cores_per_process=cores_per_process,
        cores=cores,
        max_restarts=max_restarts,
        catch=catch,
        verbose=verbose,
        fit=fit,
    )
    arguments.check_study(storage, study_name)
    arguments.check_pruner(pruner)
    seed = arguments.check_seed(seed)
    arguments.check_sampler(sampler, 0)
    with _log_level(verbose), studies.storage_for(storage) as opened:
        study = studies.open_study(opened, study_name, request.direction, metric, pruner)
        seed = studies.seed_for(study, seed)
        study.sampler = arguments.check_sampler(sampler, seed)
        return _Search(request, study, opened, seed, verbose).run(keep=storage is None)


@contextlib.contextmanager
def _log_level(verbose: Any) -> Iterator[None]:
    """Hides Optuna's line for each trial, unless it was asked for."""
    logging = require_optuna().logging
    level = logging.get_verbosity()
    try:
        if verbose != 2:
            logging.set_verbosity(max(level, logging.WARNING))
        yield
    finally:
        logging.set_verbosity(level)


class _Search:
    """One call of `search`.

    Args:
        request: `arguments.Request`.
        study: `optuna.Study`.
        storage: its storage.
        seed: int.
        verbose: as in `search`.
    """

    def __init__(self, request: Any, study: Any, storage: Any, seed: int, verbose: Any) -> None:
        self._request, self._study, self._storage = request, study, storage
        self._seed, self._verbose = seed, verbose
        self._best: tuple[int, Any] = (-1, None)  # a trial and its model
        self._parallel = 0

    def run(self, keep: bool) -> SearchResult:
        """Runs the trials that are left.

        Args:
            keep: bool, whether the study is to be copied into memory: its storage ends.
        """
        from nanotf.tuning import studies

        try:
            studies.fail_dead_trials(self._study)  # of an earlier call
            left, before = self._left(), None
            # A trial whose worker dies once too often is replaced, as long as others end.
            while left and left != before:
                self._run_trials(left)
                left, before = self._left(), left
        finally:
            studies.fail_dead_trials(self._study)  # those that an exception interrupted
        study = studies.in_memory(self._study, self._storage) if keep else self._study
        return SearchResult(study, *self._best, self._train_again, self._parallel)

    def _left(self) -> int:
        from nanotf.tuning import studies

        left: int = self._request.trials - studies.ended(self._study)
        return max(0, left)

    def _run_trials(self, count: int) -> None:
        """Runs a number of trials."""
        from nanotf.tuning import measure, studies

        request = self._request
        workers: Any = request.parallel
        if workers == "auto":
            workers = measure.choose(request, self._study, count, self._verbose)
        workers = min(workers, count)
        self._parallel = max(self._parallel, workers)
        first = len(self._study.get_trials(deepcopy=False))
        results = mapping.imap(
            self._function(workers),
            range(first, first + count),
            workers,
            cores_per_process=request.cores_per_process,
            shared={"fit": request.fit},
            on_error="return",
            cores=request.cores,
            seed=self._seed,
            max_restarts=request.max_restarts,
            verbose=0 if self._verbose == 2 else self._verbose,
        )
        with results:
            for result in results:
                if isinstance(result, WorkerDied):
                    given_up = studies.fail_dead_trials(self._study, request.max_restarts)
                    logger.warning("Trials %s are not tried again. %s", given_up, result.what)
                elif isinstance(result, BaseException):
                    raise result
                else:
                    self._take(*result)

    def _take(self, number: int, model: Any) -> None:
        """Keeps a model if it is the best so far."""
        if model is not None and self._study.best_trial.number == number:
            self._best = number, model

    def _function(self, workers: int) -> Any:
        """Returns the function that runs a trial in a worker."""
        from nanotf.tuning.sampling import SeededSampler
        from nanotf.tuning.trials import TrialFunction

        study, request = self._study, self._request
        opened = {
            "study_name": study.study_name,
            "storage": self._storage,
            "sampler": study.sampler,
            "pruner": study.pruner,
        }
        return TrialFunction(
            request.recipe,
            request.space,
            _pickled(opened),
            self._seed,
            workers > 1 and not isinstance(study.sampler, SeededSampler),
            request.catch,
            request.max_restarts,
            require_optuna().logging.get_verbosity(),
        )

    def _train_again(self, trial: Any) -> Any:
        """Trains the model of a trial of an earlier call, in a worker."""
        from nanotf.tuning import studies
        from nanotf.tuning.trials import BestModel

        request = self._request
        seed = studies.training_seed(self._seed, trial)
        function = BestModel(request.recipe, dict(trial.params), seed)
        [model] = mapping.map(
            function,
            [trial.number],
            1,
            cores_per_process=request.cores_per_process,
            shared={"fit": request.fit},
            cores=request.cores,
            verbose=0,
        )
        return model


def _pickled(opened: dict[str, Any]) -> bytes:
    """Pickles the arguments of `optuna.load_study`.

    Raises:
        InvalidArgumentError: One of them cannot be pickled; names it.
    """
    for name, value in opened.items():
        try:
            cloudpickle.dumps(value)
        except Exception as error:
            raise InvalidArgumentError(
                f"Each worker opens the study, so its {name} must be picklable. Received: an "
                f"object of class {type(value).__qualname__}, which is not: {error}. Pass another."
            ) from error
    return bytes(cloudpickle.dumps(opened))
