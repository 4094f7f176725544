"""The process that workers are forked from. It has imported TensorFlow, but run no operation.

A process that imports TensorFlow takes seconds to start; its fork takes milliseconds. A fork works
as long as TensorFlow has run no operation (seen with 2.14 to 2.21, both Keras generations): the
only threads at that point belong to NumPy's BLAS, which ends and restarts them around a fork.

    parent                                     zygote
      |  Fork (rank, cores ...; 4 descriptors) ->  |   forks; the child becomes a worker
      |  <- process id, later how it ended         |   on a pipe for each worker

It begins as a new interpreter (`main`), or as a fork of the parent, if that has imported TensorFlow
and done nothing yet (`become`).

If TensorFlow must not be imported before the fork, each worker has its own zygote, which imports
nothing. Whatever ends the parent ends the zygote. The kernel then ends the workers
(PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import pathlib
import signal
import socket
import sys
import traceback
import types
from importlib import machinery
from multiprocessing import connection
from typing import Any, NoReturn

from nanotf.compat import process_state
from nanotf.machine import forking, interpreter, neighbours
from nanotf.machine.own_exit import end_with_parent
from nanotf.wire import messages
from nanotf.wire.channel import KEY_NBYTES, Channel, ChannelClosed
from nanotf.wire.memory_files import STANDARD
from nanotf.worker import life, process

POLL_SECONDS = 1.0  # between checks that the parent still exists


class _Zygote:
    """The loop that forks workers and reports how they ended.

    Args:
        channel: the one to the parent.
        parent: the parent's process id.
    """

    def __init__(self, channel: Channel, parent: int) -> None:
        self._channel, self._parent = channel, parent
        self._own_pid = os.getpid()
        self._pipes: dict[int, int] = {}  # to report about a worker, by its process id
        self._woken, waking = os.pipe()  # a signal writes a byte: it wakes `serve`
        for fd in (self._woken, waking):
            os.set_blocking(fd, False)
        # The parent may ignore SIGCHLD, and children inherit that.
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        # Schedulers send it to every process. The zygote's end would end all workers.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)

    def serve(self) -> tuple[messages.Fork, int]:
        """Forks as often as the parent asks; returns only in the forks.

        Returns:
            The order and the descriptor of the worker's socket.

        Raises:
            ChannelClosed: The parent needs no more workers.
        """
        while True:
            waiting: list[Any] = [self._channel, self._woken]
            ready: list[Any] = connection.wait(waiting, POLL_SECONDS)
            if os.getppid() != self._parent:  # it is gone, but a fork of it holds the channel
                raise ChannelClosed
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 4096)
                self._report_ended()
            if self._channel in ready:
                order = self._channel.receive()
                sock, log, directory, pipe = self._channel.receive_fds(4)
                if self._fork(pipe) == 0:
                    self._become_worker(log, directory)
                    return order, sock
                for fd in (sock, log, directory):
                    os.close(fd)

    def _fork(self, pipe: int) -> int:
        try:
            pid = forking.fork()
        except OSError as error:
            _tell(pipe, -(error.errno or errno.EAGAIN))  # below 0: no process id
            os.close(pipe)
            return -1
        self._pipes[pid] = pipe  # in the fork, under 0: it closes this one with the others
        if pid > 0:
            _tell(pipe, pid)
        return pid

    def _report_ended(self) -> None:
        # All of them: signals of one kind merge, so one byte may tell of several ends.
        for pid, pipe in list(self._pipes.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._pipes[pid]
                _tell(pipe, os.waitstatus_to_exitcode(status))
                os.close(pipe)

    def _become_worker(self, log: int, directory: int) -> None:
        """Resets this fork to the state of a newly started process."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end_with_parent(self._own_pid)
        process.rename(neighbours.WORKER)
        os.fchdir(directory)
        os.close(directory)
        self._channel.close()
        for pipe in self._pipes.values():
            os.close(pipe)
        os.setsid()  # Ctrl-C in the terminal is for the parent to handle
        for standard in STANDARD[1:]:
            os.dup2(log, standard)
        os.close(log)


