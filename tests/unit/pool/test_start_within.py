"""`warm.start_within`: who waits for a start, and what comes of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from nanotf.console import progress_rows, silent
from nanotf.pool import warm

Does = Callable[[Callable[[], None]], list[str]]


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> Does:
    """Replaces the start of workers; returns what happens to the pool afterwards."""

    def does(start: Callable[[], None]) -> list[str]:
        seen: list[str] = []
        monkeypatch.setattr(warm, "_current", lambda *_: start())
        monkeypatch.setattr(warm, "shutdown", lambda: seen.append("ended"))
        monkeypatch.setattr(warm, "_start_idle_timer", lambda: seen.append("kept"))
        return seen

    return does


def _within(seconds: float) -> bool:
    plan: Any = None
    return warm.start_within(plan, "shm", seconds)


def test_a_pool_that_is_ready_is_kept(starting: Does) -> None:
    seen = starting(lambda: None)
    assert _within(60.0)
    assert seen == ["kept"]


def test_any_error_reaches_the_caller(starting: Does) -> None:
    def start() -> None:
        raise OSError(28, "No space left on device")

    seen = starting(start)
    with pytest.raises(OSError, match="No space left"):
        _within(60.0)
    assert seen == ["ended"]


def test_a_pool_that_comes_too_late_is_ended(starting: Does) -> None:
    is_over = threading.Event()
    seen = starting(lambda: _must(is_over.wait(60)))
    assert not _within(0.0)
    (thread,) = [t for t in threading.enumerate() if t.name == "nanotf-start"]
    is_over.set()
    thread.join(60)
    assert seen == ["ended"]


def _must(value: bool) -> None:
    assert value


def test_a_quiet_call_starts_quietly(starting: Does) -> None:
    quiet: list[bool] = []
    starting(lambda: quiet.append(progress_rows._silent.get()))
    with silent(True):
        assert _within(60.0)
    assert _within(60.0)
    assert quiet == [True, False]
