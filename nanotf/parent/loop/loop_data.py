"""The data of a `@nano` function, which the parent reads for the workers."""

from __future__ import annotations

import collections
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from nanotf.compat import dataset_graphs, keras_steps
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import InvalidArgumentError
from nanotf.parent.reading.fit_data import Stream
from nanotf.shipping import orders
from nanotf.shipping.data import streams


class LoopSource:
    """A dataset, iterator or generator of the user's, whose batches are handed out.

    Args:
        source: the dataset, iterator or generator.
    """

    def __init__(self, source: Any) -> None:
        tf = require_tensorflow()
        self._source = source
        self.passed = 0  # passes that were complete when a restart began
        cardinality = int(tf.data.UNKNOWN_CARDINALITY)
        if not isinstance(source, tf.data.Dataset):
            self._ahead = _read_ahead.setdefault(source, collections.deque())
        if isinstance(source, types.GeneratorType):
            kind, signature = "generator", self._specs_of_first()
        else:
            kind = "dataset" if isinstance(source, tf.data.Dataset) else "iterator"
            signature = source.element_spec
            if kind == "dataset":
                cardinality = int(source.cardinality())
        streams.check_dense(signature, "A dataset of a @nano function")
        self.data = orders.LoopData(kind, signature, cardinality)

    def _specs_of_first(self) -> Any:
        """Returns the specs of a generator's elements, by its first element."""
        tf = require_tensorflow()
        if not self._ahead:
            try:
                self._ahead.append(next(self._source))
            except StopIteration:
                raise InvalidArgumentError(
                    "A generator of a @nano function must yield at least one batch. Received: an "
                    "exhausted one."
                ) from None
        return tf.nest.map_structure(
            lambda a: tf.TensorSpec(None, np.asarray(a).dtype), self._ahead[0]
        )

    def begin_again(self, complete: int) -> None:
        """Prepares a call that continues after `complete` passes, with the same shuffle orders."""
        self.passed = complete
        copy = dataset_graphs.copy_of(self._source)
        if copy is None:  # TensorFlow cannot write its graph, so it is not rewound
            return
        self._source = copy
        for _ in range(complete):
            keras_steps.drop([iter(copy)])  # every iterator draws a shuffle order

    def stream(self) -> Stream:
        """Returns a stream of one pass over the data."""
        source = self._source if self.data.kind == "dataset" else self._rest()
        return Stream(OnePass(source), self.data.signature, trains=False)

    def _rest(self) -> Iterator[Any]:
        """Yields the batches of data that can be read once; keeps the user's generator open."""
        while self._ahead:
            yield self._ahead.popleft()
        for batch in self._source:  # noqa: UP028 - `yield from` would close it
            yield batch

    def put_back(self, unread: Sequence[Any]) -> None:
        """Keeps batches that no worker has read for the next call."""
        if self.data.kind != "dataset":
            self._ahead.extendleft(reversed(unread))


# By iterator or generator: the batches that were read from it, but that no worker requested.
_read_ahead: weakref.WeakKeyDictionary[Any, collections.deque[Any]] = weakref.WeakKeyDictionary()


class OnePass(streams.EpochsToRead):
    """One iteration over a source, for a `StreamWriter` to read."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._given = 0
        # A writer is ahead of the workers by its slots, and by a batch that waits for a free one.
        self._last: collections.deque[Any] = collections.deque(maxlen=streams.SLOTS + 1)

    def unread(self, taken: int) -> list[Any]:
        """Returns the batches that were read, except the first `taken` ones."""
        count = self._given - taken
        return list(self._last)[-count:] if count > 0 else []

    def evaluations(self) -> Iterator[Any]:
        yield self._batches()

    def _batches(self) -> Iterator[tuple[Any, Any]]:
        iterator = iter(self._source)
        for batch in iterator:
            self._given += 1
            self._last.append(batch)
            yield iterator, batch
