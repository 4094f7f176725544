"""Shared blocks, arrays in them, and the distribution of rows: no TensorFlow needed."""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from waiting import wait_until

from nanotf.shipping.data import arrays
from nanotf.shipping.data.inputs import rows_of_rank
from nanotf.shipping.data.streams import Coming, StreamReader, StreamWriter
from nanotf.wire import messages
from nanotf.wire.blocks import ALIGNMENT, Block, Packing, aligned


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [(0, 0), (1, 64), (63, 64), (64, 64), (65, 128), (2**40 + 1, 2**40 + 64)],
)
def test_aligned(nbytes: int, expected: int) -> None:
    assert aligned(nbytes) == expected


@pytest.mark.parametrize("nbytes", [0, 1, 64, 4097])
def test_block_is_zero_filled_and_shared_by_its_descriptor(nbytes: int) -> None:
    block = Block(nbytes)
    other = Block(nbytes, os.dup(block.fd))
    size = max(nbytes, ALIGNMENT)
    assert block.nbytes == other.nbytes == size
    assert not block.array(0, (size,), np.uint8).any()
    block.array(0, (size,), np.uint8)[...] = 7
    assert (other.array(0, (size,), np.uint8) == 7).all()
    block.close_fd()


def _named_segments() -> set[pathlib.Path]:
    directory = pathlib.Path("/dev/shm")
    return set(directory.glob("*nanotf*")) if directory.is_dir() else set()


def test_block_has_no_name() -> None:
    before = _named_segments()
    block = Block(4096)
    assert _named_segments() <= before
    block.close_fd()


def test_array_outlives_its_block() -> None:
    block = Block(64)
    view = block.array(0, (8,), np.int64)
    view[...] = np.arange(8)
    block.close_fd()
    del block
    gc.collect()
    assert view.tolist() == list(range(8))


def test_descriptor_closes_with_the_block() -> None:
    block = Block(64)
    fd = block.fd
    del block
    gc.collect()
    with pytest.raises(OSError):
        os.fstat(fd)


def test_a_received_descriptor_is_closed_once_it_is_mapped() -> None:
    block = Block(64)
    fd = os.dup(block.fd)
    Block(64, fd)
    with pytest.raises(OSError):
        os.fstat(fd)


@pytest.mark.skipif(not hasattr(mmap, "MADV_REMOVE"), reason="no MADV_REMOVE on this system")
def test_discarded_memory_is_returned_and_reads_as_zeros() -> None:
    block = Block(1 << 20)
    other = Block(1 << 20, os.dup(block.fd))
    block.array(0, (1 << 20,), np.uint8)[...] = 7
    assert os.fstat(block.fd).st_blocks * 512 >= 1 << 20
    block.discard()
    assert os.fstat(block.fd).st_blocks == 0
    assert not other.array(0, (1 << 20,), np.uint8).any()


def test_closing_twice_closes_once() -> None:
    block = Block(64)
    block.close_fd()
    fd = os.open(os.devnull, os.O_RDONLY)  # gets the block's old number
    block.close_fd()
    os.fstat(fd)
    os.close(fd)


