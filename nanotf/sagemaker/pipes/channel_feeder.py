"""Feeds a channel's pipes as SageMaker's platform does: a FIFO per epoch, with all files in it.

    feeder                                     reader
      makes <channel>_0 and <channel>_1
      opens <channel>_0, waits for a reader      opens <channel>_0
      writes all files, closes it                reads to its end, or closes it early
      makes <channel>_2, removes <channel>_0
      opens <channel>_1, ...                     opens <channel>_1, ...

The next FIFO always exists before the present one ends, so the reader need not wait for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import itertools
import os
import random
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from nanotf.errors import InvalidArgumentError, RecordError, check_choice
from nanotf.sagemaker.pipes.pipe_files import pipe_path
from nanotf.sagemaker.pipes.records import BUFFER_BYTES, widen_pipe
from nanotf.wire import files

COMPRESSIONS = ("None", "Gzip")
RECORD_WRAPPINGS = ("None", "RecordIO")

# RecordIO, which `records.py` describes. A part's flag says if it is the first, and the last.
_MAGIC = 0xCED7230A
_FLAGS = {(True, True): 0, (True, False): 1, (False, False): 2, (False, True): 3}
MAX_PART = (1 << 29) - 1  # bytes


@dataclasses.dataclass(frozen=True)
class Feed:
    """A channel to be fed.

    Args:
        source: path of a file, or of a folder, of which all files are written, at any depth.
        pipe_dir: path of the folder of the FIFOs, made if it does not exist.
        channel: str, its name.
        shuffle: int or None, a seed. The files of each epoch then come in another order, not the
            records in a file. None, the default: sorted by name.
        compression: str, "None" (the default) or "Gzip": the files are unzipped.
        record_wrapping: str, "None" (the default) or "RecordIO": each file becomes one record.
        epochs: int or None, how many FIFOs to write; None, the default: without end.

    Raises:
        InvalidArgumentError: An argument cannot be used.
    """

    source: Path
    pipe_dir: Path
    channel: str
    shuffle: int | None = None
    compression: str = "None"
    record_wrapping: str = "None"
    epochs: int | None = None

    def __post_init__(self) -> None:
        check_choice("compression", self.compression, COMPRESSIONS)
        check_choice("record_wrapping", self.record_wrapping, RECORD_WRAPPINGS)
        if not self.channel or "/" in self.channel:
            raise InvalidArgumentError(
                f"`channel` must be a file name. Received: channel={self.channel!r}."
            )
        if self.epochs is not None and self.epochs < 1:
            raise InvalidArgumentError(
                f"`epochs` must be 1 or more. Received: epochs={self.epochs}."
            )

    def files(self, epoch: int) -> list[Path]:
        """Returns the files of an epoch, in the order in which they are written.

        Args:
            epoch: int, counts from 0; with `shuffle`, each has an order of its own.

        Raises:
            InvalidArgumentError: There are none.
        """
        found = [self.source] if self.source.is_file() else []
        if self.source.is_dir():
            found = [path for path in self.source.rglob("*") if path.is_file()]
        if not found:
            raise InvalidArgumentError(
                "`source` must be a file, or a folder with files. Received: "
                f"source={os.fspath(self.source)!r}."
            )
        # S3 lists keys in this order.
        found.sort(key=lambda path: os.fsencode(path.relative_to(self.source)))
        if self.shuffle is not None:
            random.Random(self.shuffle + epoch).shuffle(found)
        return found


def feed(what: Feed) -> None:
    """Writes epoch after epoch, as they are read; returns after the last one.

    An exception in the midst, such as one of a signal's handler, ends it. Its FIFOs are removed.

    Args:
        what: `Feed`, the channel, its files and its folder.

    Raises:
        InvalidArgumentError: There are no files, or another feeder feeds the channel.
        RecordError: A file cannot be unzipped.
        OSError: A file cannot be read.
    """
    what.files(0)  # a source without files is rejected before anything is made
    what.pipe_dir.mkdir(parents=True, exist_ok=True)
    last = None if what.epochs is None else what.epochs - 1
    # In this order: the FIFOs are removed before another feeder may make its own.
    with _sole_feeder(what), contextlib.ExitStack() as made:
        _make_pipe(what, 0, made)
        for epoch in itertools.count():
            if epoch != last:  # before this epoch ends: its reader may open the next one at once
                _make_pipe(what, epoch + 1, made)
            _feed_epoch(what, epoch)
            if epoch == last:
                return


def _feed_epoch(what: Feed, epoch: int) -> None:
    """Waits for the epoch's reader, and writes all files, unless the reader closes before."""
    path = pipe_path(what.channel, epoch, what.pipe_dir)
    # Unbuffered, so that closing after the reader has left has nothing to write.
    with contextlib.suppress(BrokenPipeError), path.open("wb", buffering=0) as pipe:
        path.unlink()  # the reader has it open, and no other may read it
        widen_pipe(pipe.fileno())
        for file in what.files(epoch):
            with _open(what, file) as source:
                _write(what, file, source, pipe)


