"""Returns a model's outputs from the workers through shared memory.

    worker, every rank                            parent
      takes its part of the outputs of each batch
      Outputs(structure, arrays) + a block  --->  keeps the blocks
      ... whenever there are `PIECE_NBYTES`       joins them: batch by batch, rank by rank

A rank's part of a batch's output is contiguous along the first dimension, and the ranks' parts
follow each other. So this order is the order of the rows.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nanotf.compat import keras_runs
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import ModelError
from nanotf.shipping.data.arrays import ArrayRef, PackedArrays, view
from nanotf.shipping.objects import pickling
from nanotf.wire.blocks import Block

PIECE_NBYTES = 64 * 1024**2  # a worker collects this much before it sends a piece
# Each mapping has a file descriptor, and a callback may ask for every batch. So smaller pieces, and
# all blocks beyond that number, are copied.
KEPT_NBYTES = 2**20
KEPT_BLOCKS = 64
SCALAR = -1  # the length of an output without dimensions


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """One output. A dense tensor is sent as one array, other kinds as several."""

    kind: str  # "dense", "ragged" or "sparse"
    parts: int  # number of arrays


def _kind(output: Any) -> _Leaf:
    tf = require_tensorflow()
    if isinstance(output, tf.RaggedTensor):
        return _Leaf("ragged", 1 + output.ragged_rank)
    return _Leaf("sparse", 3) if isinstance(output, tf.SparseTensor) else _Leaf("dense", 1)


def _parts(leaf: _Leaf, output: Any) -> list[np.ndarray[Any, Any]]:
    if leaf.kind == "ragged":
        found = [output.flat_values, *output.nested_row_splits]
    elif leaf.kind == "sparse":
        found = [output.indices, output.values, output.dense_shape]
    else:
        found = [output]
    return [np.asarray(part) for part in found]


def _whole(leaf: _Leaf, parts: Sequence[np.ndarray[Any, Any]]) -> Any:
    """Undoes `_parts`; a dense output stays an array."""
    tf = require_tensorflow()
    if leaf.kind == "dense":
        return parts[0]
    # Copies, since TensorFlow may keep an array's memory, which is freed later.
    tensors = [tf.constant(np.array(part)) for part in parts]
    if leaf.kind == "ragged":
        return tf.RaggedTensor.from_nested_row_splits(tensors[0], tensors[1:])
    return tf.SparseTensor(*tensors)


def _number_of_rows(output: Any) -> int:
    """Returns the length of the first dimension; 0 for a scalar."""
    if hasattr(output, "dense_shape"):
        return int(output.dense_shape[0])
    if hasattr(output, "nrows"):
        return int(output.nrows())
    return int(output.shape[0]) if output.shape else 0


def _rows(output: Any, first: int, last: int) -> Any:
    if not hasattr(output, "dense_shape"):
        return output[first:last]
    tf = require_tensorflow()
    shape = output.dense_shape.numpy()
    start = [first, *[0] * (len(shape) - 1)]
    return tf.sparse.slice(output, start, [last - first, *shape[1:]])


class OutputWriter:
    """The worker's side.

    Args:
        send: called with the pickled structure, the number of batches, the references of the
            arrays and their block.
    """

    def __init__(self, send: Callable[[bytes, int, tuple[ArrayRef, ...], Block], None]) -> None:
        self._send = send
        self._structure = b""
        self._arrays: list[np.ndarray[Any, Any]] = []
        self._steps = 0

    def take(self, outputs: Any, lengths: Any) -> None:
        """Takes the result of one execution of the predict function.

        Args:
            outputs: nested structure of tensors, the outputs of one or more batches.
            lengths: int tensor of shape (batches, outputs), the number of this rank's rows in each
                output of each batch; `SCALAR` if it has no dimension.

        Raises:
            ModelError: An output is a scalar.
        """
        nest = require_tensorflow().nest
        flat = [_as_array_or_composite(output) for output in nest.flatten(outputs)]
        leaves = [_kind(output) for output in flat]
        self._structure = pickling.dumps(nest.pack_sequence_as(outputs, leaves))
        ends = np.cumsum(_checked(np.asarray(lengths)), axis=0)
        for first, last in zip([np.zeros_like(ends[0]), *ends], ends, strict=False):
            for leaf, output, *part in zip(leaves, flat, first, last, strict=True):
                self._arrays += _parts(leaf, _rows(output, *part))
            self._steps += 1
        if sum(array.nbytes for array in self._arrays) >= PIECE_NBYTES:
            self.flush()

    def flush(self) -> None:
        """Sends the outputs collected so far."""
        if self._steps == 0:
            return
        packed = PackedArrays(self._arrays)
        block = packed.block()
        self._send(self._structure, self._steps, packed.refs, block)
        block.close_fd()  # the parent has its own
        self._arrays, self._steps = [], 0


def _as_array_or_composite(output: Any) -> Any:
    tf = require_tensorflow()
    if isinstance(output, (tf.RaggedTensor, tf.SparseTensor)):
        return output
    return np.asarray(output.numpy() if hasattr(output, "numpy") else output)


def _checked(lengths: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    scalars = np.flatnonzero((lengths == SCALAR).any(axis=0))
    if scalars.size:
        raise ModelError(
            "predict(num_processes=...) joins the outputs of batches along their first dimension, "
            f"so each must have one. Received: a scalar as output {scalars[0]} of "
            f"{lengths.shape[1]}. Leave num_processes out for this model."
        )
    return lengths


class OutputReader:
    """The parent's side: collects and joins the outputs of all ranks.

    Args:
        size: number of workers.
    """

    def __init__(self, size: int) -> None:
        # By rank: the outputs of its rows, as a list of leaves for each batch.
        self._steps: list[list[list[Any]]] = [[] for _ in range(size)]
        self._blocks: list[Block] = []
        self._structure: Any = None
        self._leaves: list[_Leaf] = []
        self._seen = 0

    def take(self, rank: int, structure: bytes, arrays: Sequence[ArrayRef], block: Block) -> None:
        """Takes outputs of a rank; keeps some large blocks until `discard`."""
        if self._structure is None:
            self._structure = pickle.loads(structure)  # the same in every message
            self._leaves = require_tensorflow().nest.flatten(self._structure)
        parts = [view(block, ref) for ref in arrays]
        if block.nbytes < KEPT_NBYTES or len(self._blocks) == KEPT_BLOCKS:
            parts = [np.array(part) for part in parts]
        else:
            self._blocks.append(block)
        views = iter(parts)
        step_parts = sum(leaf.parts for leaf in self._leaves)
        for _ in range(len(arrays) // step_parts):
            self._steps[rank].append(
                [_whole(leaf, [next(views) for _ in range(leaf.parts)]) for leaf in self._leaves]
            )

    def new(self) -> Any:
        """Returns the outputs since the last call, as tensors, in the model's structure."""
        tf = require_tensorflow()
        first, self._seen = self._seen, len(self._steps[0])
        return tf.nest.map_structure(
            lambda x: tf.constant(x) if isinstance(x, np.ndarray) else x, self._joined(first)
        )

    def all(self) -> Any:
        """Returns the outputs of all batches, as Keras's `predict` does."""
        return self._joined(0)

    def _joined(self, first_step: int) -> Any:
        leaves = [self._joined_leaf(i, first_step) for i in range(len(self._leaves))]
        return require_tensorflow().nest.pack_sequence_as(self._structure, leaves)

    def _joined_leaf(self, place: int, first_step: int) -> Any:
        tf = require_tensorflow()
        by_rank = [[step[place] for step in steps[first_step:]] for steps in self._steps]
        # A rank without rows of a batch does not know the shape, but some rank always has rows.
        batches = [
            [output for output in batch if _number_of_rows(output)]
            for batch in zip(*by_rank, strict=True)
        ]
        kind = self._leaves[place].kind
        if kind == "dense":
            rows = [output for batch in batches for output in batch]
            if len({output.shape[1:] for output in rows}) == 1:
                return np.concatenate(rows)  # a copy, which outlives the blocks
            # Their other dimensions differ: Keras makes a ragged tensor.
            return keras_runs.join_batches([tf.constant(np.concatenate(b)) for b in batches])
        if kind == "sparse":
            joined = [tf.sparse.concat(axis=0, sp_inputs=batch) for batch in batches]
        else:
            joined = [tf.concat(batch, axis=0) for batch in batches]
        return keras_runs.join_batches(joined)

    def discard(self) -> None:
        """Frees the memory."""
        self._steps = []  # the arrays lie in the blocks, which read as zeros from now on
        while self._blocks:
            self._blocks.pop().discard()
