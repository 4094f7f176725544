"""A worker of `nanotf.map`: it calls the user's function, as a process of its own would.

Unlike `session.Session` it has no strategy. Nothing of Keras or TensorFlow is replaced, but for
what would keep the graphs of ended items in memory (`life`).
"""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import tensorflow as tf

from nanotf.compat import quiet_bars
from nanotf.shipping import orders
from nanotf.shipping.objects import pickling, whole
from nanotf.shipping.objects.packing import Packer, Pickled
from nanotf.wire import messages
from nanotf.wire.blocks import Block
from nanotf.wire.channel import Channel, ChannelClosed
from nanotf.worker import isolation, output
from nanotf.worker.order_failure import order_failed


class ItemSession:
    """A worker's state between items: the function, which it loads once for each call.

    Args:
        channel: the one to the parent.
        fds: empty, since there is no group.
    """

    def __init__(self, rank: int, channel: Channel, setup: messages.Setup, fds: list[int]) -> None:
        self.rank = rank
        self.channel = channel
        self._task: isolation.IsolatedFunction | None = None
        tf.config.set_visible_devices([], "GPU")  # workers would fight for its memory

    def run(self, inbox: Any, message: messages.Order, blocks: list[Block], reader: Any) -> None:
        """Runs an order received by `inbox`, and reports its end."""
        message.state.restore()
        order = pickling.loads(message.body)
        if isinstance(order, orders.ForgetTask):
            self._task = None
            _clean()
            return
        try:
            small = self._run_item(message, order, blocks)
            answer: messages.Message = messages.OrderDone(message.order, self.rank, small)
        except ChannelClosed:
            raise
        except BaseException as error:
            answer = order_failed(message.order, self.rank, error)
        del order, blocks
        if self._task is not None:
            self._task.end()
        _clean()  # before the answer, so that the parent sees how much memory is left in use
        self.channel.send(answer)

    def _run_item(
        self, message: messages.Order, order: orders.ItemOrder, blocks: list[Block]
    ) -> Pickled | None:
        if order.task is not None:
            shared = blocks[0] if order.task.has_block else None
            self._task = isolation.IsolatedFunction(order.task, shared)
        assert self._task is not None, "a worker's first item of a call brings it"
        (item,) = whole.load(order.whole, blocks[-1] if order.has_block else None)
        function, arguments = self._task.begin()
        if message.descriptors:
            arguments["descriptors"] = message.descriptors
        _begin(message, order)
        quiet = quiet_bars.quiet_by_default() if order.quiet else contextlib.nullcontext()
        with quiet, output.relayed(self._printing(message.order), order.terminal):
            result = function(item, **arguments)
        return self._send_arrays(message.order, result)

    def _printing(self, number: int) -> Any:
        def send(stream: str, text: str) -> None:
            self.channel.send(messages.Printed(number, stream, text))

        return send

    def _send_arrays(self, number: int, result: Any) -> Pickled | None:
        """Sends a result with large arrays; returns one without, which needs no shared block."""
        packer = Packer()
        found = whole.dump({"The result": result}, packer)
        if not packer.nbytes:
            return found
        block = packer.block()
        assert block.fd is not None
        returned = messages.Returned(number, found, block.nbytes)
        self.channel.send(returned, [block.fd])
        block.close_fd()
        return None


def _begin(message: messages.Order, order: orders.ItemOrder) -> None:
    """Makes Keras and all random numbers the same, whatever ran in this process before.

    Keras counts the layers of a process to name them. `set_random_seed` comes last: the settings
    must not draw from it.
    """
    tf.keras.backend.clear_session()
    message.state.restore()
    tf.keras.utils.set_random_seed(order.seed)


def _clean() -> None:
    """Frees the models of an item, which are in reference cycles and in Keras's lists."""
    tf.keras.backend.clear_session()
    gc.collect()
