"""Ranks and groups of processes: pure functions of their number and the configuration.

The processes of an mp_group hold the partitions of one copy of the model. The processes of a
dp_group hold the same partition of different copies. With 8 processes and 2 partitions:

    "cluster"   mp_groups [0, 1] [2, 3] [4, 5] [6, 7]   dp_groups [0, 2, 4, 6] [1, 3, 5, 7]
    "spread"    mp_groups [0, 4] [1, 5] [2, 6] [3, 7]   dp_groups [0, 1, 2, 3] [4, 5, 6, 7]
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from nanotf.errors import InvalidArgumentError


class CommGroup(enum.Enum):
    """A group of processes: all, or this process's mp_group or dp_group."""

    WORLD = "world"
    MP_GROUP = "mp_group"
    DP_GROUP = "dp_group"


WORLD, MP_GROUP, DP_GROUP = CommGroup  # the original has them under these names, too


class RankType(enum.Enum):
    """The group in which a rank counts."""

    WORLD_RANK = "rank"  # in the order of `CommGroup`: `communication._GROUPS` pairs them
    MP_RANK = "mp_rank"
    DP_RANK = "dp_rank"


@dataclass(frozen=True)
class Place:
    """A process among others."""

    rank: int
    size: int
    mp_rank: int  # in its mp_group: the partition that it holds
    mp_size: int
    dp_rank: int  # in its dp_group: the copy of the model to which it belongs
    dp_size: int
    mp_group: tuple[int, ...]  # ranks among all processes, by `mp_rank`
    dp_group: tuple[int, ...]  # ranks among all processes, by `dp_rank`


def place(rank: int, size: int, partitions: int, placement_strategy: str = "cluster") -> Place:
    """Returns the place of a process.

    Args:
        size: number of processes.
        placement_strategy: "cluster" gives an mp_group neighboring ranks, "spread" a dp_group.

    Raises:
        InvalidArgumentError: The processes cannot be divided into copies of the model.
    """
    if size % partitions:
        raise InvalidArgumentError(
            "The number of processes must be divisible by the number of partitions. Received: "
            f"{size} processes, partitions={partitions}."
        )
    copies = size // partitions
    if placement_strategy == "cluster":
        dp_rank, mp_rank = divmod(rank, partitions)
        mp_group = range(dp_rank * partitions, (dp_rank + 1) * partitions)
        dp_group = range(mp_rank, size, partitions)
    else:
        mp_rank, dp_rank = divmod(rank, copies)
        mp_group = range(dp_rank, size, copies)
        dp_group = range(mp_rank * copies, (mp_rank + 1) * copies)
    return Place(rank, size, mp_rank, partitions, dp_rank, copies, tuple(mp_group), tuple(dp_group))
