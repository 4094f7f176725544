"""`nanotf run --ranks`: N processes run the script, each as a rank, on this host or on several.

    nanotf run --ranks -n 2 train.py            every other host: the same command
      | watches the processes (`rank_crew`)       | joins as an agent (`RankLender`)
      +-- rank 0   pinned; its output is          +-- rank 2   its output goes to a log
      |            this process's                 +-- rank 3
      +-- rank 1   its output goes to a log

    rank 0  <--- collectives between hosts, see `collectives.hosts_engine` --->  rank 2

The hosts are those that also lend workers (`pool.hosts`), and find each other alike. Here a host
lends ranks. What fails on one is told to the first host, which tells the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from nanotf.errors import InvalidArgumentError, UnavailableError
from nanotf.machine import neighbours, topology
from nanotf.machine.cluster import Cluster
from nanotf.pool.stalls import stall_seconds
from nanotf.ranks.rank_order import RankScript
from nanotf.sagemaker.smp import config
from nanotf.sagemaker.smp import rank_groups as places

if TYPE_CHECKING:
    from nanotf.pool.hosts import agent_messages, leaders
    from nanotf.pool.hosts.agent import LentProcesses
    from nanotf.pool.hosts.members import Hosts


def are_wanted(flag: bool, environ: Mapping[str, str]) -> bool:
    """Returns True if ranks run the script.

    They do with `--ranks` or `--smp`, or if `SM_HP_MP_PARAMETERS` asks for several partitions.

    Args:
        flag: True if `--ranks` or `--smp` is given.
        environ: environment variables.

    Raises:
        InvalidArgumentError, InvalidArgumentTypeError: The configuration breaks a rule.
    """
    wanted = config.load(None, environ) if config.VARIABLE in environ else None
    return flag or (wanted is not None and wanted.partitions > 1)


def number(
    found: Cluster, num_processes: int | str | None, is_smp: bool, environ: Mapping[str, str]
) -> int:
    """Returns the number of ranks of this host.

    Args:
        found: the hosts; the numbers that its source gives go first.
        num_processes: the value of `-n`; "auto" and None mean the number of partitions of
            `SM_HP_MP_PARAMETERS`.
        is_smp: True with `--smp`.
        environ: environment variables.

    Raises:
        InvalidArgumentError, InvalidArgumentTypeError: The number is missing, or not divisible by
            the number of partitions.
        UnavailableError: There are several hosts, and the script is one for `nanotf.smp`.
    """
    wanted = config.load(None, environ) if config.VARIABLE in environ else None
    if num_processes in (None, topology.AUTO) and wanted is not None:
        num_processes = wanted.partitions
    given = found.workers[found.rank]
    size = num_processes if given is None else given
    if not isinstance(size, int):
        raise InvalidArgumentError(
            "`nanotf run --ranks` needs the number of processes of each host. Received: "
            f"-n {num_processes}, and no {config.VARIABLE}. Pass -n N; for model parallelism, "
            "divisible by the number of partitions that the script passes to smp.init()."
        )
    topology.check_num_processes(size)
    if wanted is not None:
        places.place(0, size, wanted.partitions)  # raises if they cannot be divided
    if found.size > 1 and (is_smp or (wanted is not None and wanted.partitions > 1)):
        raise UnavailableError(
            "The ranks of nanotf.smp run on one host. Received: the hosts "
            f"{', '.join(found.hosts)} (from {found.source}). Run the command on one of them, "
            "outside the launcher."
        )
    return size


class RankLender:
    """Makes an agent lend ranks instead of workers; see `Agent`."""

    def __init__(self, script: RankScript) -> None:
        self._script = script

    def __call__(
        self,
        order: agent_messages.Lend,
        secret: bytes,
        part: float,
        accepted: leaders.Accepted,
        tell: Callable[..., None],
    ) -> LentProcesses:
        """Starts the ranks. Called in the main thread, by whose end they would end."""
        from nanotf.ranks import rank_hosts

        return rank_hosts.LentRanks(self._script, order, secret, accepted, tell)


def run(script: RankScript, size: int, hosts: Hosts | None) -> tuple[int, bool]:
    """Runs a script as ranks, `size` of them on this host.

    Args:
        hosts: the others, on the first of several; they have joined. None for this host alone.

    Returns:
        The exit code: 0 if all ranks have ended as they should, else that of the first that has
        not; and True if that one is of another host.

    Raises:
        PlacementError: The machine has too few cores.
        NanoError: Another host could not start its ranks.
    """
    # These import NumPy, which the other commands do without.
    from nanotf.collectives.spec import HostsSpec
    from nanotf.ranks import rank_crew, rank_hosts

    if hosts is not None and hosts.members():
        return rank_hosts.run(script, hosts)
    plan = neighbours.plan(size)
    with rank_crew.started(script, HostsSpec(0, (size,), ("",), stall_seconds()), plan) as crew:
        crew.watch()
    return crew.result(), False
