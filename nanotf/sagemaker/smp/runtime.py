"""This process's configuration, place and mailbox.

`nanotf run --smp` starts the ranks (`nanotf.ranks`), and gives each its mailbox by `enter`, before
the script begins. Without it, this process is the only one.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import os
import pathlib
import shlex
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from nanotf.console import logger
from nanotf.errors import InvalidArgumentError, JobError, UnavailableError
from nanotf.region import context
from nanotf.sagemaker.smp import rank_groups
from nanotf.sagemaker.smp.config import Config, is_int, load
from nanotf.sagemaker.smp.mailboxes.mailbox import Mailbox
from nanotf.tracebacks import raising_at_the_call

T = TypeVar("T")


@dataclasses.dataclass
class _Process:
    """This process, as a rank of smp."""

    config: Config | None = None  # since `init`
    mailbox: Mailbox | None = None  # of one of several ranks; `enter` sets it
    hosts: tuple[str, ...] = ()  # of the ranks


_here = _Process()
_hooks: list[Callable[[], Any]] = []  # until the first step: `register_post_partition_hook`
# The `trace.Notes` of the model's call that is traced; `partition` notes operations there.
notes: contextvars.ContextVar[Any] = contextvars.ContextVar("nanotf_smp_notes", default=None)
# The models that steps have called, in the order of their first calls.
called: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
# While the code of a step, or of `save_model`, may call models: gets those that it calls.
calling: contextvars.ContextVar[weakref.WeakKeyDictionary[Any, None] | None]
calling = contextvars.ContextVar("nanotf_smp_calling", default=None)


@contextlib.contextmanager
def setting(variable: contextvars.ContextVar[T], value: T) -> Iterator[None]:
    """Gives a variable of the context a value, in this context."""
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


def enter(mailbox: Mailbox | None, hosts: tuple[str, ...] = ()) -> None:
    """Makes this process a rank. Called before the user's script begins.

    Args:
        mailbox: None makes this process the only one again.
        hosts: the names of those that have ranks; several leave smp without mailboxes.
    """
    _here.mailbox, _here.config, _here.hosts = mailbox, None, hosts


def is_rank() -> bool:
    """Returns True if this process is one of several ranks."""
    return _here.mailbox is not None


def is_used() -> bool:
    """Returns True if the script has called `init`."""
    return _here.config is not None


def mailbox() -> Mailbox:
    """Returns this rank's mailbox. Raises `JobError` in a process that is the only one."""
    if _here.mailbox is None:
        raise JobError(
            "Only ranks that `nanotf run --smp` starts have mailboxes. Received: a single process."
        )
    return _here.mailbox


def gather(
    group: Sequence[int], tag: str, arrays: Sequence[Any], what: str | None = None
) -> list[Any]:
    """Sends arrays to the other ranks of a group; returns the lists of all, in the group's order.

    All of them call this in the same order. Mailboxes send without waiting, so nobody blocks.

    Args:
        group: with this rank.
        tag: the same on all of them.
        arrays: of any shapes, which may differ between ranks.
        what: the call, for errors about ranks that do not make it; None for that of `receive`.
    """
    own, others = rank(), [each for each in group if each != rank()]
    if others:  # the only process has no mailbox
        mailbox().send_to_all(others, tag, list(arrays))
    return [list(arrays) if each == own else mailbox().receive(each, tag, what) for each in group]


@raising_at_the_call
def init(config: dict[str, Any] | None = None) -> None:
    """Begins smp in this process. Call it before any other function of smp.

    A later call begins anew with another configuration; functions decorated by `smp.step` are
    traced again.

    Args:
        config: dict, default None, which reads the environment variable `SM_HP_MP_PARAMETERS`
            (JSON). The keys and defaults are those of SageMaker's smp; "partitions" is required.
            Equal on all ranks.

    Raises:
        InvalidArgumentError, InvalidArgumentTypeError: The configuration breaks a rule, or the
            number of processes is not divisible by the number of partitions.
        JobError: It asks for more than one partition in a process that is the only one.
        CollectiveError: In a later call: ranks have different configurations.
        UnavailableError: The call is in a `@nano` function with several workers, or the ranks are
            on several hosts.
    """
    found = load(config, os.environ)
    if context.size() > 1:
        raise UnavailableError(
            "nanotf.smp does not run in a @nano function with several workers. Received: "
            f"smp.init() in one with {context.size()} workers. Call it in your own process."
        )
    if len(_here.hosts) > 1:
        raise UnavailableError(
            "The ranks of nanotf.smp run on one host. Received: smp.init() on the hosts "
            f"{', '.join(_here.hosts)}. Start the script on one of them."
        )
    if _here.mailbox is not None:  # its owner compares the configurations of all ranks
        _here.mailbox.introduce(_place(found).mp_rank, repr(found))
    elif found.partitions > 1:
        raise JobError(
            "Each partition of a model needs a process. Received: partitions="
            f"{found.partitions}, in the only process. Start the script with\n"
            f"    {command(found.partitions)}\n"
            "A larger number, divisible by that of partitions, trains several copies."
        )
    _here.config = found  # only now: a call that raises leaves the configuration before
    _hooks.clear()
    for line in found.without_effect() if _place(found).rank == 0 else ():
        logger.warning("%s", line)


