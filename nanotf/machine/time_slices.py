"""Tells Linux's scheduler what threads of this process are for.

Where several threads share a core, each runs for a slice of some milliseconds. See sched(7).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
import sys

_SHORT = 100_000  # ns, the shortest slice that Linux gives
_USUAL = 0  # Linux's own choice
# sched_setattr, sched_getattr: the C library has no functions for them.
_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
# struct sched_attr: size, policy, flags, nice, priority, runtime (of SCHED_OTHER: the slice in ns),
# deadline, period, and the limits of utilization.
_ATTRIBUTES = struct.Struct("=IIQiIQQQII")
_RUNTIME = 5


def finish_slices() -> None:
    """Lets a thread of this process keep its core when another one of them wakes.

    TensorFlow gives each operation that becomes ready to a pool of threads. On a worker's one core
    a second thread would preempt the first, only to take operations from it: a step of an LSTM
    took 1.2 times as long. Threads that start later inherit the policy.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):  # a sandbox may forbid it; steps then take longer
        if os.sched_getscheduler(0) == os.SCHED_OTHER:  # else the user has chosen another policy
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            _set_slice(_USUAL)  # that of a process which runs soon is inherited by its forks


def run_soon() -> None:
    """Lets this thread preempt others as soon as it wakes, for the price of short slices.

    For a thread that works for microseconds at a time, and for which others wait: one that wakes
    with a short slice runs before those that have long ones. Linux 6.12 and later; nothing happens
    before. Threads that start later inherit it.
    """
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:  # as above
        _set_slice(_SHORT)


def _set_slice(nanoseconds: int) -> None:
    """Sets this thread's slice, and leaves its policy and priority as they are."""
    if platform.machine() not in _CALLS:
        return
    write, read = _CALLS[platform.machine()]
    buffer = ctypes.create_string_buffer(_ATTRIBUTES.size)
    call = ctypes.CDLL(None).syscall
    if call(read, 0, buffer, _ATTRIBUTES.size, 0) != 0:
        return  # a sandbox may forbid it; answers then take longer
    found = list(_ATTRIBUTES.unpack(buffer.raw))
    found[_RUNTIME] = nanoseconds
    call(write, 0, ctypes.create_string_buffer(_ATTRIBUTES.pack(*found)), 0)