def _tell(pipe: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the parent no longer waits for this worker
        os.write(pipe, messages.STATUS.pack(number))


def main(arguments: list[str]) -> int:
    """Forks workers until the parent exits. The arguments are FD, PARENT and "imports" or "".

    Returns:
        In the forks, the exit code of a worker. The zygote itself exits here.
    """
    fd, parent, imports = arguments
    # Not to the pipe's end: a fork of the parent may hold the other end open.
    key = sys.stdin.buffer.read(KEY_NBYTES)
    return _live(int(fd), int(parent), key, imports=bool(imports))


_of_parent: list[Any] = []  # what would finalize the parent's objects if it went


def become(fd: int, parent: int, key: bytes, log: int) -> NoReturn:
    """Makes this fork of the parent what `main` is, and ends it.

    Nothing of the parent's may be seen outside: no descriptor stays open, no object is finalized,
    and no function runs at the exit.

    Args:
        fd: the descriptor of the channel to the parent.
        parent: the parent's process id.
        key: the channel's.
        log: the descriptor of the file to print to.
    """
    code = 1
    try:
        gc.disable()  # a collection would finalize objects of the parent's
        _of_parent.extend([sys.stdin, sys.stdout, sys.stderr])
        os.setsid()
        for standard in STANDARD[1:]:
            os.dup2(log, standard)
        process.write_log()
        _close_all_but({*STANDARD, fd})
        _forget_handlers()
        _forget_program()
        code = _live(fd, parent, key, imports=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):  # the disk may be full
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _close_all_but(kept: set[int]) -> None:
    for name in list(pathlib.Path("/proc/self/fd").iterdir()):
        if int(name.name) not in kept:
            with contextlib.suppress(OSError):  # that of the listing
                os.close(int(name.name))


def _forget_handlers() -> None:
    """Resets the signals that the parent handles, as a new program would find them."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            default = number == signal.SIGINT and signal.default_int_handler
            signal.signal(number, default or signal.SIG_DFL)


def _forget_program() -> None:
    """Drops the script and the user's modules: a worker imports them when it needs them."""
    users = process_state.users_modules()
    # Compiled modules may be loaded only once, such as those of a NumPy that the user has built.
    compiled = {name.partition(".")[0] for name, module in users.items() if _is_compiled(module)}
    for name in ["__main__", *users]:
        if name.partition(".")[0] not in compiled:
            _of_parent.append(sys.modules.pop(name, None))
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = [__file__]
    sys.path[:] = interpreter.with_standard_first(sys.path)


def _is_compiled(module: types.ModuleType) -> bool:
    return (process_state.file_of(module) or "").endswith(tuple(machinery.EXTENSION_SUFFIXES))


def _live(fd: int, parent: int, key: bytes, *, imports: bool) -> int:
    process.leave_interrupts_to_parent()
    process.write_log()
    process.rename(neighbours.ZYGOTE)
    if sys.stdin is not None:
        sys.stdin.close()
    os.dup2(os.open(os.devnull, os.O_RDONLY), STANDARD[0])
    channel = Channel(socket.socket(fileno=fd))
    gc.disable()  # what imports make stays; looking for garbage takes a fifth of their time
    if imports:
        # An import that fails here fails again in the workers, which tell the parent.
        with contextlib.suppress(Exception):
            from nanotf.region import overrides
            from nanotf.worker import (  # noqa: F401, for the forks to find
                item_session,
                reading_session,
                session,
            )

            life.replace_for_life()
            overrides.find()
    gc.freeze()  # a collection in a fork would copy every page that holds an object
    gc.enable()
    try:
        channel.show_key_first(key)
        order, sock = _Zygote(channel, parent).serve()
    except ChannelClosed:
        os._exit(0)  # also ends any workers, and skips TensorFlow's destructors
    os.environ.clear()
    os.environ.update(order.environ)  # as the parent asks: the zygote's may be older
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, order.usable)
    return life.run(sock, order)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
