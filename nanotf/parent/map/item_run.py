"""One `nanotf.map` in the parent: gives items to workers, and collects the results.

    mapping.map | imap
      item_call.run_items   checks the arguments, ships function and items
        ItemRun.run         a thread that has the pool: gives each worker items ahead
          item_batches      how many; `wire.item_pipes` carries them and their ends

A thread, so that the workers continue while the user's code works on a result.
"""

from __future__ import annotations

import collections
import itertools
import pickle
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from nanotf.console import ItemBar, logger
from nanotf.errors import WorkerDied, WorkerError
from nanotf.parent import worker_errors
from nanotf.parent.map.item_arguments import label_of
from nanotf.parent.map.item_batches import AHEAD_SECONDS, MOST_BYTES, GivenItems, Pace
from nanotf.parent.map.item_output import ItemOutput
from nanotf.parent.map.item_task import Outcome, Policy, Task, seeds_of
from nanotf.pool import interrupts, warm
from nanotf.pool.items import ItemPool, Joined, NotStarted, WorkerGone
from nanotf.pool.pool import Delivery, explaining_few_descriptors
from nanotf.pool.supervision import POLL_SECONDS
from nanotf.pool.transports import NO_TRANSPORT
from nanotf.shipping import orders
from nanotf.shipping.objects import pickling
from nanotf.shipping.objects.packing import Pickled
from nanotf.wire import messages
from nanotf.wire.blocks import Block

# Bytes by which a worker may grow after its first item: what libraries and the user's code keep
# from item to item. To replace the worker takes a fraction of a second.
GROWTH_LIMIT = 256 << 20


class _NoMoreWanted(Exception):
    """The user wants no more results."""


