"""The parent's side of a group: it owns the memory and can abort.

The memory is an anonymous file (`memfd_create`). It has no name that another process could open
or that could survive `kill -9`. Only a process that gets the descriptor can map it, and the size
of `/dev/shm` does not limit it. Pages are allocated on first write, so the size of the file,

    4 KiB + size x (12 KiB + size x 128 B, in whole pages + 16 x 4 x (chunk + chunk / size)),

is only address space. In ordinary training a rank uses two of the 16 slots, at most 4 x chunk
bytes each: 1 MiB.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
import secrets
import struct
import weakref
from types import TracebackType

from nanotf.collectives import layout
from nanotf.collectives.native_library import check_available, layout_of
from nanotf.errors import InvalidArgumentError
from nanotf.wire.failures import Failure, FailureKind
from nanotf.wire.memory_files import anonymous_file

REDUCTIONS = ("sum", "min", "max")
DEFAULT_DEADLINE = 600.0  # s

# Measured with benchmarks/latency.py.
_CHUNK_BYTES = 128 << 10
_SPIN_SECONDS = 50e-6
_READ_DURING_A_WAIT = 50 << 10  # bytes


@dataclasses.dataclass(frozen=True)
class GroupSpec:
    """The data that a worker needs, besides the file descriptor, to attach to a group."""

    size: int  # number of ranks
    nonce: int  # random, to reject the descriptor of another group
    chunk_bytes: int  # bytes per round of the protocol; a multiple of 64
    # All-reduces above this take two steps: each rank reduces a part, then all copy the results.
    symmetric_bytes: int
    # Number of NUMA nodes: the first `size // nodes` ranks are on the first node, and so on.
    # All-reduces in two steps then cross from node to node once. 1 if nodes have different numbers
    # of ranks.
    nodes: int
    spin_seconds: float  # how long a rank spins before it sleeps in the kernel
    deadline: float  # limit of one wait for other ranks, in seconds

    @property
    def layout(self) -> layout.Layout:
        """The offsets in the shared memory."""
        return layout_of(self.size, self.chunk_bytes, self.nodes)


def write_abort_record(
    memory: mmap.mmap, places: layout.Layout, offset: int, failure: Failure
) -> None:
    """Writes an abort record at `offset` if it is not set, then the group's abort flag."""
    # In this order: who sees the flag finds the record's first word, and with that the record.
    if struct.unpack_from("<I", memory, offset)[0] == 0:
        raw, begin = bytes(layout.RawFailure.of(failure)), offset + places.record_failure
        memory[begin : begin + len(raw)] = raw
        struct.pack_into("<I", memory, offset, 1)
    struct.pack_into("<I", memory, places.aborted, 1)


def read_abort_record(memory: mmap.mmap, places: layout.Layout, size: int) -> Failure | None:
    """Returns why a group has failed, as its ranks raise it; None if it has not.

    Args:
        size: number of ranks.
    """
    if not struct.unpack_from("<I", memory, places.aborted)[0]:
        return None
    ranks = (places.region(rank) + places.rank_record for rank in range(size))
    for offset in (places.common_record, *ranks):  # as `Group::CheckAborted`
        if struct.unpack_from("<I", memory, offset)[0]:
            begin = offset + places.record_failure
            return layout.RawFailure.from_buffer_copy(memory, begin).unpacked()
    raise AssertionError("the record is written before the flag")


@dataclasses.dataclass(frozen=True)
class HostsSpec:
    """The hosts of a group."""

    index: int  # this host
    counts: tuple[int, ...]  # the number of ranks by host; ranks are numbered host by host
    names: tuple[str, ...]  # by host, for messages
    # Limit of one wait for another host, in seconds. Shorter than the deadline of the host's own
    # group: otherwise ranks would blame their leader for a late host.
    deadline: float

    def ranks(self, host: int) -> range:
        """Returns the ranks of a host."""
        first = sum(self.counts[:host])
        return range(first, first + self.counts[host])

    @property
    def size(self) -> int:
        """Returns the number of ranks of all hosts."""
        return sum(self.counts)

    @property
    def others(self) -> list[int]:
        """Returns the other hosts, starting after this one: not all send to one host first."""
        count = len(self.counts)
        return [(self.index + step) % count for step in range(1, count)]


@dataclasses.dataclass(frozen=True)
class CollectiveWait:
    """A collective in which a rank waits for others."""

    rank: int
    missing: tuple[int, ...]  # the ranks that have not arrived
    tag: int  # of the collective; see `native/layout.h`
    what: str  # description of the call for people


