"""This process's place among the ranks of a script, and its group.

`rank_process` calls `enter` before the script begins. A process that no launcher has started is the
only rank.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import pathlib
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nanotf.machine.own_exit import at_own_exit
from nanotf.ranks.rank_order import GroupSeat

# Keys of collectives outside steps, besides those of `collectives.launcher`.
JOIN_KEY = 3
FILES_KEY = 4


@dataclass(frozen=True)
class RankPlace:
    """A rank among all, and among those of its host."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among the ranks of its host
    local_size: int = 1
    cross_rank: int = 0  # among the hosts that have a rank of this `local_rank`
    cross_size: int = 1
    is_homogeneous: bool = True  # all hosts have the same number of ranks

    @classmethod
    def of(cls, rank: int, counts: Sequence[int]) -> RankPlace:
        """Returns the place of a rank.

        Args:
            counts: the number of ranks by host; ranks are numbered host by host.
        """
        ends = list(itertools.accumulate(counts))
        host = bisect.bisect_right(ends, rank)
        local = rank - ends[host] + counts[host]
        here = [number for number, count in enumerate(counts) if count > local]
        return cls(
            rank, ends[-1], local, counts[host], here.index(host), len(here), len(set(counts)) == 1
        )


@dataclass
class _Here:
    """The state of this process."""

    place: RankPlace = RankPlace()
    seat: GroupSeat | None = None
    uses: set[str] = field(default_factory=set)  # the libraries that the script uses


_here = _Here()


def enter(seat: GroupSeat) -> None:
    """Makes this process a rank."""
    _here.seat = seat
    _here.place = RankPlace.of(seat.rank, seat.hosts.counts)


def is_rank() -> bool:
    """Returns True if a launcher has started this process as a rank, even as the only one."""
    return _here.seat is not None


def place() -> RankPlace:
    """Returns this process's place."""
    return _here.place


def note_use(library: str) -> bool:
    """Records that the script uses a library of ranks. Returns True at the first time."""
    is_first = library not in _here.uses
    _here.uses.add(library)
    return is_first


def is_alone() -> bool:
    """Returns True if the script uses no library of ranks: each rank trains for itself."""
    return not _here.uses


@functools.cache
def group() -> Any:
    """Returns this rank's `collectives.Group`. Imports TensorFlow.

    Attaches at the first call: a script that does not communicate takes no part.
    """
    from nanotf.collectives.group import Group

    assert _here.seat is not None, "a process that no launcher has started has no group"
    seat = _here.seat
    hosts = seat.hosts if len(seat.hosts.counts) > 1 else None
    found = Group.attach(seat.spec, seat.rank, seat.fd, hosts, seat.connections)
    # The other ranks must not wait for a process that has ended.
    at_own_exit(found.close)
    return found


@functools.cache
def keys() -> Any:
    """Returns the `collectives.launcher.Keys` of this process's collectives."""
    from nanotf.collectives.launcher import Keys

    return Keys()


def command(processes: int | None = None) -> str:
    """Returns the command that starts this script as ranks, for messages."""
    # Not for `python -c`, nor in an interactive session.
    is_script = pathlib.Path(sys.argv[0]).is_file()
    words = sys.argv if is_script else ["train.py", *sys.argv[1:]]
    return f"nanotf run --ranks -n {processes or 2} {shlex.join(words)}"
