"""The part that a rank takes in the others' collectives once its own data have ended.

It gives what changes nothing: zeros to a sum, no rows to a gather.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nanotf.errors import CollectiveError

if TYPE_CHECKING:
    from nanotf.collectives.engine import Array, Engine


class CollectiveKind(enum.IntEnum):
    """The kinds of collectives, `NanotfKind` of `native/shm.h`."""

    NOTHING = 0  # no call has come; in a call: the collective's own kind
    ALL_REDUCE = 1
    ALL_GATHER = 2
    BARRIER = 3
    BROADCAST = 4
    SPREAD = 5  # the last step of a collective over hosts: a broadcast on one host
    OTHER = 6  # each rank gives or gets a part of its own, so none may be missing
    ALL_JOINED = 7  # no call


@dataclass(frozen=True)
class CollectiveOffer:
    """A collective, as a rank that has joined needs to know it."""

    key: int
    kind: CollectiveKind
    type: str = "float32"  # of reductions
    op: str = "sum"
    nbytes: int = 0  # all bytes; of a gather those of a row


def take_part(engine: Engine, offer: CollectiveOffer, rank: int) -> bool:
    """Makes another rank's collective.

    Args:
        rank: this one, in messages.

    Returns:
        True if it is a whole one, and not the last step of one over hosts.

    Raises:
        CollectiveError: It cannot do without this rank. All ranks raise.
    """
    if offer.kind is CollectiveKind.ALL_REDUCE:
        engine.all_reduce([_neutral(offer)], offer.key, offer.op)
    elif offer.kind is CollectiveKind.ALL_GATHER:
        # In bytes, of whatever dtype the others are: a follower has the signature of its guide.
        engine.all_gather(np.empty((0, offer.nbytes), np.uint8), offer.key)
    elif offer.kind is CollectiveKind.BARRIER:
        engine.barrier(offer.key)
    elif offer.kind is CollectiveKind.SPREAD:
        engine.broadcast(np.empty(offer.nbytes, np.uint8), offer.key)
        return False
    else:
        text = missed(f"rank {rank}", offer.kind)
        engine.abort(text)
        raise CollectiveError(text)
    return True


def missed(who: str, kind: CollectiveKind) -> str:
    """Returns the text of an error: who has joined cannot take part in a collective."""
    what = "broadcasts" if kind is CollectiveKind.BROADCAST else "scatters"
    return (
        "who has joined takes part in reductions, gathers and barriers. Received: "
        f"{who} has joined, and another rank {what}. Let all ranks join first"
    )


def last_joined(engine: Engine, key: int, count: int) -> int:
    """Returns the rank that has joined last, once all have.

    Args:
        count: of the collectives in which this rank has taken part since it joined.
    """
    # Clocks of hosts may differ, so they only decide between ranks that joined together.
    rows = engine.all_gather(np.array([[engine.rank, count, -time.time()]]), key).tolist()
    return int(min(rows, key=lambda row: row[1:])[0])


def _neutral(offer: CollectiveOffer) -> Array:
    """Returns the elements that change no result of a reduction."""
    dtype, value = np.dtype(offer.type), 0.0
    if offer.op != "sum" and dtype.kind == "i":
        limits = np.iinfo(dtype)
        value = limits.max if offer.op == "min" else limits.min
    elif offer.op != "sum":
        value = np.inf if offer.op == "min" else -np.inf
    return np.full(offer.nbytes // dtype.itemsize, value, dtype)
