"""The reader processes of one call of `fit`, `evaluate` or `predict`: `read_processes`."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import inspect
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

from nanotf.compat.versions import require_tensorflow
from nanotf.console import logger
from nanotf.errors import InvalidArgumentError, check_integer
from nanotf.machine import neighbours, topology
from nanotf.machine.reader_places import ReaderPlan
from nanotf.parent import calls
from nanotf.parent.keras_call import KerasCall
from nanotf.parent.reading import read_ahead
from nanotf.parent.reading.batch_readers import BatchReaders, ended
from nanotf.parent.where import Where
from nanotf.pool import backends, warm

AUTO = "auto"
# "auto" adds a reader when somebody has waited for this share of the time, over this many batches.
WAITED = 0.1
LOOKED_AT = 8

_DATA = ("x", "validation_data")  # the arguments that may be datasets
# Keras's own readers, in attributes of its datasets and in arguments of Keras 2's methods.
_KERAS_READERS: dict[str, Any] = {"workers": 1, "use_multiprocessing": False}

# By class of `x`: the number of readers at which "auto" arrived in the last call.
_arrived: dict[type, int] = {}


def check(value: Any) -> int | str | None:
    """Checks the argument `read_processes`; None stays None.

    Raises:
        InvalidArgumentTypeError, InvalidArgumentError: It is not "auto" or an int above 0.
    """
    if value is None or (isinstance(value, str) and value == AUTO):
        return value
    remedy = "Pass 'auto', or a number of processes"
    return check_integer("read_processes", value, remedy)


@contextlib.contextmanager
def attached(
    wanted: int | str | None,
    call: KerasCall,
    where: Where,
    max_restarts: int = 0,
) -> Iterator[Readers]:
    """Gives a call's datasets to readers, which run until the end of this context.

    Args:
        wanted: int, "auto" or None for no readers, the checked `read_processes`.
        where: the workers beside which the readers run.
        max_restarts: int, how many readers that end are replaced.

    Yields:
        `Readers`, with the arguments to use instead of the call's.

    Raises:
        InvalidArgumentError: There is nothing that readers can read.
    """
    if wanted is None or call.given is None:
        yield Readers(call)
        return
    found = _datasets(call.given)
    kind = type(next(iter(found.values())))
    number = most = int(wanted) if wanted != AUTO else 0
    if wanted == AUTO:
        most = max(1, topology.usable_count() - where.size)  # as many as there are cores
        number = min(most, _arrived.get(kind, 1))
    readers = Readers(call)
    seed = _seed(call.model)
    readers.prepare(found, where, Settings(number, most, max_restarts, seed))
    with warm.keeping_zygote():  # its end would end the readers, its forks
        try:
            yield readers
        except Exception as error:
            # TensorFlow keeps only the text of what a dataset raises inside Keras's own loop.
            if readers.failure is None or readers.failure is error:
                raise
            raise readers.failure from error
        finally:
            readers.close()
    if wanted == AUTO:
        _arrived[kind] = readers.number


def _datasets(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the datasets among a method's arguments that can be indexed, by argument."""
    kind = read_ahead.dataset_class()
    found = {name: given[name] for name in _DATA if isinstance(given.get(name), kind)}
    if not found:
        raise InvalidArgumentError(_refusal(given.get("x")))
    return found


def _refusal(x: Any) -> str:
    rule = (
        "`read_processes` is for datasets whose batches are read by index: a PyDataset or Sequence."
    )
    received = f"Received: x of class {type(x).__module__}.{type(x).__qualname__}"
    if isinstance(x, types.GeneratorType) or hasattr(x, "__next__"):
        return (
            f"{rule} {received}, which cannot be indexed, nor sent to another process. Write a "
            "PyDataset whose __getitem__(i) makes batch i, or leave read_processes out."
        )
    if isinstance(x, require_tensorflow().data.Dataset):
        return (
            f"{rule} {received}, which reads in threads of its own. Leave read_processes out, and "
            "read in parallel with map(..., num_parallel_calls=tf.data.AUTOTUNE)."
        )
    return f"{rule} {received}, of which nothing has to be read ahead. Leave read_processes out."


