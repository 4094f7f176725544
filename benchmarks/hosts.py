"""Measures collectives between hosts: `python -m benchmarks.hosts [--help]`.

The ranks are processes of this machine. Two levels: the ranks of a host share memory, and one of
them exchanges over TCP (the loopback interface). One level: every rank is a host of its own, as if
there were no shared memory. The table has the median time of an all-reduce for each, interleaved,
and their ratio. A real network is slower, which favors two levels further: they move the buffer
of one rank per host.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks import report
from nanotf.collectives import HostsSpec, create_group
from nanotf.collectives.hosts_engine import HostsEngine
from nanotf.collectives.native_engine import NativeEngine
from nanotf.collectives.spec import GroupOwner

SIZES = (4 << 10, 256 << 10, 4 << 20, 32 << 20)
DEADLINE = 120.0  # s
_REPEATS_OF_BYTES = 256 << 20
_BARRIER, _REDUCE = 1, 2


def _connected() -> tuple[int, int]:
    """Returns the ends of a TCP connection of the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    for end in (one, other):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one.detach(), other.detach()


def _rank(
    owner: GroupOwner, hosts: HostsSpec, rank: int, fds: Sequence[int], results: Connection
) -> None:
    local = NativeEngine(owner.spec, rank, owner.fd)
    engine = HostsEngine(local, hosts, fds if rank == 0 else (), owner.fd)
    found = []
    for nbytes in SIZES:
        values = np.ones(nbytes // 4, np.float32)
        times = []
        for repeat in range(3 + max(5, min(100, _REPEATS_OF_BYTES // nbytes))):
            engine.barrier(_BARRIER)
            began = time.perf_counter()
            engine.all_reduce([values], _REDUCE)
            if repeat >= 3:
                times.append(time.perf_counter() - began)
        found.append(statistics.median(times))
    results.send(found)
    results.recv()  # all have measured
    engine.close()


def measure(counts: Sequence[int]) -> list[float]:
    """Measures all-reduces of ranks that are distributed over hosts.

    Args:
        counts: sequence of int, the number of ranks by host.

    Returns:
        list of float, the seconds of rank 0's all-reduce for each of `SIZES`.
    """
    fork = multiprocessing.get_context("fork")
    links: list[dict[int, int]] = [{} for _ in counts]
    for one in range(len(counts)):
        for other in range(one):
            links[one][other], links[other][one] = _connected()
    names = tuple(f"host {host}" for host in range(len(counts)))
    ends, processes = [], []
    for host, count in enumerate(counts):
        owner = create_group(count, deadline=DEADLINE)
        hosts = HostsSpec(host, tuple(counts), names, DEADLINE)
        fds = [links[host][other] for other in sorted(links[host])]
        for rank in range(count):
            ours, theirs = fork.Pipe()
            process = fork.Process(target=_rank, args=(owner, hosts, rank, fds, theirs))
            process.start()
            ends.append(ours)
            processes.append(process)
    found = [end.recv() for end in ends]
    for end in ends:
        end.send(None)
    for process in processes:
        process.join()
    times: list[float] = found[0]
    return times


def compare(hosts: int, ranks: int, rounds: int) -> list[dict[str, Any]]:
    """Compares two levels with one, interleaved.

    Args:
        hosts: int, the number of hosts.
        ranks: int, the ranks of each.
        rounds: int.

    Returns:
        list of dict, for each of `SIZES`: `bytes`; `two` and `one`, the median seconds of an
        all-reduce; `ratios`, one / two of each round.
    """
    ways = {"two": (ranks,) * hosts, "one": (1,) * (hosts * ranks)}
    found = [{way: measure(counts) for way, counts in ways.items()} for _ in range(rounds)]
    rows = []
    for place, nbytes in enumerate(SIZES):
        two, one = ([each[way][place] for each in found] for way in ways)
        row = {"bytes": nbytes, "two": statistics.median(two), "one": statistics.median(one)}
        rows.append({**row, "ratios": [o / t for o, t in zip(one, two, strict=True)]})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__)
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts, default 2")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of each, default 2")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved runs, default 3")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    options = parser.parse_args(arguments)
    rows = compare(options.hosts, options.ranks, options.rounds)
    if options.json:
        print(json.dumps(rows))
    else:
        print(f"all-reduce of {options.hosts} hosts with {options.ranks} ranks each")
        print(report.levels(rows))


if __name__ == "__main__":
    main()
