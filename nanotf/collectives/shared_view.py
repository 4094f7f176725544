"""A rank's view of the shared memory in pure Python: words, buffers and waits.

Words are read and written through memoryviews; each access is one machine instruction. Where
the C++ implementation uses acquire and release, this code relies on x86's order of stores, and on
`_fence` elsewhere.
"""

from __future__ import annotations

import mmap
import os
import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path

from nanotf.collectives import layout
from nanotf.collectives.spec import GroupSpec, write_abort_record
from nanotf.wire.failures import Failure, FailureKind

_ORDERED_STORES = platform.machine() in ("x86_64", "AMD64")
_fence_lock = threading.Lock()

_SHORTEST_SLEEP = 20e-6  # s
_LONGEST_SLEEP = 1e-3
_LOOK_AROUND_EVERY = 0.05  # s, to check for an abort, a death and the deadline


def _fence() -> None:
    """Orders all earlier reads and writes before all later ones."""
    if not _ORDERED_STORES:
        # A release orders earlier accesses, an acquire orders later ones, and the processor does
        # not move an acquire before an earlier release.
        for _ in range(2):
            with _fence_lock:
                pass


class CollectiveFailed(Exception):
    """The failure of a collective; `python_engine` turns it into a `CollectiveError`."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class SharedView:
    """One rank's mapping of a group's memory.

    Args:
        fd: int; the caller keeps it.
    """

    def __init__(self, spec: GroupSpec, rank: int, fd: int) -> None:
        self.spec = spec
        self.rank = rank
        self.layout = spec.layout
        if os.fstat(fd).st_size < self.layout.total_bytes:
            raise self.misused(
                f"the descriptor must be the file of the group. Received: fd={fd}",
                "Pass the descriptor that came with the specification.",
            )
        self._map = mmap.mmap(fd, self.layout.total_bytes)
        self._words = memoryview(self._map).cast("Q")
        self._halves = memoryview(self._map).cast("I")
        self.bytes = memoryview(self._map)
        self.closed = False
        expected = [layout.MAGIC, spec.nonce, spec.size, spec.chunk_bytes, spec.nodes]
        if [self._words[i] for i in range(5)] != expected:
            raise self.misused(
                "the descriptor belongs to another group than the specification",
                "Pass the descriptor that came with it.",
            )
        region = self.layout.region(rank)
        if self.half(region + layout.STATE) != layout.ABSENT:
            raise self.misused(
                f"a rank can be attached once. Received: rank={rank}, which process "
                f"{self.half(region + layout.PID)} has"
            )
        self.set_half(region + layout.PID, os.getpid())
        self.set_half(region + layout.STATE, layout.ATTACHED)

    def word(self, offset: int) -> int:
        """Reads an unsigned 64-bit word that another rank may write."""
        value = self._words[offset // 8]
        _fence()
        return value

    def set_word(self, offset: int, value: int) -> None:
        """Writes a word; everything written before is visible no later than it."""
        _fence()
        self._words[offset // 8] = value

    def half(self, offset: int) -> int:
        """Reads an unsigned 32-bit word that another rank may write."""
        value = self._halves[offset // 4]
        _fence()
        return value

    def set_half(self, offset: int, value: int) -> None:
        """Writes 32 bits in the manner of `set_word`."""
        _fence()
        self._halves[offset // 4] = value

    def tag(self, rank: int, slot: int) -> int:
        """Returns the offset of a slot's tag."""
        return self.layout.region(rank) + layout.TAGS + slot * 8

    def acknowledged(self, reader: int, owner: int, slot: int) -> int:
        """Returns the offset at which `reader` acknowledges the last tag of `owner`'s slot."""
        index = owner * layout.SLOTS + slot
        return self.layout.region(reader) + layout.ACKNOWLEDGEMENTS + index * 8

    def slot_header(self, rank: int, slot: int) -> int:
        """Returns the offset of a slot's header."""
        region = self.layout.region(rank)
        return region + layout.SLOT_HEADERS + slot * layout.SLOT_HEADER_BYTES

    def buffer(self, rank: int, slot: int, number: int, nbytes: int) -> memoryview:
        """Returns the first bytes of a round's buffer."""
        begin = (
            self.layout.region(rank)
            + self.layout.buffers
            + slot * self.layout.slot_bytes
            + number % layout.BUFFERS * self.layout.chunk_bytes
        )
        return self.bytes[begin : begin + nbytes]

    def check_aborted(self) -> None:
        """Raises `CollectiveFailed` if the group was aborted or is closed on this rank."""
        if self.closed:
            raise self.misused(f"the group is closed on rank {self.rank}", "Attach to a new group.")
        if not self.half(layout.ABORTED):
            return
        records = [layout.COMMON_RECORD] + [
            self.layout.region(rank) + layout.RANK_RECORD for rank in range(self.spec.size)
        ]
        record = next((offset for offset in records if self.half(offset)), records[0])
        raw = layout.RawFailure.from_buffer_copy(self._map, record + layout.RECORD_FAILURE)
        raise CollectiveFailed(raw.unpacked())

    def misused(self, text: str, remedy: str = "") -> CollectiveFailed:
        """Returns the exception for an invalid call; `text` and `remedy` as in `Failure`."""
        return CollectiveFailed(Failure(FailureKind.MISUSED, self.rank, text, remedy))

    def abort(self, failure: Failure) -> None:
        """Aborts the group with `failure`, unless this rank has already reported one."""
        write_abort_record(self._map, self.layout.region(self.rank) + layout.RANK_RECORD, failure)

    def wait(
        self, ready: Callable[[], bool], look_around: Callable[[float], None] | None = None
    ) -> None:
        """Returns when `ready()` is true.

        Args:
            ready: called often.
            look_around: called periodically with the seconds waited; may raise. A late call adds
                only one second: this process was frozen meanwhile (SIGSTOP, `docker pause`), and
                usually its peers too, so that they could not arrive.
        """
        for _ in range(50 if self.spec.spin_seconds else 1):
            if ready():
                return
        looked, waited = time.monotonic(), 0.0
        pause = _SHORTEST_SLEEP
        while not ready():
            self.check_aborted()
            now = time.monotonic()
            if now - looked >= _LOOK_AROUND_EVERY and look_around is not None:
                waited += min(now - looked, 1.0)
                looked = now
                look_around(waited)
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_SLEEP)

    def lost(self, rank: int) -> str | None:
        """Returns how a rank left, None if it has not."""
        region = self.layout.region(rank)
        state = self.half(region + layout.STATE)
        if state == layout.CLOSED:
            return "left the group"
        if state == layout.ATTACHED and not is_alive(self.half(region + layout.PID)):
            return "ended"
        return None

    def close(self) -> None:
        """Tells the peers that this rank has left. The memory is freed with its last view."""
        if not self.closed:
            self.closed = True
            self.set_half(self.layout.region(self.rank) + layout.STATE, layout.CLOSED)


def is_alive(pid: int) -> bool:
    """Returns True if a process runs. A zombie does not: its parent may reap it late."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:  # no /proc, or it just exited; the next look will tell
        return True
    # The name in parentheses may contain anything, including a parenthesis.
    return status.rpartition(b")")[2].split()[:1] not in ([b"Z"], [b"X"])
