"""A reader: a process that calls `__getitem__` of the user's datasets.

Before every call it sets the random numbers to a state that depends on the seed, the dataset, the
moment and the index, so that a batch is the same whichever reader reads it.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import os
import pickle
import socket
import sys
import traceback
from typing import Any, NoReturn

from nanotf.wire import messages
from nanotf.wire.blocks import private_view
from nanotf.wire.channel import Channel, ChannelClosed
from nanotf.wire.reader_messages import BEFORE, BatchFailed, BatchRead, Dataset, Read, ReadMoment
from nanotf.worker import process


def run(fd: int, key: bytes, rank: int, cores: tuple[int, ...], numa_node: int | None) -> int:
    """Reads batches until the parent exits or kills this process; never returns.

    Args:
        fd, key, rank, cores, numa_node: as in `life.run`.
    """
    process.write_log()
    process.write_stacks()
    warnings = process.pin(cores)
    process.bind_memory(numa_node)
    channel = Channel(socket.socket(fileno=fd))
    try:
        channel.show_key_first(key)
        channel.send(messages.Hello(rank, os.getpid(), cores, None, tuple(warnings)))
        setup = channel.receive()
        setup.state.begin()
        _Reader(channel).serve()
    except ChannelClosed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # skips TensorFlow's destructors


@dataclasses.dataclass
class _Opened:
    """A dataset in this process."""

    dataset: Any  # the user's object, or the exception that its pickle raised
    held: list[Any]  # of `datasets.Held`: the generators that the dataset holds
    seed: int  # the call's


@dataclasses.dataclass
class _Done:
    """The batches of a dataset that this process has read in the present pass.

    One is read again if training continues in the middle of an epoch, after a worker has died.
    """

    moment: ReadMoment | None = None  # the present pass; None before the first
    indices: set[int] = dataclasses.field(default_factory=set)

    def add(self, moment: ReadMoment, index: int) -> bool:
        """Adds a batch; returns True if it is new."""
        if moment == BEFORE:  # Keras opens the data, maybe once more
            return False
        if moment != self.moment:
            self.moment, self.indices = moment, set()
        is_new = index not in self.indices
        self.indices.add(index)
        return is_new


class _Reader:
    def __init__(self, channel: Channel) -> None:
        from nanotf.shipping.data import datasets

        self._channel = channel
        self._slots = datasets.BatchMemory()
        self._fds: dict[int, tuple[int, int]] = {}  # of blocks by number: descriptor, size
        self._used: dict[int, set[int]] = {}  # the blocks of each dataset
        self._datasets: dict[int, _Opened] = {}
        self._done: collections.defaultdict[int, _Done] = collections.defaultdict(_Done)

    def serve(self) -> NoReturn:
        """Reads one batch after another; ends only by `ChannelClosed`."""
        while True:
            message = self._channel.receive()
            if isinstance(message, Dataset):
                self._take(message)
            elif isinstance(message, Read):
                self._answer(message)

    # ---------------------------------------------------------------------------- datasets
    def _take(self, message: Dataset) -> None:
        fds = self._channel.receive_fds(len(message.new))
        for (number, nbytes), fd in zip(message.new, fds, strict=True):
            self._fds[number] = (fd, nbytes)
        self._used[message.dataset] = {message.pickle, *message.arrays}
        for number in self._fds.keys() - set().union(*self._used.values()):
            os.close(self._fds.pop(number)[0])
        self._datasets[message.dataset] = self._open(message)

    def _open(self, message: Dataset) -> _Opened:
        from nanotf.shipping.data import datasets

        # Mapped anew: what the dataset has written to its last arrays is gone.
        arrays = [self._view(number) for number in message.arrays]
        body = self._view(message.pickle)[: message.nbytes]
        try:
            message.state.restore()
            dataset, held = datasets.loads(body.data, [array.data for array in arrays])
        except Exception as error:
            dataset, held = error, []
        return _Opened(dataset, held, message.seed)

    def _view(self, number: int) -> Any:
        return private_view(*self._fds[number])

    # ----------------------------------------------------------------------------- batches
    def _answer(self, message: Read) -> None:
        from nanotf.shipping.data import datasets

        self._slots.release(message.free)
        opened = self._datasets[message.dataset]
        try:
            if isinstance(opened.dataset, Exception):
                raise opened.dataset
            is_new = self._done[message.dataset].add(message.moment, message.index)
            _seed(opened, message, is_new)
            body, packer = datasets.pack_batch(opened.dataset[message.index])
        except Exception as error:
            self._channel.send(_failed(message.number, error))
            return
        if not packer.nbytes:
            self._channel.send(BatchRead(message.number, body, ()))
            return
        slot, block = self._slots.write(packer)
        nbytes = None if block is None else block.nbytes
        fds = () if block is None or block.fd is None else (block.fd,)
        self._channel.send(BatchRead(message.number, body, packer.places(0), slot, nbytes), fds)
        if block is not None:
            block.close_fd()


def _seed(opened: _Opened, read: Read, is_new: bool) -> None:
    from nanotf.compat import eager_context, random_states

    place = (opened.seed, read.dataset, read.moment.epoch, read.moment.turn, read.index)
    key = hashlib.sha256(repr(place).encode()).digest()
    random_states.seed(key)
    eager_context.seed(int.from_bytes(key[:8], "big") >> 1, is_new)  # below 2**63
    for held in opened.held:
        held.seed(key)


def _failed(number: int, error: BaseException) -> BatchFailed:
    from nanotf.shipping.objects import pickling

    try:
        pickled = pickling.dumps(error)
        pickle.loads(pickled)  # some exceptions pickle, but do not unpickle
    except Exception:
        pickled = b""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return BatchFailed(number, f"{type(error).__name__}: {error}", text, pickled)
