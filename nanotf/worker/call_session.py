"""A worker that runs functions of nanotf's own, such as a server's.

Unlike `item_session` it does not begin anew for each call, and calls nothing of the user's that a
process of the user's would have to send: a parent that has not imported TensorFlow can give orders.
"""

from __future__ import annotations

import pickle
from typing import Any

import tensorflow as tf

from nanotf.shipping import orders
from nanotf.wire import messages
from nanotf.wire.blocks import Block
from nanotf.wire.channel import Channel, ChannelClosed
from nanotf.worker import output
from nanotf.worker.order_failure import order_failed

_NO_TERMINAL = orders.Terminal({"stdout": False, "stderr": False}, 80)


class CallSession:
    """A worker's state between calls: none.

    Args:
        channel: the one to the parent.
        fds: empty, since there is no group.
    """

    def __init__(self, rank: int, channel: Channel, setup: messages.Setup, fds: list[int]) -> None:
        self._rank, self._channel = rank, channel
        tf.config.set_visible_devices([], "GPU")  # workers would fight for its memory

    def run(self, inbox: Any, message: messages.Order, blocks: list[Block], reader: Any) -> None:
        """Runs an order received by `inbox`, and reports its end.

        The function also gets the order's descriptors, as its last argument.
        """

        def send(stream: str, text: str) -> None:
            self._channel.send(messages.Printed(message.order, stream, text))

        try:
            function, arguments = pickle.loads(message.body)
            with output.RelayedOutput(send, _NO_TERMINAL):
                result = function(*arguments, message.descriptors)
            answer: messages.Message = messages.OrderDone(message.order, self._rank, result)
        except ChannelClosed:  # the parent is gone: the inbox ends this process
            raise
        except BaseException as error:  # SystemExit, too: the order must have an answer
            answer = order_failed(message.order, self._rank, error)
        self._channel.send(answer)
