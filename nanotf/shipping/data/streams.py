"""Batches that are read in the parent and handed out through shared memory.

    parent                                        worker, every rank
      runs Keras's loop over the user's data        `StreamInput.dataset`
      copies each batch into a free slot            copies its rows out of the slot
      Batch(slot) to all          ------------->
                                  <-------------    SlotRead(slot)
      a slot is free when all have read it

The number of slots bounds the memory. Waiting for a free slot is the back-pressure: the parent
reads at most `SLOTS` batches, plus what a worker prefetches, ahead of the slowest worker, and
never beyond the last batch of an epoch.

Keras's loop runs twice: in the workers, with the steps, and without steps in the parent
(`compat.keras_epochs.Epochs`). So the parent makes the same iterators at the same points, even
those that Keras never reads. A shuffled dataset draws the same orders as in a single process. A
turn is an iterator that is read at least once; both sides count turns. An epoch of training begins
after the parent's callbacks for its beginning, an evaluation when a worker opens its turn.
The orders of shuffled arrays are one turn that is read ahead, one element for each pass.
`EndOfStream` ends a turn on the workers' side: without it a worker that drops an iterator would
wait for the thread that prefetches the next element.

If the user's data raise, the turn ends as if they had ended (`StreamWriter.end_in_failure`), at
the same step on every rank. The ranks abandon the call there: no rank is in the middle of anything,
and the pool can run another call.
"""

from __future__ import annotations

import collections
import dataclasses
import queue
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from nanotf.compat import keras_steps
from nanotf.compat.generators import from_generator
from nanotf.compat.versions import require_tensorflow
from nanotf.console import logger
from nanotf.errors import ShippingError
from nanotf.pool import interrupts
from nanotf.shipping.data.arrays import ArrayRef, PackedArrays, view
from nanotf.shipping.data.inputs import (
    check_rows,
    claiming,
    extent_spec,
    own_rows,
    rows_differ,
    tuned,
)
from nanotf.wire import messages, timing
from nanotf.wire.blocks import PAGE, Block, aligned
from nanotf.wire.own_threads import OwnThread

SLOTS = 3
STOP_SECONDS = 5.0  # time for user code to finish making a batch


@dataclasses.dataclass(frozen=True)
class StreamInput:
    """A stream of batches from the parent."""

    stream: int  # its number within the call
    signature: Any  # nested structure of `tf.TensorSpec`, of one batch
    # Batches per iteration that a worker's Keras assumes, or TensorFlow's codes for endless and
    # unknown.
    cardinality: int
    steps: int | None = None  # batches per epoch; None if not known
    rows: int | None = None  # of each batch; None if the dataset does not know it
    # Whether arrays of a batch may differ in rows. Every worker gets the whole of such a batch,
    # with an extent of no rows, and `Coming` tells it before.
    may_differ: bool = False

    def dataset(self, reader: StreamReader, rank: int, size: int) -> Any:
        """Returns the worker's dataset."""
        tf = require_tensorflow()

        def generate() -> Iterator[Any]:
            for flat, rows in reader.iterate(self.stream, rank, size):
                yield tf.nest.pack_sequence_as(self.signature, flat), np.zeros([rows, 0], bool)

        read = from_generator(generate, (self.signature, extent_spec(self.rows)))
        made = tuned(read.prefetch(2))
        if self.cardinality == tf.data.UNKNOWN_CARDINALITY:
            return made
        # Keras runs one step too many if it does not know the number.
        return claiming(made, self.cardinality)


def signature_of(element_spec: Any, what: str) -> Any:
    """Returns the specs of batches with any number of rows.

    Args:
        element_spec: nested structure of type specifications, of one batch.
        what: the argument's name, for the error.

    Raises:
        ShippingError: An element is not a dense tensor with a batch dimension.
    """
    tf = require_tensorflow()
    check_dense(element_spec, what)

    def relaxed(spec: Any) -> Any:
        if spec.shape.rank is None:
            return spec
        if spec.shape.rank == 0:
            raise ShippingError(
                f"{what} must yield batches. Received: a scalar element, {spec}. "
                "Call .batch(batch_size) on the dataset."
            )
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)

    return tf.nest.map_structure(relaxed, element_spec)


def rows_of_batches(element_spec: Any) -> int | None:
    """Returns the number of rows that all tensors of a batch have, None if it is not known."""
    rows = {spec.shape[0] for spec in require_tensorflow().nest.flatten(element_spec)}
    return rows.pop() if len(rows) == 1 else None


