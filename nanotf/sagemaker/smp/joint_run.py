"""A function on all workers at the same time: each is a rank, with a mailbox for the others.

    together      gives each worker of a `nanotf.map` pool one item, its rank
      JointRun    sends the ends of a mailbox along; the function gets them as `descriptors`

The function makes its mailbox from them (`in_workers`). This process supervises the mailboxes as
`nanotf run --smp` does. A rank that fails ends the call, and the pool's workers are killed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanotf.parent.map import mapping
from nanotf.parent.map.item_results import Results
from nanotf.parent.map.item_run import ItemRun, Policy, Task
from nanotf.parent.where import check_may_start
from nanotf.pool import backends
from nanotf.pool.stalls import stall_seconds
from nanotf.sagemaker.smp.mailboxes.mailbox_owner import MailboxOwner, supervised
from nanotf.shipping import orders


def together(
    function: Callable[..., Any],
    labels: Sequence[str],
    shared: Mapping[str, Any],
    call: str,
) -> list[Any]:
    """Calls `function(rank, **shared, descriptors=...)` in one worker for each rank.

    Args:
        function: one of this package.
        labels: the ranks for people; as many as workers.
        shared: keyword arguments; arrays are mapped by all workers.
        call: the call as the user wrote it, for errors.

    Returns:
        The results, by rank.

    Raises:
        PlacementError: There are fewer cores than ranks.
        ShippingError: An argument cannot be sent; the message names it.
        WorkerError: A rank has failed.
        WorkerDied: A worker has died; its `index` is the rank.
        CollectiveError: Ranks wait for each other.
    """
    check_may_start(call)
    size = len(labels)
    # No restarts: a rank that fails ends the call.
    policy = Policy(backends.plan("local", size, None, None), 0, None, None)
    task = mapping.task_of(function, range(size), shared, 0, orders.Terminal.capture())
    owner = MailboxOwner(size, stall_seconds())
    try:
        with (
            supervised(owner),
            Results(JointRun(task, policy, owner, labels), size, True, True, None) as results,
        ):
            return results.all()
    finally:
        owner.close()


class JointRun(ItemRun):
    """Items that run at the same time, one a worker.

    Args:
        task, policy: see `ItemRun`.
        owner: of as many ranks as there are items; the caller closes it.
        labels: the ranks for people.
    """

    def __init__(
        self, task: Task, policy: Policy, owner: MailboxOwner, labels: Sequence[str]
    ) -> None:
        super().__init__(task, policy)
        self._owner, self._labels = owner, labels

    def _ends(self, index: int) -> tuple[int, ...]:
        return self._owner.spec(index).fds

    def _name(self, index: int) -> str:
        return self._labels[index]

    def _remedy(self) -> str:
        return ""
