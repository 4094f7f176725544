"""`read_processes`: reader processes call `__getitem__` of a dataset, ahead of its use.

    Keras's loop, here or in a stream's thread          readers
      `ReadAhead[position]`                               `dataset[index]`
        `DatasetToRead.batch`: requests the next batches   ->
        waits for its own                           <-

Keras gets a `PyDataset` (Keras 2: `Sequence`) of nanotf's in place of the user's: `ReadAhead`. So
the order of batches, the hooks of the dataset, class weights and all errors are Keras's. Only the
order of shuffled batches is drawn here, at the moment and from the generator from which Keras draws
it: to read ahead, it must be known.

The user's object stays in this process. Its hooks run here, and it is sent to the readers, if it
has changed, before the first batch that follows a hook.
"""

from __future__ import annotations

import concurrent.futures
import functools
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from nanotf.compat.generation import generation
from nanotf.compat.process_state import ProcessState
from nanotf.compat.versions import require_tensorflow
from nanotf.console import logger
from nanotf.errors import WorkerError
from nanotf.parent.reading.batch_readers import BatchReaders, Published, ReadBatch
from nanotf.parent.worker_errors import worker_raised
from nanotf.shipping import orders
from nanotf.shipping.data import datasets
from nanotf.wire import messages

BATCHES_AHEAD = 2  # for each reader

_now = time.monotonic


class DatasetToRead:
    """A dataset that readers read.

    Args:
        dataset: the user's `PyDataset` or `Sequence`.
        number: its number in the call, by which readers know it.
        seed: the call's, from which readers seed each batch.
        shuffles: whether each pass has an order of its own.
        readers: callable that returns the `BatchReaders`, and starts them if it is the first to.
        note: callable of the seconds that somebody waited for a batch, and of those since the last
            batch of the pass.
    """

    def __init__(
        self,
        dataset: Any,
        number: int,
        seed: int,
        shuffles: bool,
        readers: Callable[[], BatchReaders],
        note: Callable[[float, float], None],
    ) -> None:
        self.dataset = dataset
        self._number, self._seed, self._shuffles = number, seed, shuffles
        self._readers, self._note = readers, note
        self.failure: BaseException | None = None
        self._lock = threading.Lock()  # a dropped iterator of TensorFlow's may still read
        self._snapshot: datasets.DatasetSnapshot | None = None
        self._may_differ = True  # whether the user's object may differ from the snapshot
        self._epoch = 0  # how many have ended
        self._turn = -1  # of the pass, in its epoch
        self._pass = orders.BEFORE
        self._order: range | list[int] | None = range(0)  # None: all positions
        self._window: dict[int, concurrent.futures.Future[ReadBatch]] = {}  # by position
        self._returned = 0.0  # when the last batch was
        self.open()

    def open(self) -> None:
        """Expects Keras to look at the first batches; called before Keras opens the data."""
        with self._lock:
            self._looks_left: int | None = None  # not known yet
            self._turn = -1

    def size(self) -> int | None:
        """Returns the number of batches in a pass; None if it is endless."""
        number = getattr(self.dataset, "num_batches", None)  # Keras 3
        return number if hasattr(type(self.dataset), "num_batches") else len(self.dataset)

    def close(self) -> None:
        """Frees the memory; called when the readers have ended. TensorFlow keeps this object."""
        with self._lock:
            self.failure = None  # its traceback holds what has read the data
            self._window.clear()
            self._snapshot = None
            self._may_differ = False

    # ------------------------------------------------------------------------------- hooks
    def epoch_began(self) -> None:
        """Calls the dataset's hook."""
        self.dataset.on_epoch_begin()
        self._may_differ = True

    def epoch_ended(self) -> None:
        """Calls the dataset's hook."""
        self.dataset.on_epoch_end()
        with self._lock:
            self._may_differ = True
            self._epoch += 1
            self._turn = -1

    # ----------------------------------------------------------------------------- batches
    def batch(self, position: int) -> Any:
        """Returns the batch at a position of the present pass; position 0 begins a new one."""
        began = _now()
        with self._lock:
            index, future = self._requested(position)
        found = self._result(index, future)
        ended = _now()
        if position > 0:  # the first of a pass has none before it
            self._note(ended - began, ended - self._returned)
        self._returned = ended
        return found

    def _requested(self, position: int) -> tuple[int, concurrent.futures.Future[ReadBatch]]:
        readers = self._readers()
        if self._looks_left is None:
            looks, size = generation().batches_looked_at(), self.size()
            self._looks_left = looks if size is None else min(looks, size)
        # Keras looks at the first batches, in order, before a pass: no shuffled order is drawn yet.
        if self._looks_left > 0:
            self._looks_left -= 1
            self._send(readers)
            return position, readers.read(self._number, position, orders.BEFORE)
        if position == 0:
            self._begin_pass()
        self._send(readers)
        last = position + BATCHES_AHEAD * len(readers)
        if isinstance(self._order, (range, list)):
            last = min(last, len(self._order) - 1)
        for each in range(position, last + 1):
            if each not in self._window:
                self._window[each] = readers.read(self._number, self._index(each), self._pass)
        return self._index(position), self._window.pop(position)

    def _index(self, position: int) -> int:
        return position if self._order is None else self._order[position]

    def _begin_pass(self) -> None:
        self._forget_window()
        self._turn += 1
        self._pass = orders.ReadMoment(self._epoch, self._turn)
        self._may_differ = True  # the user's code may have changed it since the last pass
        size = self.size()
        if size is not None and self._shuffles:
            # As Keras does at the beginning of a pass, from the same generator.
            self._order = list(range(size))
            random.shuffle(self._order)
        else:
            self._order = None if size is None else range(size)

    def _forget_window(self) -> None:
        for future in self._window.values():
            future.cancel()
        self._window.clear()

    def _send(self, readers: BatchReaders) -> None:
        """Sends the dataset to the readers if it has changed."""
        if not self._may_differ:
            return
        self._may_differ = False
        last, self._snapshot = self._snapshot, datasets.snapshot(self.dataset, self._snapshot)
        if self._snapshot is last:
            return
        self._forget_window()  # read from the dataset as it was
        blocks, nbytes = self._snapshot.blocks(), self._snapshot.nbytes
        state = ProcessState.capture()
        readers.publish(Published(self._number, self._seed, nbytes, blocks, state))

    def _result(self, index: int, future: concurrent.futures.Future[ReadBatch]) -> Any:
        try:
            answer = self._waited(index, future)
            if isinstance(answer.found, messages.OrderFailed):
                raise self._raised(index, answer)
        except Exception as error:
            self.failure = self.failure or error
            raise
        return datasets.unpack_batch(answer.found.body, answer.slot, answer.found.places)

    def _waited(self, index: int, future: concurrent.futures.Future[ReadBatch]) -> ReadBatch:
        patience = self._readers().stall_seconds
        while not future.done():
            concurrent.futures.wait([future], patience)
            if not future.done():
                logger.warning(
                    "Batch %d of the dataset %s has not come for %g s: %s",
                    index,
                    _name(self.dataset),
                    patience,
                    self._readers().describe(future),
                )
        return future.result()

    def _raised(self, index: int, answer: ReadBatch) -> WorkerError:
        """Returns the exception of `__getitem__`, with the index."""
        who = f"{_name(self.dataset)}.__getitem__({index}), in {answer.where},"
        return worker_raised(WorkerError(""), answer.found, who)


