"""The parent's side of a call that runs on workers.

    loop | training, inference   one call: its arguments, callbacks, results
                      Call.run   sends the order, handles messages, ends or fails

`Call` starts, follows, fails and ends every kind of call.
"""

from __future__ import annotations

import os
import queue
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from nanotf.compat.process_state import ProcessState
from nanotf.compat.versions import require_tensorflow
from nanotf.console import logger, pass_on
from nanotf.errors import (
    DivergedError,
    NanoError,
    ShippingError,
    WorkerDied,
    WorkerError,
    WorkerStuck,
)
from nanotf.parent import defaults, warned, worker_errors
from nanotf.parent.reading.fit_data import Stream
from nanotf.parent.where import Where
from nanotf.pool import interrupts
from nanotf.pool.plans import AnyPlan
from nanotf.pool.pool import Pool, explaining_few_descriptors
from nanotf.pool.supervision import POLL_SECONDS
from nanotf.report import call_report
from nanotf.shipping import orders
from nanotf.shipping.data import streams
from nanotf.shipping.objects import pickling
from nanotf.wire import messages, timing
from nanotf.wire.blocks import Block

ABANDON_SECONDS = 60.0  # time for workers to use the batches that they have, after the data raised
FAILED_SECONDS = 1.0  # time for user code to finish making a batch, after a failure
STATE_BLOCK = 0  # the call's first block, which the pool keeps; the blocks of arrays follow


def seed_of_user(number: int) -> int:
    """Returns a seed that follows `set_random_seed` without using up the user's random numbers.

    Args:
        number: int; different numbers give different seeds in the same random state.
    """
    state: Any = np.random.get_state(legacy=False)
    position = f"{state['state']['pos']} {number}".encode()
    return zlib.crc32(state["state"]["key"].tobytes() + position)


