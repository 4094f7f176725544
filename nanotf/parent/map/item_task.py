"""The work of a call of `nanotf.map`, how it is to be done, and what comes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from nanotf.compat.process_state import ProcessState
from nanotf.pool.plans import AnyPlan
from nanotf.shipping import orders
from nanotf.shipping.objects.packing import Packer, Pickled
from nanotf.wire.blocks import Block


class PackedObject(NamedTuple):
    """A pickled object, and the arrays that lie beside it."""

    whole: Pickled
    packer: Packer

    def block(self) -> Block | None:
        """Returns a new block with the arrays; None if there are none."""
        return self.packer.block() if self.packer.nbytes else None

    @property
    def nbytes(self) -> int:
        """Returns the size of it all in bytes."""
        return len(self.whole.body) + self.packer.nbytes


@dataclasses.dataclass(frozen=True)
class Task:
    """The work of a call."""

    name: str  # of the function, for people
    names: tuple[str, ...]  # of the function's keyword arguments
    function: PackedObject  # a tuple of the function and the values of its keyword arguments
    items: Sequence[PackedObject]
    values: Sequence[Any]  # the items themselves, for their names in errors
    seed: int  # with an item's index it seeds the item's random numbers
    state: ProcessState  # of this process when the user made the call
    terminal: orders.Terminal
    quiet: bool  # as in `orders.TaskShipment`

    def shipment(self, has_block: bool) -> orders.TaskShipment:
        """Returns what a worker gets with its first items.

        Args:
            has_block: as in `orders.TaskShipment`.
        """
        whole = self.function.whole
        return orders.TaskShipment(whole, self.names, has_block, self.terminal, self.quiet)


@dataclasses.dataclass(frozen=True)
class Policy:
    """Decisions about the workers of a call."""

    plan: AnyPlan
    max_restarts: int  # how often an item whose worker died is run again
    recycle_after: int | None  # items of the call after which a worker is replaced; None for never
    # Bytes above which a worker is replaced; None for no limit; `topology.AUTO` for a growth above
    # `GROWTH_LIMIT`.
    memory_limit: int | str | None


@dataclasses.dataclass(slots=True)  # a frozen one takes three times as long to make
class Outcome:
    """The end of an item."""

    index: int  # of the item
    result: Pickled | None = None  # None if the item failed
    block: Block | None = None  # the result's arrays; None if it has none
    error: Exception | None = None


def seeds_of(base: int, count: int) -> list[int]:
    """Returns the seeds of so many items; more items do not change those of the first.

    `numpy.random.SeedSequence` makes them of the base of the call.
    """
    found: list[int] = np.random.SeedSequence(base).generate_state(count).tolist()
    return found
