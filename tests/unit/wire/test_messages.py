"""Messages pass through the channel, with the file descriptors that belong to them."""

from __future__ import annotations

import dataclasses
import errno
import inspect
import os
import pickle
import resource
import socket
import threading
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from typing import Any

import pytest

from nanotf.pool.outbox import Outbox, Parcel
from nanotf.wire import messages
from nanotf.wire.channel import Channel, ChannelClosed, packed

KINDS = sorted(
    (
        kind
        for _, kind in inspect.getmembers(messages, inspect.isclass)
        if issubclass(kind, messages.Message) and kind is not messages.Message
    ),
    key=lambda kind: kind.__name__,
)


def _example(kind: type) -> Any:
    """Returns a message with every required field set."""
    required = {
        field.name: f"<{field.name}>"
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    return kind(**required)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_message_survives_a_pickle(kind: type) -> None:
    message = _example(kind)
    assert pickle.loads(pickle.dumps(message)) == message


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_message_is_immutable(kind: type) -> None:
    assert kind.__dataclass_params__.frozen


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    """The two ends of a channel."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    made = Channel(ours), Channel(theirs)
    yield made
    for end in made:
        end.close()


def test_messages_arrive_in_order(ends: tuple[Channel, Channel]) -> None:
    parent, worker = ends
    for began in range(5):
        worker.send(messages.Stalled(began))
    assert [parent.receive().began for _ in range(5)] == list(range(5))


def test_descriptors_follow_their_message(ends: tuple[Channel, Channel]) -> None:
    parent, worker = ends
    pipes = [os.pipe() for _ in range(2)]
    parent.send(messages.Order(1, b"", (1, 2)), [reader for reader, _ in pipes])
    parent.send(messages.Stop())
    assert isinstance(worker.receive(), messages.Order)
    received = worker.receive_fds(2)
    assert isinstance(worker.receive(), messages.Stop)
    for (_, writer), fd in zip(pipes, received, strict=True):
        os.write(writer, b"x")
        assert os.read(fd, 1) == b"x"
        assert not os.get_inheritable(fd)
    for fd in [*received, *(fd for pipe in pipes for fd in pipe)]:
        os.close(fd)


def test_poll_reports_an_arrived_message(ends: tuple[Channel, Channel]) -> None:
    parent, worker = ends
    assert not parent.poll(0.0)
    worker.send(messages.Ready())
    assert parent.poll(5.0)


def test_closed_end_is_told(ends: tuple[Channel, Channel]) -> None:
    parent, worker = ends
    worker.close()
    assert parent.poll(5.0), "so that receive() gets to say it"
    with pytest.raises(ChannelClosed):
        parent.receive()
    with pytest.raises(ChannelClosed):
        parent.receive_fds(1)
    with pytest.raises(ChannelClosed):
        for _ in range(1000):
            parent.send(messages.Order(1, b"x" * 4096))


def test_an_end_that_does_nothing_is_not_waited_for(ends: tuple[Channel, Channel]) -> None:
    parent, worker = ends
    parent.limit(0.05)
    with pytest.raises(BlockingIOError):
        parent.receive()
    with pytest.raises(BlockingIOError):
        parent.send(messages.Order(1, b"x" * 10**7))
    parent.limit(0)
    threading.Timer(0.2, worker.send, [messages.Stalled(3)]).start()
    assert parent.receive() == messages.Stalled(3)


def test_a_waiting_thread_continues_when_a_channel_is_shut_down(
    ends: tuple[Channel, Channel],
) -> None:
    parent, _ = ends
    ended: list[str] = []

    def receive() -> None:
        with pytest.raises(ChannelClosed):
            parent.receive()
        ended.append("receive")

    def send() -> None:
        with pytest.raises(ChannelClosed):
            parent.send(messages.Order(1, b"x" * 10**7))
        ended.append("send")

    threads = [threading.Thread(target=receive), threading.Thread(target=send)]
    for thread in threads:
        thread.start()
    parent.shut_down()
    for thread in threads:
        thread.join(60)
    assert sorted(ended) == ["receive", "send"]


def test_an_outbox_waits_in_place_of_the_sender(ends: tuple[Channel, Channel]) -> None:
    """The worker reads no message; its descriptors are closed in every case."""
    parent, worker = ends
    failures: list[BaseException] = []
    outbox = Outbox(parent, "nanotf-test", failures.append)
    outbox.begin()
    reader, writer = os.pipe()
    big = packed(messages.Order(1, b"x" * 10**7, (1,)))
    parcels = [Parcel(big, [writer], 1) for _ in range(3)]
    os.close(writer)
    for parcel in parcels:
        outbox.put(parcel)
    assert len(worker.receive().body) == 10**7
    for fd in worker.receive_fds(1):
        os.close(fd)
    parent.shut_down()
    outbox.end()
    late = Parcel(b"", [reader], 1)
    outbox.put(late)
    assert [parcel.fds for parcel in [*parcels, late]] == [[]] * 4
    assert os.read(reader, 1) == b"", "the other end is closed everywhere"
    os.close(reader)
    assert failures == []


@pytest.mark.parametrize("key", [b"the same", b"another"])
def test_both_ends_show_the_key(ends: tuple[Channel, Channel], key: bytes) -> None:
    parent, worker = ends
    failures: list[BaseException] = []

    def answer() -> None:
        try:
            worker.show_key_first(b"the same")
        except (AuthenticationError, EOFError, OSError) as error:
            failures.append(error)

    thread = threading.Thread(target=answer)
    thread.start()
    if key == b"the same":
        parent.show_key_second(key)
        thread.join(60)
        assert failures == []
    else:
        with pytest.raises(AuthenticationError):
            parent.show_key_second(key)
        parent.close()
        thread.join(60)
        assert failures
    assert not thread.is_alive()


def test_a_descriptor_beyond_the_limit_is_an_error(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    ours.send(messages.Stop(), [0])
    assert theirs.receive() == messages.Stop()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        with pytest.raises(OSError, match="open files"):
            while True:
                taken.append(os.dup(0))
        with pytest.raises(OSError, match="open files") as raised:
            theirs.receive_fds(1)
        assert raised.value.errno == errno.EMFILE
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
