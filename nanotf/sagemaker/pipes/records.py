"""Reads a stream into records, batch by batch: RecordIO, TFRecord, lines of text.

| format | a record |
| --- | --- |
| RecordIO | uint32 0xced7230a, uint32 `flag << 29 \\| length`, payload, zeros up to a multiple of 4. Flag 0: whole; 1, 2, 3: start, middle, end of a record in several parts |
| TFRecord | uint64 length, masked CRC-32C of it, payload, masked CRC-32C of the payload |
| TextLine | up to a newline, or up to the end of the stream |

All numbers are little-endian. `collectives/native/records.cc` finds the records in what the pipe
held. A batch has the complete ones, so a slow writer's records arrive without delay, and those of
a fast writer arrive thousands at once.
"""  # noqa: E501 - a row per format

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
from collections.abc import Iterator

from nanotf.collectives import native_library
from nanotf.errors import InvalidArgumentError, RecordError, check_choice
from nanotf.sagemaker.pipes.pipe_files import STALL_SECONDS, await_data

BUFFER_BYTES = 1 << 20  # also the size of the pipe, where the kernel allows it
RECORDS_AT_ONCE = 4096  # 64 KiB of offsets, `_spans`

# The enums NanotfRecordFormat and NanotfRecordFault of records.h.
FORMATS = {"RecordIO": 0, "TFRecord": 1, "TextLine": 2}
_FAULTS = {
    1: "it does not begin with RecordIO's magic number",
    2: "a part of a multipart record is missing",
    3: "the checksum of its length does not match",
    4: "the checksum of its data does not match",
}


class RecordReader:
    """Reads the records of one pipe or file, once.

    Args:
        path: the file's path, for messages.
        fd: its descriptor, which stays the caller's.
        record_format: a key of `FORMATS`.
        max_corrupted_records_to_skip: only of "TFRecord".
        stall_seconds: for how long the writer may write nothing.

    Attributes:
        records, bytes: int, what was read.
        skipped: int, corrupt records skipped.

    Raises:
        InvalidArgumentError: An argument cannot be used.
    """

    def __init__(
        self,
        path: str,
        fd: int,
        record_format: str,
        max_corrupted_records_to_skip: int = 0,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        check_choice("record_format", record_format, tuple(FORMATS))
        if max_corrupted_records_to_skip < 0:
            raise InvalidArgumentError(
                "`max_corrupted_records_to_skip` must be 0 or more. Received: "
                f"max_corrupted_records_to_skip={max_corrupted_records_to_skip}."
            )
        self.records = self.bytes = self.skipped = 0
        self._path, self._fd = path, fd
        self._format = record_format
        self._limit = max_corrupted_records_to_skip
        self._stall_seconds = stall_seconds
        self._scan = native_library.NanotfScan()
        self._spans = (ctypes.c_uint64 * (2 * RECORDS_AT_ONCE))()
        self._buffer = bytearray(BUFFER_BYTES)
        self._filled = 0
        self._at = 0  # offset of the buffer's start in the stream

    def batches(self) -> Iterator[list[bytes]]:
        """Yields lists of records until the stream ends.

        Raises:
            RecordError: A record is corrupt, the stream ends inside a record, or the writer
                stopped. The records before it have been yielded.
        """
        widen_pipe(self._fd)
        while self._fill():
            full = True
            while full:
                spans = self._find()
                # Then the buffer may hold more records.
                full = len(spans) == 2 * RECORDS_AT_ONCE
                if spans:
                    yield self._take(spans)
                self._advance()
        yield from self._last()

    def _find(self) -> list[int]:
        """Finds records in the buffer, without the GIL.

        Returns:
            Begin and end of each record, one after the other.
        """
        self._scan.limit = self._limit - self.skipped  # how many more may be skipped
        native_library.load().nanotf_scan_records(
            FORMATS[self._format],
            # No copy: the scanner moves the parts of a record together where they are.
            (ctypes.c_char * len(self._buffer)).from_buffer(self._buffer),
            self._filled,
            self._spans,
            RECORDS_AT_ONCE,
            ctypes.byref(self._scan),
        )
        return self._spans[: 2 * self._scan.records]

    def _take(self, spans: list[int]) -> list[bytes]:
        self.records += len(spans) // 2
        ends = iter(spans)
        with memoryview(self._buffer) as view:
            return [bytes(view[begin:end]) for begin, end in zip(ends, ends, strict=True)]

    def _fill(self) -> bool:
        """Reads what there is, at least a byte; returns False at the end of the stream."""
        if self._filled == len(self._buffer):  # one record, not yet complete, fills it
            # Doubled, so that a record of any size costs a few copies.
            self._buffer = self._buffer + bytes(len(self._buffer))
        await_data(self._path, self._fd, self._stall_seconds, self.bytes)
        with memoryview(self._buffer) as view:
            count = os.readv(self._fd, [view[self._filled :]])
        self._filled += count
        self.bytes += count
        return count > 0

    def _advance(self) -> None:
        scan = self._scan
        self.skipped += scan.skipped
        if scan.fault:
            self._fail(_FAULTS[scan.fault], self._at + scan.fault_at)
        rest = self._filled - scan.consumed
        if scan.consumed:
            self._buffer[:rest] = self._buffer[scan.consumed : self._filled]
        self._at += scan.consumed
        self._filled = rest

    def _last(self) -> Iterator[list[bytes]]:
        if not self._filled:
            return
        if self._format != "TextLine":  # a last line needs no newline
            self._fail(f"the stream ends inside it, after {self._filled} bytes", self._at)
        yield self._take([0, self._filled])

    def _fail(self, reason: str, offset: int) -> None:
        raise RecordError(
            f"{self._path} must hold {self._format} records. Received: a corrupt record: number "
            f"{self.records + self.skipped}, at byte {offset}: {reason}. Records skipped before: "
            f"{self.skipped} of at most {self._limit}. Check the format of the channel's files."
        )


def widen_pipe(fd: int) -> None:
    """Lets a pipe hold more than 64 KiB, so that reader and writer switch less often."""
    # Linux alone has such pipes; files are none; a user's limit may be reached.
    with contextlib.suppress(AttributeError, OSError):
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, BUFFER_BYTES)
