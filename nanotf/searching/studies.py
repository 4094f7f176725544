"""The study of a search: where it is stored, which trials have ended, and those that died.

A worker notes its process in each trial that it begins. So any process of the same host can tell a
trial that runs from one whose worker, or whose whole program, was killed. It marks a killed
worker's trial failed and enqueues its parameters again.

Optuna makes a trial before the worker can note anything in it. Workers of a host therefore begin
trials in turn (`beginning`), and note in the study who begins one: a trial without a process is
that worker's, unless another host's worker begins one, too. A trial also has the item of
`nanotf.imap` for which it runs: if a worker dies after its trial has ended, and before the result
has arrived, the item needs no other trial.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import platform
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import optuna

from nanotf.console import logger
from nanotf.errors import InvalidArgumentError
from nanotf.machine import process_identity
from nanotf.searching.sampling import RETRY_OF, number_of, seed_of
from nanotf.wire import files

# Attributes of trials.
PROCESS = "nanotf_process"  # [host, process id, its start as in `process_identity.start_of`]
ERROR = "nanotf_error"  # text; the trial has ended without a value, and is not tried again
ITEM = "nanotf_item"  # text, the item of `nanotf.imap` that runs the trial
SUGGESTED = "nanotf_suggested"  # True once all of its parameters are drawn
ATTEMPT = "nanotf_attempt"  # how many trials with these parameters died before
# Attributes of the study.
METRIC = "nanotf_metric"
SEED = "nanotf_seed"
PARALLEL = "nanotf_parallel"
BEGINS = "nanotf_begins"  # with a host: [the number of trials before, the process as in PROCESS]
SEARCH = "nanotf_search"  # the process that searches in it, as in PROCESS; None for none

SQLITE_SECONDS = 60.0  # a worker waits that long, at most, while others write


@contextlib.contextmanager
def log_level(verbose: Any) -> Iterator[None]:
    """Hides Optuna's line for each trial meanwhile, unless it was asked for.

    Args:
        verbose: as in `search`.
    """
    logging = optuna.logging
    level = logging.get_verbosity()
    try:
        if verbose != 2:
            logging.set_verbosity(max(level, logging.WARNING))  # the user may want still less
        yield
    finally:
        logging.set_verbosity(level)


class JournalLock:
    """The right to write a journal, with the methods of Optuna's locks.

    The kernel releases it when its holder is killed, as workers are after an error or Ctrl-C. Of
    Optuna's own locks, others would wait for 30 s.

    Args:
        path: the file that stands for it.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._held: files.Lock | None = None  # by the thread that the storage lets write

    def acquire(self) -> bool:
        """Waits until nobody else has it."""
        self.release()  # Ctrl-C may have kept Optuna from it
        self._held = files.Lock(self._path, waits=True)
        return True

    def release(self) -> None:
        """Lets others have it."""
        held, self._held = self._held, None
        if held is not None:
            held.release()


@contextlib.contextmanager
def storage_for(given: Any) -> Iterator[Any]:
    """Opens a storage that worker processes can open, too.

    Args:
        given: the address of a database; a storage of Optuna; or None for a temporary file.

    Yields:
        An Optuna storage.

    Raises:
        InvalidArgumentError: The storage cannot be opened, or not by other processes.
    """
    if given is None:
        with tempfile.TemporaryDirectory(prefix="nanotf-search-") as folder:
            path = pathlib.Path(folder, "journal.log")
            lock = JournalLock(path.with_name("lock"))
            backend = optuna.storages.journal.JournalFileBackend(str(path), lock)
            yield optuna.storages.JournalStorage(backend)
    elif isinstance(given, optuna.storages.InMemoryStorage):
        raise _refused("an InMemoryStorage", "other processes cannot read it")
    elif isinstance(given, str):
        yield _database(given)
    else:
        yield given


def _database(address: str) -> Any:
    import sqlalchemy

    try:
        url = sqlalchemy.engine.make_url(address)
        if url.get_backend_name() != "sqlite":
            return optuna.storages.RDBStorage(address)
        if url.database in (None, "", ":memory:"):
            raise _refused(repr(address), "other processes cannot read a database in memory")
        # Workers may have another working directory.
        url = url.set(database=str(pathlib.Path(url.database).absolute()))
        waiting = {"connect_args": {"timeout": SQLITE_SECONDS}}
        return optuna.storages.RDBStorage(
            url.render_as_string(hide_password=False), engine_kwargs=waiting
        )
    except (sqlalchemy.exc.SQLAlchemyError, ImportError) as error:
        raise _refused(repr(address), f"{type(error).__name__}: {error}") from error


