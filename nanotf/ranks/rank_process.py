"""The process of a rank, see `rank_launch`.

python -m nanotf.ranks.rank_process FD PARENT RANK
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Sequence

from nanotf.console import logger, say
from nanotf.machine import cluster
from nanotf.machine.own_exit import at_own_exit, end_with_parent
from nanotf.ranks import this_rank
from nanotf.ranks.rank_order import RankOrder
from nanotf.sagemaker.smp import runtime
from nanotf.sagemaker.smp.mailboxes.mailbox import Mailbox
from nanotf.worker import process


def main(arguments: Sequence[str]) -> None:
    """Runs a script as a rank.

    Args:
        arguments: the descriptor of a file with a pickled `RankOrder`, the process id of the
            parent, and the rank, which only lists of processes show.
    """
    fd, parent, _ = map(int, arguments)
    end_with_parent(parent)
    with os.fdopen(fd, "rb") as file:
        file.seek(0)  # the position is the parent's, where it has ended to write
        order: RankOrder = pickle.load(file)
    placement = order.placement
    for warning in process.pin(placement.cores if placement.pin else ()):
        logger.warning("Rank %s %s", placement.rank, warning)
    process.bind_memory(placement.numa_node)
    process.write_stacks()
    _write_whole_lines()
    mailbox = None if order.mailbox is None else Mailbox(order.mailbox)
    if mailbox is not None:
        # Registered before the script's handlers, it runs after them.
        at_own_exit(mailbox.close)
    runtime.enter(mailbox, order.cluster.hosts)
    this_rank.enter(order.seat)
    cluster.choose(order.cluster)  # TF_CONFIG names the ranks
    _run(order)


def _run(order: RankOrder) -> None:
    try:
        order.script.run_as_rank(order.placement.rank)
    except SystemExit as end:
        if not end.code:  # `sys.exit()` and `sys.exit(0)` end a script that succeeded
            _tell_if_alone()
        raise
    _tell_if_alone()


def _tell_if_alone() -> None:
    """Says so if the ranks had nothing to do with each other."""
    place = this_rank.place()
    if place.rank == 0 and place.size > 1 and this_rank.is_alone() and not runtime.is_used():
        say(
            f"each of the {place.size} ranks ran the script for itself: it made no strategy of "
            "tf.distribute and called neither hvd.init() nor smp.init(). "
            f"`nanotf run -n {place.size}`, without --ranks, divides each fit() instead.",
            sys.stderr,
        )


def _write_whole_lines() -> None:
    """Makes `print` write each line at once, and in one piece: other ranks print, too."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None if it is closed
            stream.reconfigure(line_buffering=True, write_through=False)


if __name__ == "__main__":
    main(sys.argv[1:])
