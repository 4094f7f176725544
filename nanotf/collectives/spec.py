"""The parent's side of a group: it owns the memory and can abort.

The memory is an anonymous file (`memfd_create`). It has no name that another process could open
or that could survive `kill -9`. Only a process that gets the descriptor can map it, and the size
of `/dev/shm` does not limit it. Pages are allocated on first write, so the size of the file,

    4 KiB + size x (12 KiB + size x 128 B, in whole pages + 16 x 4 x (chunk + chunk / size)),

is only address space. In ordinary training a rank uses two of the 16 slots, at most 4 x chunk
bytes each: 1 MiB for the native implementation, 8 MiB for the Python implementation.
"""

from __future__ import annotations

import dataclasses
import functools
import mmap
import os
import secrets
import struct
import weakref
from types import TracebackType

from nanotf.collectives import layout
from nanotf.collectives.native_library import native_status, python_wanted
from nanotf.console import logger
from nanotf.errors import InvalidArgumentError
from nanotf.wire.failures import Failure, FailureKind
from nanotf.wire.memory_files import anonymous_file

IMPLEMENTATIONS = ("native", "python")
REDUCTIONS = ("sum", "min", "max")
DEFAULT_DEADLINE = 600.0  # s

# Measured with benchmarks/latency.py.
_CHUNK_BYTES = {"native": 128 << 10, "python": 1 << 20}
_SPIN_SECONDS = 50e-6
_READ_DURING_A_WAIT = 50 << 10  # bytes


@dataclasses.dataclass(frozen=True)
class GroupSpec:
    """The data that a worker needs, besides the file descriptor, to attach to a group."""

    size: int  # number of ranks
    nonce: int  # random, to reject the descriptor of another group
    implementation: str  # one of `IMPLEMENTATIONS`, the same on all ranks
    chunk_bytes: int  # bytes per round of the protocol; a multiple of 64
    # All-reduces above this take two steps: each rank reduces a part, then all copy the results
    # (native implementation).
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
        return layout.Layout(self.size, self.chunk_bytes, self.nodes)


def write_abort_record(memory: mmap.mmap, offset: int, failure: Failure) -> None:
    """Writes an abort record at `offset` if it is not set, then the group's abort flag."""
    # In this order: who sees the flag finds the record's first word, and with that the record.
    if struct.unpack_from("<I", memory, offset)[0] == 0:
        raw, begin = bytes(layout.RawFailure.of(failure)), offset + layout.RECORD_FAILURE
        memory[begin : begin + len(raw)] = raw
        struct.pack_into("<I", memory, offset, 1)
    struct.pack_into("<I", memory, layout.ABORTED, 1)


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
        self.fd = anonymous_file(spec.layout.total_bytes, fixed=True)
        self._closer = weakref.finalize(self, os.close, self.fd)
        # Only the common page: the parent does not use the ranks' regions, and pages that it
        # touched there would be on its own NUMA node.
        self._common = mmap.mmap(self.fd, layout.PAGE)
        struct.pack_into(
            "<5Q",
            self._common,
            0,
            layout.MAGIC,
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
            write_abort_record(self._common, layout.COMMON_RECORD, failure)

    def waits(self) -> list[CollectiveWait]:
        """Returns the collectives in which a rank waits for others that have not arrived."""
        return [wait for rank in range(self.spec.size) for wait in self._waits_of(rank)]

    def _waits_of(self, rank: int) -> list[CollectiveWait]:
        places, found = self.spec.layout, []
        peers = [peer for peer in range(self.spec.size) if peer != rank]
        for slot, tag in enumerate(self._words(places.region(rank) + layout.TAGS, layout.SLOTS)):
            missing = tuple(p for p in peers if tag and not self._has_come(p, rank, slot, tag))
            header = places.region(rank) + layout.SLOT_HEADERS + slot * layout.SLOT_HEADER_BYTES
            if missing:
                length = struct.unpack("<I", os.pread(self.fd, 4, header + layout.TEXT_LENGTH))[0]
                text = os.pread(self.fd, min(length, layout.TEXT_BYTES), header + layout.TEXT)
                found.append(CollectiveWait(rank, missing, tag, text.decode(errors="replace")))
        return found

    def _has_come(self, peer: int, rank: int, slot: int, tag: int) -> bool:
        region = self.spec.layout.region(peer)
        place = layout.ACKNOWLEDGEMENTS + (rank * layout.SLOTS + slot) * 8
        # In this order: a peer acknowledges a tag of its own before it overwrites the tag.
        here = tag in self._words(region + layout.TAGS, layout.SLOTS)
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
    implementation: str | None = None,
    chunk_bytes: int | None = None,
    symmetric_bytes: int | None = None,
    spin_seconds: float | None = None,
) -> GroupOwner:
    """Creates the shared memory of a group in the parent.

    Args:
        size: number of ranks.
        nodes: as in `GroupSpec`. The Python implementation ignores it.
        deadline: seconds, for each wait for other ranks.
        implementation: one of `IMPLEMENTATIONS`. `None` means "native" if the library was built and
            `NANOTF_NATIVE` is not 0, else "python". The log then gives the reason once.
        chunk_bytes: see `GroupSpec`; the default was measured.
        symmetric_bytes: see `GroupSpec`; `_symmetric_bytes` gives the default.
        spin_seconds: `None` spins 50 us, but not at all with more ranks than cores: a spinning rank
            would keep the rank that it waits for from running.

    Environment variables read: `NANOTF_NATIVE`.
    """
    if not 1 <= size <= layout.MAX_SIZE:
        raise InvalidArgumentError(
            f"size must be 1 to {layout.MAX_SIZE}. Received: size={size}. "
            "Pass the number of workers."
        )
    if not deadline > 0:
        raise InvalidArgumentError(
            f"deadline must be positive. Received: deadline={deadline}. Pass seconds."
        )
    implementation = _choose(implementation)
    if nodes < 1 or size % nodes:
        raise InvalidArgumentError(
            f"nodes must divide size into equal numbers of ranks. Received: nodes={nodes}, "
            f"size={size}. Omit nodes if the nodes have different numbers of ranks."
        )
    if implementation == "python" or size == nodes:
        nodes = 1
    if chunk_bytes is None:
        chunk_bytes = _CHUNK_BYTES[implementation]
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
            implementation=implementation,
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


def _choose(implementation: str | None) -> str:
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise InvalidArgumentError(
            f"implementation must be one of {IMPLEMENTATIONS} or None. "
            f"Received: implementation={implementation!r}."
        )
    if implementation == "python":
        return implementation
    available, reason = native_status()
    if not available and implementation == "native":
        raise InvalidArgumentError(
            "implementation='native' needs the compiled library. "
            f"Received: {reason}. Run `python -m nanotf.collectives.build`."
        )
    if not available and not python_wanted(os.environ):
        _warn_of_python(reason)
    return "native" if available else "python"


@functools.cache
def _warn_of_python(reason: str) -> None:
    logger.warning(
        "Workers exchange gradients in pure Python, which is slower: %s. See `nanotf doctor`.",
        reason,
    )


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
