"""Sets up a worker's process before it imports TensorFlow: cores, memory, signals, log."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import errno
import faulthandler
import io
import os
import pathlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

from nanotf.errors import UnavailableError
from nanotf.machine.neighbours import PINNED
from nanotf.machine.own_exit import prctl
from nanotf.machine.shell_state import thread_count
from nanotf.wire import files
from nanotf.wire.memory_files import STANDARD

_PR_SET_NAME = 15  # linux/prctl.h

# What OpenBLAS reads when it is loaded, the first that is set.
_BLAS_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
# Of a system's OpenBLAS, and of those in NumPy's wheels: up to 1.25, and since.
_BLAS_SETTERS = (
    "openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "scipy_openblas_set_num_threads64_",
)


def pin(cores: tuple[int, ...]) -> list[str]:
    """Restricts this process to `cores`, and renames it so that other pools avoid these cores.

    Returns:
        Warnings for the user.
    """
    if not cores or not hasattr(os, "sched_setaffinity"):
        return []
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        return [f"could not be pinned to cores {list(cores)}: {error}. It runs unpinned."]
    rename(PINNED)
    return []


def rename(name: str) -> None:
    """Gives this process a name in `ps -o comm` and `top`, of 15 characters at most."""
    prctl(_PR_SET_NAME, name.encode())


def size_blas() -> None:
    """Gives OpenBLAS the number of threads with which it would be loaded now.

    It counts cores and reads its variables when it is loaded, which the process that forked this
    one has done, or the user's.
    """
    if sys.platform != "linux":
        return
    found = (thread_count(os.environ.get(name)) for name in _BLAS_VARIABLES)
    usable = len(os.sched_getaffinity(0))
    count = min(next((number for number in found if number), usable), usable)
    lines = pathlib.Path("/proc/self/maps").read_text(errors="replace").splitlines()
    paths = {line.partition("/")[2] for line in lines if "openblas" in line.rpartition("/")[2]}
    for path in paths:
        with contextlib.suppress(OSError):  # its file was replaced
            # A handle of the library that is loaded; never loads another.
            library = ctypes.CDLL(f"/{path}", os.RTLD_NOLOAD | os.RTLD_NOW)
            for name in _BLAS_SETTERS:
                if (setter := getattr(library, name, None)) is not None:
                    setter(count)


def refuse_breakpoints() -> None:
    """Makes `breakpoint()` raise: a debugger would read this process's closed standard input."""
    sys.breakpointhook = _refuse_breakpoint


def _refuse_breakpoint(*args: Any, **kwargs: Any) -> Any:
    chosen = os.environ.get("PYTHONBREAKPOINT")  # "0" for none, or a debugger without a terminal
    if chosen:
        return sys.__breakpointhook__(*args, **kwargs)
    raise UnavailableError(
        "A debugger needs a terminal, which a worker does not have. Received: breakpoint() in a "
        "worker. Leave num_processes out, so that all code runs in your process, or set "
        "PYTHONBREAKPOINT to a debugger that listens on a socket."
    )


def write_stacks() -> None:
    """Writes Python's stacks to the log when this process crashes and when the parent asks."""
    if sys.stderr is None:  # a daemon's
        return
    faulthandler.enable(all_threads=False)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGQUIT, all_threads=True)  # see `pool.handles.STACK_SIGNAL`


def leave_interrupts_to_parent() -> None:
    """Makes SIGINT do nothing here: schedulers send it to every process; the parent decides.

    SIGINT was blocked when this process started. Programs that the user's code starts do not
    inherit a handler, but would inherit `SIG_IGN`.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored already
        signal.signal(signal.SIGINT, lambda number, frame: None)
        # A handler makes system calls of C code fail with EINTR, unless the kernel restarts them.
        signal.siginterrupt(signal.SIGINT, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextlib.contextmanager
def leaving_sigterm_to_parent() -> Iterator[None]:
    """Makes SIGTERM do nothing here: the parent writes a checkpoint, then ends the workers.

    Schedulers send it to every process of a job. Only for the main thread.
    """
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    # A handler makes system calls of C code fail with EINTR, unless the kernel restarts them.
    signal.siginterrupt(signal.SIGTERM, False)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _LogFile(io.FileIO):
    """A standard stream that drops output if the disk is full, or by `ulimit -f`."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (*files.FULL, errno.EFBIG):
                raise
            # As if written: else BufferedWriter keeps the data, and each later print raises again.
            return len(memoryview(data).cast("B"))


def write_log() -> None:
    """Makes `print` write whole lines to the log at once, as long as there is disk space."""
    for name, fd in zip(("stdout", "stderr"), STANDARD[1:], strict=True):
        raw = _LogFile(fd, "w", closefd=False)
        stream = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True
        )
        setattr(sys, name, stream)


def bind_memory(numa_node: int | None) -> None:
    """Prefers memory of a NUMA node if libnuma is installed and there are several nodes."""
    if numa_node is None:
        return
    name = ctypes.util.find_library("numa")
    if name is None:
        return
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(name)
        # After -1 all other functions are undefined: numa(3).
        if library.numa_available() >= 0 and library.numa_max_node() > 0:
            library.numa_set_preferred(ctypes.c_int(numa_node))
