"""A reader: a worker that calls `__getitem__` of the user's datasets.

Before every call it sets the random numbers to a state that depends on the seed, the dataset, the
moment and the index, so that a batch is the same whichever reader reads it.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import os
from typing import Any

from nanotf.compat import eager_context, random_states
from nanotf.shipping import orders
from nanotf.shipping.data import datasets
from nanotf.shipping.objects import pickling
from nanotf.wire import messages
from nanotf.wire.blocks import Block, private_view
from nanotf.wire.channel import Channel, ChannelClosed
from nanotf.worker.order_failure import order_failed


@dataclasses.dataclass
class _Opened:
    """A dataset in this process."""

    dataset: Any  # the user's object, or the exception that its pickle raised
    held: list[datasets.Held]  # the generators that the dataset holds
    seed: int  # the call's


@dataclasses.dataclass
class _Done:
    """The batches of a dataset that this process has read in the present pass.

    One is read again if training continues in the middle of an epoch, after a worker has died.
    """

    moment: orders.ReadMoment | None = None  # the present pass; None before the first
    indices: set[int] = dataclasses.field(default_factory=set)

    def add(self, moment: orders.ReadMoment, index: int) -> bool:
        """Adds a batch; returns True if it is new."""
        if moment == orders.BEFORE:  # Keras opens the data, maybe once more
            return False
        if moment != self.moment:
            self.moment, self.indices = moment, set()
        is_new = index not in self.indices
        self.indices.add(index)
        return is_new


class ReadingSession:
    """A reader's state between batches: the datasets, and the memory of its batches.

    Args:
        channel: the one to the parent.
        fds: empty, since there is no group.
    """

    def __init__(self, rank: int, channel: Channel, setup: messages.Setup, fds: list[int]) -> None:
        self.rank = rank
        self._channel = channel
        self._slots = datasets.BatchMemory()
        self._datasets: dict[int, _Opened] = {}
        self._done: collections.defaultdict[int, _Done] = collections.defaultdict(_Done)

    def run(self, inbox: Any, message: messages.Order, blocks: list[Block], reader: Any) -> None:
        """Runs an order received by `inbox`: takes a dataset, or reads a batch and sends it."""
        order = pickling.loads(message.body)
        if isinstance(order, orders.DatasetOrder):
            self._datasets[order.dataset] = _open(order, message)
            return
        try:
            batch = self._read(order, message.order)
            answer: messages.Message = messages.OrderDone(message.order, self.rank, batch)
        except ChannelClosed:  # the parent is gone: the inbox ends this process
            raise
        except BaseException as error:
            answer = order_failed(message.order, self.rank, error)
        self._channel.send(answer)

    def _read(self, order: orders.ReadOrder, number: int) -> orders.BatchRead:
        self._slots.release(order.free)
        opened = self._datasets[order.dataset]
        if isinstance(opened.dataset, Exception):
            raise opened.dataset
        is_new = self._done[order.dataset].add(order.moment, order.index)
        _seed(opened, order, is_new)
        body, packer = datasets.pack_batch(opened.dataset[order.index])
        if not packer.nbytes:
            return orders.BatchRead(body)
        slot, block = self._slots.write(packer)
        if block is not None:
            assert block.fd is not None
            self._channel.send(messages.Returned(number, slot, block.nbytes), [block.fd])
            block.close_fd()  # the parent has its own by now
        return orders.BatchRead(body, packer.places(), slot)


def _open(order: orders.DatasetOrder, message: messages.Order) -> _Opened:
    # Mapped anew: what the dataset has written to its last arrays is gone.
    pickled, *arrays = map(private_view, message.descriptors, order.blocks)
    for fd in message.descriptors:
        os.close(fd)
    try:
        message.state.restore()
        body = pickled[: order.nbytes]
        dataset, held = datasets.loads(body.data, [array.data for array in arrays])
    except Exception as error:  # raised by `_read`: this order has no answer
        dataset, held = error, []
    return _Opened(dataset, held, order.seed)


def _seed(opened: _Opened, order: orders.ReadOrder, is_new: bool) -> None:
    place = (opened.seed, order.dataset, order.moment.epoch, order.moment.turn, order.index)
    key = hashlib.sha256(repr(place).encode()).digest()
    random_states.seed(key)
    eager_context.seed(int.from_bytes(key[:8], "big") >> 1, is_new)  # below 2**63
    for held in opened.held:
        held.seed(key)
