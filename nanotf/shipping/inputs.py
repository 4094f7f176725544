"""How batches reach the workers: each gets its share of every global batch, and no more.

Arrays lie once in shared memory; a worker picks its rows of each batch by index. Everything
else (`tf.data.Dataset`) is read once, in the parent, and handed out through a ring of slots
(`stream`), so that the order, the randomness and the work are those of a single process.

In a worker both become a `tf.data.Dataset` of `(data, share)`, where `share` is the part of
the global batch that the worker's rows are (scalar float64). A worker for which a short batch
has no row gets one row to stand in, with share 0.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from nanotf.compat.versions import require_tensorflow
from nanotf.errors import InvalidArgumentError, ShippingError
from nanotf.shipping.arrays import ArrayRef, Packing, view
from nanotf.shipping.blocks import Block


def rows_of_rank(rows: int, rank: int, size: int) -> tuple[int, int]:
    """The rows of a batch that a rank owns: contiguous, and as equal as possible.

    Args:
        rows: int, rows of the global batch.
        rank: int.
        size: int, number of workers.

    Returns:
        A tuple of the first row and the row after the last; equal where there is none.
    """
    base, extra = divmod(rows, size)
    first = rank * base + min(rank, extra)
    return first, first + base + (rank < extra)


@dataclasses.dataclass(frozen=True)
class ArrayInput:
    """Arrays in a shared block, read by index.

    Args:
        structure: nested structure of int, the places of the arrays in `arrays`, in the form
            `(x,)`, `(x, y)` or `(x, y, sample_weight)`.
        arrays: tuple of `ArrayRef`.
        block: int, which of the job's blocks they lie in.
        rows: int, length of every array.
        batch_size: int, rows of a global batch.
        shuffle: bool, whether every epoch has an order of its own.
        seed: int, of that order.
    """

    structure: Any
    arrays: tuple[ArrayRef, ...]
    block: int
    rows: int
    batch_size: int
    shuffle: bool = False
    seed: int = 0

    @property
    def steps(self) -> int:
        """Batches per epoch."""
        return -(-self.rows // self.batch_size)

    def may_be_empty(self, size: int) -> bool:
        """Whether some batch has fewer rows than there are workers."""
        last = self.rows % self.batch_size or self.batch_size
        return min(last, self.batch_size, self.rows) < size

    def dataset(self, blocks: list[Block], rank: int, size: int, first_epoch: int = 0) -> Any:
        """The worker's endless `tf.data.Dataset`, epoch after epoch from `first_epoch` on."""
        tf = require_tensorflow()
        tensors = [_tensor_over(view(blocks[self.block], ref)) for ref in self.arrays]

        @tf.autograph.experimental.do_not_convert
        def order(epoch: Any) -> Any:
            def permutation(e: Any) -> Any:
                return np.random.default_rng((self.seed, int(e))).permutation(self.rows)

            result = tf.numpy_function(permutation, [epoch], tf.int64, stateful=False)
            result.set_shape([self.rows])
            return result

        @tf.autograph.experimental.do_not_convert
        def element(step: Any, epoch_order: Any = None) -> Any:
            first, count, share = _share_of_step(step, self.rows, self.batch_size, rank, size)
            if epoch_order is None:
                flat = [tensor[first : first + count] for tensor in tensors]
            else:
                index = epoch_order[first : first + count]
                flat = [tf.gather(tensor, index) for tensor in tensors]
            return tf.nest.map_structure(lambda place: flat[place], self.structure), share

        @tf.autograph.experimental.do_not_convert
        def epoch(number: Any) -> Any:
            epoch_order = order(number) if self.shuffle else None
            steps = tf.data.Dataset.range(self.steps)
            return steps.map(functools.partial(element, epoch_order=epoch_order))

        if self.shuffle:
            dataset = tf.data.Dataset.range(first_epoch, np.iinfo(np.int64).max).flat_map(epoch)
        else:
            dataset = tf.data.Dataset.range(self.steps).repeat().map(element)
        return tuned(dataset.prefetch(2))


def _tensor_over(array: np.ndarray[Any, Any]) -> Any:
    """A tensor that shares the array's memory where TensorFlow can, and a copy elsewhere."""
    tf = require_tensorflow()
    if array.dtype.kind in "iufc" and array.size and array.flags.c_contiguous:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.constant(array)


