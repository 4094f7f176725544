"""A `tf.data` pipeline that reads files, of which every worker reads an N-th.

    files 0, N, 2N ...     1, N+1 ...          what TensorFlow's AutoShardPolicy.FILE divides
        worker 0              worker 1         each runs the whole pipeline on its own files,
      B/N rows a step       B/N rows a step    cut into its part of a batch of B rows
             \\                 /
          rows of both, step by step           one cell for each rank, in shared memory
             |                 |
      share = own rows / rows of all           0 and a row to stand in, if its files ran out

Nothing is read twice and nothing passes through the parent. What it costs: the order is another
one than that of a single process, and a worker with less to read waits out the end of the epoch
with empty shares. An epoch has as many steps as the worker with most rows needs, and ends for all
at the same: at the step for which nobody has a row.

How ranks agree on the rows of a step, without a collective and ahead of the step. `_Rows` is an
array of integers, a row for each rank, written by that rank alone:

1. A rank writes its number of rows for step k to its cell k % 2, then the step's tag.
2. It waits until the tags of all others, in their cell k % 2, are that of step k.
3. It reads their rows.

Two cells are enough: a rank writes step k + 2 after it has seen all tags of k + 1, and another
writes that after it has read the rows of step k. Tags grow over steps and turns (an iterator of
which something is read; all ranks begin the same, in the same order), so that a larger tag says
that the other has gone on to another turn, as `closed` says that it has dropped this one: then
nobody takes another step with it. The rows are written before the tag and read before the tag is
read again; x86 keeps that order. There is no deadline: the other worker may rightly wait in a
callback. One that dies ends the job in the parent.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from nanotf.compat.data_adapters import UNKNOWN_CARDINALITY
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import InvalidArgumentError, ShippingError
from nanotf.shipping.arrays import ArrayRef, Packing, view
from nanotf.shipping.inputs import (
    resumed,
    rows_of_rank,
    tuned,
    until_rows_differ,
)
from nanotf.shipping.state import SEED_DISTANCE
from nanotf.wire.blocks import Block

_TAGS, _ROWS, _CLOSED = slice(0, 2), slice(2, 4), 4  # the columns of a rank's row
_PAUSES = (0.0001, 0.001)  # s, between two looks at another's tag: the first and the longest

_READERS = re.compile(r"(TFRecord|TextLine|FixedLengthRecord)Dataset(V\d+)?$")
_OF_FUNCTIONS = re.compile(r".*(FlatMap|Interleave)Dataset(V\d+)?$")
# What counts or pairs the rows of all files, after they were read.
_OF_ALL_ROWS = re.compile(r"(Experimental)?(Take|Skip|Window|Zip|Shard|TakeWhile)Dataset(V\d+)?$")


@dataclasses.dataclass(frozen=True)
class FilesInput:
    """A pipeline of global batches that every worker runs on its own files.

    Args:
        graph: bytes, see `compat.pipelines`.
        element_spec: nested structure of `tf.TensorSpec`, as the dataset has it.
        batch_size: int, rows of a global batch; -1 where the graph does not say it, as after a
            `map` over batches, which may change it.
        is_endless: bool, whether it repeats for ever.
        block: int, which of the job's blocks holds the numbers of rows.
        rows: `ArrayRef`, where they lie.
        steps: None; nobody knows how many there are.
        iterated, taken: int, as in `pipelines.PipelineInput`.
    """

    graph: bytes
    element_spec: Any
    batch_size: int
    is_endless: bool
    block: int
    rows: ArrayRef
    steps: int | None = None
    iterated: int = 0
    taken: int = 0

    @property
    def cardinality(self) -> int:
        """What Keras is told: TensorFlow's code for endless or for unknown."""
        endless: int = require_tensorflow().data.INFINITE_CARDINALITY
        return endless if self.is_endless else UNKNOWN_CARDINALITY

    def may_be_empty(self, size: int) -> bool:
        """Whether some batch may have fewer rows than there are workers."""
        return True

    def datasets(self, blocks: list[Block], rank: int, size: int) -> tuple[Any, Any]:
        """The worker's datasets: the one that Keras asks for its length, and what it iterates."""
        tf = require_tensorflow()
        rows = _Rows(view(blocks[self.block], self.rows), rank)
        numbers = itertools.count()
        batches = self._batches(rank, size)
        drawn = tuned(batches)
        for _ in range(self.iterated):
            iter(drawn)

        def turn() -> Iterator[int]:
            number = next(numbers)
            try:
                yield number
            finally:
                rows.close(number)

        @tf.autograph.experimental.do_not_convert
        def one_turn(number: Any) -> Any:
            def with_total(step: Any, element: Any) -> Any:
                batch, own = element
                total = tf.numpy_function(rows.total, [number, step, own], tf.int64, stateful=True)
                return batch, own, tf.reshape(total, [])

            counted = batches.enumerate().map(tf.autograph.experimental.do_not_convert(with_total))
            return counted.take_while(lambda _batch, _own, total: total > 0)

        @tf.autograph.experimental.do_not_convert
        def with_share(batch: Any, own: Any, total: Any) -> Any:
            share = tf.cast(own, tf.float64) / tf.cast(total, tf.float64)
            return tf.nest.pack_sequence_as(self.element_spec, batch), share

        turns = tf.data.Dataset.from_generator(turn, output_signature=tf.TensorSpec([], tf.int64))
        made = tuned(turns.flat_map(one_turn).map(with_share).prefetch(2))
        made = resumed(made, self.taken)
        return made.apply(tf.data.experimental.assert_cardinality(self.cardinality)), made

    def _batches(self, rank: int, size: int) -> Any:
        """Endless: flat batches of this rank's rows and their number, 0 after the last."""
        from nanotf.compat import pipelines

        tf = require_tensorflow()
        flat_specs = tf.nest.flatten(self.element_spec)

        @tf.autograph.experimental.do_not_convert
        def flat(*elements: Any) -> Any:
            batch = elements if isinstance(self.element_spec, tuple) else elements[0]
            parts = tuple(tf.nest.flatten(batch))
            return parts, tf.shape(parts[0], out_type=tf.int64)[0]

        @tf.autograph.experimental.do_not_convert
        def or_last_row(last: Any, element: Any) -> Any:
            batch, rows = element
            batch = tf.cond(rows > 0, lambda: tuple(batch), lambda: tuple(last))
            batch = tuple(_with_shape(t, spec) for t, spec in zip(batch, flat_specs, strict=True))
            return tuple(t[:1] for t in batch), (batch, rows)

        graph = pipelines.with_seeds_of(self.graph, rank, SEED_DISTANCE)
        shipped = pipelines.from_graph(graph, self.element_spec)
        whole = until_rows_differ(pipelines.files_of(shipped, rank, size), _refuse)
        own = _cut(whole, self.batch_size, rank, size).map(flat)
        # One row of zeros, for a worker whose files are empty.
        nothing = tuple(
            tf.zeros([1, *[1 if d is None else d for d in spec.shape[1:]]], spec.dtype)
            for spec in flat_specs
        )
        ended = tf.data.Dataset.from_tensors((nothing, np.int64(0))).repeat()
        return own.concatenate(ended).scan(nothing, or_last_row)


