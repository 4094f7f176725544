"""The workers' inputs: each worker gets only its share of every global batch.

Arrays lie once in shared memory; a worker picks its rows of each batch by index. Everything
else (`tf.data.Dataset`, `PyDataset`, generators) is read once, in the parent, and handed out
through a ring of slots (`streams`), unless workers run a `tf.data.Dataset` themselves
(`pipelines`). So order, randomness and work are the same as in a single process.

In a worker all become a `tf.data.Dataset` of `(data, extent)`: the worker's rows, and a tensor of
shape (n, 0) whose shape tells how many rows the batch has. If a short batch has no row for a
worker, it gets a padding row; see `region.rows.Division`.

TensorFlow finds a step's trace by the shapes of its data. A trace knows the number of the batch's
rows, so all workers must find the same one: only the extent has a known number of rows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from nanotf.compat.generation import generation
from nanotf.compat.generators import from_generator
from nanotf.compat.keras_epochs import UNKNOWN_CARDINALITY
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import InvalidArgumentError, UndividedError
from nanotf.shipping.data.arrays import ArrayRef, PackedArrays, view
from nanotf.wire.blocks import Block

_ROWS_OF_A_PIECE = 2**19  # of an order, at most; 4 MiB
_ALIGNED = 64  # bytes; TensorFlow's kernels end the process at a tensor that is not


def rows_differ(arrays: Sequence[Any]) -> bool:
    """Returns True if arrays or tensors of a batch differ in rows."""
    return len({tuple(array.shape)[:1] for array in arrays}) > 1


def _undivided(shapes: Sequence[tuple[int, ...]]) -> UndividedError:
    return UndividedError(
        "All arrays of a batch must have the same number of rows to be divided between "
        f"workers. Received: a batch of arrays of shapes {list(shapes)}. Give every array a "
        "row for each sample, or leave num_processes (`-n` of `nanotf run`) out."
    )


def check_rows(arrays: Sequence[Any]) -> None:
    """Raises `UndividedError` if arrays or tensors of a batch differ in rows."""
    if rows_differ(arrays):
        raise _undivided([tuple(array.shape) for array in arrays])


def until_rows_differ(dataset: Any, refuse: Callable[[InvalidArgumentError], None]) -> Any:
    """Returns a dataset that ends before the first batch whose arrays differ in rows.

    Args:
        dataset: `tf.data.Dataset` of batches.
        refuse: called with the error, for that batch.
    """
    tf = require_tensorflow()

    def refused(*shapes: Any) -> Any:
        refuse(_undivided([tuple(int(d) for d in shape) for shape in shapes]))
        return np.False_

    @tf.autograph.experimental.do_not_convert
    def agree(*batch: Any) -> Any:
        shapes = [tf.shape(t, out_type=tf.int64) for t in tf.nest.flatten(batch)]
        rows = tf.stack([shape[0] for shape in shapes])

        # Only for the batch that is refused: all others are checked without Python.
        @tf.autograph.experimental.do_not_convert
        def ask() -> Any:
            return tf.ensure_shape(tf.numpy_function(refused, shapes, tf.bool), [])

        return tf.cond(tf.reduce_all(rows == rows[0]), lambda: True, ask)

    return dataset.take_while(agree)


def rows_of_rank(rows: int, rank: int, size: int) -> tuple[int, int]:
    """Returns the rows of a batch that a rank owns: contiguous, and as equal as possible.

    Args:
        rows: of the global batch.
        size: number of workers.

    Returns:
        The first row and the row after the last; equal if the rank has no row.
    """
    return rows * rank // size, rows * (rank + 1) // size


def pieces_of(rows: int, batch_size: int) -> tuple[int, int]:
    """Returns how the order of shuffled arrays is sent: in pieces of whole batches.

    Args:
        rows: of the arrays.
        batch_size: rows of a global batch.

    Returns:
        The rows of a piece and the number of pieces; the last may have fewer rows.
    """
    size = min(rows, batch_size * max(1, _ROWS_OF_A_PIECE // batch_size))
    return size, -(-rows // size)


def with_extent(own: Any, rows: Any) -> tuple[Any, Any]:
    """Returns an element of a worker's dataset.

    Args:
        own: the worker's rows of a batch: nested structure of tensors or None.
        rows: the number of the batch's rows: an int or a scalar tensor.
    """
    tf = require_tensorflow()

    def of_any_length(leaf: Any) -> Any:
        if leaf is None or leaf.shape.rank is None:
            return leaf
        # Hides the number of rows: a step's trace must depend on the extent's alone.
        return tf.compat.v1.placeholder_with_default(leaf, [None, *leaf.shape[1:]])

    return tf.nest.map_structure(of_any_length, own), tf.zeros([rows, 0], tf.bool)


def specs_of_step(data: Any) -> Any:
    """Returns the `tf.TensorSpec`s that a worker's dataset of such elements has.

    Args:
        data: `(data, extent)` of eager tensors or None.
    """
    tf, (own, extent) = require_tensorflow(), data

    def spec(leaf: Any) -> Any:
        return None if leaf is None else tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)

    return tf.nest.map_structure(spec, own), tf.TensorSpec(extent.shape, extent.dtype)


def extent_spec(rows: int | None = None) -> Any:
    """Returns the `tf.TensorSpec` of the extent of batches of `rows` rows, None for any number."""
    tf = require_tensorflow()
    return tf.TensorSpec([rows, 0], tf.bool)


@dataclasses.dataclass(frozen=True)
class ArrayInput:
    """Arrays in a shared block, read by index."""

    # The places of the arrays in `arrays`: nested structure of int or None, in the form of a step's
    # batch: x, `(x,)`, `(x, y)` or `(x, y, sample_weight)`.
    structure: Any
    arrays: tuple[ArrayRef, ...]
    block: int  # the number of their block in the call
    rows: int  # length of every array
    batch_size: int  # rows of a global batch
    # The stream of the pieces of the passes' orders, see `pieces_of`. None is the arrays' order.
    order: int | None = None
    # How many passes an iterator makes; None is endless, which lets Keras keep one iterator over
    # all epochs.
    passes: int | None = None
    taken: int = 0  # how many batches of the first pass are already used

    @property
    def steps(self) -> int:
        """Batches in one pass over the data."""
        return -(-self.rows // self.batch_size)

    def dataset(
        self, blocks: list[Block], orders: Iterator[Any] | None, rank: int, size: int
    ) -> Any:
        """Returns the worker's dataset.

        Args:
            blocks: those of the call.
            orders: the pieces of the passes' orders, or None for the arrays' order. A piece is not
                used after the next one is requested.
            size: number of workers.
        """
        arrays = [view(blocks[self.block], ref) for ref in self.arrays]
        return self.dataset_over(arrays, orders, rank, size)

    def dataset_over(
        self,
        given: Sequence[np.ndarray[Any, Any]],
        orders: Iterator[Any] | None,
        rank: int,
        size: int,
        extents: bool = True,
    ) -> Any:
        """Returns the dataset over arrays that need not be in the block.

        Args:
            given: in the order of `arrays`.
            orders, rank, size: see `dataset`.
            extents: whether an element also has the batch's extent.
        """
        tf = require_tensorflow()
        arrays = [_Rows(array) for array in given]
        # Known to the graph if all batches have as many, the last one included.
        rows: Any = None if self.rows % self.batch_size else self.batch_size

        @tf.autograph.experimental.do_not_convert
        def element(step: Any, piece: Any = None) -> Any:
            length = self.rows if piece is None else tf.size(piece, tf.int64)
            start = step * self.batch_size
            total = tf.minimum(tf.constant(self.batch_size, tf.int64), length - start)
            first, count = own_rows(total if rows is None else rows, rank, size)
            first += start
            if piece is None:
                flat = [array.between(first, first + count) for array in arrays]
            else:
                index = piece[first : first + count]
                flat = [array.at(index) for array in arrays]
            places = tf.nest.map_structure(
                lambda place: None if place is None else flat[place], self.structure
            )
            if not extents:
                return places
            return with_extent(places, total if rows is None else rows)

        @tf.autograph.experimental.do_not_convert
        def of_piece(piece: Any) -> Any:
            steps = (tf.size(piece, tf.int64) + self.batch_size - 1) // self.batch_size
            return tf.data.Dataset.range(steps).map(functools.partial(element, piece=piece))

        if orders is None:
            dataset = tf.data.Dataset.range(self.steps).repeat(self.passes).map(element)
        else:
            spec = tf.TensorSpec([None], tf.int64)
            # All iterators share the orders: each continues where the one before has ended.
            drawn = from_generator(lambda: orders, spec)
            pieces = pieces_of(self.rows, self.batch_size)[1]
            taken = -1 if self.passes is None else self.passes * pieces
            dataset = drawn.take(taken).flat_map(of_piece)
        dataset = resumed(tuned(dataset.prefetch(2)), self.taken)
        if self.passes is None:
            return dataset
        return claiming(dataset, self.steps if self.passes == 1 else UNKNOWN_CARDINALITY)


def passes_for(model: Any, source: Any, steps: int | None) -> tuple[Any, int | None]:
    """Returns an input and the number of steps for Keras's `fit`.

    With Keras 3, an execution of several steps ends only where the data end. For one step at a
    time, an array's dataset is endless, so that Keras keeps one iterator.

    Args:
        model: a compiled model.
        source: an input of workers; None if there are no such data.
        steps: of an epoch; None leaves the number to the data.
    """
    several = generation().steps_at_once(model) > 1
    if several and isinstance(source, ArrayInput) and steps == source.steps:
        return dataclasses.replace(source, passes=1), None
    return source, steps


class _Rows:
    """Rows of an array in shared memory, in TensorFlow ops.

    The tensor over the array shares its memory if TensorFlow can do so; else it is a copy.
    """

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        tf = require_tensorflow()
        self._dtype = tf.as_dtype(array.dtype)
        if array.dtype.kind == "b":  # TensorFlow does not accept booleans through DLPack
            array = array.view(np.uint8)
        is_plain = array.dtype.kind in "iufc" and array.size and array.flags.c_contiguous
        if is_plain and array.ctypes.data % _ALIGNED == 0:
            self._tensor = tf.experimental.dlpack.from_dlpack(array.__dlpack__())
        else:
            self._tensor = tf.constant(array)

    def between(self, first: Any, end: Any) -> Any:
        """Returns the rows `first` to `end - 1`."""
        return self._converted(self._tensor[first:end])

    def at(self, index: Any) -> Any:
        """Returns the rows of an index vector."""
        return self._converted(require_tensorflow().gather(self._tensor, index))

    def _converted(self, rows: Any) -> Any:
        return rows if rows.dtype == self._dtype else require_tensorflow().cast(rows, self._dtype)


def own_rows(rows: Any, rank: int, size: int) -> tuple[Any, Any]:
    """Returns a rank's first row of a batch, and its number of rows: at least a padding row.

    Args:
        rows: of the batch: an int, or a scalar tensor.
        size: number of workers.
    """
    tf = require_tensorflow()
    first, end = rows_of_rank(rows, rank, size)
    if isinstance(rows, int):
        return min(first, rows - 1), max(end - first, 1)
    return tf.minimum(first, rows - 1), tf.maximum(end - first, 1)


def claiming(dataset: Any, cardinality: int) -> Any:
    """Returns a dataset that tells Keras its number of elements, or one of TensorFlow's codes.

    TensorFlow enforces the number that a dataset claims; Keras does not need it to be exact. So
    Keras sees one dataset, which claims the number, and iterates another.
    """
    tf = require_tensorflow()
    claims = dataset.apply(tf.data.experimental.assert_cardinality(cardinality))
    body = {"__iter__": lambda self: iter(dataset)}
    claims.__class__ = type(type(claims).__name__, (type(claims),), body)
    return claims


def tuned(dataset: Any) -> Any:
    """Sets the options that keep a dataset from stealing its worker's time.

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


