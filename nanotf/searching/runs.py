"""One call of `nanotf.search` in the parent: opens the study, and gives its trials to workers."""

from __future__ import annotations

import os
import pathlib
import uuid
from typing import Any

import cloudpickle
import optuna

from nanotf import console
from nanotf.console import logger
from nanotf.errors import InvalidArgumentError, WorkerDied
from nanotf.machine import topology
from nanotf.parent.map import item_call, mapping
from nanotf.searching import auto_parallel, studies
from nanotf.searching.result import SearchResult
from nanotf.searching.sampling import SeededSampler
from nanotf.searching.search_arguments import SearchArguments
from nanotf.searching.trials import BestModel, TrialFunction
from nanotf.wire import memory_files


class SearchRun:
    """One call of `search`.

    Args:
        study: `optuna.Study`, open in this process.
        storage: its storage, which each worker opens, too.
        seed: that of the search, see `studies.seed_for`.
        verbose: as in `search`.
    """

    def __init__(
        self, request: SearchArguments, study: Any, storage: Any, seed: int, verbose: Any
    ) -> None:
        self._request, self._study, self._storage = request, study, storage
        self._seed, self._verbose = seed, verbose
        self._best: tuple[int, Any] = (-1, None)  # a trial and its model
        self._parallel = 0

    def run(self, keep: bool) -> SearchResult:
        """Runs the trials that are left.

        Args:
            keep: True copies the study into memory, since its storage ends with the call.
        """
        try:
            studies.fail_dead_trials(self._study)  # of an earlier call
            left, before = self._left(), None
            # A trial whose worker dies once too often is replaced, as long as others end.
            while left and left != before:
                self._run_trials(left)
                left, before = self._left(), left
        finally:
            with studies.last_notes():
                studies.fail_dead_trials(self._study)  # those that an exception interrupted
        study = studies.in_memory(self._study, self._storage) if keep else self._study
        return SearchResult(study, *self._best, self._train_again, self._parallel)

    def _left(self) -> int:
        return max(0, self._request.trials - studies.ended(self._study))

    def _run_trials(self, count: int) -> None:
        """Runs a number of trials."""
        request = self._request
        workers: Any = request.parallel
        if workers == topology.AUTO:
            workers, count = auto_parallel.choose(request, self._study, count, self._verbose)
        workers = min(workers, count)
        self._parallel = max(self._parallel, workers)  # a last round may have fewer
        # Without a name, the file is gone even if this process is killed.
        file = memory_files.anonymous_file(0, fixed=False)
        try:
            self._run_items(count, workers, pathlib.Path(f"/proc/{os.getpid()}/fd/{file}"))
        finally:
            os.close(file)

    def _run_items(self, count: int, workers: int, lock: pathlib.Path) -> None:
        request = self._request
        # A guess of the trials' numbers: output shows it until these are known.
        first = len(self._study.get_trials(deepcopy=False))
        function, slots = self._function(workers, lock), range(first, first + count)
        numbers: dict[int, int] = {}  # of trials, by the index of an item
        verbose = 0 if self._verbose == 2 else self._verbose  # 2: Optuna writes the lines
        left = self._left()
        bar = console.ItemBar(
            "search",
            verbose,
            self._best_so_far,
            before=request.trials - left,
            after=left - count,
        )

        def number(index: int) -> object:
            if index not in numbers:
                found = studies.number_for(self._study, function.item(slots[index]))
                if found is None:  # it prints before its trial has begun
                    return slots[index]
                numbers[index] = found
            return numbers[index]

        results = item_call.run_items(
            function,
            slots,
            workers,
            bar,
            number,
            cores_per_process=request.cores_per_process,
            shared={"fit": request.fit},
            on_error="return",  # a death does not end the search
            cores=request.cores,
            seed=self._seed,
            max_restarts=request.max_restarts,
            output=request.output,
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
        # Another worker may have completed a better trial since this one looked.
        if model is not None and self._study.best_trial.number == number:
            self._best = number, model

    def _best_so_far(self) -> str:
        best = studies.best_of(self._study)
        if best is None:
            return ""
        return f"best {self._request.recipe.metric} {best.value:.4g} (trial {best.number})"

    def _function(self, workers: int, lock: pathlib.Path) -> TrialFunction:
        """Returns the function that runs a trial in a worker."""
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
            # Copies of the user's sampler would draw the same parameters in all workers.
            workers > 1 and not isinstance(study.sampler, SeededSampler),
            request.catch,
            request.max_restarts,
            optuna.logging.get_verbosity(),
            lock,
            uuid.uuid4().hex,
        )

    def _train_again(self, study: Any, trial: Any) -> Any:
        """Trains the model of a trial whose model is not here, in a worker.

        Args:
            study: that of the result. The storage of the search's own may be gone.
            trial: of Optuna.
        """
        request = self._request
        seed = studies.training_seed(self._seed, study, trial)
        function = BestModel(request.recipe, dict(trial.params), seed)
        retraining = console.status(f"training the model of trial {trial.number} again")
        with console.silent(self._verbose == 0), retraining:
            [model] = mapping.map(
                function,
                [trial.number],
                1,
                cores_per_process=request.cores_per_process,
                shared={"fit": request.fit},
                cores=request.cores,
                verbose=0,
                output=request.output,
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
