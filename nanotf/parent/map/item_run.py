"""One `nanotf.map` in the parent: gives items to workers, and collects the results.

    mapping.map | imap
      item_call.run_items   checks the arguments, ships function and items
        ItemRun.run         a thread that has the pool: one item a worker at a time

A thread, so that the workers continue while the user's code works on a result.
"""

from __future__ import annotations

import collections
import dataclasses
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from nanotf.compat.process_state import ProcessState
from nanotf.console import ItemBar, logger
from nanotf.errors import WorkerDied, WorkerError
from nanotf.parent import worker_errors
from nanotf.parent.map.item_output import ItemOutput
from nanotf.pool import interrupts, warm
from nanotf.pool.items import ItemPool, Joined, NotStarted, WorkerGone
from nanotf.pool.plans import AnyPlan
from nanotf.pool.pool import Delivery, explaining_few_descriptors
from nanotf.pool.supervision import POLL_SECONDS
from nanotf.pool.transports import NO_TRANSPORT
from nanotf.shipping import orders
from nanotf.shipping.objects import pickling
from nanotf.shipping.objects.packing import Packer, Pickled
from nanotf.wire import messages
from nanotf.wire.blocks import Block

# Bytes by which a worker may grow after its first item: what libraries and the user's code keep
# from item to item. To replace the worker takes a fraction of a second.
GROWTH_LIMIT = 256 << 20


@dataclasses.dataclass(frozen=True)
class PackedObject:
    """A pickled object, and the arrays that lie beside it."""

    whole: Pickled
    packer: Packer

    def block(self) -> Block | None:
        """Returns a new block with the arrays; None if there are none."""
        return self.packer.block() if self.packer.nbytes else None


@dataclasses.dataclass(frozen=True)
class Task:
    """The work of a call."""

    name: str  # of the function, for people
    names: tuple[str, ...]  # of the function's keyword arguments
    function: PackedObject  # a tuple of the function and the values of its keyword arguments
    items: Sequence[PackedObject]
    labels: Sequence[str]  # short descriptions of the items, for people
    seed: int  # with an item's index it seeds the item's random numbers
    state: ProcessState  # of this process when the user made the call
    terminal: orders.Terminal
    quiet: bool  # as in `orders.ItemOrder`


