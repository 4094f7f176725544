"""The task of a rank's process, as the launcher pickles it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from nanotf.machine import topology

if TYPE_CHECKING:
    from nanotf.collectives.spec import GroupSpec, HostsSpec
    from nanotf.machine.cluster import Cluster
    from nanotf.sagemaker.smp.mailboxes.mailbox import MailboxSpec


class RankScript(Protocol):
    """A script that ranks can run; picklable."""

    @property
    def shows_all_ranks(self) -> bool:
        """True if all ranks print; False if only rank 0 does."""

    def run_as_rank(self, rank: int) -> None:
        """Runs the script in this process, a rank."""


@dataclass(frozen=True)
class GroupSeat:
    """A rank's seat in the group of all ranks."""

    spec: GroupSpec  # of the ranks of this host
    rank: int  # among all
    fd: int  # the group's memory; the process inherits it
    hosts: HostsSpec
    connections: tuple[int, ...]  # of the first rank of a host to those of others; inherited


@dataclass(frozen=True)
class RankOrder:
    """The task of a rank's process."""

    script: RankScript
    placement: topology.Placement  # its rank and cores
    mailbox: MailboxSpec | None  # None on one of several hosts
    seat: GroupSeat
    cluster: Cluster  # the hosts, as the launcher has found them
