"""The pool's view of its workers on another host, and its connection to them, see `remote`.

All workers of a pool get the same messages in the same order. So the bridge sends the messages for
its first worker to the host, where all workers get them, and drops the copies for the others.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

from nanotf.console import logger
from nanotf.machine import topology
from nanotf.pool.handles import STACK_SECONDS, Worker
from nanotf.pool.hosts import agent_messages
from nanotf.pool.hosts.members import Member
from nanotf.pool.hosts.remote import Originals, Said, descriptors_of, read
from nanotf.wire.channel import Channel, ChannelClosed, packed, socket_pair

ANSWER_SECONDS = 5.0  # for an answer that needs no waiting
LOST = -9  # the exit code of a worker that was lost with its host, as if by SIGKILL


class HostProcess:
    """A worker's process on another host, with the methods of `subprocess.Popen` that a pool needs.

    Args:
        pool: its pool's number.

    Attributes:
        pid: int, once it runs.
        returncode: int or None; `LOST` if its host is gone.
        lost: str, how it was lost, after "was lost"; empty if it was not.
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


class HostWorker(Worker):
    """A worker on another host.

    Args:
        channel: the pool's end.
        end: the bridge's end.
    """

    process: HostProcess
    shares_memory = False

    def __init__(
        self,
        member: Member,
        placement: topology.Placement,
        process: HostProcess,
        channel: Channel,
        end: Channel,
    ) -> None:
        self.rank, self.cores = placement.rank, placement.cores
        self.process, self.channel = process, channel
        self._member, self._end = member, end

    def log_tail(self) -> str:
        return self.process.ask("log_tail")

    def is_ready(self) -> None:
        pass  # its log begins with its first call

    def trim_log(self) -> None:
        pass  # its host does

    def stack(self) -> str:
        return self.process.ask("stack", STACK_SECONDS) or "its machine does not answer"

    def is_stopped(self) -> bool:
        return self.rank in self._member.stopped

    def has_answered(self, since: float) -> bool:
        return self._member.heard > since

    def where(self) -> str:
        return f"{super().where()} on host {self._member.name}"

    def how_it_ended(self) -> tuple[str, int | None, int | None]:
        if self.process.lost:
            return f"was lost {self.process.lost}", None, None
        if self.process.returncode is None:
            return f"was lost: host {self._member.name} does not answer", None, None
        return super().how_it_ended()

    def wait_killed(self) -> None:
        self.process.wait()

    def close(self) -> None:
        self.channel.close()
        self._end.shut_down()  # ends the bridge's threads for it


class Bridge:
    """The connection to a pool's workers on one other host.

    Args:
        pool: the pool's number.
        ranks: of the workers there.
        key: the pool's secret key.

    Attributes:
        ahead: int, nanoseconds, this process's clock minus the host's.
    """

    def __init__(self, member: Member, pool: int, ranks: Sequence[int], key: bytes) -> None:
        self.pool, self.ahead = pool, 0
        self._member = member
        self._originals = Originals()
        self._said: dict[int, queue.SimpleQueue[Said]] = {r: queue.SimpleQueue() for r in ranks}
        self._processes = {rank: HostProcess(member, pool, rank) for rank in ranks}
        self._channels: dict[int, tuple[Channel, Channel]] = {}  # the pool's end, and this one's
        for rank in ranks:
            ours, theirs = socket_pair()
            self._channels[rank] = Channel(ours), Channel(theirs)
            end = self._channels[rank][1]
            self._in_thread(self._down, rank, end, key, rank == ranks[0])

    def worker(self, pid: int, placement: topology.Placement) -> HostWorker:
        """Returns a worker that the host has started."""
        process = self._processes[placement.rank]
        process.pid = pid
        return HostWorker(self._member, placement, process, *self._channels[placement.rank])

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
        self._processes[rank].ended(code)

    def host_lost(self) -> None:
        """Records that the host is gone, for all its workers."""
        for process in self._processes.values():
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
