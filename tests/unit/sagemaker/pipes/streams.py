"""Streams of records as other programs write them: a second implementation of the formats."""

from __future__ import annotations

import itertools
import os
import pathlib
import struct
from collections.abc import Sequence

from nanotf.sagemaker.pipes.records import RecordReader


def record_io(payload: bytes, *ends: int) -> bytes:
    """Returns a RecordIO record, cut into parts at `ends`."""
    bounds = [0, *ends, len(payload)]
    parts = [payload[a:b] for a, b in itertools.pairwise(bounds)]
    flags = [0] if len(parts) == 1 else [1, *[2] * (len(parts) - 2), 3]
    return b"".join(
        struct.pack("<II", 0xCED7230A, flag << 29 | len(part)) + part + bytes(-len(part) % 4)
        for flag, part in zip(flags, parts, strict=True)
    )


def crc32c(data: bytes) -> int:
    """CRC-32C, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 & -(crc & 1))
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def tf_record(payload: bytes) -> bytes:
    length = struct.pack("<Q", len(payload))
    return length + struct.pack("<I", masked(length)) + payload + struct.pack("<I", masked(payload))


def read_all(
    path: pathlib.Path, data: bytes, record_format: str, skip: int = 0
) -> tuple[list[bytes], RecordReader, Exception | None]:
    """Returns the records of a file with `data`, its reader, and the error that ended them."""
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    records: list[bytes] = []
    reader = RecordReader(str(path), fd, record_format, skip)
    try:
        for batch in reader.batches():
            records += batch
    except Exception as error:
        return records, reader, error
    finally:
        os.close(fd)
    return records, reader, None


def payloads(sizes: Sequence[int]) -> list[bytes]:
    """Returns payloads that differ in every byte's neighborhood."""
    return [bytes((7 * i + size) % 251 for i in range(size)) for size in sizes]