def _name(dataset: Any) -> str:
    return type(dataset).__qualname__


@functools.cache
def dataset_class() -> Any:
    """Returns Keras's base class of datasets with `__getitem__`."""
    return require_tensorflow().keras.utils.Sequence  # Keras 3's other name of `PyDataset`


@functools.cache
def _read_ahead_class() -> Any:
    """Returns the class of the dataset that Keras gets."""

    class ReadAhead(dataset_class()):  # type: ignore[misc]
        """Batches of a `DatasetToRead`, in the order of their use."""

        def __init__(self, source: DatasetToRead) -> None:
            super().__init__()
            self.nanotf_source = source

        def __getitem__(self, position: int) -> Any:
            return self.nanotf_source.batch(position)

        def __len__(self) -> int:
            return self.nanotf_source.size() or 0

        @property
        def num_batches(self) -> int | None:
            return self.nanotf_source.size()

        def on_epoch_begin(self) -> None:
            self.nanotf_source.epoch_began()

        def on_epoch_end(self) -> None:
            self.nanotf_source.epoch_ended()

    return ReadAhead


def read_ahead(source: DatasetToRead) -> Any:
    """Returns the dataset that Keras reads in place of a source's own."""
    return _read_ahead_class()(source)


def source_of(data: Any) -> DatasetToRead | None:
    """Returns the source of a dataset made by `read_ahead`; None for other data."""
    found: DatasetToRead | None = getattr(data, "nanotf_source", None)
    return found


def reopen(*data: Any) -> None:
    """Prepares datasets made by `read_ahead` for a Keras that opens them once more."""
    for source in map(source_of, data):
        if source is not None:
            source.open()
