"""Batches that are read in the parent and handed out through shared memory.

    parent                                        worker, every rank
      iterates the user's dataset                   `StreamInput.dataset`
      copies each batch into a free slot            copies its rows out of the slot
      Batch(slot) to all          ------------->
                                  <-------------    SlotRead(slot)
      a slot is free when all have read it

The number of slots bounds the memory, and waiting for a free one is the back-pressure. A
worker that starts to read its n-th iterator says OpenStream; the first to do so makes the
parent read its own n-th. Keras makes iterators that it never reads; the parent makes those,
too, so that a shuffled dataset draws the orders that it would draw in a single process.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from nanotf import messages
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import ShippingError
from nanotf.shipping.arrays import ArrayRef, Packing, view
from nanotf.shipping.blocks import Block
from nanotf.shipping.inputs import rows_of_rank, tuned

SLOTS = 3


@dataclasses.dataclass(frozen=True)
class StreamInput:
    """A stream of batches from the parent.

    Args:
        stream: int, its number within the job.
        signature: nested structure of `tf.TensorSpec`, of one batch.
        cardinality: int, batches per iteration, or TensorFlow's codes for endless and unknown.
    """

    stream: int
    signature: Any
    cardinality: int

    @property
    def steps(self) -> int | None:
        """Batches per iteration, where that is known."""
        return self.cardinality if self.cardinality > 0 else None

    def may_be_empty(self, size: int) -> bool:
        """Whether some batch may have fewer rows than there are workers."""
        return True

    def datasets(self, reader: StreamReader, rank: int, size: int) -> Callable[[int], Any]:
        """The worker's datasets: a function of `turn`, which counts the parent's iterations."""
        tf = require_tensorflow()
        signature = (self.signature, tf.TensorSpec([], tf.float64))

        def generate(turn: int) -> Iterator[Any]:
            for arrays, rows in reader.iterate(self.stream, turn):
                first, last = rows_of_rank(rows, rank, size)
                share = (last - first) / rows
                if first == last:  # a row to stand in, see `inputs`
                    first, last = 0, 1
                flat = [np.array(array[first:last]) for array in arrays]
                yield tf.nest.pack_sequence_as(self.signature, flat), share

        def dataset(turn: int) -> Any:
            made = tf.data.Dataset.from_generator(
                functools.partial(generate, turn), output_signature=signature
            )
            if self.cardinality != tf.data.UNKNOWN_CARDINALITY:
                # Keras runs one step too many where it does not know the number.
                made = made.apply(tf.data.experimental.assert_cardinality(self.cardinality))
            return tuned(made.prefetch(2))

        return dataset


def signature_of(dataset: Any, what: str) -> Any:
    """The specification of a dataset's batches, whatever their number of rows.

    Raises:
        ShippingError: An element is not a dense tensor with a batch dimension.
    """
    tf = require_tensorflow()

    def relaxed(spec: Any) -> Any:
        if not isinstance(spec, tf.TensorSpec):
            raise ShippingError(
                f"{what} must yield dense tensors to be shared between workers. "
                f"Received: an element of {spec}. Convert it with to_tensor() or "
                "tf.sparse.to_dense() in a map()."
            )
        if spec.shape.rank is None:
            return spec
        if spec.shape.rank == 0:
            raise ShippingError(
                f"{what} must yield batches. Received: a scalar element, {spec}. "
                "Call .batch(batch_size) on the dataset."
            )
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)

    return tf.nest.map_structure(relaxed, dataset.element_spec)


class Channel(Protocol):
    """What a worker's stream reader needs of its connection to the parent."""

    def send(self, message: messages.Message) -> None: ...


def _flat_arrays(batch: Any) -> list[np.ndarray[Any, Any]]:
    flat = require_tensorflow().nest.flatten(batch)
    return [np.asarray(item.numpy() if hasattr(item, "numpy") else item) for item in flat]


class StreamReader:
    """A worker's side: turns messages into batches.

    `deliver` is called by the thread that reads the connection, `iterate` by tf.data's.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._queues: dict[tuple[int, int], queue.SimpleQueue[Any]] = {}
        self._blocks: dict[int, Block] = {}
        self._lock = threading.Lock()

    def deliver(self, message: messages.Batch | messages.EndOfStream, block: Block | None) -> None:
        """Takes a message of the parent's."""
        self._queue(message.stream, message.turn).put((message, block))

    def _queue(self, stream: int, turn: int) -> queue.SimpleQueue[Any]:
        with self._lock:
            return self._queues.setdefault((stream, turn), queue.SimpleQueue())

    def iterate(self, stream: int, turn: int) -> Iterator[tuple[list[np.ndarray[Any, Any]], int]]:
        """Yields the arrays of each global batch, valid until the next, and its rows."""
        inbox = self._queue(stream, turn)
        self._channel.send(messages.OpenStream(stream, turn))
        try:
            while True:
                message, block = inbox.get()
                if isinstance(message, messages.EndOfStream):
                    return
                if block is not None:
                    self._blocks[stream] = block
                yield (
                    [
                        view(self._blocks[stream], ArrayRef(offset, shape, dtype, nbytes))
                        for offset, shape, dtype, nbytes in message.arrays
                    ],
                    message.rows,
                )
                self._channel.send(messages.SlotRead(stream, message.slot))
        finally:
            self._channel.send(messages.CloseStream(stream, turn))