def _without_keras_readers(found: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments without those for Keras's own readers; logs that they are not used."""
    told = [
        f"{name}={value!r}"
        for name, default in _KERAS_READERS.items()
        for value in [
            given.get(name, default),
            *(getattr(d, name, default) for d in found.values()),
        ]
        if value != default
    ]
    if told:
        logger.info(
            "With read_processes, Keras's own readers are not used: %s has no effect.",
            ", ".join(dict.fromkeys(told)),
        )
    return {name: value for name, value in given.items() if name not in _KERAS_READERS}


def _seed(model: Any) -> int:
    """Returns a seed that follows the user's; the second of two calls in a row has another."""
    optimizer = getattr(model, "optimizer", None)
    return calls.seed_of_user(0 if optimizer is None else int(optimizer.iterations.numpy()))


def _plan(number: int, where: Where) -> ReaderPlan:
    is_local = backends.check_backend(where.backend) == backends.DEFAULT_BACKEND
    # Workers of other back ends choose their cores themselves, wherever they run.
    size = where.size if is_local else topology.usable_count()
    named = (where.cores_per_process, where.cores) if is_local else (None, None)
    return neighbours.plan_readers(number, size, *named)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a call's readers.

    Args:
        number: int, of readers at the beginning.
        most: int, the number up to which readers are added.
        max_restarts: int, how many readers that end are replaced.
        seed: int, for random numbers in `__getitem__`.
    """

    number: int = 0
    most: int = 0
    max_restarts: int = 0
    seed: int = 0


class Readers:
    """The readers of one call. They start when the first batch is needed.

    Args:
        call: the user's, from which the call to make is derived.

    Attributes:
        call: the call to make instead, with datasets that readers read.
        cores: tuple of int, the logical CPUs that workers leave free.
        number: int, of readers at present.
    """

    def __init__(self, call: KerasCall) -> None:
        self.call = call
        self.cores: tuple[int, ...] = ()
        self.number = 0
        self._settings = Settings()
        self._running: BatchReaders | None = None
        self._starting = threading.Lock()  # guards the next two
        self._has_ended = False
        self._sources: list[read_ahead.DatasetToRead] = []
        self._recent: collections.deque[tuple[float, float]] = collections.deque(maxlen=LOOKED_AT)

    def prepare(self, found: Mapping[str, Any], where: Where, settings: Settings) -> None:
        """Replaces datasets in the arguments, and plans where their readers run.

        Args:
            found: mapping of str to the user's datasets, by argument.
            where: the workers beside which the readers run.
        """
        self.number, self._settings = settings.number, settings
        self._plan = _plan(self.number, where)
        self.cores = self._plan.cores()
        if where.size > 1 and not self._plan.own:
            logger.warning(
                "%d readers have no cores of their own beside %d workers: they share the "
                "workers' cores. Pass fewer of either.",
                self.number,
                where.size,
            )
        given = _without_keras_readers(found, self.call.given or {})
        for number, (name, dataset) in enumerate(found.items()):
            shuffles = name == "x" and self._shuffles(given)
            if shuffles:
                given["shuffle"] = False  # the source draws the order
            read = (number, settings.seed, shuffles, self._started, self._note)
            self._sources.append(read_ahead.DatasetToRead(dataset, *read))
            given[name] = read_ahead.read_ahead(self._sources[-1])
        self.call = self.call.with_arguments(given)

    def _shuffles(self, given: Mapping[str, Any]) -> bool:
        """Returns True if Keras's method would shuffle the batches."""
        parameter = inspect.signature(self.call.method).parameters.get("shuffle")
        return parameter is not None and bool(given.get("shuffle", parameter.default))

    @property
    def failure(self) -> BaseException | None:
        """The exception of a dataset or a reader that ended the call."""
        return next((s.failure for s in self._sources if s.failure is not None), None)

    def _started(self) -> BatchReaders:
        with self._starting:
            if self._has_ended:
                raise ended()
            if self._running is None:
                self._running = BatchReaders(self._plan.placements, self._settings.max_restarts)
                self._running.begin()
            return self._running

    def _note(self, waited: float, since: float) -> None:
        """Adds a reader if batches have been waited for."""
        if self._running is None or self.number >= self._settings.most:
            return
        self._recent.append((waited, since))
        if len(self._recent) < LOOKED_AT:
            return
        share = sum(w for w, _ in self._recent) / max(1e-9, sum(s for _, s in self._recent))
        self._recent.clear()
        if share > WAITED:
            # Not pinned: the next call knows the number, and gives each its own core.
            core = self._plan.placements[0].cores
            if self._running.add(topology.Placement(self.number, core, None, pin=False)):
                self.number += 1

    def close(self) -> None:
        """Ends the readers."""
        with self._starting:
            self._has_ended = True  # an iterator that TensorFlow still reads must start none
            readers = self._running
        if readers is not None:
            readers.close()
        for source in self._sources:
            source.close()
