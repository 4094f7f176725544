"""Passes on summaries from a `@nano` function to the writers that its caller has made.

TensorFlow does not reveal a writer's directory. So rank 0 writes to a directory of its own. The
parent reads the files there as they grow, and passes on their contents to the user's writer.
"""

from __future__ import annotations

import pathlib
import shutil
import struct
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from nanotf.compat.versions import require_tensorflow

FLUSH_MILLISECONDS = 1000
_HEAD = struct.Struct("<QI")  # head of a TFRecord: the length of its data, and a checksum
_CHECKSUM = 4  # bytes, behind the data


class Relay:
    """Link between a writer and the workers that write in its place.

    Args:
        writer: `tf.summary.SummaryWriter`.

    Attributes:
        directory: str, where rank 0 writes.
    """

    def __init__(self, writer: Any) -> None:
        self.directory = tempfile.mkdtemp(prefix="nanotf-summaries-")
        self._read: dict[pathlib.Path, int] = {}  # bytes of each file
        weakref.finalize(writer, shutil.rmtree, self.directory, ignore_errors=True)

    def pass_on(self, writer: Any) -> None:
        """Passes on to the writer the data that have arrived since the last call."""
        tf = require_tensorflow()
        with writer.as_default(step=0):
            for path in sorted(pathlib.Path(self.directory).iterdir()):
                for record in self._records(path):
                    event = tf.compat.v1.Event.FromString(record)
                    if event.HasField("summary"):
                        summary = event.summary.SerializeToString()
                        tf.summary.experimental.write_raw_pb(summary, event.step)

    def _records(self, path: pathlib.Path) -> Iterator[bytes]:
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                length, _ = _HEAD.unpack(head)
                body = file.read(length + _CHECKSUM)
                if len(body) < length + _CHECKSUM:  # the rest is not there yet
                    return
                self._read[path] = file.tell()
                yield body[:length]


_relays: weakref.WeakKeyDictionary[Any, Relay] = weakref.WeakKeyDictionary()


def relay_of(writer: Any) -> Relay:
    """Returns a writer's relay, the same for each call."""
    if writer not in _relays:
        _relays[writer] = Relay(writer)
    return _relays[writer]


def is_writer(value: Any) -> bool:
    """Returns True if a value is a writer of summaries."""
    return isinstance(value, require_tensorflow().summary.SummaryWriter)


def pass_on(roots: Sequence[Any]) -> None:
    """Passes on, in the parent, the workers' summaries to the writers among a call's roots."""
    for root in filter(is_writer, roots):
        relay_of(root).pass_on(root)


def flush(roots: Sequence[Any]) -> None:
    """Flushes, in a worker, the writers among a call's roots."""
    for root in filter(is_writer, roots):
        root.flush()
