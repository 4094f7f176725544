"""`nanotf.search`: hyperparameters of a Keras model, on warm workers with their own cores.

    search                    `search_arguments.check` finds what is wrong before a process starts
      studies.open_study
      runs.SearchRun.run      enqueues the trials of dead processes, runs those that are left
        auto_parallel.choose  parallel="auto"
        mapping.imap          one item a trial; `trials.TrialFunction` runs in the workers
      SearchResult

Optuna's storage connects the processes: each worker opens the study, asks Optuna for a trial's
parameters, reports its epochs and writes its value, as in Optuna's own parallel studies.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nanotf import console
from nanotf.compat import versions
from nanotf.errors import UnavailableError
from nanotf.tracebacks import raising_at_the_call

if TYPE_CHECKING:
    from nanotf.searching.result import SearchResult


@raising_at_the_call
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
    output: str = "prefix",
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
        parallel: int, how many trials run at a time, or "auto", the default: times the first trials
            on as many workers as there are cores. Then it measures, once in a study, whether many
            trials with few cores each or few with many end first, if that takes a tenth of what it
            can save, at most.
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
            progress bar, with the best value so far.
        output: "prefix", "keep" or "drop", as in `nanotf.map`; the prefix is the trial's number.
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
    _check_optuna()
    with console.silent(verbose == 0):
        versions.import_visibly()
    from nanotf.searching import runs, search_arguments, studies  # they import Optuna

    request = search_arguments.check(
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
        output=output,
        fit=fit,
    )
    search_arguments.check_study(storage, study_name)
    search_arguments.check_pruner(pruner)
    seed = search_arguments.check_seed(seed)
    search_arguments.check_sampler(sampler, 0)  # before the study, which knows the seed, is opened
    with (
        console.silent(verbose == 0),
        studies.log_level(verbose),
        studies.storage_for(storage) as opened,
    ):
        study = studies.open_study(opened, study_name, request.direction, metric, pruner)
        with studies.sole_search(study):
            seed = studies.seed_for(study, seed)
            study.sampler = search_arguments.check_sampler(sampler, seed)
            return runs.SearchRun(request, study, opened, seed, verbose).run(keep=storage is None)


def _check_optuna() -> None:
    """Raises `UnavailableError` if Optuna, which is optional, cannot be imported."""
    try:
        importlib.import_module("optuna")
    except ModuleNotFoundError as error:
        raise UnavailableError(
            "nanotf.search needs an installed Optuna, with its dependencies. Received: no module "
            f"named {error.name!r}. Install it: pip install 'nanotf[search]'."
        ) from error
