"""Facts about the ranks, by Horovod's names.

`nanotf run --ranks` starts the ranks. A process that it has not started is the only rank.
"""

from __future__ import annotations

import sys
from typing import Any

from nanotf.console import say
from nanotf.errors import InvalidArgumentError, JobError, UnavailableError
from nanotf.ranks import this_rank

_state = {"initialized": False}  # set by `init` and `shutdown`


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Begins Horovod's API in this process. Call it before any other function.

    Args:
        comm: None; nanotf has no MPI communicators.
        process_sets: None or empty; all ranks take part in each collective.

    Raises:
        UnavailableError: An argument asks for a part of the ranks.
    """
    if comm is not None or process_sets:
        raise UnavailableError(
            "All ranks take part in Horovod's collectives under nanotf. Received: "
            f"comm={comm!r}, process_sets={process_sets!r}. Call hvd.init() without arguments."
        )
    _state["initialized"] = True
    # Noted for ranks, too: one that uses no such library is told that it trains by itself.
    if this_rank.note_use("horovod") and not this_rank.is_rank():
        say(
            "hvd.init() found no launcher: this process is the only rank. "
            f"`{this_rank.command()}` starts several.",
            sys.stderr,  # scripts may print results for other programs to stdout
        )


def shutdown() -> None:
    """Ends Horovod's API; `init` begins it again."""
    _state["initialized"] = False


def is_initialized() -> bool:
    """Returns True between `init` and `shutdown`."""
    return _state["initialized"]


def place() -> this_rank.RankPlace:
    """Returns this rank's place.

    Raises:
        JobError: `init` has not been called.
    """
    if not _state["initialized"]:
        raise JobError(
            "Horovod must be initialized first. Received: no call of hvd.init() so far. Call it "
            "at the begin of the script; a script of nanotf.smp needs no Horovod: "
            "StepOutput.accumulate() replaces hvd.allreduce, smp.rank() and smp.dp_rank() name "
            "the process."
        )
    return this_rank.place()


def rank() -> int:
    """Returns this process's rank, 0 to `size() - 1`."""
    return place().rank


def size() -> int:
    """Returns the number of ranks."""
    return place().size


def local_rank() -> int:
    """Returns this process's rank among those of its host."""
    return place().local_rank


def local_size() -> int:
    """Returns the number of ranks of this host."""
    return place().local_size


def cross_rank() -> int:
    """Returns the index of this host among those that have a rank of this `local_rank()`."""
    return place().cross_rank


def cross_size() -> int:
    """Returns the number of hosts that have a rank of this `local_rank()`."""
    return place().cross_size


def is_homogeneous() -> bool:
    """Returns True if each host has the same number of ranks."""
    return place().is_homogeneous


def check_root(root_rank: int) -> int:
    """Returns the rank of a root.

    Raises:
        InvalidArgumentError: There is no such rank.
    """
    if not 0 <= int(root_rank) < size():
        raise InvalidArgumentError(
            f"root_rank must be a rank, 0 to {size() - 1}. Received: root_rank={root_rank!r}."
        )
    return int(root_rank)  # NumPy's integers are taken, too


def check_process_set(process_set: Any) -> None:
    """Raises `UnavailableError` if not all ranks are to take part in a collective."""
    # A subset would need a group of its own: each collective waits for all ranks.
    if process_set is not None and process_set is not global_process_set:
        raise UnavailableError(
            "All ranks take part in Horovod's collectives under nanotf. Received: "
            f"process_set={process_set!r}. Leave it out."
        )


class _AllRanks:
    """The process set of all ranks."""

    process_set_id = 0  # Horovod's number of the set of all ranks

    def included(self) -> bool:
        """Returns True: this rank is among them."""
        return True

    def rank(self) -> int:
        """Returns this process's rank."""
        return rank()

    def size(self) -> int:
        """Returns the number of ranks."""
        return size()


global_process_set = _AllRanks()


def _not_built() -> bool:
    """Returns False: nanotf's collectives need no such library."""
    return False


# Scripts ask before they use what is of one library, such as NCCL.
mpi_built = mpi_enabled = mpi_threads_supported = gloo_built = gloo_enabled = _not_built
nccl_built = ddl_built = ccl_built = cuda_built = rocm_built = sycl_built = _not_built
