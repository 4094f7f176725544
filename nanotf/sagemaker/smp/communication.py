"""Communication of objects between processes, by their mailboxes.

A process waits in `send` and `broadcast` until the object is received, as the original's do. So a
send without its receive is an error on both sides, not a message that nobody misses.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from nanotf.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    ShippingError,
)
from nanotf.sagemaker.smp import runtime
from nanotf.sagemaker.smp.rank_groups import CommGroup, RankType

_GROUPS = dict(zip(RankType, CommGroup, strict=True))  # in which a rank counts
_OBJECT, _RECEIVED = "smp: object", "smp: object received"  # tags: a letter's, and its answer's


def broadcast(obj: Any, group: CommGroup = CommGroup.WORLD) -> None:
    """Sends an object to all other processes of a group, which call `recv_from`.

    Waits until all have received it.

    Args:
        obj: picklable object.
        group: `CommGroup`, default all processes.

    Raises:
        CollectiveError: A process does not receive it.
        WorkerDied: A process has died.
    """
    _send(obj, _others(group), f"smp.broadcast(group={group.name})")


def allgather(obj: Any, group: CommGroup = CommGroup.WORLD) -> list[Any]:
    """Returns the objects of all processes of a group, in the order of ranks.

    Args:
        obj, group: as in `broadcast`.

    Raises:
        CollectiveError, WorkerDied: As `broadcast`.
    """
    if not _others(group):
        return [obj]
    members, what = _members(group), f"smp.allgather(group={group.name})"
    found = runtime.gather(members, f"smp: allgather {group.name}", [_pickled(obj)], what)
    return [
        obj if rank == runtime.rank() else pickle.loads(data.data)
        for rank, (data,) in zip(members, found, strict=True)
    ]


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Waits for all processes of a group.

    Args:
        group: `CommGroup`, default all processes.

    Raises:
        CollectiveError, WorkerDied: As `broadcast`.
    """
    if _others(group):
        what = f"smp.barrier(group={group.name})"
        runtime.gather(_members(group), f"smp: barrier {group.name}", [], what)


def dp_barrier() -> None:
    """Waits for all processes of this process's dp_group."""
    barrier(CommGroup.DP_GROUP)


def mp_barrier() -> None:
    """Waits for all processes of this process's mp_group."""
    barrier(CommGroup.MP_GROUP)


def send(obj: Any, dest_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> None:
    """Sends an object to another process. Waits until it has received it.

    Args:
        obj: picklable object.
        dest_rank: int, the other process's rank.
        rank_type: `RankType`, the group in which `dest_rank` counts.

    Raises:
        InvalidArgumentError: There is no such other process, or the object cannot be pickled.
        CollectiveError, WorkerDied: As `broadcast`.
    """
    destination = _peer("dest_rank", dest_rank, rank_type)
    _send(obj, [destination], f"smp.send(dest_rank={dest_rank}, {rank_type})")


def recv_from(src_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> Any:
    """Returns the object that another process has sent or broadcast.

    Args:
        src_rank, rank_type: as `dest_rank` and `rank_type` of `send`.

    Raises:
        InvalidArgumentError: There is no such other process.
        CollectiveError: That process does not send.
        WorkerDied: A process has died.
    """
    source = _peer("src_rank", src_rank, rank_type)
    what = f"smp.recv_from(src_rank={src_rank}, {rank_type})"
    (data,) = runtime.mailbox().receive(source, _OBJECT, what)
    obj = pickle.loads(data.data)
    runtime.mailbox().send(source, _RECEIVED, [])  # once unpickled, which may raise
    return obj


def _send(obj: Any, destinations: Sequence[int], what: str) -> None:
    if destinations:
        box = runtime.mailbox()
        box.send_to_all(destinations, _OBJECT, [_pickled(obj)])
        for destination in destinations:
            box.receive(destination, _RECEIVED, what)


def _pickled(obj: Any) -> np.ndarray[Any, Any]:
    try:
        return np.frombuffer(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), np.uint8)
    except Exception as error:  # whatever an object's __reduce__ raises
        raise ShippingError(
            f"Objects must be picklable to be sent. Received: an object of type "
            f"{type(obj).__name__} ({error}). Send its picklable parts."
        ) from error


def _others(group: Any) -> list[int]:
    """Returns the other ranks of a group."""
    if not isinstance(group, CommGroup):
        raise InvalidArgumentTypeError(f"group must be a smp.CommGroup. Received: group={group!r}.")
    return [rank for rank in _members(group) if rank != runtime.rank()]


def _members(group: CommGroup) -> Sequence[int]:
    place = runtime.place()
    if group is CommGroup.WORLD:
        return range(place.size)
    return place.mp_group if group is CommGroup.MP_GROUP else place.dp_group


def _peer(name: str, value: Any, rank_type: Any) -> int:
    """Returns the rank, among all, of another process."""
    if not isinstance(rank_type, RankType):
        raise InvalidArgumentTypeError(
            f"rank_type must be a smp.RankType. Received: rank_type={rank_type!r}."
        )
    members = _members(_GROUPS[rank_type])
    own = members.index(runtime.rank())
    others = dict(enumerate(members))
    del others[own]
    if not isinstance(value, int) or value not in others:
        raise InvalidArgumentError(
            f"{name} must be the rank of another process. Received: {name}={value!r} "
            f"({rank_type}), and the number of processes is {len(members)}; this one has rank "
            f"{own}."
        )
    return others[value]