def check_dense(element_spec: Any, what: str) -> None:
    """Raises `ShippingError` if an element has tensors that are not dense.

    Args:
        element_spec, what: see `signature_of`.
    """
    tf = require_tensorflow()
    for spec in tf.nest.flatten(element_spec):
        if not isinstance(spec, tf.TensorSpec):
            raise ShippingError(
                f"{what} must yield dense tensors to be shared between workers. "
                f"Received: an element of {spec}. Convert it with to_tensor() or "
                "tf.sparse.to_dense() in a map()."
            )


class StreamChannel(Protocol):
    """The part of a worker's channel to the parent that a stream reader uses."""

    def send(self, message: messages.Message) -> None: ...


def flat_arrays(batch: Any, signature: Any) -> list[np.ndarray[Any, Any]]:
    """Returns a batch's arrays in the types of its signature, converted as TensorFlow does."""
    tf = require_tensorflow()
    flat, specs = tf.nest.flatten(batch), tf.nest.flatten(signature)
    if len(flat) != len(specs):
        raise TypeError(
            "Every batch must have the structure of the first. Received: a batch of "
            f"{len(flat)} arrays where {len(specs)} were expected, {signature}."
        )
    return [_array(item, spec) for item, spec in zip(flat, specs, strict=True)]


def _array(item: Any, spec: Any) -> np.ndarray[Any, Any]:
    item = item.numpy() if hasattr(item, "numpy") else item
    array: np.ndarray[Any, Any] = np.asarray(item, dtype=spec.dtype.as_numpy_dtype)
    if not spec.shape.is_compatible_with(array.shape):
        raise TypeError(  # the beginning is Keras 3's message, word for word
            f"Generator yielded an element of shape {array.shape} where an element of shape "
            f"{spec.shape} was expected. Your generator provides tensors with variable input "
            "dimensions other than the batch size. Make sure that the generator's first two "
            "batches do not have the same dimension value wherever there is a variable input "
            "dimension."
        )
    return array


class StreamReader:
    """The worker's side: turns messages into batches.

    The thread that reads the connection calls `deliver`; tf.data's threads call `iterate`.

    Args:
        order: the number of the order whose streams it reads.
    """

    def __init__(self, channel: StreamChannel, order: int) -> None:
        self._channel = channel
        self._order = order
        self._inboxes: dict[tuple[int, int], _Inbox] = {}
        self._blocks: dict[int, Block] = {}
        self._turns: collections.Counter[int] = collections.Counter()
        self._ended = False
        self._failed: dict[int, messages.EndOfStream] = {}  # by stream
        self._broken: set[int] = set()  # streams with a turn that ended by a failure
        self._lock = threading.Lock()

    def deliver(self, message: messages.Batch | messages.EndOfStream, block: Block | None) -> None:
        """Takes a message from the parent."""
        with self._lock:
            self._inbox(message.stream, message.turn).put(message, block)
            if isinstance(message, messages.EndOfStream) and message.failed:
                self._failed[message.stream] = message
                # Later turns have no batches either: whoever waits for one must end.
                for (stream, turn), inbox in self._inboxes.items():
                    if stream == message.stream and turn > message.turn:
                        inbox.put(message)

    def _inbox(self, stream: int, turn: int) -> _Inbox:
        """Returns the inbox of a turn; called with the lock held."""
        if (stream, turn) not in self._inboxes:
            inbox = self._inboxes[stream, turn] = _Inbox()
            failed = self._failed.get(stream)
            if failed is not None and turn > failed.turn:
                inbox.put(failed)
        return self._inboxes[stream, turn]

    def kinds(self, stream: int, turn: int) -> queue.SimpleQueue[bool | None]:
        """Returns what a turn's messages say when they arrive, see `Coming.is_whole`."""
        with self._lock:
            return self._inbox(stream, turn).kinds

    def is_broken(self, stream: int) -> bool:
        """Returns True if an iterator over a stream has ended because the user's data raised.

        After that end, every rank gets the same answer.
        """
        return stream in self._broken

    def iterate(
        self,
        stream: int,
        rank: int | None,
        size: int,
        copies: bool = True,
    ) -> Iterator[tuple[list[np.ndarray[Any, Any]], int]]:
        """Reads the next turn: yields a rank's rows of each array of a batch, and the batch's rows.

        Args:
            stream: its number.
            rank: None for whole arrays, which need not have rows.
            size: number of workers.
            copies: otherwise arrays are in shared memory until the next batch is requested.
        """
        with self._lock:
            if self._ended:
                return
            turn = self._turns[stream]
            self._turns[stream] += 1
            inbox = self._inbox(stream, turn)
        self._channel.send(messages.OpenStream(self._order, stream, turn))
        try:
            while True:
                message, block = inbox.get()
                if isinstance(message, messages.EndOfStream):
                    if message.failed:
                        self._broken.add(stream)
                    return
                if block is not None:
                    self._blocks[stream] = block
                arrays = [view(self._blocks[stream], ArrayRef(*p)) for p in message.arrays]
                if rank is not None and message.rows:
                    first, count = own_rows(message.rows, rank, size)
                    arrays = [array[first : first + count] for array in arrays]
                read = messages.SlotRead(self._order, stream, message.slot)
                if copies:
                    arrays = [np.array(array) for array in arrays]
                    self._channel.send(read)
                yield arrays, message.rows
                if not copies:  # only now may the parent write over the slot
                    self._channel.send(read)
        finally:  # also of an iterator that is dropped before its end
            self._channel.send(messages.CloseStream(self._order, stream, turn))

    def end(self) -> None:
        """Ends the order: threads that wait for a batch get no more.

        A callback may have ended a pass while a tf.data thread waits for its next batch. Dropping
        the dataset's iterator, maybe in Python's garbage collector, would wait for that thread.
        """
        with self._lock:
            self._ended = True
            for (stream, turn), inbox in self._inboxes.items():
                inbox.put(messages.EndOfStream(stream, turn))

    def forget(self, stream: int) -> None:
        """Frees the memory of a stream that is no longer read."""
        with self._lock:
            self._blocks.pop(stream, None)
            for key in [key for key in self._inboxes if key[0] == stream]:
                del self._inboxes[key]


