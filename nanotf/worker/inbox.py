"""Messages from the parent, sorted by the thread that waits for them."""

from __future__ import annotations

import dataclasses
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from nanotf.wire import messages
from nanotf.wire.channel import Channel, ChannelClosed


class Inbox:
    """Reader of the channel, with its own thread.

    The thread ends the process when the parent is gone, whatever the main thread does, so
    that no worker outlives its parent.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        # The `StreamReader` of the last order received. It is made here, since a faster rank may
        # have asked for batches: they may arrive before this rank begins the order.
        self._streams: Any = None
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[messages.Proceed] = queue.SimpleQueue()
        self._wrote: queue.SimpleQueue[messages.Wrote] = queue.SimpleQueue()
        self._unread: list[messages.Wrote] = []  # taken from `_wrote`, but not asked for yet
        self.pauses: int | None = None  # the order that the parent last asked to pause
        threading.Thread(target=self._read, name="nanotf-inbox", daemon=True).start()

    def next_order(self) -> Any:
        """Waits for an order; returns the message, its blocks and its `StreamReader`, or `Stop`."""
        return self._orders.get()

    def answer(self) -> messages.Proceed:
        """Waits for the parent's answer to `Waiting`."""
        return self._answers.get()

    def wrote(self, order: int, what: str) -> messages.Wrote:
        """Waits until rank 0 has written `what` in an order; returns each message once."""
        # A function that has raised on this rank leaves messages of its order.
        self._unread = [message for message in self._unread if message.order == order]
        while not any(message.what == what for message in self._unread):
            self._unread.append(self._wrote.get())
        found = next(message for message in self._unread if message.what == what)
        self._unread.remove(found)
        return found

    def _read(self) -> None:
        try:
            while True:
                self._route(self.channel.receive())
        except ChannelClosed:  # `sys.exit` would end this thread alone
            os._exit(1)
        except BaseException:  # without a reader, the main thread would wait forever
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def _route(self, message: messages.Message) -> None:
        self._ROUTES[type(message)](self, message)

    def _take_order(self, message: Any) -> None:
        # Imported late: `streams` imports TensorFlow, and `life` imports this module at once.
        from nanotf.shipping.data.streams import StreamReader
        from nanotf.wire.blocks import Block

        count = len(message.blocks)
        # They follow the message: the next `receive` would take their bytes for a message.
        fds = self.channel.receive_fds(count + len(message.descriptors))
        blocks = [Block(n, fd) for n, fd in zip(message.blocks, fds[:count], strict=True)]
        message = dataclasses.replace(message, descriptors=tuple(fds[count:]))
        self._streams = StreamReader(self.channel, message.order)
        self._orders.put((message, blocks, self._streams))

    def _take_batch(self, message: Any) -> None:
        from nanotf.wire.blocks import Block

        block = None
        if message.block is not None:
            block = Block(message.block, self.channel.receive_fds(1)[0])
        self._streams.deliver(message, block)

    def _take_end_of_stream(self, message: Any) -> None:
        self._streams.deliver(message, None)

    def _take_pause(self, message: Any) -> None:
        self.pauses = message.order

    def _take_answer(self, message: Any) -> None:
        self._answers.put(message)

    def _take_written(self, message: Any) -> None:
        self._wrote.put(message)

    def _take_stop(self, message: Any) -> None:
        self._orders.put(message)

    _ROUTES: ClassVar[Mapping[type, Callable[[Inbox, Any], None]]] = {
        messages.Order: _take_order,
        messages.Batch: _take_batch,
        messages.EndOfStream: _take_end_of_stream,
        messages.Pause: _take_pause,
        messages.Proceed: _take_answer,
        messages.Wrote: _take_written,
        messages.Stop: _take_stop,
    }
