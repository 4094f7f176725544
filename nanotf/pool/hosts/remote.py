"""Workers on other machines: the memory that stands for the parent's.

    Pool                parent's end                        node's end            workers there
      channel  <----->  Originals: notes which parts   -->  Twins: fills them,
                        of blocks a message needs           then delivers
               <-----   fills its blocks,              <--  copies what was    <---
                        then delivers                       written

To the pool a remote worker looks like a local one: a Unix socket with messages and file
descriptors. Each shared block of a call has a twin on the node. A message lists the parts of blocks
that its sender has written (`Order`: all of its blocks; `Batch`: its arrays; `Proceed`,
`Waiting`, `OrderDone`: their field `written`), and these are copied before it is delivered. Between
two messages each byte has one writer, the parent or one rank, so copies never conflict.
"""

from __future__ import annotations

import dataclasses
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nanotf.wire import messages
from nanotf.wire.blocks import Block
from nanotf.wire.channel import Channel

PIECE_NBYTES = 64 * 1024**2  # copied at once, so that nothing on the way holds a whole block

# Prefixes of the parent's variables that workers on all nodes get; see `taken_over`.
TAKEN_OVER = (
    *("TF_", "TF2_", "KERAS_", "XLA_", "ONEDNN_", "DNNL_", "NANOTF_", "PYTHONHASHSEED"),
    *("OMP_", "KMP_", "MKL_", "TCMALLOC_", "MALLOC_CONF", "GLIBC_TUNABLES"),
)
# These belong to Terraform, not TensorFlow, and may hold credentials; or describe one host.
FOREIGN = ("TF_VAR_", "TF_TOKEN_", "TF_CLI_", "TF_CONFIG")
OF_ONE_HOST = ("NANOTF_SECRET", "NANOTF_CURRENT_HOST", "NANOTF_INTERFACE", "NANOTF_PORT")

Key = tuple[str, int]  # of a block: ("call", its place in the call) or ("ring", a stream's number)


