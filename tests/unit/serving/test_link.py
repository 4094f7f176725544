"""The connection between the front and a worker."""

import contextlib
import errno
import os
import pathlib
import resource
import socket

import pytest

from nanotf.serving.link import INLINE, KEPT, Link, LinkClosed


@pytest.fixture
def ends():
    one, sock = Link.pair()
    other = Link(sock)
    yield one, other
    one.close()
    other.close()


@pytest.mark.parametrize("sizes", [[], [0], [5, 0, 7], [INLINE + 1], [INLINE, 3], [KEPT + 9, 1]])
def test_contents_arrive_as_they_were(ends, sizes):
    one, other = ends
    contents = [os.urandom(size) for size in sizes]
    for sender, receiver in ((one, other), (other, one), (one, other)):
        sender.send({"header": sizes}, contents)
        header, found = receiver.receive()
        assert header == {"header": sizes}
        assert [bytes(each) for each in found] == contents


def test_a_long_header_is_no_limit(ends):
    one, other = ends
    header = ["x" * 100] * 5000
    one.send(header)
    assert other.receive() == (header, [])


def test_shared_memory_is_used_again(ends):
    one, other = ends
    before = len(list(pathlib.Path("/proc/self/fd").iterdir()))
    for number in range(50):
        one.send(number, [b"%d" % number * INLINE])
        header, (content,) = other.receive()
        assert (header, bytes(content)) == (number, b"%d" % number * INLINE)
    assert (
        len(list(pathlib.Path("/proc/self/fd").iterdir())) <= before + 3
    )  # the memory's own, and one for each mapping


def test_memory_of_a_long_message_is_given_back(ends):
    one, other = ends
    one.send(0, [bytes(KEPT + 1)])
    before = len(list(pathlib.Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        one.send(0, [bytes(KEPT + 1)])
        other.receive()
    assert len(list(pathlib.Path("/proc/self/fd").iterdir())) == before


def test_a_closed_end_is_told(ends):
    one, other = ends
    other.close()
    with pytest.raises(LinkClosed):
        one.receive()
    with pytest.raises(LinkClosed):
        one.send("x")


def test_memory_that_does_not_arrive_is_noticed(ends):
    one, other = ends
    one.send("first", [b"secret" * INLINE])
    other.receive()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    one.send("second", [bytes(KEPT + 1)])
    used = max(int(path.name) for path in pathlib.Path("/proc/self/fd").iterdir())
    spare = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, limit[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                spare.append(os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(OSError, match="descriptors"):
            other.receive()
    finally:
        for descriptor in spare:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_memory_that_could_not_be_sent_is_sent_with_the_next_message(ends, monkeypatch):
    one, other = ends
    stock = socket.send_fds

    def refuse(sock, parts, fds):
        raise OSError(errno.ENOBUFS, "no room")

    monkeypatch.setattr(socket, "send_fds", refuse)
    with pytest.raises(OSError, match="no room"):
        one.send("lost", [bytes(INLINE + 1)])
    monkeypatch.setattr(socket, "send_fds", stock)
    for size in (INLINE + 1, INLINE + 2):
        one.send("later", [b"x" * size])
        header, (content,) = other.receive()
        assert (header, bytes(content)) == ("later", b"x" * size)
