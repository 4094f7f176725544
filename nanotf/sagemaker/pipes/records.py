"""Reads a stream into records, batch by batch.

A batch has the complete records of what the pipe held, so a slow writer's records arrive without
delay, and those of a fast writer arrive thousands at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from nanotf.errors import InvalidArgumentError, RecordError, check_choice
from nanotf.sagemaker.pipes import scanning
from nanotf.sagemaker.pipes.pipe_files import STALL_SECONDS, await_data

BUFFER_BYTES = 1 << 20  # also the size of the pipe, where the kernel allows it


class RecordReader:
    """Reads the records of one pipe or file, once.

    Args:
        path: the file's path, for messages.
        fd: its descriptor, which stays the caller's.
        record_format: a key of `scanning.FORMATS`.
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
        check_choice("record_format", record_format, tuple(scanning.FORMATS))
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
        self._scan = scanning.scanner()
        self._buffer = bytearray(BUFFER_BYTES)
        self._filled = self._searched = 0
        self._at = 0  # offset of the buffer's start in the stream

    def batches(self) -> Iterator[list[bytes]]:
        """Yields lists of records until the stream ends.

        Raises:
            RecordError: A record is corrupt, the stream ends inside a record, or the writer
                stopped. The records before it have been yielded.
        """
        widen_pipe(self._fd)
        kind = scanning.FORMATS[self._format]
        while self._fill():
            full = True
            while full:
                limit = self._limit - self.skipped
                scan = self._scan(kind, self._buffer, self._filled, limit, self._searched)
                # Then the buffer may hold more records.
                full = len(scan.spans) == 2 * scanning.RECORDS_AT_ONCE
                if scan.spans:
                    yield self._take(scan.spans)
                self._advance(scan)
        yield from self._last()

    def _take(self, spans: list[int]) -> list[bytes]:
        self.records += len(spans) // 2
        ends = iter(spans)
        with memoryview(self._buffer) as view:
            return [bytes(view[begin:end]) for begin, end in zip(ends, ends, strict=True)]

    def _fill(self) -> bool:
        """Reads what there is, at least a byte; returns False at the end of the stream."""
        if self._filled == len(self._buffer):  # one record, not yet complete, fills it
            self._buffer = self._buffer + bytes(len(self._buffer))
        await_data(self._path, self._fd, self._stall_seconds, self.bytes)
        with memoryview(self._buffer) as view:
            count = os.readv(self._fd, [view[self._filled :]])
        self._filled += count
        self.bytes += count
        return count > 0

    def _advance(self, scan: scanning.Scan) -> None:
        self.skipped += scan.skipped
        if scan.fault:
            self._fail(scanning.FAULTS[scan.fault], self._at + scan.fault_at)
        rest = self._filled - scan.consumed
        if scan.consumed:
            self._buffer[:rest] = self._buffer[scan.consumed : self._filled]
        self._at += scan.consumed
        self._filled, self._searched = rest, scan.searched

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