def _refuse(error: InvalidArgumentError) -> None:
    raise error  # a worker's error: the others are at other batches, and could not abandon the job


def _with_shape(tensor: Any, spec: Any) -> Any:
    tensor.set_shape([None, *spec.shape[1:]])
    return tensor


def _cut(dataset: Any, batch_size: int, rank: int, size: int) -> Any:
    """Makes of batches of `batch_size` rows those of this rank's part of it."""
    tf = require_tensorflow()
    specs = tf.nest.flatten(dataset.element_spec)
    if batch_size > 0 and all(None not in spec.shape[1:].as_list() for spec in specs):
        first, last = rows_of_rank(batch_size, rank, size)
        return dataset.rebatch(last - first)

    # Batches of different widths cannot be joined, and those of unknown length need not be, so
    # each is cut by itself. The parts of a step are of different places in their batches, so that
    # they add up to one.
    @tf.autograph.experimental.do_not_convert
    def parts(*elements: Any) -> Any:
        rows = tf.shape(tf.nest.flatten(elements)[0], out_type=tf.int64)[0]

        @tf.autograph.experimental.do_not_convert
        def part(number: Any) -> Any:
            place = (number + rank) % size
            begin = place * (rows // size) + tf.minimum(place, rows % size)
            count = rows // size + tf.cast(place < rows % size, tf.int64)
            taken = tf.nest.map_structure(lambda t: t[begin : begin + count], elements)
            return taken if isinstance(dataset.element_spec, tuple) else taken[0]

        least = tf.minimum(rows, size)
        numbers = tf.data.Dataset.range(size).filter(lambda n: (n + rank) % size < least)
        return numbers.map(part)

    return dataset.flat_map(parts)


class _Rows:
    """A rank's side of the agreement on the rows of a step; see the top of the module.

    Args:
        cells: `numpy.ndarray` of int64, shape (ranks, 5), in shared memory and zero at first.
        rank: int.
    """

    def __init__(self, cells: np.ndarray[Any, Any], rank: int) -> None:
        self._cells = cells
        self._rank = rank

    def total(self, turn: int, step: int, rows: int) -> Any:
        """The rows of all ranks at a step; 0 where nobody has one, or somebody goes no further."""
        tag, cell = (int(turn) << 32) + int(step) + 1, int(step) % 2
        own = self._cells[self._rank]
        own[_ROWS][cell] = rows
        own[_TAGS][cell] = tag
        total = int(rows)
        for rank, other in enumerate(self._cells):
            if rank != self._rank:
                found = _rows_at(other, int(turn), tag, cell)
                if found is None:
                    return np.int64(0)
                total += found
        return np.int64(total)

    def close(self, turn: int) -> None:
        """Says that this rank reads no further in a turn."""
        self._cells[self._rank][_CLOSED] = turn + 1


def _rows_at(other: np.ndarray[Any, Any], turn: int, tag: int, cell: int) -> int | None:
    pause, longest = _PAUSES
    while True:
        closed = other[_CLOSED] > turn  # written after the last tag, and so read before it
        if other[_TAGS][cell] == tag:
            rows = int(other[_ROWS][cell])
            return rows if other[_TAGS][cell] == tag else None
        if closed or other[_TAGS][cell] > tag:
            return None
        time.sleep(pause)
        pause = min(2 * pause, longest)


# ---------------------------------------------------------------------------- in the parent
def files_input(
    dataset: Any, cardinality: int, what: str, size: int, block: int
) -> tuple[FilesInput, Packing]:
    """Describes a dataset as an input of which every worker reads its own files.

    Args:
        dataset: `tf.data.Dataset` of batches, or None for data of another kind.
        cardinality: int, batches, or TensorFlow's codes for endless and unknown.
        what: str, the argument's name, for the error.
        size: int, number of workers.
        block: int, the block that the numbers of rows will be written to.

    Returns:
        A tuple of the `FilesInput` and the `Packing` that writes its block.

    Raises:
        ShippingError: Its files cannot be divided.
    """
    from nanotf.compat import pipelines

    tf = require_tensorflow()
    if dataset is None:
        raise _refusal(what, "data that only your process can read")
    try:
        graph = pipelines.to_random_graph(dataset)
    except tf.errors.OpError as error:
        raise _refusal(what, f"a dataset of which TensorFlow says: {error.message}") from error
    for reason in _obstacles(graph, size):
        raise _refusal(what, reason)
    shipped = pipelines.from_graph(graph, dataset.element_spec)
    try:
        for rank in range(size):
            pipelines.files_of(shipped, rank, size)
    except tf.errors.OpError as error:
        reason = str(error.message).splitlines()[0][:200]
        raise _refusal(what, f"a dataset of which TensorFlow says: {reason}") from error
    batch_size = pipelines.batch_size(shipped)
    if 0 <= batch_size < size:
        raise _refusal(what, f"a batch size of {batch_size}, for {size} workers")
    packing = Packing([np.zeros((size, 5), np.int64)])
    is_endless = cardinality == tf.data.INFINITE_CARDINALITY
    made = FilesInput(graph, dataset.element_spec, batch_size, is_endless, block, packing.refs[0])
    return made, packing


def _refusal(what: str, received: str) -> ShippingError:
    return ShippingError(
        f"{what} must be batches of a tf.data.Dataset of files (TFRecordDataset, TextLineDataset, "
        "FixedLengthRecordDataset) that can be divided between the workers. Received: "
        f'sharding="file" and {received}. Use sharding="parent".'
    )


def _obstacles(graph: bytes, size: int) -> Iterator[str]:
    """Why the files of a graph cannot be divided though TensorFlow would."""
    tf = require_tensorflow()
    definition = tf.compat.v1.GraphDef.FromString(graph)
    nodes = {node.name: node for node in definition.node}
    functions = {f.signature.name: f.node_def for f in definition.library.function}

    def reads(node: Any) -> bool:
        if _READERS.match(node.op):
            return True
        inside = functions.get(node.attr["f"].func.name, ())
        return bool(_OF_FUNCTIONS.match(node.op)) and any(reads(inner) for inner in inside)

    def input_of(node: Any, place: int) -> Any:
        return nodes[node.input[place].split(":")[0].lstrip("^")]

    ends = [node for node in definition.node if node.op == "_Retval"]
    left = [input_of(end, 0) for end in ends]
    while left:
        node = left.pop()
        if reads(node):
            count = _number_of_files(node, input_of)
            if count is not None and count < size:
                yield f"{count} file{'s' * (count != 1)} for {size} workers"
        elif node.op == "ConcatenateDataset":
            left += [input_of(node, 0), input_of(node, 1)]
        elif _OF_ALL_ROWS.match(node.op):
            name = re.sub(r"Experimental|Dataset.*", "", node.op)
            yield f"{_snake(name)}(), which is about the rows of all files"
        else:
            if node.op.startswith("CacheDataset") and _text(input_of(node, 1)):
                yield "a cache() in a file, which all workers would write"
            if node.input and "Dataset" in node.op:
                left.append(input_of(node, 0))


def _number_of_files(reader: Any, input_of: Any) -> int | None:
    """How many names a reader gets, at most, where the graph says so."""
    tf = require_tensorflow()
    node = input_of(reader, 0)
    while "Dataset" in node.op and not node.op.startswith("TensorSlice") and node.input:
        if node.op.startswith(("Repeat", "Concatenate", "Zip")):
            return None
        node = input_of(node, 0)
    if not node.op.startswith("TensorSlice"):
        return None
    names = input_of(node, 0)
    if names.op != "Const":
        return None
    shape = tf.TensorShape(names.attr["value"].tensor.tensor_shape)
    return int(shape[0]) if shape.rank else None


def _text(constant: Any) -> bytes:
    values = constant.attr["value"].tensor.string_val
    return bytes(values[0]) if values else b""


def _snake(name: str) -> str:
    return re.sub(r"(?<=.)([A-Z])", r"_\1", name).lower()
