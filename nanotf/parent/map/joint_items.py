"""Items that run at the same time, one a worker: each is a rank among the others.

What ranks share, such as a connection, the caller gives them as descriptors of files. An item that
fails ends the call, and the pool's workers are killed: the others may wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nanotf.console import ItemBar
from nanotf.parent.map import item_call
from nanotf.parent.map.item_output import PassedOnOutput
from nanotf.parent.map.item_results import Results
from nanotf.parent.map.item_run import ItemRun
from nanotf.parent.map.item_task import Policy, Task
from nanotf.parent.where import check_may_start
from nanotf.pool import backends
from nanotf.shipping import orders
from nanotf.wire.blocks import Block

Array = np.ndarray[Any, Any]


def together(
    function: Callable[..., Any],
    labels: Sequence[str],
    shared: Mapping[str, Any],
    descriptors: Callable[[int], tuple[int, ...]],
    call: str,
    placed: Callable[[Callable[[Array], Array]], None],
) -> list[Any]:
    """Calls `function(rank, **shared, descriptors=...)` in one worker for each rank.

    Args:
        labels: the ranks for people; as many as workers.
        shared: keyword arguments; arrays are mapped by all workers.
        descriptors: returns those that a rank gets; the caller closes its own.
        call: the call as the user wrote it, for errors.
        placed: called once the arrays of `shared` lie in shared memory, before a rank begins. It
            gets a function that replaces such an array by its read-only copy there, so that the
            caller need not keep its own.

    Returns:
        The results, by rank. Large arrays in them are read-only, and in shared memory.

    Raises:
        PlacementError: There are fewer cores than ranks.
        ShippingError: An argument cannot be sent; the message names it.
        WorkerError: A rank has failed.
        WorkerDied: A worker has died; its `index` is the rank.
    """
    check_may_start(call)
    size = len(labels)
    # No restarts: a rank that fails ends the call.
    policy = Policy(backends.plan("local", size, None, None), 0, None, None)
    task = item_call.task_of(function, range(size), shared, 0, orders.Terminal.capture(), False)
    run = _JointItems(task, policy, descriptors, labels, placed)
    with Results(run, size, True, True, in_place=True) as results:  # ordered; raises
        return results.all()


class _JointItems(ItemRun):
    """Items that run at the same time, one a worker."""

    def __init__(
        self,
        task: Task,
        policy: Policy,
        descriptors: Callable[[int], tuple[int, ...]],
        labels: Sequence[str],
        placed: Callable[[Callable[[Array], Array]], None],
    ) -> None:
        super().__init__(task, policy, ItemBar("", 0), PassedOnOutput())
        self._descriptors, self._labels, self._placed = descriptors, labels, placed

    def _has_placed(self, block: Block) -> None:
        moved = self.task.function.packer.moved(block)
        self.task.function.packer.parts.clear()  # so that nothing here refers to the arrays
        self._placed(moved)

    def _ends(self, index: int) -> tuple[int, ...]:
        return self._descriptors(index)

    def _name(self, index: int) -> str:
        return self._labels[index]

    def _remedy(self) -> str:
        return ""
