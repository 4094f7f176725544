"""The first exchange with a process that was just started: both ends show the secret key."""

from __future__ import annotations

import time

from nanotf.pool.handles import Worker
from nanotf.pool.supervision import not_finished

START_SECONDS = 300.0  # importing TensorFlow from a cold network file system takes minutes
_POLL_SECONDS = 0.2  # between checks that the process still runs


def greet(worker: Worker, key: bytes, deadline: float) -> None:
    """Waits until a worker shows the secret key, and shows it.

    Afterwards, reads and writes raise `BlockingIOError` at the deadline.

    Args:
        key: the pool's secret key.
        deadline: a time of `time.monotonic`, at most `START_SECONDS` ahead.

    Raises:
        WorkerError: It ended (the error of `Worker.died`), or it did not answer in time.
    """
    while not worker.channel.poll(_POLL_SECONDS):
        if worker.process.poll() is not None:  # a fork may hold its channel open
            raise worker.died("starting")
        if time.monotonic() > deadline:
            raise not_finished([worker], "starting", START_SECONDS)
    worker.channel.limit(max(0.1, deadline - time.monotonic()))  # 0 would be no limit
    try:
        worker.channel.show_key_second(key)
    except BlockingIOError as error:
        raise not_finished([worker], "starting", START_SECONDS) from error
    except (EOFError, OSError) as error:
        raise worker.died("starting") from error
