"""Slurm's notation for nodes and tasks, as the variables of a step have it."""

from __future__ import annotations

import re
from collections.abc import Iterator


def expand_nodes(text: str) -> tuple[str, ...]:
    """Expands a list of nodes, such as "rack[1-2]n[08-10],login".

    Raises:
        ValueError: It has another form.
    """
    items = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if ",".join(items) != text:
        raise ValueError(text)
    return tuple(name for item in items for name in _expand(item))


def _expand(item: str) -> Iterator[str]:
    before, bracket, rest = item.partition("[")
    if not bracket:
        yield item
        return
    inside, _, after = rest.partition("]")
    for part in inside.split(","):
        low, dash, high = part.partition("-")
        if not dash:
            numbers = [low]
        else:
            numbers = [str(n).zfill(len(low)) for n in range(int(low), int(high) + 1)]
        for number in numbers:
            for end in _expand(after):
                yield before + number + end


def expand_tasks(text: str | None, nodes: int) -> list[int]:
    """Expands SLURM_STEP_TASKS_PER_NODE, such as "4(x2),2".

    Args:
        text: the variable; None, if it is not set, for one task on each node.

    Returns:
        The number of tasks on each node.

    Raises:
        ValueError: The variable has another form, or counts another number of nodes.
    """
    if text is None:
        return [1] * nodes
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            raise ValueError(text)
        counts += [int(match[1])] * int(match[2] or 1)
    if len(counts) != nodes:
        raise ValueError(text)
    return counts