class _Inbox:
    """The messages of one turn.

    Attributes:
        kinds: queue of what they are, see `Coming.is_whole`. Of batches that cannot differ in rows,
            nobody asks it.
    """

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.kinds: queue.SimpleQueue[bool | None] = queue.SimpleQueue()

    def put(
        self, message: messages.Batch | messages.EndOfStream, block: Block | None = None
    ) -> None:
        self._messages.put((message, block))
        if isinstance(message, messages.EndOfStream):
            self.kinds.put(None)
        elif message.may_differ:
            self.kinds.put(message.rows == 0)

    def get(self) -> Any:
        return self._messages.get()


class Coming:
    """Tells what an iterator of a stream of training yields next.

    Args:
        stream: its number.
        passed: batches of the first turn that are read without a step.
    """

    def __init__(self, reader: StreamReader, stream: int, passed: int) -> None:
        self._reader = reader
        self._stream = stream
        self._passed = passed
        self._turn = -1
        self._iterator: Callable[[], Any] = lambda: None  # weak: it must end when Keras drops it
        self._kinds: queue.SimpleQueue[bool | None] = queue.SimpleQueue()  # of its turn

    def is_whole(self, iterator: Any) -> bool | None:
        """Waits for the next batch; returns whether it comes whole, None if there is none."""
        if self._iterator() is not iterator:
            self._turn += 1
            self._iterator = weakref.ref(iterator)
            self._kinds = self._reader.kinds(self._stream, self._turn)
            self.pass_over(iterator, self._passed)
            self._passed = 0
        kind = self._kinds.get()
        if kind is None:  # for the next question: no further message follows
            self._kinds.put(None)
        return kind

    def pass_over(self, iterator: Any, count: int) -> None:
        """Notes that an iterator's next batches have been read."""
        for _ in range(count):
            self.is_whole(iterator)


class EpochsToRead(Protocol):
    """The part of `compat.keras_epochs.Epochs` that a stream's writer uses.

    What derives from it has passes over data that belong to no training, and owns nothing.
    """

    def training(self) -> Iterator[Iterator[tuple[Any, Any]]]:
        """Yields the epochs of training, each of which yields iterator and batch."""
        return iter(())

    def evaluations(self) -> Iterator[Iterator[tuple[Any, Any]]]:
        """Yields the passes of another kind, likewise."""
        return iter(())

    def keeps(self, iterator: Any) -> bool:
        """Returns True if the next epoch may continue with an iterator."""
        return False

    def close(self) -> None:
        """Frees what was opened."""
        return


