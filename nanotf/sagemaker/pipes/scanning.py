"""Finds the records in a part of a stream: RecordIO, TFRecord, lines of text.

| format | a record |
| --- | --- |
| RecordIO | uint32 0xced7230a, uint32 `flag << 29 \\| length`, payload, zeros up to a multiple of 4. Flag 0: whole; 1, 2, 3: start, middle, end of a record in several parts |
| TFRecord | uint64 length, masked CRC-32C of it, payload, masked CRC-32C of the payload |
| TextLine | up to a newline, or up to the end of the stream |

All numbers are little-endian. `collectives/native/records.h` declares the C++ version, and both
give the same results.
"""  # noqa: E501 - a row per format

from __future__ import annotations

import ctypes
import dataclasses
import functools
import struct
from collections.abc import Callable

from nanotf.collectives import native_library

FORMATS = {"RecordIO": 0, "TFRecord": 1, "TextLine": 2}
RECORDS_AT_ONCE = 4096

# The enum NanotfRecordFault of records.h, and what each value means.
BAD_MAGIC, BAD_PART, BAD_LENGTH, BAD_CHECKSUM = 1, 2, 3, 4
FAULTS = {
    BAD_MAGIC: "it does not begin with RecordIO's magic number",
    BAD_PART: "a part of a multipart record is missing",
    BAD_LENGTH: "the checksum of its length does not match",
    BAD_CHECKSUM: "the checksum of its data does not match",
}

MAGIC = 0xCED7230A
MAX_PART = (1 << 29) - 1  # bytes
WHOLE, START, MIDDLE, END = range(4)
_PART = struct.Struct("<II")
_LENGTH, _CHECKSUM = struct.Struct("<Q"), struct.Struct("<I")


@dataclasses.dataclass
class Scan:
    """The records found in a buffer. Offsets are in bytes, from the buffer's start."""

    # Begin and end of each record, one after the other.
    spans: list[int] = dataclasses.field(default_factory=list)
    skipped: int = 0  # corrupt TFRecords
    consumed: int = 0  # bytes of complete records
    searched: int = 0  # bytes after those without a newline, for the next call
    fault: int = 0  # a key of `FAULTS`, or 0. The records in `spans` precede it.
    fault_at: int = 0  # offset of the fault


# Args: the format's number, the buffer, its bytes in use, how many corrupt TFRecords may still be
# skipped, and `Scan.searched` of the call before if no byte was consumed since; else 0. The parts
# of a multipart record are moved together in the buffer.
Scanner = Callable[[int, bytearray, int, int, int], Scan]


def scanner() -> Scanner:
    """Returns the function that finds records: in C++, or in Python without the native library."""
    return scan_natively if native_library.native_status()[0] else scan_in_python


def scan_natively(kind: int, buffer: bytearray, size: int, limit: int, searched: int) -> Scan:
    """Finds records by the native library, without the GIL. A `Scanner`."""
    spans = (ctypes.c_uint64 * (2 * RECORDS_AT_ONCE))()
    raw = native_library.NanotfScan(limit=limit, searched=searched)
    data = (ctypes.c_char * len(buffer)).from_buffer(buffer)
    native_library.load().nanotf_scan_records(
        kind, ctypes.addressof(data), size, spans, RECORDS_AT_ONCE, ctypes.byref(raw)
    )
    found = spans[: 2 * raw.records]
    return Scan(found, raw.skipped, raw.consumed, raw.searched, raw.fault, raw.fault_at)


def scan_in_python(kind: int, buffer: bytearray, size: int, limit: int, searched: int) -> Scan:
    """Finds records in pure Python: some 10 MB/s where there are checksums. A `Scanner`."""
    scan = Scan(searched=searched)
    step = (_next_part_record, _next_tfrecord, _next_line)[kind]
    with memoryview(buffer) as view:
        while len(scan.spans) < 2 * RECORDS_AT_ONCE and step(scan, buffer, view, size, limit):
            pass
    return scan


# The functions below look at the record that begins at `scan.consumed`, and return False if the
# scan ends there.


def _next_part_record(
    scan: Scan, buffer: bytearray, view: memoryview, size: int, limit: int
) -> bool:
    first = part = scan.consumed
    parts: list[tuple[int, int]] = []
    while True:
        if size - part < _PART.size:
            return False
        magic, word = _PART.unpack_from(buffer, part)
        flag, length = word >> 29, word & MAX_PART
        if magic != MAGIC or flag not in ((MIDDLE, END) if parts else (WHOLE, START)):
            scan.fault, scan.fault_at = BAD_MAGIC if magic != MAGIC else BAD_PART, part
            return False
        following = part + _PART.size + length + -length % 4
        if size < following:
            return False
        parts.append((part + _PART.size, length))
        part = following
        if flag in (WHOLE, END):
            break
    # In place, in the space of the headers between them: a record is one span.
    end = begin = first + _PART.size
    for at, length in parts:
        view[end : end + length] = bytes(view[at : at + length])
        end += length
    scan.spans += (begin, end)
    scan.consumed = part
    return True


def _next_tfrecord(scan: Scan, buffer: bytearray, view: memoryview, size: int, limit: int) -> bool:
    first, rest = scan.consumed, size - scan.consumed
    header = _LENGTH.size + _CHECKSUM.size
    if rest < header:
        return False
    (length,) = _LENGTH.unpack_from(buffer, first)
    if _checksum(view[first : first + 8]) != _CHECKSUM.unpack_from(buffer, first + 8)[0]:
        scan.fault, scan.fault_at = BAD_LENGTH, first
        return False
    if rest < header + length + _CHECKSUM.size:
        return False
    begin, end = first + header, first + header + length
    if _checksum(view[begin:end]) == _CHECKSUM.unpack_from(buffer, end)[0]:
        scan.spans += (begin, end)
    elif scan.skipped < limit:
        scan.skipped += 1
    else:
        scan.fault, scan.fault_at = BAD_CHECKSUM, first
        return False
    scan.consumed = end + _CHECKSUM.size
    return True


def _next_line(scan: Scan, buffer: bytearray, view: memoryview, size: int, limit: int) -> bool:
    first = scan.consumed
    end = buffer.find(b"\n", first + scan.searched, size)
    if end < 0:
        scan.searched = size - first
        return False
    scan.spans += (first, end)
    scan.searched, scan.consumed = 0, end + 1
    return True


@functools.cache
def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


def _checksum(data: memoryview) -> int:
    """Returns the masked CRC-32C of a TFRecord's part."""
    # The masking is TFRecord's: a rotation by 15 bits and a constant.
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ table[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def part_header(length: int, flag: int = WHOLE) -> bytes:
    """Returns the header of a part of a RecordIO record.

    Args:
        length: bytes of its payload, at most `MAX_PART`.
        flag: `WHOLE`, `START`, `MIDDLE` or `END`.
    """
    return _PART.pack(MAGIC, flag << 29 | length)