def resumed(dataset: Any, taken: int) -> Any:
    """Returns a dataset whose first iterator skips `taken` elements; later ones skip none."""
    if taken == 0:
        return dataset
    tf, iterators = require_tensorflow(), itertools.count()

    def skips() -> Iterator[int]:
        yield taken if next(iterators) == 0 else 0

    @tf.autograph.experimental.do_not_convert
    def rest(count: Any) -> Any:
        return dataset.skip(count)

    counts = from_generator(skips, tf.TensorSpec([], tf.int64))
    return tuned(counts.flat_map(rest))


def without_lists(structure: Any) -> Any:
    """Replaces lists by tuples in a structure, since tf.data makes tensors of lists."""
    if isinstance(structure, dict):
        return {key: without_lists(value) for key, value in structure.items()}
    if isinstance(structure, (list, tuple)):
        return tuple(without_lists(value) for value in structure)
    return structure


def pack_arrays(
    data: Any,
    block: int,
    batch_size: int,
    passes: int | None = None,
) -> tuple[ArrayInput, PackedArrays]:
    """Describes arrays as an input of the workers.

    Args:
        data: x, `(x,)`, `(x, y)` or `(x, y, sample_weight)`, nested structures of arrays of
            one length, or None.
        block: the number of the block that they will be written to.
        batch_size: rows of a global batch.
        passes: see `ArrayInput`.

    Returns:
        The input, and the arrays on their way into its block.

    Raises:
        UndividedError: There are no samples.
    """
    tf = require_tensorflow()
    flat = [array for array in tf.nest.flatten(data) if array is not None]
    rows = len(flat[0])
    if rows == 0:
        raise UndividedError(
            "Data must have at least one sample to be shared between workers. Received: arrays of "
            "length 0. Pass some rows, or leave num_processes out."
        )
    numbers = itertools.count()
    places = tf.nest.map_structure(lambda a: None if a is None else next(numbers), data)
    structure = without_lists(places)
    packed = PackedArrays(flat)
    made = ArrayInput(structure, packed.refs, block, rows, batch_size, passes=passes)
    return made, packed