class StreamWriter:
    """The parent's side: one thread that reads the user's data.

    Args:
        stream: its number within the call.
        data: closed when the thread ends.
        signature: nested structure of `tf.TensorSpec`, of one batch.
        trains: whether the data are for training: then an epoch begins with `begin_epoch`, and
            `end_epoch` prepares the next.
        size: number of workers.
        send: sends a message, and the block that belongs to it if any, to all workers.
        fail: called with an exception that the user's data raised, in the thread.
        divided: how many of a batch's first arrays must have equally many rows.
        ahead: whether to read before a worker asks.
        may_differ: see `StreamInput`.
    """

    def __init__(
        self,
        stream: int,
        data: EpochsToRead,
        signature: Any,
        trains: bool,
        size: int,
        send: Callable[[messages.Message, Block | None], None],
        fail: Callable[[BaseException], None],
        divided: int,
        ahead: bool = False,
        may_differ: bool = False,
    ) -> None:
        self.stream = stream
        self.ahead = ahead
        self._data = data
        self._signature = signature
        self._trains = trains
        self._size = size
        self._send = send
        self._fail = fail
        self._divided = divided
        self._may_differ = may_differ
        self.reading = timing.Reading()
        self.taken = 0  # batches that all workers have read; counted by the call's thread
        self._block: Block | None = None
        self._slot_nbytes = 0
        self._slot = 0  # the next to be written; only the writer's thread sets it and this:
        self._iterator: Any = None  # of the turn that is being read
        # Guards all below. The call's thread notifies it of workers' messages; the writer waits.
        self._changed = threading.Condition()
        self._turn = -1  # the last turn that was begun
        self._is_open = False  # whether that turn has not ended yet
        self._unread = [0] * SLOTS  # by slot, the workers that have not read it yet
        self._opened: set[int] = set()  # turns that some worker has begun to read
        self._closed: collections.Counter[int] = collections.Counter()
        self._begun = self._ended = 0  # epochs of training
        self._stopped = False
        # Made here: the main thread must make some data.
        self._evaluations = None if trains else data.evaluations()
        self._waits_since: float | None = None  # for the workers; None while it reads
        self._thread = OwnThread(target=self._run, name=f"nanotf-stream-{stream}")
        self._thread.daemon = True  # the user's code may never return

    def begin(self) -> None:
        """Starts the thread; then `stop` must follow."""
        self._thread.start()

    # ---------------------------------------------------------- called by the call's thread
    def handle(self, message: messages.Message) -> None:
        """Takes a worker's message about this stream."""
        with self._changed:
            if isinstance(message, messages.OpenStream):
                self._opened.add(message.turn)
            elif isinstance(message, messages.CloseStream):
                self._closed[message.turn] += 1
            elif isinstance(message, messages.SlotRead):
                self._unread[message.slot] -= 1
                self.taken += self._unread[message.slot] == 0
            self._changed.notify_all()

    def begin_epoch(self) -> None:
        """Notifies the thread that the workers have begun an epoch of training."""
        with self._changed:
            self._begun += 1
            self._changed.notify_all()

    def end_epoch(self) -> None:
        """Notifies the thread that the workers have ended an epoch of training."""
        with self._changed:
            self._ended += 1
            self._changed.notify_all()

    def owes(self, seconds: float) -> bool:
        """Returns True if workers may wait for the user's data, read within the last `seconds`."""
        with self._changed:
            since = self._waits_since
        return self._thread.is_alive() and (since is None or time.monotonic() - since < seconds)

    def stack(self) -> str | None:
        """Returns the thread's Python stack while it reads the user's data; None while it waits."""
        with self._changed:
            waits = self._waits_since is not None
        frame = sys._current_frames().get(self._thread.ident or 0)
        return None if waits or frame is None else "".join(traceback.format_stack(frame))

    def finish(self) -> None:
        """Ends the turn and the thread; called when the workers need nothing more."""
        with self._changed:  # an RLock, which `cancel` takes again
            self._end_turn()  # before `cancel`: a writer that is stopped sends nothing
            self.cancel()

    def end_in_failure(self) -> None:
        """Tells the workers that there are no more batches; called when the data raised."""
        with self._changed:
            self._is_open = False
            self._send(messages.EndOfStream(self.stream, max(self._turn, 0), failed=True), None)

    def cancel(self) -> None:
        """Tells the thread to end."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Ends the thread; waits at most `seconds` if the user's code keeps it."""
        self.cancel()
        interrupts.wait_for(self._thread, seconds)
        if self._block is not None:
            self._block.discard()
        if not self._thread.is_alive():
            self._block = None  # a kept exception may keep this object

    def reap(self) -> bool:
        """Frees the memory if the thread has ended; returns True if it has."""
        if self._thread.is_alive():
            return False
        self.stop()
        return True

    # ------------------------------------------------------------------ the writer's thread
    def _run(self) -> None:
        try:
            try:
                if self._evaluations is None:
                    self._train()
                else:
                    self._evaluate(self._evaluations)
            finally:
                keras_steps.drop([self._iterator])
                self._iterator = None
                self._data.close()
        except BaseException as error:  # the user's data; raised again in fit()
            if self._stopped:  # the call has ended; the next one must not get the error
                logger.info("Data that were no longer needed raised: %r", error)
            else:
                self._fail(error)

    def _train(self) -> None:
        for number, epoch in enumerate(self._data.training()):
            if not self._wait(lambda n=number: self._begun > n):  # type: ignore[misc]
                return
            if not self._write_epoch(epoch):
                return
            if not self._wait(lambda n=number: self._ended > n):  # type: ignore[misc]
                return

    def _evaluate(self, evaluations: Iterator[Iterator[tuple[Any, Any]]]) -> None:
        while self._wait(lambda: self.ahead or self._turn + 1 in self._opened):
            batches = next(evaluations, None)
            if batches is None or not self._write_epoch(batches):
                return

    def _wait(self, condition: Callable[[], bool]) -> bool:
        with self._changed:
            self._waits_since = time.monotonic()
            self._changed.wait_for(lambda: self._stopped or condition())
            self._waits_since = None
            return not self._stopped

    def _write_epoch(self, epoch: Iterator[tuple[Any, Any]]) -> bool:
        """Hands out the batches of an epoch; returns True if the call continues."""
        empty = True
        for iterator, batch in self.reading.over(epoch):
            empty = False
            continues = self._is_open and iterator is self._iterator
            if not continues and not self._begin_turn(iterator):
                return False
            if not self._wait(self._may_write):
                return False
            if self._is_closed():
                break
            began = timing.now()
            flat = flat_arrays(batch, self._signature)
            check_rows(flat[: self._divided])
            self._write_batch(flat)
            self.reading.batches += 1
            self.reading.copying += timing.now() - began
        with self._changed:
            if empty and not self._is_open:
                self._turn += 1  # workers wait for a batch, but the data have ended
                self._is_open = True
            # The next epoch of training may continue with an iterator that Keras keeps.
            if not self._trains or not self._data.keeps(self._iterator):
                self._end_turn()
        return True

    def _begin_turn(self, iterator: Any) -> bool:
        with self._changed:
            self._end_turn()
        # `SlotRead` names no turn: those of the last must have come before the counts start again.
        if self._turn >= 0 and not self._wait(self._all_read):
            return False
        # Drops the last reference; dropping a dataset's iterator may take a while.
        keras_steps.drop([self._iterator])
        self._iterator = iterator
        with self._changed:
            self._unread = [0] * SLOTS
            self._turn += 1
            self._is_open = True
        return True

    def _end_turn(self) -> None:
        """Ends the turn for the workers, if there is one; called with the lock held."""
        if self._is_open and not self._stopped:  # a later call has streams of the same numbers
            self._is_open = False
            self._send(messages.EndOfStream(self.stream, self._turn), None)

    def _all_read(self) -> bool:
        return self._is_closed() or not any(self._unread)

    def _may_write(self) -> bool:
        return self._unread[self._slot] <= 0 or self._is_closed()

    def _is_closed(self) -> bool:
        return self._closed[self._turn] == self._size

    def _rows_of(self, flat: list[np.ndarray[Any, Any]]) -> int:
        if self._may_differ and rows_differ(flat):
            return 0
        return len(flat[0]) if flat[0].ndim else 1

    def _write_batch(self, flat: list[np.ndarray[Any, Any]]) -> None:
        packed = PackedArrays(flat)
        new_block = None
        if self._block is None or packed.nbytes > self._slot_nbytes:
            # Slots in the old ring stay valid: workers hold its block until they have read them.
            # Whole pages, so that arrays of every slot are aligned as in a block of their own.
            self._slot_nbytes = aligned(packed.nbytes, PAGE)
            new_block = self._block = Block(SLOTS * self._slot_nbytes)
        start = self._slot * self._slot_nbytes
        packed.write(self._block, start)
        with self._changed:
            if self._stopped:  # a later call has streams of the same numbers
                return
            self._unread[self._slot] = self._size
            message = messages.Batch(
                self.stream,
                self._turn,
                self._slot,
                tuple((start + r.offset, r.shape, r.dtype, r.nbytes) for r in packed.refs),
                rows=self._rows_of(flat),
                block=new_block.nbytes if new_block else None,
                may_differ=self._may_differ,
            )
            self._send(message, new_block)
        self._slot = (self._slot + 1) % SLOTS


def stop_all(writers: Sequence[StreamWriter], seconds: float) -> None:
    """Ends several writers; returns within `seconds`, however many of them user code keeps."""
    for writer in writers:  # all of them first, so that their threads end side by side
        writer.cancel()
    deadline = time.monotonic() + seconds
    for writer in writers:
        writer.stop(max(0.0, deadline - time.monotonic()))
