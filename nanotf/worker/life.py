"""Runs a worker: it sends `Hello`, receives its setup, and runs one order after another.

No TensorFlow operation runs before the process is pinned. TensorFlow sizes its thread pools by the
cores available at its first operation, and the kernel places memory near them.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from typing import Any

from nanotf import tracebacks
from nanotf.machine import time_slices
from nanotf.pool.transports import CALLS, NO_TRANSPORT, READS
from nanotf.wire import messages
from nanotf.wire.channel import Channel, ChannelClosed
from nanotf.wire.ports import PortTaken, free_port
from nanotf.worker import process
from nanotf.worker.inbox import Inbox


def _setup(
    channel: Channel, rank: int, port: int | None, warnings: list[str], transport: str
) -> Any:
    """Sends `Hello`, receives the setup, and makes the session. Returns None if that failed."""
    channel.send(messages.Hello(port, tuple(warnings)))
    setup = channel.receive()
    # The group's memory, then its connections to other hosts.
    fds = channel.receive_fds(1 + setup.connections if setup.group is not None else 0)
    setup.state.begin()
    try:
        made = _session(transport)(rank, channel, setup, fds)
    except BaseException as error:
        retry = isinstance(error, PortTaken)  # the next start takes another port
        summary = f"{type(error).__name__}: {error}"
        channel.send(messages.SetupFailed(retry, summary, traceback.format_exc()))
        return None
    return made


def replace_for_life() -> None:
    """Replaces what must differ in TensorFlow for as long as a worker lives, whatever it runs.

    A worker finds this done by the process that forked it: to look through all modules takes time,
    and a copy of every page that holds an object.
    """
    from nanotf.compat import custom_gradients, quiet_bars, replacements, step_errors

    tables = custom_gradients.TABLE, quiet_bars.TABLE, step_errors.TABLE
    table = [row for each in tables for row in each if row.applies()]
    if not all(row.is_installed() for row in table):
        replacements.install(table, None)


def _session(transport: str) -> Any:
    """Returns the class of a worker's session; imports TensorFlow."""
    replace_for_life()
    if transport == NO_TRANSPORT:
        from nanotf.worker import item_session

        return item_session.ItemSession
    if transport == READS:
        from nanotf.worker import reading_session

        return reading_session.ReadingSession
    if transport == CALLS:
        from nanotf.worker import call_session

        return call_session.CallSession
    from nanotf.worker import session

    return session.Session


def run(fd: int, fork: messages.Fork) -> int:
    """Runs a worker until its parent sends `Stop` or exits.

    Args:
        fd: the descriptor of the socket to the parent.
        fork: what the parent asked the zygote for.

    Returns:
        The exit code, if the worker could not be set up. After `Stop`, the process exits here.
    """
    tracebacks.enter_worker()
    process.refuse_breakpoints()
    process.write_log()
    process.write_stacks()
    warnings = process.pin(fork.cores)
    process.size_blas()  # after `pin`, whose cores it counts
    time_slices.finish_slices()
    process.bind_memory(fork.numa_node)
    channel = Channel(socket.socket(fileno=fd))
    try:
        channel.show_key_first(fork.key)
        port = free_port() if fork.transport == "grpc" else None
        made = _setup(channel, fork.rank, port, warnings, fork.transport)
    except ChannelClosed:
        return 1
    if made is None:
        return 1
    inbox = Inbox(channel)  # no earlier: it reads the channel in a thread of its own
    channel.send(messages.Ready())
    while True:
        order = inbox.next_order()
        if isinstance(order, messages.Stop):
            # Interpreter shutdown would run TensorFlow's destructors, which can take seconds
            # or wait for a peer that is gone. A worker has nothing worth saving.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        made.run(inbox, *order)
