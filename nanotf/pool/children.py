"""Starts the interpreters that are children of this process."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanotf.machine.interpreter import python_command
from nanotf.pool.worker_log import WorkerLog
from nanotf.wire.channel import Channel
from nanotf.wire.memory_files import above_standard


def start(
    module: str,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    key: bytes,
    log: WorkerLog,
) -> tuple[subprocess.Popen[bytes], Channel]:
    """Runs a module of nanotf, and hands it one end of a channel.

    Args:
        module: str, its name.
        arguments: sequence of str, what it finds in `sys.argv` after the channel's descriptor.
        environ: mapping, all of its environment variables.
        key: bytes, the channel's secret key, which it reads from standard input.
        log: `WorkerLog`, what it prints.

    Returns:
        A tuple of the process and of this end; neither has shown the other the key yet.

    Raises:
        NanoError: `sys.executable` names no program.
        OSError: This process has no file descriptors left.
    """
    ours, theirs = (
        socket.socket(fileno=above_standard(sock.detach()))
        for sock in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    )
    try:
        command = python_command(module, str(theirs.fileno()), *arguments)
        process: subprocess.Popen[bytes] = in_lasting_thread(
            lambda: _spawn(command, environ, theirs.fileno(), log)
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    assert process.stdin is not None, "a pipe, as asked for"
    with contextlib.suppress(BrokenPipeError):  # died already; the channel will tell
        process.stdin.write(key)
        process.stdin.close()
    return process, Channel(ours)


def _spawn(
    command: list[str], environ: Mapping[str, str], fd: int, log: WorkerLog
) -> subprocess.Popen[bytes]:
    # Inherited: no SIGINT reaches it before it has seen to that itself.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        # A session of its own: Ctrl-C in the terminal is for the parent to handle.
        return subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=log.fileno(),
            stderr=subprocess.STDOUT,
            pass_fds=[fd],
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ------------------------------------------------------------------------ a lasting thread
# Linux ends a worker with the *thread* that started it (PR_SET_PDEATHSIG), while a pool outlives
# the thread that happened to need it first. So one thread, which never ends, starts them all.
_tasks: queue.SimpleQueue[Callable[[], None]] | None = None
_tasks_owner = 0  # the process that the thread belongs to; a forked one needs a thread of its own
_tasks_lock = threading.Lock()


def in_lasting_thread(function: Callable[[], Any]) -> Any:
    """What a function returns or raises when the lasting thread of this process calls it."""
    global _tasks, _tasks_owner
    outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def task() -> None:
        try:
            outcome.put((function(), None))
        except BaseException as error:
            outcome.put((None, error))

    with _tasks_lock:
        if _tasks is None or _tasks_owner != os.getpid():
            _tasks, _tasks_owner = queue.SimpleQueue(), os.getpid()
            threading.Thread(
                target=_run_tasks, args=(_tasks,), name="nanotf-starter", daemon=True
            ).start()
        _tasks.put(task)
    result, error = outcome.get()
    if error is not None:
        raise error
    return result


def _run_tasks(tasks: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        tasks.get()()