def _refused(received: str, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        "`storage` must be the address of a database that worker processes can open. Received: "
        f"storage={received}: {why}. Pass a file such as storage='sqlite:///study.db', or leave it "
        "out."
    )


def open_study(storage: Any, name: str | None, direction: str, metric: str, pruner: Any) -> Any:
    """Creates a study, or opens the one of that name.

    Raises:
        InvalidArgumentError: The study of that name has another direction or metric.
    """
    study = optuna.create_study(
        storage=storage,
        study_name=name,
        direction=direction,
        pruner=pruner,
        load_if_exists=True,
    )
    stored = {
        "direction": study.direction.name.lower(),
        "metric": study.user_attrs.get(METRIC, metric),
    }
    for argument, value in {"direction": direction, "metric": metric}.items():
        if stored[argument] != value:
            raise InvalidArgumentError(
                f"A study keeps its {argument}. Received: {argument}={value!r}, for the study "
                f"{name!r} with {argument}={stored[argument]!r}. Choose another `study_name`, or "
                f"pass {argument}={stored[argument]!r}."
            )
    study.set_user_attr(METRIC, metric)
    return study


@contextlib.contextmanager
def sole_search(study: Any) -> Iterator[None]:
    """Keeps other processes of this host from searching in a study meanwhile.

    Raises:
        InvalidArgumentError: One does already: it would count the trials of both as its own.
    """
    holder, mine = study.user_attrs.get(SEARCH), this_process()
    # Whether a process of another host still lives cannot be told from here.
    if holder not in (None, mine) and holder[0] == mine[0] and not _is_dead(holder):
        raise InvalidArgumentError(
            "A study serves one search at a time on a machine. Received: "
            f"study_name={study.study_name!r}, in which process {holder[1]} searches. Wait until "
            "that ends, or choose another `study_name`."
        )
    study.set_user_attr(SEARCH, mine)
    try:
        yield
    finally:
        with last_notes():  # without it, later searches see that this process has ended
            study.set_user_attr(SEARCH, None)


@contextlib.contextmanager
def last_notes() -> Iterator[None]:
    """Warns of a storage that does not take what is written in this context.

    For the end of a search: its result, or its error, counts more than these notes.
    """
    try:
        yield
    except Exception as error:
        logger.warning(
            "The storage of the search does not take its end: %s: %s", type(error).__name__, error
        )


def seed_for(study: Any, seed: int | None) -> int:
    """Returns the seed of a search, and notes it in the study.

    Args:
        study: `optuna.Study`.
        seed: None for that of an earlier call or, in a new study, one from NumPy's global
            generator.
    """
    if seed is None:
        noted = study.user_attrs.get(SEED)  # without a draw: that generator is the user's
        seed = int(np.random.randint(2**31) if noted is None else noted)
    study.set_user_attr(SEED, seed)
    return seed


def training_seed(seed: int, study: Any, trial: Any) -> int:
    """Returns the seed of a trial's training: a trial that is tried again has that of the first.

    Args:
        seed: the search's seed.
        trial: trial of Optuna.
    """
    return seed_of(seed, number_of(study, trial))


def in_memory(study: Any, storage: Any) -> Any:
    """Copies a study into this process's memory.

    Args:
        study: `optuna.Study`.
        storage: where the study is.
    """
    memory = optuna.storages.InMemoryStorage()
    optuna.copy_study(from_study_name=study.study_name, from_storage=storage, to_storage=memory)
    return optuna.load_study(
        study_name=study.study_name, storage=memory, sampler=study.sampler, pruner=study.pruner
    )


def ended(study: Any) -> int:
    """Counts the trials that need not be tried again: with a value, pruned, or failed for good."""
    return sum(map(_counts, study.get_trials(deepcopy=False)))


def seconds_of_a_trial(study: Any) -> float | None:
    """Returns the mean time of trials with a value, or None if there are none."""
    state = optuna.trial.TrialState.COMPLETE
    found = [trial.duration for trial in study.get_trials(deepcopy=False, states=(state,))]
    seconds = [duration.total_seconds() for duration in found if duration is not None]
    return sum(seconds) / len(seconds) if seconds else None


def _counts(trial: Any) -> bool:
    state = optuna.trial.TrialState
    is_failure = trial.state == state.FAIL and ERROR in trial.user_attrs
    return trial.state in (state.COMPLETE, state.PRUNED) or is_failure


def this_process() -> list[Any]:
    """Returns the value of `PROCESS` for trials of this process."""
    return [platform.node(), os.getpid(), process_identity.start_of(os.getpid())]


