"""The messages between the first host and the agents on the other hosts.

    first host                                  agent
      |  <- Join (host, versions, its listener)   |   both have shown the run's secret
      |  Refused | Welcome ->                     |   Join may also say why it cannot take part
      |  Lend (ranks, key, environment) ->        |   starts a pool's workers, connects to the
      |  <- Lent (workers) | NotLent (why)        |   other hosts' listeners
      |  Create, Fill (+ bytes), Deliver ->       |   a message of the pool to its workers
      |  <- FromWorker (+ bytes), Ended           |
      |  Tell, Ask ->        <- Answer            |   signals, logs, stacks, the clock
      |  <- Beat                                  |   every second
      |  TakeBack ->                              |   kills the pool's workers
      |  Bye (exit code) ->                       |   the script has ended, or cannot begin

A leader that connects to another host's listener sends `Leader` first, and its connection then
belongs to the workers' collectives.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from nanotf.collectives import HostsSpec
from nanotf.machine import topology
from nanotf.pool.hosts.remote import Key
from nanotf.wire.messages import Message

BEAT_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class Join(Message):
    """Agent -> first host."""

    host: int  # its index among the hosts
    name: str
    versions: tuple[tuple[str, str], ...]  # (package, version), which must be equal on all hosts
    lends: bool  # if False, it only waits for the end of the run
    workers: int  # how many it lends
    address: tuple[str, int]  # of its listener; ("", 0) if it lends nothing
    declines: str = ""  # why it cannot take part: it then leaves


@dataclasses.dataclass(frozen=True)
class Welcome(Message):
    """First host -> agent: it belongs to the run."""


@dataclasses.dataclass(frozen=True)
class Refused(Message):
    """First host -> agent: it cannot belong to the run; `text` says why."""

    text: str


@dataclasses.dataclass(frozen=True)
class Lend(Message):
    """First host -> agent: start workers for a pool."""

    pool: int  # its number; a host has at most one pool at a time
    hosts: HostsSpec  # seen from the agent's host
    addresses: tuple[tuple[str, int], ...]  # of the listeners, by host
    cores_per_process: int | None  # None for equal shares of the host
    key: bytes  # the pool's secret key
    environ: dict[str, str]  # variables that the workers take over from the first host
    stall_seconds: float  # the deadline of the host's own group


@dataclasses.dataclass(frozen=True)
class Lent(Message):
    """Agent -> first host: the workers run; their process ids and placements, by rank."""

    pool: int
    workers: tuple[tuple[int, topology.Placement], ...]


@dataclasses.dataclass(frozen=True)
class NotLent(Message):
    """Agent -> first host: the workers could not be started; `text` says why."""

    pool: int
    text: str


@dataclasses.dataclass(frozen=True)
class Create(Message):
    """First host -> agent: create blocks; see `Twins.create`."""

    pool: int
    new: tuple[tuple[Key, int], ...]


@dataclasses.dataclass(frozen=True)
class Fill(Message):
    """First host -> agent: bytes for a part of a block follow."""

    pool: int
    key: Key
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Deliver(Message):
    """First host -> agent: a pickled message for all of a pool's workers there."""

    pool: int
    body: bytes


@dataclasses.dataclass(frozen=True)
class FromWorker(Message):
    """Agent -> first host: what a worker has sent.

    Its `written` and `block` have sizes in bytes in place of contents, which follow in this order.
    """

    pool: int
    rank: int
    body: bytes  # the pickled message; empty when the worker has closed its channel
    written: tuple[tuple[Key, int, int], ...] = ()
    block: int | None = None


@dataclasses.dataclass(frozen=True)
class WorkerEnded(Message):
    """Agent -> first host: a worker has ended with an exit code, or minus a signal's number."""

    pool: int
    rank: int
    code: int


@dataclasses.dataclass(frozen=True)
class Tell(Message):
    """First host -> agent: send a worker a signal."""

    pool: int
    rank: int
    signal: int


@dataclasses.dataclass(frozen=True)
class Ask(Message):
    """First host -> agent: a question, "clock", "stack" or "log_tail"; the last two of a worker."""

    number: int  # the answer repeats it
    question: str
    pool: int = -1
    rank: int = -1


@dataclasses.dataclass(frozen=True)
class Answer(Message):
    """Agent -> first host: the answer to a question."""

    number: int
    value: Any


@dataclasses.dataclass(frozen=True)
class Beat(Message):
    """Agent -> first host, every second: it works; the ranks that a signal has stopped."""

    stopped: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class TakeBack(Message):
    """First host -> agent: the pool has ended; kill its workers."""

    pool: int


@dataclasses.dataclass(frozen=True)
class Bye(Message):
    """First host -> agent: the script has ended with this exit code."""

    code: int
    why: str = ""  # if it has not begun


@dataclasses.dataclass(frozen=True)
class Leader(Message):
    """Host -> host: this connection serves the collectives of a pool; `host` is the sender."""

    pool: int
    host: int


# The agent gives these to what it has lent.
ForWorkers = (Create, Fill, Deliver, Tell)