def taken_over(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the part of the parent's environment that is sent to other machines.

    It has the variables that affect the computations of TensorFlow, Keras or nanotf, by their
    prefixes (`TAKEN_OVER`), so that all workers compute alike. No other variable leaves this
    process, so passwords and cloud credentials stay here. All else in a worker's environment comes
    from its machine. Variables that user code in workers reads must be set there.
    """
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(TAKEN_OVER) and not name.startswith(FOREIGN) and name not in OF_ONE_HOST
    }


@dataclasses.dataclass(frozen=True)
class Span:
    """A part of a block: its key, offset and size in bytes."""

    key: Key
    offset: int
    nbytes: int

    def pieces(self) -> Iterator[Span]:
        """Yields parts of at most `PIECE_NBYTES`."""
        for start in range(0, self.nbytes, PIECE_NBYTES):
            nbytes = min(PIECE_NBYTES, self.nbytes - start)
            yield Span(self.key, self.offset + start, nbytes)


@dataclasses.dataclass(frozen=True)
class Said:
    """A worker's message on its way to the parent."""

    body: bytes = b""  # the pickled message; empty when the worker has closed its channel
    # (key, offset, bytes), to be copied to the parent's blocks.
    written: tuple[tuple[Key, int, Any], ...] = ()
    block: Any = None  # the bytes of the block that belongs to the message, if one does


def descriptors_of(message: Any) -> int:
    """Returns the number of descriptors that follow a message of a pool to its workers."""
    if isinstance(message, messages.Order):
        return len(message.blocks)
    return 1 if isinstance(message, messages.Batch) and message.block is not None else 0


class Originals:
    """The parent's blocks that have twins on other machines.

    Written while the workers are idle, and read once they have the order.
    """

    def __init__(self) -> None:
        self._blocks: dict[Key, Block] = {}

    def note(
        self, message: Any, channel: Channel
    ) -> tuple[list[tuple[Key, int]], list[tuple[Span, Block]]]:
        """Takes the blocks that follow a message of the pool.

        Args:
            channel: the one that it came on.

        Returns:
            The blocks to create on the other side, with their sizes in bytes, and the
            parts to copy there before the message, each with its block.
        """
        new: list[tuple[Key, int]] = []
        spans: list[Span] = []
        if isinstance(message, messages.Order):
            fds = channel.receive_fds(len(message.blocks))
            self._blocks = {
                ("call", place): Block(nbytes, fd)
                for place, (nbytes, fd) in enumerate(zip(message.blocks, fds, strict=True))
            }
            new = [(key, block.nbytes) for key, block in self._blocks.items()]
            spans = [Span(key, 0, block.nbytes) for key, block in self._blocks.items()]
        elif isinstance(message, messages.Batch):
            ring: Key = ("ring", message.stream)
            if message.block is not None:
                self._blocks[ring] = Block(message.block, channel.receive_fds(1)[0])
                new = [(ring, message.block)]
            spans = [Span(ring, offset, nbytes) for offset, _, _, nbytes in message.arrays]
        elif isinstance(message, messages.Proceed):
            spans = [Span(("call", place), *span) for place, *span in message.written]
        pieces = [piece for span in spans for piece in span.pieces()]
        return new, [(piece, self._blocks[piece.key]) for piece in pieces]

    def deliver(self, said: Said, channel: Channel, ahead: int) -> None:
        """Gives the pool a worker's message.

        Args:
            channel: the one to the pool.
            ahead: nanoseconds, the parent's clock minus the worker's.
        """
        # First: whoever reads the message may read the blocks at once.
        for key, offset, content in said.written:
            self._blocks[key].write(offset, content)
        message = pickle.loads(said.body)
        if isinstance(message, messages.OrderDone) and message.times is not None:
            message = dataclasses.replace(message, times=message.times.moved(ahead))
        if said.block is None:
            channel.send(message)
            return
        block = Block(len(said.block))
        block.write(0, said.block)
        assert block.fd is not None
        channel.send(message, [block.fd])
        block.close_fd()


class Twins:
    """The blocks on a node, shared by its workers of one pool.

    Args:
        count: the number of these workers.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._ended = 0  # workers that have ended the present order
        self._lock = threading.Lock()
        self._blocks: dict[Key, Block] = {}

    def create(self, new: Sequence[tuple[Key, int]]) -> None:
        """Creates blocks. Those of a new order replace the last one's."""
        if any(kind == "call" for (kind, _), _ in new):
            self._blocks.clear()
            self._ended = 0
        for key, nbytes in new:
            self._blocks[key] = Block(nbytes)

    def write(self, key: Key, offset: int, content: Any) -> None:
        """Copies bytes into a block."""
        self._blocks[key].write(offset, content)

    def deliver(self, message: Any, put: Callable[[Any, list[int]], None]) -> None:
        """Gives a message of the parent's to the workers, with the blocks that follow it.

        Args:
            put: sends a message and descriptors to all workers.
        """
        handed: list[Block] = []
        if isinstance(message, messages.Setup):
            state = message.state.with_paths(sys.path)
            message = dataclasses.replace(message, state=state, says_written=True)
        elif isinstance(message, messages.Order):
            message = dataclasses.replace(message, state=message.state.with_paths(sys.path))
            handed = [self._blocks["call", place] for place in range(len(message.blocks))]
        elif isinstance(message, messages.Batch) and message.block is not None:
            handed = [self._blocks["ring", message.stream]]
        put(message, [block.fd for block in handed])
        for block in handed:
            block.close_fd()

    def take(self, message: Any, channel: Channel) -> Said:
        """Returns a worker's message with the bytes that belong to it.

        Args:
            channel: the one that it came on.
        """
        block: bytes | None = None
        written: tuple[tuple[Key, int, bytes], ...] = ()
        if isinstance(message, (messages.Outputs, messages.Returned)):
            own = Block(message.nbytes, channel.receive_fds(1)[0])
            block = read(own, 0, message.nbytes)
            own.discard()
        elif isinstance(message, (messages.Waiting, messages.OrderDone)):
            written = tuple(
                (("call", place), offset, read(self._blocks["call", place], offset, nbytes))
                for place, offset, nbytes in message.written
            )
        if isinstance(message, (messages.OrderDone, messages.OrderFailed)):
            self._order_ended()
        return Said(pickle.dumps(message), written, block)

    def _order_ended(self) -> None:
        """Frees memory. The blocks stay until the next order.

        The parent may still send a batch that no worker needs, and `deliver` owns descriptors.
        """
        with self._lock:
            self._ended += 1
            if self._ended < self._count:
                return
        for own in list(self._blocks.values()):
            own.discard()


def read(block: Block, offset: int, nbytes: int) -> bytes:
    """Returns a copy of part of a block."""
    import numpy as np

    return bytes(block.array(offset, (nbytes,), np.uint8).data)