class GroupOwner:
    """The parent's handle of a group. Made by `create_group`.

    Attributes:
        spec: `GroupSpec` to send to every worker.
        fd: int, the descriptor to send with it. `close` closes it; attached workers keep their
            mapping.
    """

    def __init__(self, spec: GroupSpec) -> None:
        self.spec = spec
        self._layout = spec.layout
        self.fd = anonymous_file(self._layout.total_bytes, fixed=True)
        self._closer = weakref.finalize(self, os.close, self.fd)
        # Only the common page: the parent does not use the ranks' regions, and pages that it
        # touched there would be on its own NUMA node.
        self._common = mmap.mmap(self.fd, self._layout.page)
        struct.pack_into(
            "<5Q",
            self._common,
            0,
            self._layout.magic,
            spec.nonce,
            spec.size,
            spec.chunk_bytes,
            spec.nodes,
        )

    def abort(self, text: str) -> None:
        """Makes all collectives, running and future, raise `CollectiveError` on every rank.

        Args:
            text: the reason. Only the first abort of a group counts.

        Blocked ranks notice within 50 ms.
        """
        if not self._common.closed:
            failure = Failure(FailureKind.ABORTED, -1, text)
            write_abort_record(self._common, self._layout, self._layout.common_record, failure)

    def waits(self) -> list[CollectiveWait]:
        """Returns the collectives in which a rank waits for others that have not arrived."""
        return [wait for rank in range(self.spec.size) for wait in self._waits_of(rank)]

    def cause(self) -> Failure | None:
        """Returns the failure of another host by which collectives of this one have failed.

        Its ranks are counted over all hosts. None as long as there is none; see `HostsEngine`.
        """
        at = self._layout.region(0) + self._layout.rank_record
        begin, nbytes = at + self._layout.record_failure, ctypes.sizeof(layout.RawFailure)
        if not struct.unpack("<I", os.pread(self.fd, 4, at))[0]:
            return None
        raw = layout.RawFailure.from_buffer_copy(os.pread(self.fd, nbytes, begin))
        found = raw.unpacked()
        return found if found.rank < 0 else None  # else a rank of this host has noticed it

    def _waits_of(self, rank: int) -> list[CollectiveWait]:
        places, found = self._layout, []
        peers = [peer for peer in range(self.spec.size) if peer != rank]
        for slot, tag in enumerate(self._words(places.region(rank) + places.tags, places.slots)):
            missing = tuple(p for p in peers if tag and not self._has_come(p, rank, slot, tag))
            header = places.region(rank) + places.slot_headers + slot * places.slot_header_bytes
            if missing:
                length = struct.unpack("<I", os.pread(self.fd, 4, header + places.text_length))[0]
                text = os.pread(self.fd, min(length, places.text_bytes), header + places.text)
                found.append(CollectiveWait(rank, missing, tag, text.decode(errors="replace")))
        return found

    def _has_come(self, peer: int, rank: int, slot: int, tag: int) -> bool:
        region = self._layout.region(peer)
        place = self._layout.acknowledgements + (rank * self._layout.slots + slot) * 8
        # In this order: a peer acknowledges a tag of its own before it overwrites the tag.
        here = tag in self._words(region + self._layout.tags, self._layout.slots)
        return here or self._words(region + place, 1)[0] == tag

    def _words(self, offset: int, count: int) -> tuple[int, ...]:
        # Read through the descriptor: pages that the parent maps would be on its NUMA node.
        return struct.unpack(f"<{count}Q", os.pread(self.fd, 8 * count, offset))

    def close(self) -> None:
        """Closes the parent's mapping and descriptor. May be called twice."""
        self._common.close()
        self._closer()

    def __enter__(self) -> GroupOwner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def create_group(
    size: int,
    *,
    nodes: int = 1,
    deadline: float = DEFAULT_DEADLINE,
    chunk_bytes: int | None = None,
    symmetric_bytes: int | None = None,
    spin_seconds: float | None = None,
) -> GroupOwner:
    """Creates the shared memory of a group in the parent.

    Args:
        size: number of ranks.
        nodes: as in `GroupSpec`.
        deadline: seconds, for each wait for other ranks.
        chunk_bytes: see `GroupSpec`; the default was measured.
        symmetric_bytes: see `GroupSpec`; `_symmetric_bytes` gives the default.
        spin_seconds: `None` spins 50 us, but not at all with more ranks than cores: a spinning rank
            would keep the rank that it waits for from running.

    Raises:
        NanoError: The native library, by which ranks attach, cannot be used on this host.
    """
    check_available("Several workers need")
    if not 1 <= size <= layout.MAX_SIZE:
        raise InvalidArgumentError(
            f"size must be 1 to {layout.MAX_SIZE}. Received: size={size}. "
            "Pass the number of workers."
        )
    if not deadline > 0:
        raise InvalidArgumentError(
            f"deadline must be positive. Received: deadline={deadline}. Pass seconds."
        )
    if nodes < 1 or size % nodes:
        raise InvalidArgumentError(
            f"nodes must divide size into equal numbers of ranks. Received: nodes={nodes}, "
            f"size={size}. Omit nodes if the nodes have different numbers of ranks."
        )
    if size == nodes:
        nodes = 1
    if chunk_bytes is None:
        chunk_bytes = _CHUNK_BYTES
    if chunk_bytes < layout.LINE * size or chunk_bytes % layout.LINE:
        raise InvalidArgumentError(
            f"chunk_bytes must be a multiple of {layout.LINE}, and at least that much per rank. "
            f"Received: chunk_bytes={chunk_bytes}. Omit it for the measured default."
        )
    if spin_seconds is None:
        spin_seconds = _SPIN_SECONDS if size <= _cores() else 0.0
    if symmetric_bytes is None:
        symmetric_bytes = _symmetric_bytes(size)
    return GroupOwner(
        GroupSpec(
            size=size,
            nonce=secrets.randbits(63),
            chunk_bytes=chunk_bytes,
            symmetric_bytes=symmetric_bytes,
            nodes=nodes,
            spin_seconds=spin_seconds,
            deadline=deadline,
        )
    )


def _symmetric_bytes(size: int) -> int:
    """Returns the size up to which an all-reduce is faster in one step than in two.

    In one step a rank reads `N - 1` messages from its peers, in two steps `2 (N - 1) / N`, after
    one more wait. A wait takes as long as reading some 50 KB (5 us at 10 GB/s), so one step is
    faster up to about `50 KB / ((N - 1) (1 - 2 / N))`: 33 KB for 4 ranks, 1 KB for 56. Two ranks
    read equally much either way.
    """
    return 1 << 62 if size <= 2 else _READ_DURING_A_WAIT * size // ((size - 1) * (size - 2))


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
