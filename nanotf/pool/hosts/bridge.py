"""The pool's connection to its workers on another host, see `pool.remote`.

All workers of a pool get the same messages in the same order. So the bridge sends the messages for
its first worker to the host, where all workers get them, and drops the copies for the others.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

from nanotf.console import logger
from nanotf.pool.hosts import agent_messages
from nanotf.pool.hosts.members import Member
from nanotf.pool.hosts.remote import LOST, Originals, Said, descriptors_of, read
from nanotf.wire.channel import Channel, ChannelClosed, packed

ANSWER_SECONDS = 5.0  # for an answer that needs no waiting


class HostProcess:
    """A worker's process on another host, with the methods of `subprocess.Popen` that a pool needs.

    Args:
        pool: its pool's number.

    Attributes:
        pid: int, once it runs.
        returncode: int or None; `LOST` if its host is gone.
        lost: str, see `RemoteProcess`.
    """

    def __init__(self, member: Member, pool: int, rank: int) -> None:
        self._member, self._pool, self._rank = member, pool, rank
        self.pid, self.returncode, self.lost = 0, None, ""  # type: int, int | None, str
        self._over = threading.Event()

    def ended(self, code: int) -> None:
        """Records its exit code."""
        if self.returncode is None:
            self.returncode = code
        self._over.set()

    def host_lost(self) -> None:
        """Records that its host is gone."""
        if self.returncode is None:
            self.lost = f"with host {self._member.name}: {self._member.lost}"
            self.ended(LOST)

    def poll(self) -> int | None:
        """Returns the exit code, or None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end. Without a timeout, counts it as lost after `ANSWER_SECONDS`."""
        if not self._over.wait(ANSWER_SECONDS if timeout is None else timeout):
            if timeout is not None:
                raise subprocess.TimeoutExpired("worker", timeout)
            self.lost = f"with host {self._member.name}, which did not answer"
            self.ended(LOST)
        assert self.returncode is not None, "it has ended"
        return self.returncode

    def kill(self) -> None:
        """Kills it at once."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, sig: int) -> None:
        """Sends it a signal."""
        self._member.send(agent_messages.Tell(self._pool, self._rank, int(sig)))

    def ask(self, method: str, seconds: float = 0.0) -> str:
        """Returns its host's answer to "stack" or "log_tail"; empty if the host is gone."""
        answer = self._member.ask(method, seconds + ANSWER_SECONDS, self._pool, self._rank)
        return "" if answer is None else str(answer)


class HostLink:
    """The connection to one worker, see `Link`."""

    def __init__(self, member: Member, rank: int, end: Channel) -> None:
        self._member, self._rank, self._end = member, rank, end

    @property
    def stopped(self) -> bool:
        return self._rank in self._member.stopped

    @property
    def heard(self) -> float:
        return self._member.heard

    def close(self) -> None:
        """Ends the bridge's threads for this worker."""
        self._end.shut_down()


class Bridge:
    """The connection to a pool's workers on one other host.

    Args:
        pool: the pool's number.
        ranks: of the workers there.
        key: the pool's secret key.

    Attributes:
        channels: dict of `Channel` by rank, the pool's ends.
        processes: dict of `HostProcess` by rank.
        links: dict of `HostLink` by rank.
        ahead: int, nanoseconds, this process's clock minus the host's.
    """

    def __init__(self, member: Member, pool: int, ranks: Sequence[int], key: bytes) -> None:
        self.pool, self.ahead = pool, 0
        self._member = member
        self._originals = Originals()
        self._said: dict[int, queue.SimpleQueue[Said]] = {r: queue.SimpleQueue() for r in ranks}
        self.channels: dict[int, Channel] = {}
        self.processes = {rank: HostProcess(member, pool, rank) for rank in ranks}
        self.links: dict[int, HostLink] = {}
        for rank in ranks:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            end = Channel(theirs)
            self.channels[rank], self.links[rank] = Channel(ours), HostLink(member, rank, end)
            self._in_thread(self._down, rank, end, key, rank == ranks[0])

    def _in_thread(self, target: Any, rank: int, *arguments: Any) -> None:
        name = f"nanotf-bridge{target.__name__}-{rank}"
        threading.Thread(target=target, args=(rank, *arguments), name=name, daemon=True).start()

    # ----------------------------------------------------------------- parent to worker
    def _down(self, rank: int, end: Channel, key: bytes, forwards: bool) -> None:
        try:
            end.show_key_first(key)
            self._in_thread(self._up, rank, end)  # no earlier: the pool expects the key first
            while True:
                message = end.receive()
                if forwards:
                    self._forward(message, end)
                else:  # the descriptors must come off the stream, too
                    for fd in end.receive_fds(descriptors_of(message)):
                        os.close(fd)
        except (EOFError, OSError):
            pass  # the pool has closed its end, or `_up` this one
        except Exception as error:  # no memory or descriptor for a message: the call fails
            logger.warning("A message to host %s is lost.", self._member.name, exc_info=error)
        finally:
            end.shut_down()
            self._said[rank].put(Said())  # ends `_up`

    def _forward(self, message: Any, end: Channel) -> None:
        # The host handles these in sequence: the data are there before the message.
        new, pieces = self._originals.note(message, end)
        if new:
            self._member.send(agent_messages.Create(self.pool, tuple(new)))
        for piece, block in pieces:
            fill = agent_messages.Fill(self.pool, piece.key, piece.offset, piece.nbytes)
            self._member.send(fill, read(block, piece.offset, piece.nbytes))
        self._member.send(agent_messages.Deliver(self.pool, packed(message)))

    # ----------------------------------------------------------------- worker to parent
    def said(self, rank: int, said: Said) -> None:
        """Takes a worker's message. Called by the thread that reads from the host."""
        self._said[rank].put(said)

    def ended(self, rank: int, code: int) -> None:
        """Takes a worker's exit code."""
        self.processes[rank].ended(code)

    def host_lost(self) -> None:
        """Records that the host is gone, for all its workers."""
        for process in self.processes.values():
            process.host_lost()
        for said in self._said.values():
            said.put(Said())

    def _up(self, rank: int, end: Channel) -> None:
        try:
            while (said := self._said[rank].get()).body:
                self._originals.deliver(said, end, self.ahead)
        except (ChannelClosed, OSError):
            pass
        except Exception as error:
            logger.warning("A message of host %s is lost.", self._member.name, exc_info=error)
        finally:
            end.shut_down()
