"""A worker's main; its arguments are FD RANK CORES NUMA_NODE TRANSPORT PARENT.

Started by `pool.handles.WorkerProcess`, which passes the inherited socket's descriptor and writes
the secret key to standard input. Nothing of TensorFlow is imported before the process is pinned,
since TensorFlow sizes its thread pools, and the kernel places its memory, by what it finds then.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import errno
import faulthandler
import io
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from typing import Any

from nanotf.collectives.native_library import NativeUnusable
from nanotf.wire import messages
from nanotf.wire.channel import KEY_NBYTES, Channel, ChannelClosed
from nanotf.wire.ports import PortTaken, free_port

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def pin(cores: tuple[int, ...]) -> list[str]:
    """Restricts this process to `cores`. Returns what could not be done, for people."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        return []
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        return [f"could not be pinned to cores {list(cores)}: {error}. It runs unpinned."]
    return []


def end_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends, in whatever way.

    The inbox's thread notices that, too, but not while other code holds Python's lock.

    Args:
        parent: int, the process id of the parent.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it has ended before
            os._exit(1)


def write_stacks() -> None:
    """Makes the log tell where Python is, when this process crashes and when the parent asks."""
    faulthandler.enable(all_threads=False)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGQUIT, all_threads=True)


def leave_interrupts_to_parent() -> None:
    """Makes SIGINT do nothing here: schedulers send it to every process, and one has to decide.

    It was blocked when this process was started. A handler, other than `SIG_IGN`, is not inherited
    by programs that the user's code starts.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored as it is
        signal.signal(signal.SIGINT, lambda number, frame: None)
        signal.siginterrupt(signal.SIGINT, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


class _LogFile(io.FileIO):
    """A standard stream to which a full disk, or `ulimit -f`, is no reason to stop training."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            return len(memoryview(data).cast("B"))


def write_log() -> None:
    """Makes `print` write whole lines to the log at once, as long as the disk takes them."""
    for name in ("stdout", "stderr"):
        raw = _LogFile(getattr(sys, name).fileno(), "w", closefd=False)
        stream = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True
        )
        setattr(sys, name, stream)


def bind_memory(numa_node: int | None) -> None:
    """Prefers memory of a NUMA node, where libnuma is installed and there are several."""
    if numa_node is None:
        return
    name = ctypes.util.find_library("numa")
    if name is None:
        return
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(name)
        if library.numa_available() >= 0 and library.numa_max_node() > 0:
            library.numa_set_preferred(ctypes.c_int(numa_node))


class Inbox:
    """Reads the channel in a thread of its own.

    The thread ends the process when the parent has gone, whatever the main thread does, so
    that no worker outlives its parent.

    Args:
        channel: `Channel`.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        # A `StreamReader`, that of the last job received. It is made here, since batches may follow
        # a job at once, asked for by a rank that is faster: this one may not have begun the job.
        self._streams: Any = None
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[messages.Proceed] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="nanotf-inbox", daemon=True).start()

    def next_job(self) -> Any:
        """Waits for a job: a tuple of the message, its blocks and its `StreamReader`; or `Stop`."""
        return self._jobs.get()

    def answer(self) -> messages.Proceed:
        """Waits for the parent's answer to `Waiting`."""
        return self._answers.get()

    def _read(self) -> None:
        try:
            while True:
                self._route(self.channel.receive())
        except ChannelClosed:
            os._exit(1)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def _route(self, message: messages.Message) -> None:
        from nanotf.shipping.streams import StreamReader
        from nanotf.wire.blocks import Block

        if isinstance(message, messages.Job):
            fds = self.channel.receive_fds(len(message.blocks))
            blocks = [Block(n, fd) for n, fd in zip(message.blocks, fds, strict=True)]
            self._streams = StreamReader(self.channel, message.job)
            self._jobs.put((message, blocks, self._streams))
        elif isinstance(message, messages.Batch):
            block = None
            if message.block is not None:
                block = Block(message.block, self.channel.receive_fds(1)[0])
            self._streams.deliver(message, block)
        elif isinstance(message, messages.EndOfStream):
            self._streams.deliver(message, None)
        elif isinstance(message, messages.Proceed):
            self._answers.put(message)
        elif isinstance(message, messages.Stop):
            self._jobs.put(message)


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
    leave_interrupts_to_parent()
    end_with_parent(int(arguments[5]))
    write_log()
    write_stacks()
    fd, rank = int(arguments[0]), int(arguments[1])
    cores = tuple(int(c) for c in arguments[2].split(",") if c)
    warnings = pin(cores)
    bind_memory(int(arguments[3]) if arguments[3] else None)
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
