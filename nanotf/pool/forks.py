"""The parent's view of the process from which its workers are forked, see `worker.zygote`.

N workers cost one import of TensorFlow instead of N, and the next pool costs none. It costs none at
all where the zygote is a fork of this process (`fork_here`), as under `nanotf run`. A process has
one zygote for its next pools. It ends with `nanotf.shutdown()`, with the idle timer and with its
process. Its end ends the processes that it has forked: so a zygote that libraries would now load
differently stays until the pools that use it have ended (`Forks`).
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import math
import os
import re
import resource
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nanotf.console import logger
from nanotf.errors import InvalidArgumentError
from nanotf.machine import forking
from nanotf.machine.installed import find_installed
from nanotf.machine.interpreter import python_command
from nanotf.pool.handles import WorkerProcess
from nanotf.pool.starts import TENSORFLOW, takes_seconds
from nanotf.pool.worker_log import WorkerLog
from nanotf.wire import messages
from nanotf.wire.channel import KEY_NBYTES, Channel, ChannelClosed, socket_pair
from nanotf.wire.memory_files import above_standard, anonymous_file

START_VARIABLE = "NANOTF_START"
_STARTS = ("fork", "spawn")
_ZYGOTE = "nanotf.worker.zygote"
POLL_SECONDS = 0.05  # how long a thread that waits holds the lock
FORK_SECONDS = 300.0  # importing TensorFlow from a cold network file system takes minutes

# What the interpreter, the loader, the C library and the libraries that a zygote imports read while
# they start. A fork gets the values of all others itself, as each tracker's number of its run.
_READ_AT_START = re.compile(
    "(PYTHON|LD_|LC_|LANG|GLIBC_|MALLOC_|TCMALLOC_|MIMALLOC_|TF_|TENSORFLOW_|KERAS_|XLA_|ABSL_|GRPC_"
    "|OMP_|KMP_|GOMP_|MKL_|DNNL_|ONEDNN_|OPENBLAS_|BLIS_|GOTO_|NPY_|CUDA_|NVIDIA_|HIP_|ROCM_"
    "|PROTOCOL_BUFFERS_|HOME$)"
)
# Of those, libraries read these after the fork, or the values of any pool will do.
_READ_LATER = (
    "OMP_NUM_THREADS",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "TF_CONFIG",
    "TF_CPP_MIN_LOG_LEVEL",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)


class _Descendant:
    """A forked process, with the methods of `subprocess.Popen` that a pool needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Returns the exit code, or minus a signal's number; None while it runs."""
        return self._wait(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Waits until it has ended.

        Raises:
            subprocess.TimeoutExpired: It has not ended within `timeout` seconds.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while (code := self._wait(POLL_SECONDS)) is None:
            if time.monotonic() >= end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def _wait(self, seconds: float) -> int | None:
        with self._lock:
            if self.returncode is None:
                self.returncode = self._code(seconds)
            return self.returncode

    def _code(self, seconds: float) -> int | None:
        """Waits up to some seconds for its end; returns its exit code, or None if it runs."""
        raise NotImplementedError

    def send_signal(self, sig: int) -> None:
        """Sends a signal, if it runs."""
        if self.poll() is None:
            # The zygote reaps a worker before it reports the exit code, and the worker may end at
            # any moment: its process id may be gone already.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        """Kills it at once."""
        self.send_signal(signal.SIGKILL)


class Forked(_Descendant):
    """A worker that the zygote has forked.

    Args:
        status: the pipe on which its exit code will come; owned from now on.
    """

    def __init__(self, pid: int, status: int) -> None:
        super().__init__(pid)
        self._status = status

    def _code(self, seconds: float) -> int | None:
        if not _is_readable(self._status, seconds):
            return None
        told = _read(self._status)
        os.close(self._status)
        # A killed zygote takes its workers with it, and cannot report their exit codes.
        return -signal.SIGKILL if told is None else told


class Child(_Descendant):
    """A fork of this process."""

    def _code(self, seconds: float) -> int | None:
        end = time.monotonic() + seconds
        while True:
            try:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # it was reaped: the program waits for all of its children
                return -signal.SIGKILL
            if ended:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() >= end:
                return None
            time.sleep(0.001)


def _read(pipe: int) -> int | None:
    """Reads the next number from the zygote; None if the zygote has exited."""
    data = os.read(pipe, messages.STATUS.size)
    return messages.STATUS.unpack(data)[0] if data else None


def _is_readable(fd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


class Zygote:
    """The process from which workers are forked. Creating this object starts it.

    Args:
        environ: its environment variables, which libraries read when they are loaded.
        imports: whether it imports TensorFlow; otherwise each worker does.
        here: whether it is a fork of this process, which has imported TensorFlow; otherwise it is
            a new interpreter.

    Attributes:
        process: `handles.WorkerProcess`.
        log: `WorkerLog`, its output.
    """

    def __init__(self, environ: Mapping[str, str], *, imports: bool, here: bool = False) -> None:
        self.owner = os.getpid()
        self.seen = _what_imports_see(environ)
        self.lent = 0  # to how many `Forks`; written under `_choosing`
        self._forking = threading.Lock()  # one fork at a time; any thread may start a process
        key = secrets.token_bytes(KEY_NBYTES)
        self._key: bytes | None = key  # until both have shown it
        self.process: WorkerProcess
        if here:
            # Of memory: a search for the folder of temporary files would fix that of the script.
            self.log = WorkerLog(anonymous_file(0, fixed=False))
        else:
            takes_seconds(TENSORFLOW)  # which the zygote imports, or else its forks
            self.log = WorkerLog()
        try:
            if here:
                self.process, self._channel = _forked(key, self.log)
            else:
                arguments = str(os.getpid()), "imports" if imports else ""
                self.process, self._channel = _start(_ZYGOTE, arguments, environ, key, self.log)
        except BaseException:
            self.log.close()
            raise

    def is_alive(self) -> bool:
        """Returns True if it runs and belongs to this process."""
        return self.owner == os.getpid() and self.process.poll() is None

    def fork(self, order: messages.Fork, fds: Sequence[int]) -> Forked:
        """Forks a worker.

        Args:
            fds: the descriptors that follow the order, except the last: the pipe for the exit code.

        Raises:
            ChannelClosed: The zygote has ended.
            OSError: The kernel allows no further process, or this one has no descriptors left.
            TimeoutError: It has not forked within `FORK_SECONDS`.
        """
        reader, writer = (above_standard(fd) for fd in os.pipe())
        try:
            try:
                with self._forking:
                    self._order(order, [*fds, writer])
            finally:
                os.close(writer)
            if not _is_readable(reader, FORK_SECONDS):
                raise TimeoutError
            number = _read(reader)
            if number is None:
                raise ChannelClosed("the zygote has ended")
        except BaseException:  # Ctrl-C may have interrupted a message
            os.close(reader)
            self.process.kill()
            raise
        if number < 0:
            os.close(reader)
            raise OSError(-number, os.strerror(-number))
        return Forked(number, reader)

    def _order(self, order: messages.Fork, fds: list[int]) -> None:
        if self._key is not None:
            if not self._channel.poll(FORK_SECONDS):
                raise TimeoutError
            try:
                self._channel.show_key_second(self._key)
            except (EOFError, ConnectionError) as error:
                raise ChannelClosed(str(error)) from error
            self._key = None
        self._channel.send(order, fds)

    def close(self) -> None:
        """Kills the process, and with it the workers that it has forked."""
        if self.owner == os.getpid():
            self.process.kill()
            self.process.wait()
        self._channel.close()
        self.log.close()


def _start(
    module: str,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    key: bytes,
    log: WorkerLog,
) -> tuple[subprocess.Popen[bytes], Channel]:
    """Runs a module of nanotf, and hands it one end of a channel.

    Args:
        arguments: its `sys.argv` after the channel's descriptor.
        environ: all of its environment variables.
        key: the channel's, which it reads from standard input.

    Returns:
        The process and this end of the channel. No key has been shown yet.

    Raises:
        NanoError: `sys.executable` names no program.
        OSError: This process has no file descriptors left.
    """
    ours, theirs = socket_pair()
    try:
        # Its forks get this process's own order, with all other state.
        command = python_command(module, str(theirs.fileno()), *arguments, standard_first=True)
        process = _spawn(command, environ, theirs.fileno(), log)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    assert process.stdin is not None, "a pipe, as asked for"
    with contextlib.suppress(BrokenPipeError):  # it has died; the channel reports that
        process.stdin.write(key)
        process.stdin.close()
    return process, Channel(ours)


def _forked(key: bytes, log: WorkerLog) -> tuple[Child, Channel]:
    """Forks this process: as `_start`, without a new interpreter."""
    zygote = importlib.import_module(_ZYGOTE)  # by name, as an interpreter would: it is above us
    ours, theirs = socket_pair()
    parent = os.getpid()
    try:
        with _interrupts_blocked():
            pid = forking.fork()
            if pid == 0:
                zygote.become(theirs.fileno(), parent, key, log.fileno())
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return Child(pid), Channel(ours)


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Blocks SIGINT. A process that begins meanwhile gets none before it handles it itself."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())  # a pending Ctrl-C interrupts here
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _spawn(
    command: list[str], environ: Mapping[str, str], fd: int, log: WorkerLog
) -> subprocess.Popen[bytes]:
    with _interrupts_blocked():
        # A separate session: only the parent gets Ctrl-C from the terminal.
        return subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=log.fileno(),
            stderr=subprocess.STDOUT,
            pass_fds=[fd],
            start_new_session=True,
        )


# --------------------------------------------------------------- the zygote of this process
_zygote: Zygote | None = None
_choosing = threading.Lock()  # readers start in threads of their own


class Forks:
    """The zygotes of one pool, which stay until the pool ends.

    The pool shares this process's zygote with others, or each of its processes has its own.
    """

    def __init__(self) -> None:
        self._shared: Zygote | None = None
        self._own: list[Zygote] = []

    def zygote(self, environ: Mapping[str, str]) -> Zygote:
        """Returns the zygote from which the pool's next process is forked.

        Args:
            environ: all environment variables of that process.

        Raises:
            InvalidArgumentError: NANOTF_START is neither "fork" nor "spawn".
        """
        if not _may_fork():
            with _choosing:
                _retire()  # NANOTF_START may have allowed one before
            self._own.append(Zygote(environ, imports=False))
            return self._own[-1]
        with _choosing:
            if self._shared is None or not self._shared.is_alive():
                self._give_back()
                self._shared = _lend(environ)
            return self._shared

    def close(self) -> None:
        """Ends the zygotes that nobody needs any more. The pool's processes have ended."""
        for zygote in self._own:
            zygote.close()
        with _choosing:
            self._give_back()

    def _give_back(self) -> None:
        zygote, self._shared = self._shared, None
        if zygote is not None:
            zygote.lent -= 1
            if not zygote.lent and zygote is not _zygote:  # that one stays for the next pool
                zygote.close()


def _lend(environ: Mapping[str, str]) -> Zygote:
    """Returns this process's zygote; a new one if libraries would now be loaded differently."""
    global _zygote
    if _zygote is None or not _zygote.is_alive() or _zygote.seen != _what_imports_see(environ):
        _retire()
        _zygote = Zygote(environ, imports=True)
    _zygote.lent += 1
    return _zygote


def fork_here(environ: Mapping[str, str]) -> None:
    """Makes a fork of this process its zygote, if `may_fork_here` and no library has threads.

    For a process that has imported TensorFlow and Keras, and run no operation. The fork has loaded
    its libraries as this process has, so this one's environment counts.

    Args:
        environ: the environment variables of workers.

    Raises:
        InvalidArgumentError: NANOTF_START is neither "fork" nor "spawn".
    """
    global _zygote
    if not may_fork_here(environ):
        return
    try:
        zygote = Zygote(os.environ, imports=True, here=True)
    except OSError as error:  # the first call that needs workers tries again, and raises it
        logger.info("This process cannot be forked: %s", error)
        return
    if forking.has_kept_threads():
        zygote.close()
        return
    with _choosing:
        _retire()
        _zygote = zygote


def may_fork_here(environ: Mapping[str, str]) -> bool:
    """Returns True if a fork of this process can be the zygote, once it has imported TensorFlow.

    Args:
        environ: the environment variables of workers. They may make libraries load differently
            than in this process, as a preloaded allocator does.

    Raises:
        InvalidArgumentError: NANOTF_START is neither "fork" nor "spawn".
    """
    return (
        pid() is None
        and _may_fork()
        and threading.active_count() == 1
        and _what_imports_see(environ) == _what_imports_see(os.environ)
    )


def _retire() -> None:
    """Leaves this process's zygote to the pools that use it; ends it if there are none."""
    global _zygote
    zygote, _zygote = _zygote, None
    if zygote is not None and (not zygote.lent or zygote.owner != os.getpid()):
        zygote.close()  # in a fork of its owner, this closes only descriptors


def pid() -> int | None:
    """Returns the process id of this process's zygote, or None."""
    return None if _zygote is None or not _zygote.is_alive() else _zygote.process.pid


def end() -> None:
    """Kills this process's zygote, and with it the workers that it has forked."""
    global _zygote
    zygote, _zygote = _zygote, None
    if zygote is not None:
        zygote.close()


atexit.register(end)


def _may_fork() -> bool:
    start = os.environ.get(START_VARIABLE) or "fork"
    if start not in _STARTS:
        raise InvalidArgumentError(
            f"{START_VARIABLE} must be 'fork', to fork workers from a process that has imported "
            f"TensorFlow, or 'spawn', to start each by itself. Received: {START_VARIABLE}={start!r}"
            ". Set it to one of them, or unset it."
        )
    # libiomp5 takes its affinity when it is loaded. Other platforms are untested.
    return (
        start == "fork" and sys.platform == "linux" and not find_installed().tensorflow_uses_openmp
    )


def _what_imports_see(environ: Mapping[str, str]) -> Any:
    """Returns the settings of this process that decide how its children load libraries."""
    variables = {
        name: value
        for name, value in environ.items()
        if _READ_AT_START.match(name) and name not in _READ_LATER
    }
    names = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    return variables, [resource.getrlimit(getattr(resource, name)) for name in names]
