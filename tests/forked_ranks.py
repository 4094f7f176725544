"""Ranks with mailboxes, forked from the tests' process: for code without TensorFlow."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable, Iterator

from nanotf.sagemaker.smp.mailboxes.mailbox import Mailbox
from nanotf.sagemaker.smp.mailboxes.mailbox_owner import MailboxOwner, supervised


@contextlib.contextmanager
def forked(
    size: int, function: Callable[[Mailbox], None]
) -> Iterator[tuple[MailboxOwner, list[int]]]:
    """Runs a function in processes, each with its mailbox; an exception ends one with code 1.

    Yields:
        The owner of the mailboxes, and the process ids by rank.
    """
    owner = MailboxOwner(size)
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            _run(owner, rank, function)
        pids.append(pid)
    for rank in range(size):
        owner.release(rank)
    try:
        with supervised(owner):
            yield owner, pids
    finally:
        for pid in pids:
            with contextlib.suppress(ChildProcessError, ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        owner.close()


def _run(owner: MailboxOwner, rank: int, function: Callable[[Mailbox], None]) -> None:
    code = 1
    try:
        mailbox = Mailbox(owner.spec(rank))
        function(mailbox)
        mailbox.close()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def end_well(pids: list[int]) -> bool:
    """Waits for all processes; returns True if each has ended with code 0."""
    return all(code == 0 for code in [os.waitpid(pid, 0)[1] for pid in pids])
