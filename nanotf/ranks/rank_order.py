"""The task of a rank's process, as the launcher pickles it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from nanotf.machine import topology

if TYPE_CHECKING:
    from nanotf.collectives.spec import GroupSpec
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

    spec: GroupSpec
    rank: int
    fd: int  # the group's memory; the process inherits it


@dataclass(frozen=True)
class RankOrder:
    """The task of a rank's process."""

    script: RankScript
    placement: topology.Placement  # its rank and cores
    mailbox: MailboxSpec
    seat: GroupSeat
