"""Reads the outline of protobuf messages and of TensorFlow's tensor bundles, without TensorFlow.

A message is looked through by its fields' numbers and lengths alone, so that a large one costs a
few reads. Sources: protobuf's "Encoding" page; LevelDB's table_format.md; TensorFlow's
core/protobuf/tensor_bundle.proto.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator

Read = Callable[[int, int], bytes]  # of an offset and a number of bytes; fewer at the end

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_HEAD = 20  # bytes: a field's tag and its length, at most 10 each

_FOOTER = 48  # bytes at a table's end, of which the last eight are `_MAGIC`
_MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
_UNCOMPRESSED = b"\0"  # the byte after a block; bundles have no other

_MOST_SHARDS = 100_000  # the names of data files have five digits
# Numbers of fields.
_NUM_SHARDS = 1  # BundleHeaderProto
_SHARD, _OFFSET, _SIZE = 3, 4, 5  # BundleEntryProto


class NotWholeError(ValueError):
    """A file that ends too early, or is of another kind."""


def reader_of(descriptor: int) -> Read:
    """Reads an open file."""
    return lambda offset, length: os.pread(descriptor, length, offset)


def reader_of_bytes(data: bytes) -> Read:
    """Reads bytes."""
    return lambda offset, length: data[offset : offset + length]


def fields(read: Read, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yields the fields of a message.

    Args:
        read: reads what holds the message.
        start: where it begins.
        end: where it ends.

    Yields:
        Of each field its number, and for one of bytes where they begin and end; for a varint its
        value and -1; for other numbers where they begin and -1.

    Raises:
        NotWholeError: The message ends within a field, or is none.
    """
    while start < end:
        head = read(start, min(_HEAD, end - start))
        tag, used = _varint(head, 0)
        kind, value, stop = tag & 7, start + used, -1
        if kind in (_VARINT, _BYTES):
            value, used = _varint(head, used)
        if kind == _BYTES:
            value, stop = start + used, start + used + value
        widths = {_VARINT: used, _BYTES: stop - start, _FIXED64: used + 8, _FIXED32: used + 4}
        if kind not in widths or tag >> 3 == 0:
            raise NotWholeError("it is no protobuf message")
        start += widths[kind]
        if start > end:
            raise NotWholeError("it ends too early")
        yield tag >> 3, value, stop


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns a varint, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):  # at most ten bytes of seven bits
        if at >= len(data):
            raise NotWholeError("it ends too early")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise NotWholeError("it holds no number where there must be one")


def shard_sizes(index: bytes) -> list[int]:
    """Returns the least size in bytes of each data file that a bundle's index names.

    Args:
        index: the content of the `.index` file.

    Raises:
        NotWholeError: It is not a whole index.
    """
    if len(index) < _FOOTER or not index.endswith(_MAGIC):
        raise NotWholeError("it ends too early")
    footer = index[-_FOOTER:]
    _, at = _varint(footer, 0)  # the handle of the block of metadata: offset, size
    _, at = _varint(footer, at)
    sizes: list[int] = []
    for _, handle in _block(index, footer[at:]):
        for key, value in _block(index, handle):
            numbers = {n: v for n, v, _ in fields(reader_of_bytes(value), 0, len(value))}
            if key == b"":  # the first one
                sizes = [0] * min(numbers.get(_NUM_SHARDS, 0), _MOST_SHARDS)
            elif (shard := numbers.get(_SHARD, 0)) < len(sizes):
                end = numbers.get(_OFFSET, 0) + numbers.get(_SIZE, 0)
                sizes[shard] = max(sizes[shard], end)
            else:
                raise NotWholeError("it names a data file that it does not count")
    return sizes


def _block(table: bytes, handle: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a table's block. A key leaves out what it shares with the last.

    Args:
        handle: the block's offset and size, each a varint.
    """
    offset, at = _varint(handle, 0)
    size, _ = _varint(handle, at)
    block = table[offset : offset + size]
    kind = table[offset + size : offset + size + 1]
    if len(block) < max(size, 4) or kind != _UNCOMPRESSED:
        raise NotWholeError("it is not a table as TensorFlow writes it")
    (restarts,) = struct.unpack("<I", block[-4:])
    end, at, key = size - 4 * (restarts + 1), 0, b""  # without the restarts and their number
    while at < end:
        shared, at = _varint(block, at)
        own, at = _varint(block, at)
        length, at = _varint(block, at)
        key = key[:shared] + block[at : at + own]
        at += own
        yield key, block[at : at + length]
        at += length
