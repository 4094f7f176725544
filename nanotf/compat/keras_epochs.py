"""Keras's own handling of the data of `fit`, so that nanotf accepts exactly what Keras accepts.

Private modules of Keras decide which data it accepts, which errors it raises, how many batches
there are, when iterators are made and when the hooks of a `PyDataset` run. nanotf uses these
modules in the parent instead of imitating them: see `Generation.open_data`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from nanotf.compat import random_states
from nanotf.compat.versions import require_tensorflow
from nanotf.console import logger
from nanotf.errors import ShippingError

UNKNOWN_CARDINALITY = -2  # tf.data's code


@dataclasses.dataclass(frozen=True)
class DataArguments:
    """The arguments of `fit` or `evaluate` about one set of data, with Keras's defaults."""

    x: Any  # as in `fit`, like all but the last three
    y: Any = None
    sample_weight: Any = None
    batch_size: int | None = None
    steps: int | None = None  # `steps_per_epoch` or `validation_steps`
    shuffle: Any = False
    class_weight: Any = None
    epochs: int = 1
    initial_epoch: int = 0
    # As in Keras 2's `fit`; Keras 3's has none of them.
    workers: int = 1
    use_multiprocessing: bool = False
    max_queue_size: int = 10


@dataclasses.dataclass(frozen=True)
class Arrays:
    """In-memory data, checked and converted as Keras does."""

    # Nested structure of `numpy.ndarray` or None, shaped like a step's batch: x, `(x,)`, `(x, y)`
    # or `(x, y, sample_weight)`.
    structure: Any
    batch_size: int
    size: int  # batches in one pass over the data
    rows: int  # length of every array
    is_shuffled: bool  # whether each pass has an order of its own, see `Generation.orders`
    one_iterator: bool = False  # whether Keras draws all orders from one iterator


class Epochs:
    """Data that must be read: Keras's loop over them, without the steps.

    Args:
        element_spec: a nested structure of `tf.TypeSpec`, of one batch.
        cardinality: as told to a worker's Keras, so that its loop is the same.
        steps: batches per epoch, if Keras knows them.
        dataset: `tf.data.Dataset` that is read, including class weights; None if the data are
            of another kind.
        is_of_arrays: whether they are arrays that Keras shuffles within batches.

    Attributes:
        begun: tuple of int and `random_states.States`, or None: the number, from 0, of the
            training epoch that began last, and the random states before its first batch was read.
    """

    _passed: int | None = None
    _states: random_states.States | None = None
    begun: tuple[int, random_states.States] | None = None

    def __init__(
        self,
        element_spec: Any,
        cardinality: int,
        steps: int | None,
        dataset: Any = None,
        is_of_arrays: bool = False,
    ) -> None:
        self.dataset = dataset
        self.element_spec = element_spec
        self.cardinality = cardinality
        self.steps = steps
        self.is_of_arrays = is_of_arrays
        self._exhausted: Any = None

    def resume(self, passed: int, states: random_states.States | None) -> None:
        """Makes `training` resume after some epochs.

        Args:
            passed: complete epochs to skip. It makes the iterators that Keras made and reads no
                more than needed. 0 for data that continue from their current position.
            states: the random states when the next epoch began, or None.
        """
        self._passed, self._states = passed, states

    def training(self) -> Iterator[Iterator[tuple[Any, Any]]]:
        """Yields the epochs of training; each yields tuples of an iterator and its batch.

        Advancing to the next epoch does what Keras does between two epochs.
        """
        for number, epoch in enumerate(self._epochs()):
            yield self._noting_states(number, epoch)

    def _noting_states(
        self, number: int, epoch: Iterator[tuple[Any, Any]]
    ) -> Iterator[tuple[Any, Any]]:
        if self._states is not None:
            random_states.restore(self._states)
            self._states = None
        self.begun = (number, random_states.capture())
        yield from epoch

    def _epochs(self) -> Iterator[Iterator[tuple[Any, Any]]]:
        """Yields the epochs for `training`."""
        raise NotImplementedError

    def evaluations(self) -> Iterator[Iterator[tuple[Any, Any]]]:
        """Yields passes for evaluations, in the form of `training`. Each starts over."""
        raise NotImplementedError

    def keeps(self, iterator: Any) -> bool:
        """Returns True if the next training epoch continues with the iterator of the last."""
        raise NotImplementedError

    def close(self) -> None:
        """Stops the threads and processes that Keras started to read a `PyDataset`."""
        enqueuer = self._enqueuer()
        if enqueuer is not None and enqueuer.is_running():
            try:
                enqueuer.stop()
            except Exception as error:  # from a batch that was not requested
                logger.info("A PyDataset raised while its readers stopped: %s", error)

    def _enqueuer(self) -> Any:
        raise NotImplementedError

    def _next(self, iterator: Any) -> Any:
        try:
            return next(iterator)
        except StopIteration:
            self._exhausted = iterator
            raise


def unpack(data: Any) -> tuple[Any, Any, Any]:
    """Unpacks `validation_data` to `(x, y, sample_weight)`, or raises what Keras raises."""
    x, y, weights = require_tensorflow().keras.utils.unpack_x_y_sample_weight(data)
    return x, y, weights


def refuse_what_is_not_dense(value: Any) -> None:
    """Raises `ShippingError` for a sparse or ragged array."""
    tf = require_tensorflow()
    composite = isinstance(value, (tf.SparseTensor, tf.RaggedTensor))
    if composite or type(value).__module__.startswith("scipy.sparse"):
        raise ShippingError(
            "Arrays must be dense to be shared between workers. Received: an object of class "
            f"{type(value).__name__}. Convert it with to_tensor(), tf.sparse.to_dense() or "
            "toarray()."
        )


def is_size(value: Any) -> bool:
    """Returns True for a valid batch size."""
    return isinstance(value, (int, np.integer)) and bool(value > 0)
