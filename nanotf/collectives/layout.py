"""A group's shared memory as Python sees it; `native/layout.h` states its layout."""

from __future__ import annotations

import ctypes

from nanotf.wire.failures import Failure, FailureKind

MAGIC = 0x6E616E6F74663035  # "nanotf05": changes with the layout
LINE = 64  # bytes of a cache line
MAX_SIZE = 1024  # ranks


class RawFailure(ctypes.Structure):
    """`NanotfFailure`: a `Failure` in shared memory, and at the C interface."""

    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("rank", ctypes.c_int32),  # -1: the parent, or unknown
        ("missing", ctypes.c_uint32 * (MAX_SIZE // 32)),  # a bit for each rank
        ("text", ctypes.c_char * 1652),  # makes an abort record 2048 bytes
        ("remedy", ctypes.c_char * 256),
    ]

    @classmethod
    def of(cls, failure: Failure) -> RawFailure:
        """Packs a failure, truncating long texts."""
        raw = cls(failure.kind, failure.rank)
        for rank in failure.missing:
            raw.missing[rank // 32] |= 1 << rank % 32
        # "replace", since texts may have surrogates, of file names that are not UTF-8.
        # The cut may divide a character; `unpacked` replaces the rest of it.
        raw.text = failure.text.encode("utf-8", "replace")[: cls.text.size - 1]
        raw.remedy = failure.remedy.encode("utf-8", "replace")[: cls.remedy.size - 1]
        return raw

    def unpacked(self) -> Failure:
        """Unpacks the failure."""
        missing = [rank for rank in range(MAX_SIZE) if self.missing[rank // 32] >> rank % 32 & 1]
        text, remedy = (raw.decode("utf-8", "replace") for raw in (self.text, self.remedy))
        return Failure(FailureKind(self.kind), self.rank, text, remedy, tuple(missing))


class Layout(ctypes.Structure):
    """`NanotfLayout`: the offsets and sizes of a group that Python needs, in bytes."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "magic",
            "slots",
            "page",
            "aborted",
            "common_record",
            "record_failure",
            "tags",
            "rank_record",
            "slot_headers",
            "slot_header_bytes",
            "text_length",
            "text",
            "text_bytes",
            "acknowledgements",
            "region_bytes",
            "total_bytes",
        )
    ]

    def region(self, rank: int) -> int:
        """Returns the offset of the region of `rank` in the file."""
        return int(self.page + rank * self.region_bytes)