def command(processes: int | None) -> str:
    """Returns the command that starts this script as so many ranks."""
    # No script: `python -c`, or Python's prompt.
    is_script = pathlib.Path(sys.argv[0]).is_file()
    words = sys.argv if is_script else ["train.py", *sys.argv[1:]]
    return f"nanotf run --smp -n {processes} {shlex.join(words)}"


def current() -> Config:
    """Returns the configuration. Raises `JobError` before `init`."""
    if _here.config is None:
        raise JobError("smp must be initialized first. Received: no call of smp.init() so far.")
    return _here.config


def place() -> rank_groups.Place:
    """Returns this process's place."""
    return _place(current())


def _place(config: Config) -> rank_groups.Place:
    rank, size = (0, 1) if _here.mailbox is None else (_here.mailbox.rank, _here.mailbox.size)
    return rank_groups.place(rank, size, config.partitions, config.placement_strategy)


def rank() -> int:
    """Returns this process's rank, 0 to `size() - 1`."""
    return place().rank


def size() -> int:
    """Returns the number of processes: `mp_size() * dp_size()`."""
    return place().size


def local_rank() -> int:
    """Returns this process's rank on its host."""
    return place().rank


def local_size() -> int:
    """Returns the number of processes on this host."""
    return place().size


def mp_rank() -> int:
    """Returns the partition that this process holds."""
    return place().mp_rank


def mp_size() -> int:
    """Returns the number of partitions."""
    return place().mp_size


pp_rank, pp_size = mp_rank, mp_size  # without tensor parallelism, as in the original


def dp_rank() -> int:
    """Returns the copy of the model to which this process belongs; use it to choose data."""
    return place().dp_rank


def dp_size() -> int:
    """Returns the number of copies of the model."""
    return place().dp_size


def get_mp_group() -> list[int]:
    """Returns the ranks of the processes that hold this copy of the model."""
    return list(place().mp_group)


def get_dp_group() -> list[int]:
    """Returns the ranks of the processes that hold this partition."""
    return list(place().dp_group)


def has_replicas() -> bool:
    """Returns True if there are several copies of the model."""
    return _here.mailbox is not None and dp_size() > 1


def num_microbatches() -> int:
    """Returns the number of microbatches of a step."""
    return current().microbatches


@contextlib.contextmanager
def partition(index: int) -> Iterator[None]:
    """Assigns the operations in this context to a partition; the innermost context wins.

    Ignored with `auto_partition`, which is the default.

    Args:
        index: int, less than `partitions`.

    Raises:
        InvalidArgumentError: There is no such partition.
    """
    found = current()
    if not found.auto_partition and not (is_int(index) and 0 <= index < found.partitions):
        raise InvalidArgumentError(
            "The index of smp.partition must be less than the number of partitions. Received: "
            f"index={index!r}, partitions={found.partitions}."
        )
    noting = notes.get()
    # With one partition, and outside a model's call, nobody notes operations.
    if noting is None or found.auto_partition:
        yield
        return
    with noting.assigned(index):
        yield


def register_post_partition_hook(
    hook: Callable[..., Any], *args: Any, **kwargs: Any
) -> Callable[..., Any]:
    """Registers a function that runs once, eagerly, in the first step.

    It runs after the model is built and before the step computes. Returns the function, so that it
    can be used as a decorator.

    Args:
        hook: the function.
        *args, **kwargs: its arguments.
    """
    current()  # raises before `init`
    _hooks.append(functools.partial(hook, *args, **kwargs))
    return hook


def run_hooks() -> None:
    """Runs and forgets the registered functions."""
    while _hooks:
        _hooks.pop(0)()  # removed first, as it may raise


def allowed(
    models: weakref.WeakKeyDictionary[Any, None] | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Lets models be called in the context that it returns.

    Args:
        models: gets those that are called.
    """
    return setting(calling, weakref.WeakKeyDictionary() if models is None else models)
