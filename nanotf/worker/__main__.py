"""A worker's main; its arguments are FD RANK CORES NUMA_NODE TRANSPORT PARENT.

Started by `pool.handles.WorkerProcess`, which passes the inherited socket's descriptor and writes
the secret key to standard input. Nothing of TensorFlow is imported before the process is pinned,
since TensorFlow sizes its thread pools, and the kernel places its memory, by what it finds then.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from typing import Any

from nanotf.collectives.native_library import NativeUnusable
from nanotf.wire import messages
from nanotf.wire.channel import KEY_NBYTES, Channel, ChannelClosed
from nanotf.wire.ports import PortTaken, free_port
from nanotf.worker import process
from nanotf.worker.inbox import Inbox


def _setup(
    channel: Channel, rank: int, cores: tuple[int, ...], port: int | None, warnings: list[str]
) -> Any:
    """Says hello, learns its place, and makes the session. Returns None if that failed."""
    channel.send(messages.Hello(rank, os.getpid(), cores, port, tuple(warnings)))
    setup = channel.receive()
    fds = channel.receive_fds(1 if setup.group is not None else 0)
    sys.path[:] = setup.sys_path
    sys.argv[:] = setup.argv
    try:
        from nanotf.worker import session

        made = session.Session(rank, channel, setup, fds)
    except BaseException as error:
        unusable = str(error) if isinstance(error, NativeUnusable) else None
        retry = isinstance(error, (NativeUnusable, PortTaken))
        summary = f"{type(error).__name__}: {error}"
        channel.send(messages.SetupFailed(rank, retry, summary, traceback.format_exc(), unusable))
        return None
    return made


def main(arguments: list[str]) -> int:
    """Runs a worker until its parent says stop or goes away. Returns the exit code."""
    process.leave_interrupts_to_parent()
    process.end_with_parent(int(arguments[5]))
    process.write_log()
    process.write_stacks()
    fd, rank = int(arguments[0]), int(arguments[1])
    cores = tuple(int(c) for c in arguments[2].split(",") if c)
    warnings = process.pin(cores)
    process.bind_memory(int(arguments[3]) if arguments[3] else None)
    # Not until the end of the file: a fork of the parent's, made just now, may hold it open.
    key = sys.stdin.buffer.read(KEY_NBYTES)
    channel = Channel(socket.socket(fileno=fd))
    try:
        channel.show_key_first(key)
        port = free_port() if arguments[4] == "grpc" else None
        made = _setup(channel, rank, cores, port, warnings)
    except ChannelClosed:
        return 1
    if made is None:
        return 1
    inbox = Inbox(channel)
    channel.send(messages.Ready(rank))
    while True:
        job = inbox.next_job()
        if isinstance(job, messages.Stop):
            # Interpreter shutdown would run TensorFlow's destructors, which can take seconds
            # or wait for a peer that has gone; nothing of a worker's is worth saving.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        made.run(inbox, *job)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