def _open(what: Feed, file: Path) -> IO[bytes]:
    if what.compression == "Gzip":
        return cast(IO[bytes], gzip.open(file))
    return file.open("rb")


def _write(what: Feed, file: Path, source: IO[bytes], pipe: IO[bytes]) -> None:
    try:
        if what.record_wrapping == "RecordIO":
            for part in as_record(source):
                _write_all(pipe, part)
        else:
            while data := source.read(BUFFER_BYTES):
                _write_all(pipe, data)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise RecordError(
            f'Files of a channel with compression="Gzip" must be gzip files. Received: {file}: '
            f"{error}."
        ) from error


def _write_all(pipe: IO[bytes], data: bytes) -> None:
    # A raw file may write less than it is given.
    rest = memoryview(data)
    while rest:
        rest = rest[pipe.write(rest) :]


def as_record(source: IO[bytes]) -> Iterator[bytes]:
    """Yields a file's content as the bytes of one RecordIO record, of several parts if need be."""
    # Whole: the header in front holds the length, and a flag tells if another part follows.
    payload = source.read()
    starts = range(0, max(1, len(payload)), MAX_PART)  # an empty file is a record, too
    for start in starts:
        part = payload[start : start + MAX_PART]
        flag = _FLAGS[start == starts[0], start == starts[-1]]
        yield struct.pack("<II", _MAGIC, flag << 29 | len(part))
        yield part + bytes(-len(part) % 4)


@contextlib.contextmanager
def _sole_feeder(what: Feed) -> Iterator[None]:
    """Keeps other feeders away from the channel, so that FIFOs left behind can be replaced."""
    try:
        lock = files.Lock(what.pipe_dir / f".{what.channel}-feeder-lock")
    except files.LockHeld as held:
        raise InvalidArgumentError(
            f"A channel must have one feeder. Received: channel={what.channel!r}, which {held} "
            f"feeds in {what.pipe_dir}. Stop it, or choose another folder."
        ) from None
    try:
        yield
    finally:
        lock.release(removes=True)


def _make_pipe(what: Feed, epoch: int, made: contextlib.ExitStack) -> None:
    """Makes a FIFO, which `made` removes. Replaces one that an earlier feeder has left behind."""
    path = pipe_path(what.channel, epoch, what.pipe_dir)
    if path.exists():
        if not path.is_fifo():
            raise InvalidArgumentError(
                f"A channel's FIFO must not replace a file. Received: {path} exists. Remove it, "
                "or choose another folder."
            )
        path.unlink()

    def remove() -> None:
        if path.is_fifo():  # else a file has come in between, which is not ours
            path.unlink(missing_ok=True)

    made.callback(remove)  # first: SIGTERM may come in between
    os.mkfifo(path)