class Call:
    """One call, on the parent's side. Subclasses define its content and the use of its results.

    Args:
        size: int, number of workers.
    """

    method = "@nano"  # the called method, for the report
    # Whether the workers can end the call by themselves after the user's data raised.
    can_be_abandoned = False
    max_restarts = 0  # how often the call may begin again on new workers, after some have died

    def __init__(self, size: int) -> None:
        warned.listen()
        self.size = size
        self.clock = timing.CallTimes()
        self.restarts = 0
        self._data_failed: messages.DataFailed | None = None
        self._failed_at = 0.0  # of `time.monotonic`
        self._abandoned = False  # whether all workers have ended a call whose data raised
        # By rank: the hook at which it waits, and the results of those that have ended the call.
        self._waiting: dict[int, messages.Waiting] = {}
        self._done: dict[int, messages.OrderDone] = {}

    # --------------------------------------------------------------- defined by subclasses
    def begin(self) -> list[Block]:
        """Prepares the call; returns its blocks, which `run` frees."""
        raise NotImplementedError

    def order(self) -> Any:
        """Returns the call for the workers, one of those in `orders`."""
        raise NotImplementedError

    def data_streams(self) -> list[Stream]:
        """Returns the data that this process reads for the workers, in the order of streams."""
        return []

    def divided(self, stream: Stream) -> Any:
        """Returns the part of a stream's signature whose arrays have equally many rows."""
        return () if stream.may_differ else stream.signature

    def open_writers(self) -> Sequence[streams.StreamWriter]:
        """Returns the writers that read data for the workers now."""
        return self.writers

    def all_writers(self) -> Sequence[streams.StreamWriter]:
        """Returns the writers that may still have a thread."""
        return self.writers

    def on_sent(self) -> None:
        """Handles that the workers have the call; the blocks' descriptors are still open."""

    def on_idle(self, ended: set[int]) -> None:
        """Checks on the workers when none has sent a message for `POLL_SECONDS`.

        Args:
            ended: set of int, the ranks that have ended the call.
        """

    def reply(self, first: messages.Waiting) -> messages.Proceed:
        """Decides how all ranks proceed at a hook; `first` is rank 0's message."""
        raise AssertionError(first)

    def poll(self) -> None:
        """Handles what has happened in this process since the last message."""

    def on_replied(self) -> None:
        """Handles that the workers have been sent the answer to a hook, and continue."""

    def can_restart(self) -> bool:
        """Returns True if the call knows where to begin again."""
        return True

    def prepare_restart(self, error: WorkerError) -> None:
        """Prepares to begin again after an error; tells the user by `tell_restart`."""
        raise NotImplementedError

    def failure(self, message: messages.OrderFailed) -> BaseException:
        """Returns the exception for a call that raised in a worker."""
        error = worker_errors.failure_of(self.workers.workers[message.rank], message)
        original = error.original
        # These say all that there is to say; where nanotf's own code raised them helps nobody.
        return original if isinstance(original, (DivergedError, ShippingError)) else error

    def collect(self) -> None:
        """Handles that all workers have ended the call; its blocks still exist."""

    def fail(self) -> None:
        """Handles a failure: keeps the results of completed epochs. The workers are gone."""

    def release(self) -> None:
        """Drops all references to the call's blocks."""

    def end(self, results: list[Any]) -> Any:
        """Returns the result of the call; `results` holds the result of each rank's call."""
        raise NotImplementedError

    def reported(self) -> None:
        """Handles the end of the call; `report` has its times."""

    # ------------------------------------------------------------------------------- run
    def run_on(self, where: Where, plan: AnyPlan) -> Any:
        """Runs the call on the pool of a plan, again if it may restart; returns its result."""
        while True:
            try:
                with where.lent(plan) as workers:
                    return self.run(workers)
            except (WorkerDied, WorkerStuck) as error:
                if self.restarts >= self.max_restarts or not self.can_restart():
                    raise
                self.restarts += 1
                self.prepare_restart(error)

    def tell_restart(self, error: WorkerError, text: str) -> None:
        """Logs why the call begins again, and where."""
        logger.warning(
            "%s %s, with new workers: restart %d of %d.",
            error.what,
            text,
            self.restarts,
            self.max_restarts,
        )

    def run(self, workers: Pool) -> Any:
        """Runs the call on a pool and returns the result of the call."""
        defaults.note_use()
        with explaining_few_descriptors(self.size):
            return self._run(workers)

    def _run(self, workers: Pool) -> Any:
        self.workers, clock = workers, self.clock
        clock.lent = timing.now()
        clock.prepared = clock.prepared or clock.lent
        self.number = workers.next_order()
        blocks = self.begin()
        self.writers: list[streams.StreamWriter] = []
        try:
            body = pickling.dumps(self.order())
            sizes = tuple(block.nbytes for block in blocks)
            clock.shipped, clock.written = len(body) + sum(sizes), timing.now()
            workers.usable = False  # until all have ended the call
            state = workers.outgoing(ProcessState.capture())
            workers.send(messages.Order(self.number, body, sizes, state=state), blocks)
            self.on_sent()
            _close_descriptors(blocks[STATE_BLOCK + 1 :])
            clock.sent = timing.now()
            self.writers = [self._writer(i, stream) for i, stream in enumerate(self.data_streams())]
            for writer in self.writers:
                writer.begin()
            try:
                results = self._follow()
            finally:
                clock.done = timing.now()
            self.collect()
        except BaseException as error:
            # A process forked by a callback may end here. It owns nothing of the call.
            if workers.owner == os.getpid():
                with interrupts.held_back(error):
                    self._give_up(blocks)
            raise
        self._clear(blocks, streams.STOP_SECONDS)
        return self.finish(results, self.times)

    def finish(self, results: list[Any], times: tuple[timing.WorkerTimes, ...]) -> Any:
        """Returns the result of the call, and creates the report of its times.

        Args:
            results: list, the result of each rank's call; empty if the workers died.
            times: tuple of `timing.WorkerTimes`, by rank, or empty.
        """
        clock = self.clock
        clock.readings = [writer.reading for writer in self.writers if not writer.ahead]
        result = self.end(results)
        clock.ended = timing.now()
        self.report = call_report.Report.of(self.method, clock, times, self.size, self.parts)
        call_report.remember(self.report)
        self.reported()
        return result

    def _give_up(self, blocks: list[Block]) -> None:
        try:
            # The workers are in the middle of a step; the next call needs idle ones.
            if not self._abandoned:
                self.workers.kill()
            self.fail()
        finally:
            self._clear(blocks, FAILED_SECONDS)

    def _clear(self, blocks: list[Block], patience: float) -> None:
        try:
            streams.stop_all(self.all_writers(), patience)
        finally:
            # A kept exception keeps `_run`'s frame alive, which must not keep the memory.
            self.release()
            # A pool that ends has no next call that needs its block.
            for block in blocks[STATE_BLOCK + 1 if self.workers.usable else 0 :]:
                block.discard()
            blocks.clear()

    def _writer(self, number: int, stream: Stream) -> streams.StreamWriter:
        # Bound now: a writer with slow data may outlive a restart.
        workers, order = self.workers, self.number

        def send(message: messages.Message, block: Block | None) -> None:
            workers.send(message, [] if block is None else [block])
            if block is not None:
                block.close_fd()

        return streams.StreamWriter(
            number,
            stream.data,
            stream.signature,
            stream.trains,
            self.size,
            send,
            lambda error: workers.post(messages.DataFailed(order, number, error)),
            len(require_tensorflow().nest.flatten(self.divided(stream))),
            stream.ahead,
            stream.may_differ,
        )

    def _reading(self) -> list[str]:
        """Returns the stacks of threads that read data, for which workers may wait."""
        return [stack for w in self.open_writers() if (stack := w.stack()) is not None]

    def _follow(self) -> list[Any]:
        """Handles messages until all workers have ended the call; returns their results."""
        try:
            results = self._hear_all()
        except NanoError:
            if self._data_failed is None:
                raise
        else:
            self._abandoned = self._data_failed is not None
        if self._data_failed is not None:
            raise self._data_failed.error
        return results

    def _data_have_failed(self, failed: messages.DataFailed) -> None:
        """Lets the workers use the batches that they have after the user's data raised.

        Callbacks run for these batches, as in a single process, and for nothing after them.
        """
        if not self.can_be_abandoned:
            raise failed.error
        if self._data_failed is None:
            self._data_failed, self._failed_at = failed, time.monotonic()
            if failed.stream is not None:
                self.writers[failed.stream].end_in_failure()

    def _check_abandoned(self) -> None:
        failed = self._data_failed
        if failed is not None and time.monotonic() - self._failed_at > ABANDON_SECONDS:
            raise failed.error  # which kills the workers

    def _is_over(self, hook: str) -> bool:
        """Returns True if a hook comes after the failure of the user's data."""
        return self._data_failed is not None and hook not in orders.BATCH_HOOKS

    def _hear_all(self) -> list[Any]:
        self._waiting.clear()
        self._done.clear()
        while len(self._done) < self.size:
            self._hear()
            if len(self._waiting) == self.size:
                self._answer()
        self.workers.usable = True
        ended = [self._done[rank] for rank in range(self.size)]
        self.times = tuple(message.times for message in ended if message.times is not None)
        return [message.result for message in ended]

    def _hear(self) -> None:
        """Handles the next message of a worker, or of a thread of this process, if one comes."""
        self._check_abandoned()
        self.poll()
        try:
            rank, message = self.workers.receive(POLL_SECONDS)
        except queue.Empty:
            self.workers.check_progress({*self._waiting, *self._done}, self._reading)
            self.on_idle(set(self._done))
            return
        if isinstance(message, BaseException):
            raise message
        self.handle(rank, message)

    def _answer(self) -> None:
        """Answers the hook that all ranks have reached."""
        first = self._reached()
        if self._is_over(first.hook):
            self.workers.send(messages.Proceed(self.number, abandon=True))
            self._waiting.clear()
            return
        with self.clock.hook(first.hook):
            answer = self.reply(first)
        self.poll()  # SIGTERM may have come during the hook
        self.workers.send(answer)
        self._waiting.clear()
        self.on_replied()

    def _reached(self) -> messages.Waiting:
        _check_same_hook(self._waiting)
        return self._waiting[0]

    def with_state(self) -> messages.Waiting:
        """Makes the workers report the hook at which they wait again, with their state."""
        self.workers.send(messages.Proceed(self.number, store=True))
        self._waiting.clear()
        while len(self._waiting) < self.size:
            self._hear()
        return self._reached()

    # -------------------------------------------------------------------------- messages
    def handle(self, rank: int, message: Any) -> None:
        """Handles a message of a worker, or of a thread of this process, by `HANDLERS`."""
        getattr(self, self.HANDLERS[type(message)])(rank, message)

    def _on_stream(self, rank: int, message: Any) -> None:
        if message.order == self.number:  # not of a thread that has outlived its order
            self.on_stream_message(rank, message)

    def on_stream_message(self, rank: int, message: Any) -> None:
        """Handles a message about the data that this process reads."""
        self.writers[message.stream].handle(message)

    def _on_failed(self, rank: int, message: messages.OrderFailed) -> None:
        raise self.workers.supervisor.explain(message) or self.failure(message)

    def _on_handled(self, rank: int, message: Any) -> None:
        """Does nothing: the pool has handled the message, or `poll` does."""

    def _on_stalled(self, rank: int, message: messages.Stalled) -> None:
        # Workers that wait for the user's slow data do not hang.
        if not any(w.owes(self.workers.stall_seconds) for w in self.open_writers()):
            self.workers.supervisor.note_stalled(rank, message)

    def _on_data_failed(self, rank: int, message: messages.DataFailed) -> None:
        if message.order == self.number:
            self._data_have_failed(message)

    def _on_printed(self, rank: int, message: messages.Printed) -> None:
        pass_on(message.stream, message.text)

    def _on_warned(self, rank: int, message: Any) -> None:
        warned.give(message)

    def _on_done(self, rank: int, message: messages.OrderDone) -> None:
        self._done[rank] = message
        self.parts = message.parts

    def _on_waiting(self, rank: int, message: messages.Waiting) -> None:
        self._waiting[rank] = message

    # By the class of a message: the name of the method that handles it. Subclasses add theirs.
    HANDLERS: ClassVar[Mapping[type, str]] = {
        messages.OpenStream: "_on_stream",
        messages.CloseStream: "_on_stream",
        messages.SlotRead: "_on_stream",
        messages.DataFailed: "_on_data_failed",
        messages.OrderDone: "_on_done",
        messages.OrderFailed: "_on_failed",
        messages.Waiting: "_on_waiting",
        messages.Stalled: "_on_stalled",
        messages.Progress: "_on_handled",
        messages.Woken: "_on_handled",
        messages.Printed: "_on_printed",
        messages.Warned: "_on_warned",
        messages.Logged: "_on_warned",
    }


def _close_descriptors(blocks: list[Block]) -> None:
    for block in blocks:
        block.close_fd()


def _check_same_hook(waiting: Mapping[int, messages.Waiting]) -> None:
    first = waiting[0]
    if any((m.hook, m.index) != (first.hook, first.index) for m in waiting.values()):
        raise WorkerError(
            "All workers must reach the same hook. Received: rank 0 at "
            f"{first.hook}({first.index}), others at "
            f"{[(rank, m.hook, m.index) for rank, m in waiting.items() if rank]}."
        )