@dataclasses.dataclass(frozen=True)
class Policy:
    """Decisions about the workers of a call."""

    plan: AnyPlan
    max_restarts: int  # how often an item whose worker died is run again
    recycle_after: int | None  # items of the call after which a worker is replaced; None for never
    # Bytes above which a worker is replaced; None for no limit; `topology.AUTO` for a growth above
    # `GROWTH_LIMIT`.
    memory_limit: int | str | None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of an item."""

    index: int  # of the item
    result: Pickled | None = None  # None if the item failed
    block: Block | None = None  # the result's arrays; None if it has none
    error: Exception | None = None


class _NoMoreWanted(Exception):
    """The user wants no more results."""


def seed_of(base: int, index: int) -> int:
    """Returns the seed of an item: distinct streams for all indices of one base.

    `numpy.random.SeedSequence` mixes the two numbers.
    """
    return int(np.random.SeedSequence((base, index)).generate_state(1)[0])


class ItemRun:
    """One call: its items, and the workers that have them.

    Args:
        bar: shows how far it is, and has begun. Who waits for outcomes ends it.
        output: handles what the items print.

    Attributes:
        outcomes: queue of `Outcome`, in the order in which items end; then of the exception that
            ended the call, or None. The run's thread fills it.
    """

    def __init__(self, task: Task, policy: Policy, bar: ItemBar, output: ItemOutput) -> None:
        self.task, self.policy = task, policy
        self.bar, self._output = bar, output
        self.outcomes: queue.SimpleQueue[Outcome | BaseException | None] = queue.SimpleQueue()
        self._waiting = collections.deque(range(len(task.items)))
        self._left = len(task.items)
        self._restarts: collections.Counter[int] = collections.Counter()  # by item
        self._running: dict[int, int] = {}  # by rank, the item
        self._latest: dict[int, int] = {}  # by rank, the same, also once it has ended
        self._results: dict[int, Delivery] = {}  # by rank, those with arrays, until `OrderDone`
        self._given: collections.Counter[int] = collections.Counter()  # by rank, of one process
        self._absent: set[int] = set()  # ranks without a worker that could take an item
        self._lost: set[int] = set()  # those of them that get none any more
        self._informed: set[int] = set()  # ranks whose worker has the function
        self._shared: Block | None = None  # the function's arrays
        self._cancelled = threading.Event()  # set by any thread
        self._pool: ItemPool | None = None

    def run(self) -> None:
        """Runs all items; the target of the run's thread."""
        try:
            with warm.pool_for(self.policy.plan, NO_TRANSPORT) as pool:
                assert isinstance(pool, ItemPool)
                self._pool = pool
                if self._cancelled.is_set():  # while they started; the next call gets them
                    raise _NoMoreWanted
                with explaining_few_descriptors(pool.size):
                    self._run_on(pool)
        except _NoMoreWanted:
            self._end_call(None)
        except BaseException as error:  # raised in the thread that waits for outcomes
            self._end_call(error)
        else:
            self._end_call(None)

    def _end_call(self, error: BaseException | None) -> None:
        try:
            self._output.end_all()
        finally:
            self.outcomes.put(error)

    @property
    def has_workers(self) -> bool:
        """True once they have started."""
        return self._pool is not None

    def cancel(self) -> None:
        """Makes the run end soon; its workers are killed in the middle of their items."""
        self._cancelled.set()
        if self._pool is not None:
            self._pool.post(messages.Woken())  # `_give_all` then stops

    # ---------------------------------------------------------------------------- the loop
    def _run_on(self, pool: ItemPool) -> None:
        pool.usable = False  # until all have ended their items
        try:
            self._shared = self.task.function.block()
            self._give_all(pool)
            while self._left:
                self._hear(pool)
                self._give_all(pool)
            self._end(pool)
        except BaseException:
            with interrupts.held_back():
                pool.kill()
            raise
        finally:
            self._shared = None

    def _end(self, pool: ItemPool) -> None:
        """Leaves the pool to the next call, without this call's function and arrays."""
        pool.settle()
        body = pickling.dumps(orders.ForgetTask())
        forget = messages.Order(pool.next_order(), body, state=self.task.state)
        for rank in self._informed:
            pool.send_to(rank, forget)
        pool.usable = True

    def _hear(self, pool: ItemPool) -> None:
        """Waits for an event and handles it."""
        if (event := pool.event(POLL_SECONDS)) is not None:
            rank, found = event
            self._HANDLERS[type(found)](self, pool, rank, found)

    def _on_joined(self, pool: ItemPool, rank: int, event: Any) -> None:
        self._absent.discard(rank)

    def _on_not_started(self, pool: ItemPool, rank: int, event: Any) -> None:
        self._give_up(pool, rank, event.error)

    def _on_printed(self, pool: ItemPool, rank: int, message: Any) -> None:
        # Not that of the message's order: a logger keeps the stream that it was created with.
        # Without an item, it is a thread of an earlier call that prints.
        if rank in self._latest:
            self._output.take(self._latest[rank], message.stream, message.text)

    def _on_delivery(self, pool: ItemPool, rank: int, message: Any) -> None:
        self._results[rank] = message

    def _on_done(self, pool: ItemPool, rank: int, message: Any) -> None:
        self._end_item(rank, self._succeeded(rank, message))

    def _on_failed(self, pool: ItemPool, rank: int, message: Any) -> None:
        index = self._running[rank]
        where, printed = f"{self._name(index)}: ", self._output.end(index)
        error = worker_errors.failure_of(pool.workers[rank], message, where, index, printed)
        self._end_item(rank, Outcome(index, error=error))

    def _succeeded(self, rank: int, done: messages.OrderDone) -> Outcome:
        # A result with arrays has come before, in a `Delivery`.
        index, arrived = self._running[rank], self._results.pop(rank, None)
        if arrived is None:
            return Outcome(index, done.result)
        return Outcome(index, arrived.message.value, arrived.block)

    def _end_item(self, rank: int, outcome: Outcome) -> None:
        del self._running[rank]
        self._finish(outcome)

    def _finish(self, outcome: Outcome) -> None:
        self._left -= 1
        self._output.end(outcome.index)
        self.bar.item_ends(outcome.index, outcome.error is not None)
        self.outcomes.put(outcome)

    def _name(self, index: int) -> str:
        return f"Item {index} of {self.task.name} ({self.task.labels[index]})"

    # ------------------------------------------------------------------------------- giving
    def _give_all(self, pool: ItemPool) -> None:
        """Gives each idle worker an item, or replaces it if it has had enough."""
        if self._cancelled.is_set():
            raise _NoMoreWanted
        for rank in range(pool.size):
            if not self._waiting:
                return
            if rank in self._running or rank in self._absent:
                continue
            if self._is_worn(pool, rank):
                self._replace(pool, rank)
            else:
                self._give(pool, rank, self._waiting.popleft())

    def _is_worn(self, pool: ItemPool, rank: int) -> bool:
        # A new worker takes an item whatever it weighs; else a low limit would replace it forever.
        if not pool.has_worked(rank):
            return False
        after, limit = self.policy.recycle_after, self.policy.memory_limit
        if after is not None and self._given[rank] >= after:
            return True
        if isinstance(limit, str):
            return pool.growth_of(rank) > GROWTH_LIMIT
        return limit is not None and pool.memory_of(rank) > limit

    def _give(self, pool: ItemPool, rank: int, index: int) -> None:
        item, task = self.task.items[index], None
        blocks = []
        if rank not in self._informed:  # a worker's first item in a call brings the function
            self._informed.add(rank)
            blocks += [] if self._shared is None else [self._shared]
            whole, names = self.task.function.whole, self.task.names
            task = orders.TaskShipment(whole, names, self._shared is not None)
        of_item = item.block()
        blocks += [] if of_item is None else [of_item]
        seed = seed_of(self.task.seed, index)
        how = self.task.terminal, self.task.quiet
        contents = orders.ItemOrder(task, item.whole, of_item is not None, seed, *how)
        sizes = tuple(block.nbytes for block in blocks)
        self._running[rank] = self._latest[rank] = index
        self.bar.item_begins(index)
        self._given[rank] += 1
        body, number = pickling.dumps(contents), pool.next_order()
        order = messages.Order(number, body, sizes, self._ends(index), self.task.state)
        pool.send_to(rank, order, blocks)

    def _ends(self, index: int) -> tuple[int, ...]:
        """Returns the descriptors that an item's function gets as `descriptors`; for subclasses."""
        return ()

    # ---------------------------------------------------------------------------- replacing
    def _replace(self, pool: ItemPool, rank: int) -> None:
        self._absent.add(rank)
        self._informed.discard(rank)
        self._given[rank] = 0
        pool.replace(rank)

    def _died(self, pool: ItemPool, rank: int, ended: WorkerGone) -> None:
        """Handles the end of a worker: its item is run again, or has failed."""
        if rank in self._absent:  # it was to be replaced, and had no item
            return
        died = ended.worker.died("running an item")
        self._results.pop(rank, None)
        index = self._running.get(rank)
        if index is None:
            logger.warning("%s It had just ended an item, or had none.", died.what)
        elif self._restarts[index] < self.policy.max_restarts:
            self._run_again(rank, index, died)
        else:
            self._end_item(rank, Outcome(index, error=self._failed(index, died)))
        self._absent.add(rank)
        self._informed.discard(rank)
        if self._waiting:
            self._replace(pool, rank)

    def _give_up(self, pool: ItemPool, rank: int, died: WorkerDied) -> None:
        """Handles a worker that cannot be started; without any, the items that wait have failed."""
        self._lost.add(rank)
        if len(self._lost) < pool.size:
            logger.warning("%s The other workers run its items.", died.what)
            return
        while self._waiting:
            index = self._waiting.popleft()
            self._finish(Outcome(index, error=self._failed(index, died)))

    def _run_again(self, rank: int, index: int, died: WorkerError) -> None:
        del self._running[rank]
        self._restarts[index] += 1
        self._waiting.appendleft(index)  # before items that nobody has begun
        self._output.end(index)
        self.bar.item_is_lost(index)
        logger.warning(
            "%s %s is run again: restart %d of %d.",
            died.what,
            self._name(index),
            self._restarts[index],
            self.policy.max_restarts,
        )

    def _failed(self, index: int, died: WorkerError) -> WorkerDied:
        """Returns the error for an item whose worker died once too often."""
        text = f"{self._name(index)}: {died.what}{self._remedy()}"
        error = died.retold(WorkerDied, text, index)
        error.printed = self._output.end(index)
        return error

    def _remedy(self) -> str:
        """Returns the end of the text of an error for a lost item."""
        return f" Pass max_restarts={self.policy.max_restarts + 1} to run such an item again."

    # By the class of an event of the pool, or of a worker's message.
    _HANDLERS: ClassVar[Mapping[type, Callable[[ItemRun, ItemPool, int, Any], None]]] = {
        Joined: _on_joined,
        NotStarted: _on_not_started,
        WorkerGone: _died,
        Delivery: _on_delivery,
        messages.Printed: _on_printed,
        messages.OrderDone: _on_done,
        messages.OrderFailed: _on_failed,
    }