class StreamWriter:
    """The parent's side: one thread that iterates the user's dataset.

    Args:
        stream: int.
        iterate: callable that starts an iteration, as `iter(dataset)` does.
        size: int, number of workers.
        send: callable of a message and a `Block` or None, which sends both to all workers.
        fail: callable of an exception that the user's dataset raised.
    """

    def __init__(
        self,
        stream: int,
        iterate: Callable[[], Iterator[Any]],
        size: int,
        send: Callable[[messages.Message, Block | None], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self.stream = stream
        self._iterate = iterate
        self._size = size
        self._send = send
        self._fail = fail
        self._block: Block | None = None
        self._slot_nbytes = 0
        # Guards all below; the job's thread reports what workers said, the writer waits for it.
        self._changed = threading.Condition()
        self._unread = [0] * SLOTS  # workers that have not read a slot yet
        self._opened: set[int] = set()  # the turns that some worker has begun to read
        self._closed: collections.Counter[int] = collections.Counter()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"nanotf-stream-{stream}")
        self._thread.daemon = True
        self._thread.start()

    def handle(self, message: messages.Message) -> None:
        """Takes what a worker said of this stream."""
        with self._changed:
            if isinstance(message, messages.OpenStream):
                self._opened.add(message.turn)
            elif isinstance(message, messages.CloseStream):
                self._closed[message.turn] += 1
            elif isinstance(message, messages.SlotRead):
                self._unread[message.slot] -= 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Ends the thread; returns when it has."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()
        if self._block is not None:
            self._block.discard()

    def _run(self) -> None:
        made = 0  # iterators made so far
        try:
            while (turn := self._wait_for_turn(made)) is not None:
                for _ in range(turn - made):
                    self._iterate()  # made and dropped unread, as in a worker
                self._write_turn(turn)
                made = turn + 1
        except BaseException as error:  # the user's dataset; raised again in fit()
            self._fail(error)

    def _wait_for_turn(self, made: int) -> int | None:
        """The next turn that a worker has begun to read; None when stopped."""

        def next_turn() -> int | None:
            return min((turn for turn in self._opened if turn >= made), default=None)

        return next_turn() if self._wait(lambda: next_turn() is not None) else None

    def _wait(self, condition: Callable[[], bool]) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or condition())
            return not self._stopped

    def _write_turn(self, turn: int) -> None:
        slot = 0
        for batch in self._iterate():
            if not self._wait(functools.partial(self._may_write, slot, turn)):
                return
            if self._is_closed(turn):
                break
            self._write_batch(turn, slot, _flat_arrays(batch))
            slot = (slot + 1) % SLOTS
        else:
            self._send(messages.EndOfStream(self.stream, turn), None)
        self._wait(lambda: self._is_closed(turn))
        with self._changed:
            self._unread = [0] * SLOTS

    def _may_write(self, slot: int, turn: int) -> bool:
        return self._unread[slot] <= 0 or self._is_closed(turn)

    def _is_closed(self, turn: int) -> bool:
        return self._closed[turn] == self._size

    def _write_batch(self, turn: int, slot: int, flat: list[np.ndarray[Any, Any]]) -> None:
        packing = Packing(flat)
        new_block = None
        if self._block is None or packing.nbytes > self._slot_nbytes:
            # Slots in the old ring stay valid: workers hold that block until they have read them.
            self._slot_nbytes = -(-packing.nbytes // 4096) * 4096
            new_block = self._block = Block(SLOTS * self._slot_nbytes)
        start = slot * self._slot_nbytes
        packing.write(self._block, start)
        with self._changed:
            self._unread[slot] = self._size
        message = messages.Batch(
            self.stream,
            turn,
            slot,
            tuple((start + r.offset, r.shape, r.dtype, r.nbytes) for r in packing.refs),
            rows=len(flat[0]),
            block=new_block.nbytes if new_block else None,
        )
        self._send(message, new_block)