class ItemRun:
    """One call: its items, and the workers that have them.

    Args:
        bar: shows how far it is, and has begun. Who waits for outcomes ends it.
        output: handles what the items print.

    Attributes:
        outcomes: queue of lists of `Outcome`, in the order in which items end; then of the
            exception that ended the call, or None. The run's thread fills it.
    """

    def __init__(self, task: Task, policy: Policy, bar: ItemBar, output: ItemOutput) -> None:
        self.task, self.policy = task, policy
        self.bar, self._output = bar, output
        self.outcomes: queue.SimpleQueue[list[Outcome] | BaseException | None] = queue.SimpleQueue()
        self._waiting = collections.deque(range(len(task.items)))
        self._left = len(task.items)
        self._restarts: collections.Counter[int] = collections.Counter()  # by item
        # By rank, of a worker process that has the function.
        self._given: dict[int, GivenItems] = {}
        self._seeds = seeds_of(task.seed, len(task.items))
        self._pace = Pace()
        self._before = 0  # the orders of this call have greater numbers
        self._results: dict[int, Delivery] = {}  # by rank, those with arrays, until `ItemEnded`
        self._absent: set[int] = set()  # ranks without a worker that could take an item
        self._lost: set[int] = set()  # those of them that get none any more
        self._unreplaced: set[int] = set()  # those of them whose worker ended when no item waited
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
        self._before = pool.next_order()
        try:
            self._shared = self.task.function.block()
            if self._shared is not None:
                self._has_placed(self._shared)
                # Copies of what lies in the block, such as weights, or the user's own arrays.
                self.task.function.packer.parts.clear()
            self._give_all(pool)
            while self._left:
                self._hear(pool)
                self._look_at_late(pool)
                self._give_all(pool)
            self._end(pool)
        except BaseException:
            with interrupts.held_back():
                pool.kill()
                for given in self._given.values():  # no result is lost that was there
                    self._take_ends(given)
            raise
        finally:
            self._shared = None
            for given in self._given.values():
                given.pipes.close()

    def _end(self, pool: ItemPool) -> None:
        """Leaves the pool to the next call, without this call's function and arrays."""
        pool.settle()
        body = pickling.dumps(orders.ForgetTask())
        forget = messages.Order(pool.next_order(), body, state=self.task.state)
        for rank in self._given:
            pool.send_to(rank, forget)
        pool.usable = True

    def _hear(self, pool: ItemPool) -> None:
        """Waits for an event and handles it."""
        is_ahead = any(len(given) > 1 for given in self._given.values())
        # A record in a pipe wakes nobody: while there may be some, they are looked for more often.
        if (event := pool.event(AHEAD_SECONDS if is_ahead else POLL_SECONDS)) is not None:
            rank, found = event
            self._HANDLERS[type(found)](self, pool, rank, found)

    def _look_at_late(self, pool: ItemPool) -> None:
        """Reads the records of workers that have told nothing for long; helps with their items.

        Such a worker runs an item that takes longer than those before it.
        """
        for given in self._given.values():
            if len(given) > 1 and given.is_late():
                self._take_ends(given)
                if given.is_late() and not self._waiting and self._has_idle(pool):
                    # Reversed: `extendleft` turns the order around.
                    self._waiting.extendleft(reversed(given.take_back()))

    def _has_idle(self, pool: ItemPool) -> bool:
        return any(not self._given.get(r) for r in range(pool.size) if r not in self._absent)

    def _on_joined(self, pool: ItemPool, rank: int, event: Any) -> None:
        self._absent.discard(rank)

    def _on_not_started(self, pool: ItemPool, rank: int, event: Any) -> None:
        self._give_up(pool, rank, event.error)

    def _on_printed(self, pool: ItemPool, rank: int, message: Any) -> None:
        if message.order > self._before:  # else a thread of an earlier call prints
            self._output.take(message.item, message.stream, message.text)

    def _on_delivery(self, pool: ItemPool, rank: int, message: Any) -> None:
        self._results[rank] = message

    def _on_done(self, pool: ItemPool, rank: int, message: Any) -> None:
        given = self._given.get(rank)
        if given is not None:  # else all its items were known to have ended, and it was replaced
            self._take_ends(given)

    def _on_ended(self, pool: ItemPool, rank: int, message: messages.ItemEnded) -> None:
        """Handles the end of an item that has sent something else before."""
        given, index, error = self._given[rank], message.item, None
        self._take_ends(given)  # they came before
        arrived = self._results.pop(rank, None)
        if not given.end(index):
            return
        self._note_pace(given, [message.seconds])
        if message.failed is not None:
            where, printed = f"{self._name(index)}: ", self._output.end(index)
            worker = pool.workers[rank]
            error = worker_errors.failure_of(worker, message.failed, where, index, printed)
            self._finish([(Outcome(index, error=error), message.seconds)])
        elif arrived is None:
            self._finish([(Outcome(index, message.result), message.seconds)])
        else:
            outcome = Outcome(index, arrived.message.value, arrived.block)
            self._finish([(outcome, message.seconds)])
        self._show_running(given)

    def _take_ends(self, given: GivenItems) -> None:
        """Takes the results that a worker has recorded."""
        ends = list(given.new_ends())
        self._note_pace(given, [end.seconds for end in ends])
        self._finish([(Outcome(end.index, Pickled(end.result, ())), end.seconds) for end in ends])
        self._show_running(given)

    def _note_pace(self, given: GivenItems, seconds: Sequence[float]) -> None:
        # Not those of a process's first item, which has loaded the function.
        is_first = given.ended == len(seconds)
        self._pace.note(seconds[1:] if is_first else seconds)

    def _finish(self, ended: Sequence[tuple[Outcome, float]]) -> None:
        """Takes outcomes of items, with the seconds that each has taken."""
        if not ended:
            return
        self._left -= len(ended)
        for outcome, seconds in ended:
            self._output.end(outcome.index)
            self.bar.item_ends(outcome.index, seconds, outcome.error is not None)
        self.outcomes.put([outcome for outcome, _ in ended])

    def _show_running(self, given: GivenItems) -> None:
        if (index := given.running) is not None:
            self.bar.item_begins(index)

    def _name(self, index: int) -> str:
        return f"Item {index} of {self.task.name} ({label_of(self.task.values[index])})"

    # ------------------------------------------------------------------------------- giving
    def _give_all(self, pool: ItemPool) -> None:
        """Gives each worker that has few items more, or replaces it if it has had enough."""
        if self._cancelled.is_set():
            raise _NoMoreWanted
        for rank in range(pool.size):
            while rank not in self._absent and (number := self._missing(pool, rank)):
                if self._is_worn(pool, rank):
                    if self._given.get(rank):
                        break  # not before its items have ended
                    self._replace(pool, rank)
                elif not self._give(pool, rank, number):
                    break

    def _missing(self, pool: ItemPool, rank: int) -> int:
        """Returns how many items a worker should get now, in one of two orders that it has."""
        given = self._given.get(rank)
        if not self._waiting:
            return 0
        if given is None:  # this order brings the function
            return 1
        # A process's first item shows how much memory the next ones will take.
        most = self._pace.most() if given.ended else 1
        if self.policy.recycle_after is not None:
            most = min(most, max(1, self.policy.recycle_after - given.count))
        if 2 * len(given) > most or (given and most == 1) or given.is_late():
            return 0
        # The last items are for all workers.
        return min(-(-most // 2), most - len(given), -(-len(self._waiting) // pool.size))

    def _is_worn(self, pool: ItemPool, rank: int) -> bool:
        # A new worker takes an item whatever it weighs; else a low limit would replace it forever.
        if not pool.has_worked(rank):
            return False
        after, limit = self.policy.recycle_after, self.policy.memory_limit
        given = self._given.get(rank)
        if after is not None and given is not None and given.count >= after:
            return True
        if isinstance(limit, str):
            return pool.growth_of(rank) > GROWTH_LIMIT
        return limit is not None and pool.memory_of(rank) > limit

    def _give(self, pool: ItemPool, rank: int, most: int) -> bool:
        """Gives a worker up to so many items; returns False if its pipe takes none now."""
        number, given = pool.next_order(), self._given.get(rank)
        task, state, blocks = None, None, list[Block]()
        descriptors: tuple[int, ...] = ()
        if given is None:  # a worker's first items in a call bring the function
            given = self._given[rank] = GivenItems()
            state, descriptors = self.task.state, given.pipes.of_worker
            task = self.task.shipment(self._shared is not None)
            blocks += [] if self._shared is None else [self._shared]
        indices = self._next_items(most)
        indices = indices[: given.give(number, indices)]
        if not indices:
            return False
        for _ in indices:
            self._waiting.popleft()
        packed = [self.task.items[index] for index in indices]
        blocks += [block for block in (item.block() for item in packed) if block is not None]
        contents = orders.ItemOrder(
            task,
            tuple(indices),
            tuple(self._seeds[index] for index in indices),
            tuple(item.whole.body for item in packed),
            {
                i: item.whole.buffers
                for i, item in zip(indices, packed, strict=True)
                if item.packer.nbytes
            },
        )
        # Without the user's objects in it, the standard pickle is enough, and ten times as fast.
        body, sizes = pickle.dumps(contents), tuple(block.nbytes for block in blocks)
        descriptors = *descriptors, *self._ends(indices[0])
        pool.send_to(rank, messages.Order(number, body, sizes, descriptors, state), blocks)
        self._show_running(given)
        return True

    def _next_items(self, most: int) -> list[int]:
        """Returns the items that come next, as many as fit into an order."""
        found, nbytes = list[int](), 0
        for index in itertools.islice(self._waiting, most):
            nbytes += self.task.items[index].nbytes
            if found and nbytes > MOST_BYTES:
                break
            found.append(index)
        return found

    def _has_placed(self, block: Block) -> None:
        """Called once the function's arrays lie in a block; for subclasses."""

    def _ends(self, index: int) -> tuple[int, ...]:
        """Returns the descriptors that an item's function gets as `descriptors`; for subclasses."""
        return ()

    # ---------------------------------------------------------------------------- replacing
    def _replace(self, pool: ItemPool, rank: int) -> None:
        self._absent.add(rank)
        self._unreplaced.discard(rank)
        if (given := self._given.pop(rank, None)) is not None:
            given.pipes.close()
        pool.replace(rank)

    def _died(self, pool: ItemPool, rank: int, ended: WorkerGone) -> None:
        """Handles the end of a worker: its item is run again, or has failed."""
        if rank in self._absent:  # it was to be replaced, and had no item
            return
        died = ended.worker.died("running an item")
        self._results.pop(rank, None)
        given = self._given.pop(rank, None)
        if given is not None:
            self._take_ends(given)
            self._waiting.extendleft(reversed(given.take_back()))
            given.pipes.close()
        if given is None or (index := given.running) is None:
            logger.warning("%s It had just ended an item, or had none.", died.what)
        elif self._restarts[index] < self.policy.max_restarts:
            self._run_again(index, died)
        else:
            self._finish([(Outcome(index, error=self._failed(index, died)), given.seconds())])
        self._absent.add(rank)
        if self._waiting or any(len(each) > 1 for each in self._given.values()):
            self._replace(pool, rank)
        else:
            self._unreplaced.add(rank)

    def _give_up(self, pool: ItemPool, rank: int, died: WorkerDied) -> None:
        """Handles a worker that cannot be started; without any, the items that wait have failed."""
        self._lost.add(rank)
        if len(self._lost) < pool.size:
            logger.warning("%s The other workers run its items.", died.what)
            if self._waiting and self._unreplaced:  # there may be no other one
                self._replace(pool, min(self._unreplaced))
            return
        failed = [(Outcome(i, error=self._failed(i, died)), 0.0) for i in self._waiting]
        self._waiting.clear()
        self._finish(failed)

    def _run_again(self, index: int, died: WorkerError) -> None:
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
        messages.ItemEnded: _on_ended,
    }
