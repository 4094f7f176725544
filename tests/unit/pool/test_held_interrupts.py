"""Ctrl-C while a call ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from nanotf.pool import interrupts


def _press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def endless() -> Iterator[threading.Thread]:
    """A thread that nobody ends before the test has ended."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="nanotf-endless", daemon=True)
    thread.start()
    yield thread
    end.set()
    thread.join()


def _after(error: type[BaseException], cleanup: Callable[[], object]) -> None:
    """Runs a cleanup after an error, and raises the error."""
    try:
        raise error
    except BaseException as caught:
        with interrupts.held_back(caught):
            cleanup()
        raise
    finally:
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_interrupt_ends_the_wait(
    endless: threading.Thread, capsys: pytest.CaptureFixture[str]
) -> None:
    def cleanup() -> None:
        _press()
        assert not interrupts.wait_for(endless, 1000.0)
        assert not interrupts.wait_for(endless, 1000.0)
        done.append("the rest")

    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        _after(KeyboardInterrupt, cleanup)
    assert done == ["the rest"]
    assert capsys.readouterr().err == "nanotf: the call ends at once. Its workers were killed.\n"


def test_work_is_left_to_a_thread() -> None:
    def work() -> None:
        _press()
        end.wait()
        done.append("the work")

    def cleanup() -> None:
        assert not interrupts.finish(work, "nanotf-work")
        assert not done

    done: list[str] = []
    end = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        _after(KeyboardInterrupt, cleanup)
    end.set()
    for thread in threading.enumerate():
        if thread.name == "nanotf-work":
            thread.join()
    assert done == ["the work"]


def test_work_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 starts none at the end of the process, where pools are freed, too."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[str] = []
    with interrupts.held_back():
        assert interrupts.finish(lambda: done.append("work"), "nanotf-test")
    assert done == ["work"]


def test_work_that_raises() -> None:
    def work() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        _after(KeyboardInterrupt, lambda: interrupts.finish(work, "nanotf-work"))


def test_the_third_interrupt_ends_the_cleanup() -> None:
    def cleanup() -> None:
        _press()
        done.append("the second")
        _press()
        done.append("not this")

    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        _after(KeyboardInterrupt, cleanup)
    assert done == ["the second"]


def test_the_first_interrupt_follows_the_cleanup_after_another_error() -> None:
    def cleanup() -> None:
        _press()
        with interrupts.held_back():
            done.append("the rest")

    done: list[str] = []
    with pytest.raises(KeyboardInterrupt) as caught:
        _after(ValueError, cleanup)
    assert isinstance(caught.value.__context__, ValueError)
    assert done == ["the rest"]


def test_a_press_in_the_users_own_cleanup_is_not_lost() -> None:
    """It is another one than that which the user's code handles."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt), interrupts.held_back():
            _press()


def test_a_press_is_deferred() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        try:
            _press()
        except:  # noqa: E722 - as in Keras
            done.append("swallowed")
        done.append("whole")
    assert done == ["whole"]
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        _press()
        _press()
        done.append("not this")
    assert done == ["whole"]
    with pytest.raises(KeyboardInterrupt) as raised, interrupts.deferred():
        _press()
        raise ZeroDivisionError  # such as that of a program that a terminal has interrupted, too
    assert isinstance(raised.value.__context__, ZeroDivisionError)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_line_tells_that_it_takes_more_than_a_moment(
    endless: threading.Thread, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(interrupts, "MOMENT_SECONDS", 0.0)
    with pytest.raises(ZeroDivisionError):
        _after(ZeroDivisionError, lambda: interrupts.wait_for(endless, 0.2))
    assert capsys.readouterr().err == ""
    with pytest.raises(KeyboardInterrupt):
        _after(KeyboardInterrupt, lambda: interrupts.wait_for(endless, 0.2))
    assert capsys.readouterr().err == "nanotf: ending the call. Ctrl-C again ends it at once.\n"


def test_other_threads_wait_as_ever(endless: threading.Thread) -> None:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(interrupts.wait_for(endless, 0.01)))
    thread.start()
    thread.join()
    assert found == [False]
