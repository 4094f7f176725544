"""The parent's side of a group: it owns the memory and can abort.

The memory is an anonymous file (`memfd_create`). It has no name that anybody could open or
that could stay behind after `kill -9`; only who is handed the descriptor can map it, and the
size of `/dev/shm` sets no limit. Pages are allocated when they are first written, so the
size of the file,

    4 KiB + size x (12 KiB + size x 128 B, in whole pages + 16 x 4 x (chunk + chunk / size)),

is address space. What a rank really uses is two slots (of the 16) in ordinary training, at
most 4 x chunk bytes each: 1 MiB for the native implementation, 8 MiB for the Python one.
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
from nanotf.wire.failures import Failure, Kind
from nanotf.wire.memory_files import anonymous_file

IMPLEMENTATIONS = ("native", "python")
REDUCTIONS = ("sum", "min", "max")
DEFAULT_DEADLINE = 600.0  # s

# Measured with benchmarks/latency.py; see there.
_CHUNK_BYTES = {"native": 128 << 10, "python": 1 << 20}
_SPIN_SECONDS = 50e-6
_READ_DURING_A_WAIT = 50 << 10  # bytes


@dataclasses.dataclass(frozen=True)
class GroupSpec:
    """Everything but the file descriptor that a worker needs to attach to a group.

    Args:
        size: int, number of ranks.
        nonce: int, random; a descriptor of another group is refused.
        implementation: str, one of `IMPLEMENTATIONS`, the same on all ranks.
        chunk_bytes: int, what one round of the protocol moves; a multiple of 64.
        symmetric_bytes: int, all-reduces above this take two steps: each rank reduces a part,
            then all copy the results (native implementation).
        nodes: int, on how many NUMA nodes the ranks are: the first `size // nodes` of them on one,
            and so on. All-reduces of two steps then cross from node to node once. 1 where nodes
            have unlike numbers of ranks.
        spin_seconds: float, how long a rank spins before it sleeps in the kernel.
        deadline: float, seconds that one wait for other ranks may take.
    """

    size: int
    nonce: int
    implementation: str
    chunk_bytes: int
    symmetric_bytes: int
    nodes: int
    spin_seconds: float
    deadline: float

    @property
    def layout(self) -> layout.Layout:
        """The offsets in the shared memory."""
        return layout.Layout(self.size, self.chunk_bytes, self.nodes)


def write_abort_record(memory: mmap.mmap, offset: int, failure: Failure) -> None:
    """Writes an abort record at `offset` unless it is set, then the group's abort flag."""
    if struct.unpack_from("<I", memory, offset)[0] == 0:
        raw, begin = bytes(layout.RawFailure.of(failure)), offset + layout.RECORD_FAILURE
        memory[begin : begin + len(raw)] = raw
        struct.pack_into("<I", memory, offset, 1)
    struct.pack_into("<I", memory, layout.ABORTED, 1)


@dataclasses.dataclass(frozen=True)
class Wait:
    """A collective in which a rank waits.

    Args:
        rank: int.
        missing: tuple of int, the ranks that have not come.
        tag: int, of the collective; see `native/layout.h`.
        what: str, the call, for people.
    """

    rank: int
    missing: tuple[int, ...]
    tag: int
    what: str


class GroupOwner:
    """The parent's handle of a group. Made by `create_group`.

    Attributes:
        spec: `GroupSpec`, to be sent to every worker.
        fd: int, the descriptor to be sent along. `close` closes it; workers that have
            attached keep their mapping.
    """

    def __init__(self, spec: GroupSpec) -> None:
        self.spec = spec
        self.fd = anonymous_file(spec.layout.total_bytes, fixed=True)
        self._closer = weakref.finalize(self, os.close, self.fd)
        # The common page alone: the parent has no business in the ranks' regions, and what it
        # touched there would lie on its NUMA node.
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
        """Makes every rank that is in a collective, or enters one, raise `CollectiveError`.

        Args:
            text: str, why. The first abort of a group counts.

        Blocked ranks notice within 50 ms.
        """
        if not self._common.closed:
            failure = Failure(Kind.ABORTED, -1, text)
            write_abort_record(self._common, layout.COMMON_RECORD, failure)

    def waits(self) -> list[Wait]:
        """The collectives in which some rank waits for others that have not come."""
        return [wait for rank in range(self.spec.size) for wait in self._waits_of(rank)]

    def _waits_of(self, rank: int) -> list[Wait]:
        places, found = self.spec.layout, []
        peers = [peer for peer in range(self.spec.size) if peer != rank]
        for slot, tag in enumerate(self._words(places.region(rank) + layout.TAGS, layout.SLOTS)):
            missing = tuple(p for p in peers if tag and not self._has_come(p, rank, slot, tag))
            header = places.region(rank) + layout.SLOT_HEADERS + slot * layout.SLOT_HEADER_BYTES
            if missing:
                length = struct.unpack("<I", os.pread(self.fd, 4, header + layout.TEXT_LENGTH))[0]
                text = os.pread(self.fd, min(length, layout.TEXT_BYTES), header + layout.TEXT)
                found.append(Wait(rank, missing, tag, text.decode(errors="replace")))
        return found

    def _has_come(self, peer: int, rank: int, slot: int, tag: int) -> bool:
        region = self.spec.layout.region(peer)
        place = layout.ACKNOWLEDGEMENTS + (rank * layout.SLOTS + slot) * 8
        # In this order: a peer acknowledges what is in its tags before it puts another there.
        here = tag in self._words(region + layout.TAGS, layout.SLOTS)
        return here or self._words(region + place, 1)[0] == tag

    def _words(self, offset: int, count: int) -> tuple[int, ...]:
        # Read through the descriptor: what the parent maps would lie on its NUMA node.
        return struct.unpack(f"<{count}Q", os.pread(self.fd, 8 * count, offset))

    def close(self) -> None:
        """Gives up the parent's mapping and descriptor. May be called twice."""
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
    """Creates the shared memory of a group, in the parent.

    Args:
        size: int, number of ranks.
        nodes: int, as in `GroupSpec`, of which the Python implementation makes nothing.
        deadline: float, default 600 seconds, for each wait for other ranks.
        implementation: str or None, one of `IMPLEMENTATIONS`. `None` takes "native" where the
            library was built and `NANOTF_NATIVE` is not 0, else "python", with one line in the
            log that says why.
        chunk_bytes: int or None, see `GroupSpec`; the default was measured.
        symmetric_bytes: int or None, see `GroupSpec`; for the default see `_symmetric_bytes`.
        spin_seconds: float or None. `None` spins 50 us, and not at all if there are more ranks
            than cores: a spinning rank would keep the one it waits for from running.

    Returns:
        A `GroupOwner`.

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
            f"nodes must divide size, since each has as many ranks. Received: nodes={nodes}, "
            f"size={size}. Leave it out for ranks that are on unlike nodes."
        )
    if implementation == "python" or size == nodes:
        nodes = 1
    if chunk_bytes is None:
        chunk_bytes = _CHUNK_BYTES[implementation]
    if chunk_bytes < layout.LINE * size or chunk_bytes % layout.LINE:
        raise InvalidArgumentError(
            f"chunk_bytes must be a multiple of {layout.LINE}, at least one for each rank. "
            f"Received: chunk_bytes={chunk_bytes}. Leave it out for the measured default."
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
    read as much either way.
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