DTYPES = ["float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool", "complex64"]
SHAPES: list[tuple[int, ...]] = [(), (1,), (3,), (0, 4), (5, 2, 3)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_come_back_as_they_were(dtype: str) -> None:
    originals = [np.arange(np.prod(shape)).reshape(shape).astype(dtype) for shape in SHAPES]
    packed = arrays.PackedArrays(originals)
    block = packed.block()
    for original, ref in zip(originals, packed.refs, strict=True):
        found = arrays.view(block, ref)
        assert found.dtype == original.dtype
        np.testing.assert_array_equal(found, original)
        assert ref.offset % ALIGNMENT == 0


def test_arrays_that_are_not_contiguous() -> None:
    base = np.arange(24).reshape(4, 6)
    originals = [base[:, ::2], base.T, base[::-1], np.broadcast_to(base[0], (3, 6))]
    packed = arrays.PackedArrays(originals)
    block = packed.block()
    for original, ref in zip(originals, packed.refs, strict=True):
        np.testing.assert_array_equal(arrays.view(block, ref), original)


@pytest.mark.parametrize(
    "values", [["a", "bb", "ünï"], [b"x", b""], np.array([None, 1, "z"], dtype=object)]
)
def test_arrays_of_objects(values: object) -> None:
    original = np.array(values)
    packed = arrays.PackedArrays([original, np.arange(3)])
    block = packed.block()
    assert packed.refs[0].shape == original.shape
    found = arrays.view(block, packed.refs[0])
    assert found.tolist() == original.tolist()
    assert arrays.view(block, packed.refs[1]).tolist() == [0, 1, 2]


def test_copies_in_a_block_replace_the_arrays() -> None:
    own, other = np.arange(5.0), np.arange(5.0)
    packing = Packing()
    packing.add(other + 1)
    packing.add(np.frombuffer(own, np.uint8))
    moved = packing.moved(packing.block())
    assert moved(own) is not own
    assert moved(own).tolist() == own.tolist()
    assert not moved(own).flags.writeable
    assert moved(other) is other


def test_arrays_at_an_offset() -> None:
    packed = arrays.PackedArrays([np.arange(5)])
    start = 3 * ALIGNMENT
    block = Block(start + packed.nbytes)
    packed.write(block, start)
    assert not block.array(0, (start,), np.uint8).any()
    assert block.array(start, (5,), np.int64).tolist() == list(range(5))


def test_extension_types_keep_their_name() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = np.dtype(ml_dtypes.bfloat16)
    assert arrays.numpy_dtype(arrays.dtype_name(dtype)) == dtype


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("rows", [0, 1, 2, 4, 5, 7, 32, 33, 1001])
def test_rows_are_dealt_once_each_and_evenly(rows: int, size: int) -> None:
    shares = [rows_of_rank(rows, rank, size) for rank in range(size)]
    assert shares[0][0] == 0
    assert shares[-1][1] == rows
    for (_, end), (begin, _) in itertools.pairwise(shares):
        assert end == begin
    counts = [end - begin for begin, end in shares]
    assert max(counts) - min(counts) <= 1


def test_blocks_are_written_before_and_after_the_descriptor_is_closed() -> None:
    block = Block(256)
    block.write(64, np.arange(4, dtype=np.float64))
    block.reserve(128, 64)
    block.close_fd()
    block.write(128, np.arange(4, 8, dtype=np.int32))
    block.write(0, np.empty((0, 3)))
    assert block.array(64, (4,), np.float64).tolist() == [0, 1, 2, 3]
    assert block.array(128, (4,), np.int32).tolist() == [4, 5, 6, 7]
    assert not block.array(0, (64,), np.uint8).any()


class _SlowData:
    """Data whose first epoch waits until `come` is set."""

    def __init__(self) -> None:
        self.come = threading.Event()

    def training(self) -> Iterator[Iterator[Any]]:
        self.come.wait()
        yield iter(())

    def evaluations(self) -> Iterator[Iterator[Any]]:
        raise NotImplementedError

    def keeps(self, iterator: Any) -> bool:
        return False

    def close(self) -> None:
        pass


def test_workers_may_wait_for_slow_user_data_only() -> None:
    """Workers may wait for the user's data without limit, and for nothing else."""
    data = _SlowData()
    writer = StreamWriter(0, data, (), True, 2, lambda message, block: None, pytest.fail, 0)
    writer.begin()
    assert writer.owes(0)
    data.come.set()
    wait_until(lambda: not writer.owes(0), "it waits for the workers")
    assert writer.owes(60)  # their next item may have just arrived
    writer.begin_epoch()
    writer.end_epoch()
    wait_until(lambda: not writer.owes(60), "it has read everything")
    writer.stop()


def test_streams_that_end_after_their_job_do_not_disturb_the_next() -> None:
    """The next job's streams have the same numbers."""
    data, sent = _SlowData(), []
    writer = StreamWriter(
        0, data, (), True, 2, lambda message, _: sent.append(message), pytest.fail, 0
    )
    writer.begin()
    writer.begin_epoch()
    writer.stop(seconds=0)  # the user's code is making a batch
    data.come.set()
    wait_until(writer.reap, "it ends")
    assert sent == []


def test_what_comes_is_known_before_it_is_read() -> None:
    """The parent sends the first batches before a worker makes its iterator."""
    reader = StreamReader(None, order=1)  # type: ignore[arg-type]
    for turn, rows in ((0, [5, 0]), (1, [0])):
        for each in rows:
            reader.deliver(messages.Batch(0, turn, 0, (), each, may_differ=True), None)
        reader.deliver(messages.EndOfStream(0, turn), None)
    coming = Coming(reader, 0, passed=1)
    first, second = set(), set()  # type: tuple[set[int], set[int]]
    assert [coming.is_whole(first) for _ in range(3)] == [True, None, None]
    assert [coming.is_whole(second) for _ in range(2)] == [True, None]


def test_a_thread_that_waits_for_a_batch_ends_with_the_job() -> None:
    """A callback has stopped a pass after a thread of tf.data asked for more."""

    class Channel:
        def __init__(self) -> None:
            self.sent: list[Any] = []

        def send(self, message: messages.Message) -> None:
            self.sent.append(message)

    channel = Channel()
    reader = StreamReader(channel, order=1)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(reader.iterate(0, rank=0, size=2)))
    thread.start()
    wait_until(lambda: channel.sent, "it has asked")
    reader.end()
    thread.join(60)
    assert not thread.is_alive()
    assert list(reader.iterate(1, rank=0, size=2)) == []
    assert channel.sent == [messages.OpenStream(1, 0, 0), messages.CloseStream(1, 0, 0)]
