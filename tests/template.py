"""A process that has imported slow modules and run nothing, so that tests can fork it.

A process that imports TensorFlow takes seconds to start, its fork milliseconds. A fork works as
long as TensorFlow has run no operation (seen with 2.14 to 2.21, both Keras generations).
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import importlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from waiting import SECONDS

_NUMBER = struct.Struct("i")
_MESSAGE_NBYTES, _DESCRIPTORS = 1 << 16, 16


class Forked:
    """A running fork, with the methods of `subprocess.Popen` that tests need.

    Args:
        status: int, a pipe that delivers its process id and its exit status.
    """

    def __init__(self, status: int) -> None:
        self._status = status
        self.pid = self._next()
        self.returncode: int | None = None
        os.set_blocking(status, False)

    def _next(self) -> int:
        data = os.read(self._status, _NUMBER.size)
        if len(data) < _NUMBER.size:
            raise RuntimeError("the template ended")
        number: int = _NUMBER.unpack(data)[0]
        return number

    def poll(self) -> int | None:
        """Returns the exit code, or None while it runs; a signal is negative."""
        if self.returncode is None:
            try:
                self.returncode = self._next()
            except BlockingIOError:
                return None
            os.close(self._status)
        return self.returncode

    def wait(self, timeout: float = SECONDS) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.002)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # reaped, but not reported yet
                os.kill(self.pid, number)


class Template:
    """The process that tests fork.

    Args:
        modules: names of the modules to import in it.
        environment: mapping, its environment variables during the imports.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = (
            f"import sys; sys.path[:] = {sys.path}; "
            f"import template; template.serve({theirs.fileno()}, {list(modules)})"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=[theirs.fileno()], env=dict(environment)
            )

    def start(
        self,
        function: Callable[..., None],
        *arguments: Any,
        fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Forked:
        """Calls `function(*arguments, *fds)` in a fork, which ends with the function.

        Args:
            function: importable in the template.
            *arguments: picklable.
            fds: descriptors; their numbers differ in the fork.
            environment: mapping, environment variables to add or change in the fork.
        """
        reader, writer = os.pipe()
        try:
            name = (function.__module__, function.__name__)
            task = pickle.dumps(_Task(name, arguments, dict(environment or {})))
            socket.send_fds(self._socket, [task], [writer, *fds])
            os.close(writer)
            return Forked(reader)
        except BaseException:
            os.close(reader)
            raise

    def close(self) -> None:
        self._socket.close()
        self._process.wait(SECONDS)


@dataclasses.dataclass(frozen=True)
class _Task:
    function: tuple[str, str]
    arguments: tuple[Any, ...]
    environment: dict[str, str]


def serve(fd: int, modules: Sequence[str]) -> None:
    """Runs the template until its other end closes; returns only in a fork."""
    for module in modules:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the keepers
    with socket.socket(fileno=fd) as connection:
        while True:
            data, fds, _, _ = socket.recv_fds(connection, _MESSAGE_NBYTES, _DESCRIPTORS)
            if not data:
                return
            if os.fork() == 0:
                break
            for each in fds:
                os.close(each)
    _keep(pickle.loads(data), *fds)


def _keep(task: _Task, status: int, *fds: int) -> None:
    """Forks once more, and reports the exit status of that fork on the pipe `status`."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(status)
        faulthandler.enable()
        os.environ.update(task.environment)
        getattr(importlib.import_module(task.function[0]), task.function[1])(*task.arguments, *fds)
        return
    for fd in fds:
        os.close(fd)
    os.write(status, _NUMBER.pack(pid))
    os.write(status, _NUMBER.pack(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
    os._exit(0)
