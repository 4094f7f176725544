"""A worker of `nanotf.map`: it calls the user's function, as a process of its own would.

Unlike `session.Session` it has no strategy. Nothing of Keras or TensorFlow is replaced, but for
what would keep the graphs of ended items in memory (`life`).

    the parent's order: items 4, 5, 6
      item 4   take its token, reset the process, call the function, record its end
      item 5   the same
      item 6   no token: the parent has taken it back
    done -->   the parent reads the records
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from nanotf.compat import quiet_bars
from nanotf.shipping import orders
from nanotf.shipping.objects import pickling, whole
from nanotf.shipping.objects.packing import Pickled
from nanotf.wire import messages
from nanotf.wire.blocks import Block
from nanotf.wire.channel import Channel, ChannelClosed
from nanotf.wire.item_pipes import ItemClaims
from nanotf.worker import isolation, output
from nanotf.worker.item_process import ItemProcess
from nanotf.worker.order_failure import order_failed


@dataclasses.dataclass(frozen=True)
class _CallOfItems:
    """The part of a call that this worker has."""

    claims: ItemClaims
    function: isolation.IsolatedFunction
    relayed: output.RelayedOutput
    quiet: bool  # as in `orders.TaskShipment`


@dataclasses.dataclass(slots=True)  # a frozen one takes three times as long to make
class _Item:
    """An item that this worker is to run."""

    order: int  # the number of the one that has brought it
    index: int  # among all items of the call
    seed: int
    pickled: Pickled
    block: Block | None  # holds its arrays
    arguments: Mapping[str, Any]  # of the function, besides those that all items get


class ItemSession:
    """A worker's state between items: the function, which it loads once for each call.

    Args:
        channel: the one to the parent.
        fds: empty, since there is no group.
    """

    def __init__(self, rank: int, channel: Channel, setup: messages.Setup, fds: list[int]) -> None:
        self.rank = rank
        self.channel = channel
        self._process = ItemProcess()
        self._dumper = whole.ItemDumper()
        self._call: _CallOfItems | None = None
        self._order = self._index = 0  # of the item that runs, or has run last
        self._has_spoken = False  # whether anything was sent for it through the channel
        tf.config.set_visible_devices([], "GPU")  # workers would fight for its memory

    def run(self, inbox: Any, message: messages.Order, blocks: list[Block], reader: Any) -> None:
        """Runs an order received by `inbox`, and reports its end."""
        order = pickling.loads(message.body)
        if isinstance(order, orders.ForgetTask):
            self._forget()
            message.state.restore()
            return
        descriptors = message.descriptors
        if order.task is not None:
            self._forget()
            claims, descriptors = ItemClaims(*descriptors[:2]), descriptors[2:]
            shared = blocks.pop(0) if order.task.has_block else None
            self._begin_call(message, order.task, claims, shared)
        call = self._call
        assert call is not None, "a worker's first order of a call brings the function"
        arguments = {"descriptors": descriptors} if descriptors else {}
        with quiet_bars.quiet_by_default() if call.quiet else contextlib.nullcontext():
            for item in _items(message.order, order, blocks, arguments):
                # The parent takes back all that were not begun: those that follow are its own, too.
                if not call.claims.take(item.order, item.index):
                    break
                self._run_item(call, item)
        self.channel.send(messages.OrderDone(message.order, self.rank))

    def _begin_call(
        self,
        message: messages.Order,
        task: orders.TaskShipment,
        claims: ItemClaims,
        shared: Block | None,
    ) -> None:
        relayed = output.RelayedOutput(self._print, task.terminal)
        self._process.begin_call(message.state, task.terminal)
        function = isolation.IsolatedFunction(task, shared)
        self._call = _CallOfItems(claims, function, relayed, task.quiet)

    def _forget(self) -> None:
        """Ends a call."""
        if self._call is not None:
            self._call.claims.close()
            self._call = None
            self._process.end(thoroughly=True)

    # --------------------------------------------------------------------------- an item
    def _run_item(self, call: _CallOfItems, item: _Item) -> None:
        """Runs an item, and reports its end."""
        begin = time.perf_counter()
        self._order, self._index, self._has_spoken = item.order, item.index, False
        result, failed = None, None
        try:
            result = self._result(call, item)
        except ChannelClosed:  # the parent is gone: the inbox ends this process
            raise
        except BaseException as error:  # SystemExit, too: it ends the item, not the worker
            failed = order_failed(item.order, self.rank, error)
        # Before the report, so that the parent sees how much memory is left in use.
        self._process.end(thoroughly=call.function.end())
        seconds = time.perf_counter() - begin
        # A record could overtake what the channel still carries, such as the item's prints.
        body = None if result is None or self._has_spoken else result.body
        if body is None or not call.claims.record(item.index, seconds, body):
            ended = messages.ItemEnded(item.order, item.index, seconds, result, failed)
            self.channel.send(ended)

    def _result(self, call: _CallOfItems, item: _Item) -> Pickled | None:
        (value,) = whole.load(item.pickled, item.block)
        function, arguments = call.function.begin()
        self._process.begin(item.seed)
        with call.relayed:
            result = function(value, **arguments, **item.arguments)
        return self._send_arrays(result)

    def _send_arrays(self, result: Any) -> Pickled | None:
        """Sends a result with large arrays; returns one without, which needs no shared block."""
        found, packer = self._dumper.dump("The result", result)
        if not packer.nbytes:
            return found
        block = packer.block()
        assert block.fd is not None
        self._has_spoken = True
        self.channel.send(messages.Returned(self._order, found, block.nbytes), [block.fd])
        block.close_fd()  # the parent has its own by now
        return None

    def _print(self, stream: str, text: str) -> None:
        # Of the item that runs now, whatever the call: a logger keeps the stream that it was
        # created with.
        self._has_spoken = True
        self.channel.send(messages.Printed(self._order, stream, text, self._index))


def _items(
    number: int, order: orders.ItemOrder, blocks: list[Block], arguments: Mapping[str, Any]
) -> Iterator[_Item]:
    left = iter(blocks)
    for index, seed, body in zip(order.indices, order.seeds, order.bodies, strict=True):
        buffers = order.buffers.get(index, ())
        block = next(left) if buffers else None
        yield _Item(number, index, seed, Pickled(body, buffers), block, arguments)
