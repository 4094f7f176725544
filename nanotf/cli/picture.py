"""A picture of a machine in characters: sockets, NUMA nodes, cores, and the workers on them."""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Mapping

from nanotf.machine.cpus import LogicalCpu, Machine
from nanotf.machine.topology import Plan

_RANKS = string.digits + string.ascii_lowercase  # a core is one character: 36 ranks have their own
FREE, FORBIDDEN, OFFLINE, MANY = ".", "-", "!", "#"
_GROUP, _WIDTH = 8, 64  # cores per group, and per line


def ranges(numbers: Iterable[int]) -> str:
    """Writes numbers as the kernel does: {0, 1, 2, 5} is "0-2,5"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def count(number: int, noun: str) -> str:
    """Writes a number with its noun: "1 core", "2 cores"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def gigabytes(number: int) -> str:
    """Writes a number of bytes in GiB, for people."""
    return f"{number / (1 << 30):.1f} GiB"


def draw(machine: Machine, plan: Plan | None = None) -> str:
    """Draws a machine.

    Args:
        plan: each worker's cores are shown as its rank; None shows no workers.

    Returns:
        Several lines: a box for each NUMA node, a character for each physical core, and a
        legend of the characters used.
    """
    placements = plan.placements if plan else ()
    owners = {cpu: placement.rank for placement in placements for cpu in placement.cores}
    lines, seen, socket = [], set(), None
    for (of_socket, node), cores in _nodes(machine).items():
        rows = list(_rows(machine, cores, owners))
        if of_socket != socket:
            socket = of_socket
            lines.append(f"  socket {socket}")
        title = f"-- NUMA node {node} "
        width = max(len(title) + 2, *(len(cells) + 2 for cells, _ in rows))
        lines.append(f"  +{title:-<{width}}+")
        lines += [f"  | {cells:<{width - 1}}| {label}".rstrip() for cells, label in rows]
        lines.append(f"  +{'-' * width}+")
        seen |= {character for cells, _ in rows for character in cells}
    return "\n".join([*lines, *(f"  {text}" for text in _legend(seen))])


def _nodes(machine: Machine) -> dict[tuple[int, int], list[list[LogicalCpu]]]:
    """Groups the physical cores by socket and NUMA node; each core is a list of logical CPUs."""
    cores: dict[tuple[int, int], list[LogicalCpu]] = {}
    for cpu in machine.cpus:
        cores.setdefault((cpu.socket, cpu.core), []).append(cpu)  # numbers repeat in each socket
    nodes: dict[tuple[int, int], list[list[LogicalCpu]]] = {}
    for cpus in cores.values():
        nodes.setdefault((cpus[0].socket, cpus[0].numa_node), []).append(cpus)
    return dict(sorted(nodes.items()))


def _rows(
    machine: Machine, cores: list[list[LogicalCpu]], owners: Mapping[int, int]
) -> Iterator[tuple[str, str]]:
    """Yields the lines of a node: the characters, and on the first line a label for them."""
    allowed = {cpu.id for cpu in machine.allowed_cpus()}
    for slow in (False, True):  # as `usable_cores` orders them
        of_kind = [cpus for cpus in cores if cpus[0].efficiency == slow]
        if not of_kind:
            continue
        label = f"{'efficiency ' if slow else ''}cores {ranges(cpus[0].id for cpus in of_kind)}"
        siblings = [cpu.id for cpus in of_kind for cpu in cpus[1:]]
        label += f", hyper-threads {ranges(siblings)}" if siblings else ""
        cells = [_cell(cpus, allowed, owners) for cpus in of_kind]
        for start in range(0, len(cells), _WIDTH):
            line = cells[start : start + _WIDTH]
            groups = ["".join(line[i : i + _GROUP]) for i in range(0, len(line), _GROUP)]
            yield " ".join(groups), "" if start else label


def _cell(cpus: list[LogicalCpu], allowed: set[int], owners: Mapping[int, int]) -> str:
    for cpu in cpus:
        # A worker has the lowest that is allowed, perhaps not the core's first.
        if cpu.id in owners:
            rank = owners[cpu.id]
            return _RANKS[rank] if rank < len(_RANKS) else MANY
    if not any(cpu.online for cpu in cpus):
        return OFFLINE
    return FREE if any(cpu.id in allowed for cpu in cpus) else FORBIDDEN


def _legend(seen: set[str]) -> Iterator[str]:
    if seen & {*_RANKS, MANY}:
        yield "0, 1, ...  a core of that worker"
    if MANY in seen:
        yield f"{MANY}  a core of worker {len(_RANKS)} or above"
    if FREE in seen:
        yield f"{FREE}  a core that no worker has"
    if FORBIDDEN in seen:
        yield f"{FORBIDDEN}  a core that this process may not use"
    if OFFLINE in seen:
        yield f"{OFFLINE}  a core that is offline"
