"""Records of a stream: formats, corrupt and truncated streams."""

from __future__ import annotations

import os
import pathlib
import struct

import pytest
from streams import crc32c, payloads, read_all, record_io, tf_record

from nanotf.collectives import native_library, native_status
from nanotf.errors import InvalidArgumentError, NanoError, RecordError
from nanotf.sagemaker.pipes import pipe_mode, records

pytestmark = pytest.mark.skipif(not native_status()[0], reason=native_status()[1])

SMALL = payloads([0, 1, 2, 3, 4, 5, 100, 0, 255])
PARTS = [
    record_io(SMALL[6], 0, 0, 50, 97),
    record_io(SMALL[6], 7),
    record_io(b"", 0),
    record_io(SMALL[6]),
]
STREAMS = {
    "RecordIO": [
        (b"".join(map(record_io, SMALL)), SMALL),
        (b"", []),
        (b"".join(PARTS), [SMALL[6], SMALL[6], b"", SMALL[6]]),
    ],
    "TFRecord": [(b"".join(map(tf_record, SMALL)), SMALL), (b"", [])],
    "TextLine": [
        (b"a\n\nbc\r\nlast", [b"a", b"", b"bc\r", b"last"]),
        (b"a\n", [b"a"]),
        (b"\n", [b""]),
        (b"", []),
    ],
}
CASES = [(name, data, found) for name, cases in STREAMS.items() for data, found in cases]


@pytest.mark.parametrize("buffer", [1, 13, 1 << 20])
@pytest.mark.parametrize(("record_format", "data", "expected"), CASES)
def test_every_format(
    record_format: str,
    data: bytes,
    expected: list[bytes],
    buffer: int,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Records that straddle reads, too: a small buffer grows as a record needs."""
    monkeypatch.setattr(records, "BUFFER_BYTES", buffer)
    found, reader, error = read_all(tmp_path / "pipe", data, record_format)
    assert (found, error) == (expected, None)
    assert (reader.records, reader.bytes, reader.skipped) == (len(expected), len(data), 0)


def test_more_records_than_one_scan_returns(tmp_path: pathlib.Path) -> None:
    lines = [str(i).encode() for i in range(2 * records.RECORDS_AT_ONCE + 3)]
    found, _, error = read_all(tmp_path / "pipe", b"\n".join(lines), "TextLine")
    assert (found, error) == (lines, None)


@pytest.mark.parametrize("record_format", ["RecordIO", "TFRecord"])
def test_truncated_anywhere(record_format: str, tmp_path: pathlib.Path) -> None:
    make = {"RecordIO": lambda payload: record_io(payload, 3, 7), "TFRecord": tf_record}
    data = tf_record(b"first") if record_format == "TFRecord" else record_io(b"first")
    second = make[record_format](b"0123456789")
    for cut in range(1, len(second)):
        found, _, error = read_all(tmp_path / "pipe", data + second[:cut], record_format)
        assert found == [b"first"]
        assert isinstance(error, RecordError)
        text = f"number 1, at byte {len(data)}: the stream ends inside it, after {cut} bytes"
        assert text in str(error)


@pytest.mark.parametrize(
    ("bad", "offset", "reason"),
    [
        (b"\0" + record_io(b"x")[1:], 0, "magic number"),
        (record_io(b"12345678", 4)[12:], 0, "multipart"),  # an end without a start
        (record_io(b"12345678", 4)[:12] + record_io(b"x"), 12, "multipart"),
    ],
)
def test_corrupt_record_io(bad: bytes, offset: int, reason: str, tmp_path: pathlib.Path) -> None:
    good = record_io(b"good")
    found, _, error = read_all(tmp_path / "pipe", 2 * good + bad + good, "RecordIO")
    assert found == [b"good", b"good"]
    assert isinstance(error, RecordError)
    assert f"number 2, at byte {2 * len(good) + offset}: " in str(error)
    assert reason in str(error)


def _flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_corrupt_tf_records_are_skipped_up_to_a_limit(tmp_path: pathlib.Path) -> None:
    good = tf_record(b"good")
    bad = _flip(tf_record(b"bad"), 13)
    data = good + bad + good + bad + good
    found, reader, error = read_all(tmp_path / "pipe", data, "TFRecord", skip=2)
    assert (found, reader.skipped, error) == ([b"good"] * 3, 2, None)
    found, _, error = read_all(tmp_path / "pipe", data, "TFRecord", skip=1)
    assert found == [b"good"] * 2
    at = 2 * len(good) + len(bad)
    assert f"number 3, at byte {at}: the checksum of its data" in str(error)
    assert "Records skipped before: 1 of at most 1." in str(error)


def test_a_corrupt_length_is_never_skipped(tmp_path: pathlib.Path) -> None:
    data = tf_record(b"good") + _flip(tf_record(b"bad"), 0)
    found, _, error = read_all(tmp_path / "pipe", data, "TFRecord", skip=9)
    assert found == [b"good"]
    assert "number 1, at byte 20: the checksum of its length" in str(error)


def test_a_writer_that_stops(tmp_path: pathlib.Path) -> None:
    """It never comes, or it writes no more: the error says how much there was."""
    os.mkfifo(tmp_path / "pipe")
    fd = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        for sent in (b"", b"line\nrest"):
            reader = records.RecordReader("pipe", fd, "TextLine", stall_seconds=0.01)
            batches = reader.batches()
            if sent:
                writer = os.open(tmp_path / "pipe", os.O_WRONLY)
                os.write(writer, sent)
                assert next(batches) == [b"line"]
            with pytest.raises(RecordError, match=f"after {len(sent)} bytes"):
                next(batches)
        os.close(writer)
    finally:
        os.close(fd)


def test_records_arrive_as_they_are_written(tmp_path: pathlib.Path) -> None:
    read, write = os.pipe()
    batches = records.RecordReader("pipe", read, "TextLine").batches()
    for line in (b"one", b"two"):
        os.write(write, line + b"\n" + b"begin")
        assert [each[-3:] for each in next(batches)] == [line]
    os.close(write)
    assert list(batches) == [[b"begin"]]
    os.close(read)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(("pipe", 0, "CSV"), "'RecordIO', 'TFRecord'"), (("pipe", 0, "TFRecord", -1), "0 or more")],
)
def test_wrong_arguments(arguments: tuple[str, int, str], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        records.RecordReader(*arguments)


@pytest.mark.parametrize("portable", [0, 1])
def test_checksums(portable: int) -> None:
    library = native_library.load()
    assert library.nanotf_crc32c(b"123456789", 9, portable) == 0xE3069283  # the CRC's check value
    for data in payloads(range(40)):
        assert library.nanotf_crc32c(data, len(data), portable) == crc32c(data)


def test_a_length_beyond_all_memory(tmp_path: pathlib.Path) -> None:
    length = struct.pack("<Q", (1 << 64) - 5)
    data = length + tf_record(length)[12 + 8 :]  # its checksum is that of the same 8 bytes
    found, _, error = read_all(tmp_path / "pipe", data + b"rest", "TFRecord")
    assert found == []
    assert "the stream ends inside it" in str(error)


def test_without_the_native_library(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_library, "LIBRARY", tmp_path / "_shm.so")
    with pytest.raises(NanoError, match="needs nanotf's native library") as caught:
        pipe_mode.PipeModeDataset("train")
    assert "Received: _shm.so was not built." in str(caught.value)
    assert "`python -m nanotf.collectives.build` builds it" in str(caught.value)