def _share_of_step(step: Any, rows: int, batch_size: int, rank: int, size: int) -> Any:
    """First row, number of rows and share of `rank` in batch `step`, in TensorFlow ops."""
    tf = require_tensorflow()
    start = step * batch_size
    total = tf.minimum(tf.constant(batch_size, tf.int64), rows - start)
    base, extra = total // size, total % size
    first = start + rank * base + tf.minimum(tf.constant(rank, tf.int64), extra)
    count = base + tf.cast(rank < extra, tf.int64)
    share = tf.cast(count, tf.float64) / tf.cast(total, tf.float64)
    # Nobody's row stands in where there is none: the first of the batch, with share 0.
    first = tf.where(count > 0, first, start)
    return first, tf.maximum(count, 1), share


def tuned(dataset: Any) -> Any:
    """Sets the options with which a dataset does not steal time from its worker.

    With the autotuner on, dropping an iterator waits for its sleep of 10 ms x 2^k: the
    epoch-end stall. A worker owns few cores, so the pipeline gets one thread.
    """
    options = require_tensorflow().data.Options()
    options.autotune.enabled = False
    options.threading.private_threadpool_size = 1
    options.threading.max_intra_op_parallelism = 1
    options.deterministic = True
    # tf.data's default rewrites copy every captured tensor, the whole of the shared arrays.
    options.experimental_optimization.apply_default_optimizations = False
    return dataset.with_options(options)


def to_numpy(value: Any, what: str) -> np.ndarray[Any, Any]:
    """An array-like argument of `fit` as the NumPy array that Keras would use.

    Args:
        value: array, tensor, or anything with `__array__` (pandas objects among them).
        what: str, the argument's name, for the error.

    Raises:
        ShippingError: It is none of these.
    """
    if isinstance(value, np.ndarray):
        array = value
    elif hasattr(value, "numpy"):
        array = value.numpy()
    elif hasattr(value, "__array__"):
        array = np.asarray(value)
    else:
        raise ShippingError(
            f"{what} must be an array, a tensor, or lists or dicts of them. "
            f"Received: {what} of type {type(value).__name__}. Convert it with numpy.asarray()."
        )
    if array.ndim == 0:
        raise ShippingError(
            f"{what} must have a first dimension, its samples. Received: a scalar, {array!r}."
        )
    if array.dtype == np.float64:
        # Keras casts Python-made double arrays to its own float type; so does fit().
        array = array.astype(require_tensorflow().keras.backend.floatx(), copy=False)
    return array


def _without_lists(structure: Any) -> Any:
    if isinstance(structure, dict):
        return {key: _without_lists(value) for key, value in structure.items()}
    if isinstance(structure, (list, tuple)):
        return tuple(_without_lists(value) for value in structure)
    return structure


def pack_arrays(
    data: tuple[Any, ...],
    block: int,
    batch_size: int,
    shuffle: bool = False,
    seed: int = 0,
) -> tuple[ArrayInput, Packing]:
    """Describes arrays as an input of the workers.

    Args:
        data: `(x,)`, `(x, y)` or `(x, y, sample_weight)`, nested structures of arrays.
        block: int, the block that they will be written to.
        batch_size: int.
        shuffle: bool.
        seed: int.

    Returns:
        A tuple of the `ArrayInput` and the `Packing` that writes its block.

    Raises:
        InvalidArgumentError: The arrays differ in length, or have none.
    """
    tf = require_tensorflow()
    flat = tf.nest.flatten(data)
    lengths = {len(array) for array in flat}
    if len(lengths) != 1:
        raise InvalidArgumentError(
            "Make sure all arrays contain the same number of samples. "
            f"Received: lengths {sorted(lengths)}."
        )
    rows = lengths.pop()
    if rows == 0:
        raise InvalidArgumentError(
            "Training needs at least one sample. Received: arrays of length 0."
        )
    places = tf.nest.pack_sequence_as(data, list(range(len(flat))))
    structure = _without_lists(places)  # tf.data would make one tensor of a list
    packing = Packing(flat)
    return (
        ArrayInput(structure, tuple(packing.refs), block, rows, batch_size, shuffle, seed),
        packing,
    )
