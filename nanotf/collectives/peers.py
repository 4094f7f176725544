"""The connections of a host's first rank, its leader, to the leaders of the other hosts.

    leader of host 0                            leader of host 1
      send(1, place, data)   --- frame --->      one thread per peer reads frames at once
      take(1, place)  <--- waits here              and puts them into a mailbox, by place

A place is (key, number of the call with this key, step in it). Leaders may run different keys in
different orders, so a frame can arrive before anyone asks for it. Since readers never wait for
anything but their socket, two leaders that send to each other at once cannot block each other.

A frame is a header, a description of the call for messages, and the data. A leader whose collective
fails sends the failure in place of data. All present and later calls then raise it.

A host whose ranks have all joined sends a frame to step 0, and then takes part in the calls whose
frames come; see `HostsEngine.join`.
"""

from __future__ import annotations

import dataclasses
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nanotf.collectives.engine import Array
from nanotf.collectives.joined_rank import CollectiveKind, CollectiveOffer, missed
from nanotf.collectives.patience import Patience
from nanotf.collectives.spec import HostsSpec
from nanotf.wire.failures import Failure, FailureKind

POLL_SECONDS = 0.5  # the longest time between two looks at the deadline and the host's own group
# Kind of failure or 0, key, number, step, signature, lengths in bytes of the text and of the data,
# the rows of the data; the offer's kind and bytes, lengths of its type and reduction, which follow
# the text.
_HEADER = struct.Struct("<IIIIQIQQIQII")
_NO_OFFER = (0, 0, 0, 0)
_ANY = 0  # the signature of a host whose ranks have joined
_MISSING = struct.Struct("<I")

Place = tuple[int, int, int]


