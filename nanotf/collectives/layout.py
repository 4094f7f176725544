"""The layout of a group's shared memory.

`native/layout.h` has the same numbers and states the protocol; a test compares them. All offsets
and sizes are in bytes.
"""

from __future__ import annotations

import ctypes
import dataclasses

from nanotf.wire.failures import Failure, FailureKind

MAGIC = 0x6E616E6F74663034  # "nanotf04": changes with the layout
SLOTS = 16  # collectives a rank may have in flight
BUFFERS = 4  # rounds of one collective that may be in progress
DESCRIBING = 1 << 62  # the first round in which ranks exchange descriptions
LINE = 64
PAGE = 4096
MAX_SIZE = 1024  # ranks

# In the common page.
ABORTED = 64
COMMON_RECORD = 1024
# In a rank's region.
EVENT = 0
STATE = 64
PID = 68
TAGS = 128
RANK_RECORD = 1024
SLOT_HEADERS = PAGE
# In a slot's header.
SLOT_HEADER_BYTES = 512
POSTED = 0
REDUCED = 64
COMBINED = 72
SIGNATURE = 128
ROWS = 136
TEXT_LENGTH = 144
TEXT = 148
TEXT_BYTES = 360
# In an abort record. Its first word is 1 once the record is set.
RECORD_FAILURE = 4
# In a rank's region, continued.
ACKNOWLEDGEMENTS = SLOT_HEADERS + SLOTS * SLOT_HEADER_BYTES

ABSENT, ATTACHED, CLOSED = 0, 1, 2


class RawFailure(ctypes.Structure):
    """`NanotfFailure`: a `Failure` in shared memory, and at the C interface."""

    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("rank", ctypes.c_int32),
        ("missing", ctypes.c_uint32 * (MAX_SIZE // 32)),
        ("text", ctypes.c_char * 1652),
        ("remedy", ctypes.c_char * 256),
    ]

    @classmethod
    def of(cls, failure: Failure) -> RawFailure:
        """Packs a failure, truncating long texts."""
        raw = cls(failure.kind, failure.rank)
        for rank in failure.missing:
            raw.missing[rank // 32] |= 1 << rank % 32
        raw.text = failure.text.encode("utf-8", "replace")[: cls.text.size - 1]
        raw.remedy = failure.remedy.encode("utf-8", "replace")[: cls.remedy.size - 1]
        return raw

    def unpacked(self) -> Failure:
        """Unpacks the failure."""
        missing = [rank for rank in range(MAX_SIZE) if self.missing[rank // 32] >> rank % 32 & 1]
        text, remedy = (raw.decode("utf-8", "replace") for raw in (self.text, self.remedy))
        return Failure(FailureKind(self.kind), self.rank, text, remedy, tuple(missing))


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes that depend on the group."""

    size: int  # number of ranks
    chunk_bytes: int  # bytes per round; a multiple of `LINE`
    nodes: int = 1  # see `GroupSpec`

    @property
    def part_bytes(self) -> int:
        """A rank's share of a chunk among its node's ranks, in a two-step all-reduce."""
        return _round_up(-(-self.chunk_bytes // (self.size // self.nodes)), LINE)

    @property
    def buffers(self) -> int:
        """The offset of the buffers in a region."""
        return _round_up(ACKNOWLEDGEMENTS + self.size * SLOTS * 8, PAGE)

    @property
    def slot_bytes(self) -> int:
        """The size of one slot's buffers."""
        return BUFFERS * (self.chunk_bytes + (2 if self.nodes > 1 else 1) * self.part_bytes)

    @property
    def region_bytes(self) -> int:
        """The size of the region that one rank writes."""
        return _round_up(self.buffers + SLOTS * self.slot_bytes, PAGE)

    @property
    def total_bytes(self) -> int:
        """The size of the file."""
        return PAGE + self.size * self.region_bytes

    def region(self, rank: int) -> int:
        """Returns the offset of the region of `rank` in the file."""
        return PAGE + rank * self.region_bytes
