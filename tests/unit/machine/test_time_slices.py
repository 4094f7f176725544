from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import threading

import pytest

from nanotf.machine import time_slices

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's scheduler")


def _slice() -> int:
    """Returns the slice of this thread in ns, as Linux says; 0 before 6.12."""
    buffer = ctypes.create_string_buffer(56)
    number = time_slices._CALLS[platform.machine()][1]
    assert ctypes.CDLL(None).syscall(number, 0, buffer, 56, 0) == 0
    return int(struct.unpack_from("=Q", buffer, 24)[0])


def _in_thread(*functions: object) -> list[object]:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.extend(each() for each in functions))  # type: ignore[operator]
    thread.start()
    thread.join()
    return found


@pytest.mark.skipif(platform.machine() not in time_slices._CALLS, reason="another processor")
def test_a_thread_asks_for_a_short_slice_and_keeps_the_rest() -> None:
    def nice() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before, _, after, policy, same = _in_thread(
        _slice, time_slices.run_soon, _slice, lambda: os.sched_getscheduler(0), nice
    )
    assert after == 100_000 if before else after == 0
    assert policy == os.SCHED_OTHER and same == nice()
    assert _slice() == before  # this thread's is as it was


@pytest.mark.skipif(platform.machine() not in time_slices._CALLS, reason="another processor")
def test_a_worker_of_what_runs_soon_has_usual_slices() -> None:
    before, *_, policy, after = _in_thread(
        _slice,
        time_slices.run_soon,
        time_slices.finish_slices,
        lambda: os.sched_getscheduler(0),
        _slice,
    )
    assert policy == os.SCHED_BATCH and after == before


def test_another_policy_is_left_alone() -> None:
    policies = _in_thread(
        lambda: os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)),
        time_slices.run_soon,
        time_slices.finish_slices,
        lambda: os.sched_getscheduler(0),
    )
    assert policies[-1] == os.SCHED_IDLE