class PeerFailed(Exception):
    """A collective cannot proceed. Has the attribute `failure`."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclasses.dataclass(frozen=True)
class CallNote:
    """A call, as the leaders tell each other of it."""

    signature: int  # equal on all hosts if they make the same call; 0 of those that only follow
    text: str  # describes the call in error messages
    offer: CollectiveOffer


@dataclasses.dataclass(frozen=True)
class _Frame:
    note: CallNote
    data: Array


class Peers:
    """The connections of one leader.

    Args:
        fds: connected sockets to the leaders of the other hosts, in the order of hosts; owned from
            now on.
        failed_here: returns why this host's own group has failed, None if it has not.
    """

    def __init__(
        self, hosts: HostsSpec, fds: Sequence[int], failed_here: Callable[[], Failure | None]
    ) -> None:
        self._hosts, self._deadline, self._failed_here = hosts, hosts.deadline, failed_here
        others = sorted(hosts.others)
        self._sockets = {
            host: socket.socket(fileno=fd) for host, fd in zip(others, fds, strict=True)
        }
        # Several threads may send to a host, each frame in two pieces.
        self._sending = {host: threading.Lock() for host in others}
        self._changed = threading.Condition()
        # Guarded by `_changed`. Readers put frames, `take` removes them.
        self._frames: dict[tuple[int, Place], _Frame] = {}
        self._failure: Failure | None = None  # of another host, or a closed connection
        self.waited = 0  # ns, in `take`; one thread at a time is precise enough for a report
        for host in others:
            threading.Thread(
                target=self._read, args=(host,), name=f"nanotf-host-{host}", daemon=True
            ).start()

    # -------------------------------------------------------------------------- sending
    def send(self, host: int, place: Place, note: CallNote, data: Array) -> None:
        """Sends an array.

        Args:
            data: contiguous, of at least one dimension.

        Raises:
            PeerFailed: The connection is closed.
        """
        content = data.reshape(-1).view(np.uint8)
        texts = [text.encode() for text in (note.text, note.offer.type, note.offer.op)]
        described, lengths = b"".join(texts), [len(text) for text in texts]
        header = _HEADER.pack(
            0,
            *place,
            note.signature,
            lengths[0],
            content.nbytes,
            len(data),
            note.offer.kind,
            note.offer.nbytes,
            *lengths[1:],
        )
        try:
            with self._sending[host]:
                self._sockets[host].sendall(header + described)
                self._sockets[host].sendall(content.data)
        except OSError as error:
            # The other leader may have said why before it closed the connection.
            raise PeerFailed(self._failure or self._lost(host)) from error

    def tell_all(self, failure: Failure) -> None:
        """Sends a failure to all other leaders. Skips those that have closed their connection."""
        text = failure.text.encode()
        ranks = b"".join(map(_MISSING.pack, failure.missing))
        header = _HEADER.pack(failure.kind, 0, 0, 0, 0, len(text), len(ranks), 0, *_NO_OFFER)
        for host, sock in self._sockets.items():
            try:
                with self._sending[host]:
                    sock.sendall(header + text + ranks)
            except OSError:
                pass

    # ------------------------------------------------------------------------- receiving
    def take(self, host: int, place: Place, note: CallNote) -> Array:
        """Waits for an array that another leader sends to a place.

        Returns:
            Its bytes, of shape (rows, bytes of a row).

        Raises:
            PeerFailed: The other host makes another call, its connection is closed, a collective
                failed there or in this host's own group, or the deadline has passed.
        """

        def found() -> _Frame | None:
            frame = self._frames.pop((host, place), None)
            if frame is not None or note.offer.kind is not CollectiveKind.BROADCAST:
                return frame
            # A host that has joined follows others, and the root of a broadcast is the first.
            if any(one == host and step == 0 for one, (_, _, step) in self._frames):
                text = missed(f"host {self._hosts.names[host]}", note.offer.kind)
                raise PeerFailed(Failure(FailureKind.ABORTED, -1, text))
            return None

        began = time.monotonic_ns()
        frame: _Frame = self._wait(found, lambda: self._expired([host], note.text))
        self.waited += time.monotonic_ns() - began
        if frame.note.signature != note.signature and _ANY not in (
            frame.note.signature,
            note.signature,
        ):
            raise PeerFailed(self._different(host, note.text, frame.note.text))
        return frame.data

    def next_offer(self, numbers: Mapping[int, int], joined: Place) -> CollectiveOffer | None:
        """Waits for a call of another host, all of whose steps are yet to come.

        Args:
            numbers: by key the number of calls that this host has made.
            joined: the place of the frames by which hosts say that all their ranks have joined.

        Returns:
            None once all hosts have said so.

        Raises:
            PeerFailed: as in `take`.
        """
        others = self._hosts.others

        def silent() -> list[int]:
            return [host for host in others if (host, joined) not in self._frames]

        def found() -> CollectiveOffer | None:
            for (_, (key, number, step)), frame in self._frames.items():
                if step == 1 and number == numbers.get(key, 0) + 1:
                    return frame.note.offer
            return None if silent() else CollectiveOffer(joined[0], CollectiveKind.ALL_JOINED)

        text = "a collective, or until all its ranks join,"
        offer: CollectiveOffer = self._wait(found, lambda: self._expired(silent(), text))
        return None if offer.kind is CollectiveKind.ALL_JOINED else offer

    def forget(self, place: Place) -> None:
        """Drops the frames of a place, which nobody takes."""
        with self._changed:
            for host in self._hosts.others:
                self._frames.pop((host, place), None)

    def _wait(self, find: Callable[[], Any], expired: Callable[[], Failure]) -> Any:
        """Returns what `find` returns, once that is not None. Guards its look at the frames."""
        patience = Patience(self._deadline)
        with self._changed:
            while (found := find()) is None:
                # Whoever ends the host's own group cannot wake this leader, who sees it here.
                failure = self._failure or self._failed_here()
                if failure is not None:
                    raise PeerFailed(failure)
                self._changed.wait(POLL_SECONDS)
                if patience.is_over():
                    raise PeerFailed(expired())
        return found

    def _read(self, host: int) -> None:
        sock = self._sockets[host]
        try:
            while True:
                (
                    kind,
                    *place,
                    signature,
                    described,
                    nbytes,
                    rows,
                    offered,
                    moved,
                    typed,
                    reduced,
                ) = _HEADER.unpack(_receive(sock, _HEADER.size).data)
                text, name, op = (
                    bytes(_receive(sock, count)).decode(errors="replace")
                    for count in (described, typed, reduced)
                )
                data = _receive(sock, nbytes)
                if kind:
                    ranks = tuple(rank for (rank,) in _MISSING.iter_unpack(data.tobytes()))
                    self._fail(Failure(FailureKind(kind), -1, text, missing=ranks))
                else:
                    key, number, step = place
                    offer = CollectiveOffer(key, CollectiveKind(offered), name, op, moved)
                    note = CallNote(signature, text, offer)
                    # Not -1 for the bytes of a row: rows may be 0, or have none.
                    data = data.reshape(rows, nbytes // max(1, rows))
                    self._put((host, (key, number, step)), _Frame(note, data))
        except (OSError, EOFError):
            self._fail(self._lost(host))

    def _put(self, where: tuple[int, Place], frame: _Frame) -> None:
        with self._changed:
            self._frames[where] = frame
            self._changed.notify_all()

    def _fail(self, failure: Failure) -> None:
        with self._changed:
            # The first stays: a leader that has sent its failure closes the connection next.
            self._failure = self._failure or failure
            self._changed.notify_all()

    # --------------------------------------------------------------------------- failures
    def _lost(self, host: int) -> Failure:
        text = f"the connection to host {self._hosts.names[host]} has ended"
        return Failure(FailureKind.LOST, -1, text, missing=tuple(self._hosts.ranks(host)))

    def _expired(self, missing: Sequence[int], text: str) -> Failure:
        names = ", ".join(self._hosts.names[host] for host in missing)
        return Failure(
            FailureKind.EXPIRED,
            -1,
            f"host {self._hosts.names[self._hosts.index]} waited {self._deadline:g} s in {text} "
            f"for host {names}",
            missing=tuple(rank for host in missing for rank in self._hosts.ranks(host)),
        )

    def _different(self, host: int, text: str, other: str) -> Failure:
        names = self._hosts.names
        return Failure(
            FailureKind.DIFFERENT,
            -1,
            "all ranks must call the same collective on the same type and shape. Received: host "
            f"{names[self._hosts.index]}: {text}; host {names[host]}: {other}",
            "Check that every rank runs the same model on batches of the same structure.",
        )

    def close(self) -> None:
        """Closes the connections; peers that wait for this host raise."""
        for sock in self._sockets.values():
            try:
                # `close` alone would not wake the reader, which waits for a frame.
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the other end was first
            sock.close()


def _receive(sock: socket.socket, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Reads an exact number of bytes. Raises `EOFError` if the connection ends before."""
    data = np.empty(nbytes, np.uint8)
    view = memoryview(data.data)
    while view.nbytes:
        count = sock.recv_into(view)
        if count == 0:
            raise EOFError
        view = view[count:]
    return data
