"""The state of this process's threads."""

from __future__ import annotations

import sys
import threading

import pytest
from waiting import wait_until

from nanotf.machine import threads


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_thread_that_runs_and_one_that_waits() -> None:
    end = threading.Event()

    def compute() -> None:
        while not end.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        # This thread must leave the GIL to the other one, which waits for it asleep.
        wait_until(threads.others_run, "the thread runs")
    finally:
        end.set()
        thread.join()
    wait_until(lambda: not threads.others_run(), "all threads sleep")
