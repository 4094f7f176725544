"""Reports of workers without progress, and their times."""

from __future__ import annotations

import threading

from nanotf.pool.silence import MARGIN_SECONDS, Silence
from nanotf.worker.watch import Heartbeat, beat_seconds


def test_silence_is_reported_again_after_twice_the_time() -> None:
    silence = Silence(100.0)
    first = 100.0 + MARGIN_SECONDS
    silence.begin(range(2), 0.0)
    assert silence.check((), first) == ([], 0.0)
    assert silence.check((), first + 1) == ([0, 1], first + 1)
    assert silence.check((), 2 * first) == ([], 0.0)
    assert silence.check((), 2 * first + 3) == ([0, 1], 2 * first + 3)
    silence.heard(0, 3 * first)
    assert silence.check((), 4 * first) == ([], 0.0)
    assert silence.check((), 4 * first + 7) == ([0, 1], 4 * first + 7)


def test_only_workers_without_progress_are_named() -> None:
    silence = Silence(100.0)
    silence.begin(range(3), 0.0)
    for now in range(0, 400, 10):
        silence.heard(1, float(now))
        late, _ = silence.check([2], float(now))  # waits for the parent
        assert late in ([], [0])
    assert silence.check((), 410.0) == ([], 0.0), "rank 2 was waiting for the parent"


def test_workers_that_stop_together_are_named_together() -> None:
    silence = Silence(100.0)
    silence.begin(range(3), 0.0)
    silence.heard(1, MARGIN_SECONDS / 2)
    silence.heard(2, 3 * MARGIN_SECONDS)
    assert silence.check((), 100.5 + MARGIN_SECONDS)[0] == [0, 1]


def test_a_new_order_starts_the_clock_again() -> None:
    silence = Silence(100.0)
    silence.begin(range(2), 0.0)
    assert silence.check((), 1000.0)[0] == [0, 1]
    silence.begin(range(2), 1000.0)
    assert silence.check((), 1001.0 + MARGIN_SECONDS) == ([], 0.0)
    assert silence.check((), 1101.0 + MARGIN_SECONDS)[0] == [0, 1]


def test_a_heart_beats_while_progress_changes() -> None:
    numbers = iter(range(3))
    beats = threading.Semaphore(0)
    known = [0]

    def progress() -> int:
        known[0] = next(numbers, known[0])
        return known[0]

    Heartbeat(0.001, progress, beats.release)
    assert all(beats.acquire(timeout=60) for _ in range(2))
    assert not beats.acquire(timeout=0.05)
    assert beat_seconds(600.0) < beat_seconds(1e9) * 1.01
    assert beat_seconds(4.0) == 1.0
