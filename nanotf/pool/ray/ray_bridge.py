"""The parent's end of the connection to a worker on another node, see `pool.remote`.

    Pool                Bridge                     Ray              Relay (there)      worker
      channel  <----->  down: takes a message,     put, push  --->  fills the twins,
                        with what was written                       then delivers  --->
               <-----   up: fills the blocks,      <--- pull        copies what was   <---
                        then delivers                               written

Bytes for all workers are put into Ray's object store once (`Payloads`).
"""

from __future__ import annotations

import pickle
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from nanotf.console import logger
from nanotf.pool.hosts.remote import Originals, as_bytes, read
from nanotf.wire.blocks import Block
from nanotf.wire.channel import Channel, ChannelClosed

PULL_SECONDS = 1.0  # how long a relay waits for messages, and the maximum age of `stopped`
INLINE_NBYTES = 64 * 1024  # smaller data are arguments of a call, not objects in the store


class Payloads:
    """Data that all bridges of a pool send, stored once in the object store.

    Args:
        ray: the module.
        readers: number of bridges.
    """

    def __init__(self, ray: Any, readers: int) -> None:
        self._ray = ray
        self._readers = readers
        self._lock = threading.Lock()
        # The object, and the number of bridges that still need it.
        self._held: dict[tuple[int, int], tuple[Any, int]] = {}

    def put(self, number: int, piece: int, block: Block, offset: int, nbytes: int) -> Any:
        """Returns the content of part of a block, or a reference to it in the object store.

        Args:
            number: of its message; all bridges count messages alike.
            piece: the index of the part among the message's parts.
        """
        if nbytes <= INLINE_NBYTES:
            return read(block, offset, nbytes)
        with self._lock:
            held, left = self._held.pop((number, piece), (None, self._readers))
            if held is None:
                held = self._ray.put(as_bytes(read(block, offset, nbytes)))
            if left > 1:
                self._held[number, piece] = held, left - 1
            return held


def describe(error: BaseException) -> str:
    """Describes an error of Ray's in one line: the last of several lines gives the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no reason is known'}"


def _in_thread(target: Callable[..., None], *arguments: Any) -> None:
    name = f"nanotf-bridge{target.__name__}"
    threading.Thread(target=target, args=arguments, name=name, daemon=True).start()


class RayBridge:
    """The connection to one worker.

    Args:
        ray: the module.
        relay: the handle of its `Relay`.
        key: the pool's secret key.
        ahead: nanoseconds, the parent's clock minus the relay's.

    Attributes:
        channel: `Channel`, the pool's end.
        stopped: bool, whether a signal has stopped the worker.
        heard: float, the time of the relay's last answer, at least every `PULL_SECONDS`.
    """

    def __init__(self, ray: Any, relay: Any, key: bytes, payloads: Payloads, ahead: int) -> None:
        self._ray, self._relay, self._payloads, self._ahead = ray, relay, payloads, ahead
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket = theirs.dup()
        self.channel, self._channel = Channel(ours), Channel(theirs)
        self.stopped, self.heard = False, time.monotonic()
        self._ended = False
        self._originals = Originals()
        _in_thread(self._down, key)

    def close(self) -> None:
        """Ends the bridge; its threads end soon."""
        self._ended = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the pool has closed its end

    def _fail(self, error: Exception) -> None:
        """Logs why the bridge ends; the pool learns it when its channel closes."""
        if not self._ended:
            logger.info("The way to a worker has broken.", exc_info=error)

    # ----------------------------------------------------------------- parent to worker
    def _down(self, key: bytes) -> None:
        number = 0
        try:
            self._channel.show_key_first(key)
            _in_thread(self._up)  # no earlier: the worker's first message may already have arrived
            while True:
                message = self._channel.receive()
                number += 1
                self._ship(number, message)
        except ChannelClosed:
            pass  # the pool has closed its end, or `_up` this one
        except Exception as error:
            self._fail(error)
        finally:
            self.close()
            self._channel.close()
            self._socket.close()
            self._originals.clear()

    def _ship(self, number: int, message: Any) -> None:
        new, pieces = self._originals.note(message, self._channel)
        if new:
            self._push(b"", new, ())
        for index, (piece, block) in enumerate(pieces):
            data = self._payloads.put(number, index, block, piece.offset, piece.nbytes)
            self._push(b"", (), ((piece.key, piece.offset),), data)
        self._push(pickle.dumps(message), (), ())

    def _push(self, *arguments: Any) -> None:
        push = self._relay.push.options(concurrency_group="down")
        self._ray.get(push.remote(*arguments))

    # ----------------------------------------------------------------- worker to parent
    def _up(self) -> None:
        pull = self._relay.pull.options(concurrency_group="up")
        try:
            while not self._ended:
                found, self.stopped = self._ray.get(pull.remote(PULL_SECONDS))
                self.heard = time.monotonic()
                for said in found:
                    if not said.body:
                        return
                    self._originals.deliver(said, self._channel, self._ahead)
        except ChannelClosed:
            pass
        except Exception as error:
            self._fail(error)
        finally:
            self.close()