def _is_dead(process: Any) -> bool:
    """Returns True if a process of this host has ended; False for those of other hosts."""
    if process is None:
        return False  # not a trial of nanotf
    host, pid, start = process
    return bool(host == platform.node() and process_identity.start_of(pid) != start)


def fail_dead_trials(study: Any, max_restarts: int | None = None) -> list[int]:
    """Marks the running trials of dead processes failed, and enqueues their parameters again.

    Args:
        study: `optuna.Study`.
        max_restarts: how often parameters are tried again; None for always, since the program was
            interrupted.

    Returns:
        The numbers of the trials that are not tried again.
    """
    running = optuna.trial.TrialState.RUNNING
    given_up = []
    for trial in study.get_trials(deepcopy=False, states=(running,)):
        process = trial.user_attrs.get(PROCESS) or _beginner(study, trial)
        if not _is_dead(process) or not _fail(study, trial.number):  # who fails it enqueues it
            continue
        attempt = trial.user_attrs.get(ATTEMPT, 0)
        if max_restarts is None or attempt < max_restarts:
            first = trial.user_attrs.get(RETRY_OF, trial.number)
            attributes = {RETRY_OF: first, ATTEMPT: attempt + 1}
            # Some of the parameters would shift the random numbers of the others.
            parameters = trial.params if trial.user_attrs.get(SUGGESTED) else {}
            study.enqueue_trial(parameters, user_attrs=attributes)
        else:
            given_up.append(trial.number)
    return given_up


@contextlib.contextmanager
def beginning(
    study: Any, lock: pathlib.Path, item: str, max_restarts: int
) -> Iterator[Callable[[Any], None]]:
    """Lets one worker of this host at a time begin a trial.

    Args:
        study: `optuna.Study`.
        lock: the file of which the worker has the lock meanwhile.
        item: the value of `ITEM`.
        max_restarts: as in `fail_dead_trials`.

    Yields:
        A function to call with the trial, as soon as it exists. The next worker may then begin.
    """
    turn = files.Lock(lock, waits=True)
    try:
        fail_dead_trials(study, max_restarts)
        mine = this_process()
        study.set_user_attr(_begins(), [len(study.get_trials(deepcopy=False)), mine])

        def begun(trial: Any) -> None:
            trial.set_user_attr(ITEM, item)
            trial.set_user_attr(PROCESS, mine)
            study.set_user_attr(_begins(), [0, None])  # nobody begins one now
            turn.release()

        yield begun
    finally:
        turn.release()


def _beginner(study: Any, trial: Any) -> Any:
    """Returns the process of a trial whose worker had not noted itself; None if it is not certain.

    Args:
        study: `optuna.Study`.
        trial: a running trial, as it was read.
    """
    # In this order: a worker takes itself out of `BEGINS` after it is in `PROCESS`. Whoever has
    # made a trial that still has no process, read last, was in `BEGINS` when that was read.
    noted = [value for name, value in study.user_attrs.items() if name.startswith(BEGINS)]
    possible = [
        process
        for before, process in noted
        # It began after the count of `BEGINS`, or took an enqueued trial, whose number may be lower
        if process is not None and (trial.number >= before or RETRY_OF in trial.user_attrs)
    ]
    process = study.get_trials(deepcopy=False)[trial.number].user_attrs.get(PROCESS)
    return process or (possible[0] if len(possible) == 1 else None)


def ended_for(study: Any, item: str) -> int | None:
    """Returns the number of the trial that has ended for an item, or None."""
    for trial in study.get_trials(deepcopy=False):
        if trial.user_attrs.get(ITEM) == item and trial.state.is_finished() and _counts(trial):
            return int(trial.number)
    return None


def number_for(study: Any, item: str) -> int | None:
    """Returns the number of the latest trial that has begun for an item, or None."""
    numbers = [t.number for t in study.get_trials(deepcopy=False) if t.user_attrs.get(ITEM) == item]
    return max(numbers, default=None)


def best_of(study: Any) -> Any:
    """Returns the trial with the best value, or None if there is none with a value."""
    completed = (optuna.trial.TrialState.COMPLETE,)
    return study.best_trial if study.get_trials(deepcopy=False, states=completed) else None


def _begins() -> str:
    return f"{BEGINS} {platform.node()}"


def _fail(study: Any, number: int) -> bool:
    """Marks a trial failed; returns False if another process did so first."""
    try:
        study.tell(number, state=optuna.trial.TrialState.FAIL)
    except (ValueError, RuntimeError):
        # `tell` refuses trials that have ended. One of several callers gets here without an error.
        if study.trials[number].state.is_finished():
            return False
        raise
    return True
