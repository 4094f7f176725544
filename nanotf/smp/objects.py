"""Communication of objects between processes. One process is a group of its own."""

from __future__ import annotations

from typing import Any

from nanotf.errors import InvalidArgumentError, InvalidArgumentTypeError
from nanotf.smp import runtime
from nanotf.smp.ranks import CommGroup, RankType


def broadcast(obj: Any, group: CommGroup = CommGroup.WORLD) -> None:
    """Sends an object to all other processes of a group, which call `recv_from`.

    Args:
        obj: picklable object.
        group: `CommGroup`, default all processes.
    """
    _check_group(group)


def allgather(obj: Any, group: CommGroup = CommGroup.WORLD) -> list[Any]:
    """Returns the objects of all processes of a group, in the order of ranks.

    Args:
        obj, group: as in `broadcast`.
    """
    _check_group(group)
    return [obj]


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Waits for all processes of a group."""
    _check_group(group)


def dp_barrier() -> None:
    """Waits for all processes of this process's dp_group."""
    barrier(CommGroup.DP_GROUP)


def mp_barrier() -> None:
    """Waits for all processes of this process's mp_group."""
    barrier(CommGroup.MP_GROUP)


def send(obj: Any, dest_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> None:
    """Sends an object to another process.

    Args:
        obj: picklable object.
        dest_rank: int, the other process's rank.
        rank_type: `RankType`, the group in which `dest_rank` counts.

    Raises:
        InvalidArgumentError: There is no such other process.
    """
    raise _no_peer("dest_rank", dest_rank, rank_type)


def recv_from(src_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> Any:
    """Returns the object that another process has sent or broadcast.

    Args:
        src_rank, rank_type: as `dest_rank` and `rank_type` of `send`.

    Raises:
        InvalidArgumentError: There is no such other process.
    """
    raise _no_peer("src_rank", src_rank, rank_type)


def _check_group(group: Any) -> None:
    runtime.current()
    if not isinstance(group, CommGroup):
        raise InvalidArgumentTypeError(f"group must be a smp.CommGroup. Received: group={group!r}.")


def _no_peer(name: str, value: Any, rank_type: Any) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{name} must be the rank of another process. Received: {name}={value!r} "
        f"({rank_type}), and the number of processes is {runtime.size()}."
    )
