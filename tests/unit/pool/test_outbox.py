"""Messages to a worker: in order, and without waiting for a worker that does not read."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nanotf.pool.outbox import Outbox, Parcel
from nanotf.wire import messages
from nanotf.wire.channel import SMALL, Channel, packed


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = map(Channel, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    yield ours, theirs
    ours.close()
    theirs.close()


def _outbox(channel: Channel, failures: list[BaseException]) -> Outbox:
    made = Outbox(channel, "to-worker", failures.append)
    made.begin()
    return made


def _order(number: int, size: int = 0, descriptors: tuple[int, ...] = ()) -> Parcel:
    order = messages.Order(number, bytes(size), (), descriptors)
    return Parcel(packed(order), descriptors, 1)


def _in_thread(write: Callable[[], Any]) -> None:
    """Writes in a thread, where small messages need no other: a pool's threads do so."""
    thread = threading.Thread(target=write)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def _number_of(channel: Channel) -> int:
    message = channel.receive()
    channel.receive_fds(len(message.descriptors))
    return int(message.order)


def test_small_and_large_messages_keep_their_order(ends: tuple[Channel, Channel]) -> None:
    failures: list[BaseException] = []
    outbox = _outbox(ends[0], failures)
    sizes = [0, 10, 3 * SMALL, 0, 10**6, 0, 0, SMALL, 10**6, 0]
    found: list[int] = []
    reader = threading.Thread(target=lambda: found.extend(_number_of(ends[1]) for _ in sizes))
    reader.start()

    def write() -> None:
        for number, size in enumerate(sizes):
            outbox.put(_order(number, size, (0,) if number % 3 == 1 else ()))

    _in_thread(write)
    reader.join(60)
    assert found == list(range(len(sizes)))
    assert failures == []
    ends[0].shut_down()
    outbox.end()


@pytest.mark.parametrize("size", [0, SMALL // 2, 10 * SMALL])
def test_a_worker_that_does_not_read_keeps_nobody_waiting(
    ends: tuple[Channel, Channel], size: int
) -> None:
    """More messages than a socket holds are taken; the worker that continues gets all."""
    outbox = _outbox(ends[0], [])
    _in_thread(lambda: [outbox.put(_order(number, size)) for number in range(2000)])
    assert [_number_of(ends[1]) for _ in range(2000)] == list(range(2000))
    ends[0].shut_down()
    outbox.end()


def test_descriptors_are_closed_when_the_worker_is_gone(ends: tuple[Channel, Channel]) -> None:
    failures: list[BaseException] = []
    outbox = _outbox(ends[0], failures)
    ends[1].close()
    parcels = [_order(number, 0, (0,) if number % 2 else ()) for number in range(6)]
    _in_thread(lambda: [outbox.put(parcel) for parcel in parcels])
    outbox.end()
    late = _order(6, 0, (0,))
    outbox.put(late)
    assert [parcel.fds for parcel in (*parcels, late)] == [[]] * 7
    assert failures == []
