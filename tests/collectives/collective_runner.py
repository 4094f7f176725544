"""Runs a function in several ranks of one group, each a process, and collects the results."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from template import Forked, Template


@dataclasses.dataclass(frozen=True)
class Task:
    spec: Any
    rank: int
    function: tuple[str, str]
    arguments: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Outcome:
    value: Any = None
    error: str = ""  # traceback of an exception that left the function
    traceback: str = ""
    returncode: int | None = None


_template: Template | None = None


@contextlib.contextmanager
def template_of_ranks(module: str) -> Iterator[None]:
    """The process to fork ranks from, after it imported the module with their functions."""
    global _template
    _template = Template([module, __name__], {**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        yield
    finally:
        _template.close()
        _template = None


def run_ranks(
    owner: Any,
    function: Callable[..., Any],
    *arguments: Any,
    meanwhile: Callable[[], None] = lambda: None,
    ranks: Sequence[int] | None = None,
    environment: dict[str, str] | None = None,
    deadline: float = 60.0,
) -> list[Outcome]:
    """Runs `function(spec, rank, fd, *arguments)` in one process per rank.

    Args:
        meanwhile: called in this process after the ranks have started.
        deadline: float, seconds; ranks that run longer print their stacks and are killed.
    """
    started = []
    try:
        for rank in range(owner.spec.size) if ranks is None else ranks:
            started.append(_start(owner, rank, function, arguments, environment or {}))
        meanwhile()
        return _collect(started, time.monotonic() + deadline)
    finally:
        for process, reader in started:
            if process.poll() is None:
                process.send_signal(signal.SIGABRT)  # faulthandler prints the stacks
                process.wait()
            os.close(reader)


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """Returns the ranks' results; fails with the traceback of a rank that raised."""
    for rank, outcome in enumerate(outcomes):
        assert not outcome.error, f"rank {rank}: {outcome.traceback}"
        assert outcome.returncode == 0, f"rank {rank} ended with {outcome.returncode}"
    return [outcome.value for outcome in outcomes]


def wait_for(condition: Callable[[], bool], deadline: float = 30.0) -> None:
    """Returns when `condition()` is true; fails after `deadline` seconds."""
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(0.002)


def _start(
    owner: Any,
    rank: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    environment: dict[str, str],
) -> tuple[Forked, int]:
    reader, writer = os.pipe()
    name = (function.__module__, function.__name__)
    task = Task(owner.spec, rank, name, arguments)
    try:
        assert _template is not None, "the fixture `_template_of_ranks` starts it"
        process = _template.start(rank_main, task, fds=[owner.fd, writer], environment=environment)
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    return process, reader


def _collect(started: list[tuple[Forked, int]], end: float) -> list[Outcome]:
    outcomes = []
    for process, reader in started:
        data = _read_all(reader, end)
        outcome = pickle.loads(data) if data else Outcome()
        returncode = process.wait(max(0.1, end - time.monotonic()))
        outcomes.append(dataclasses.replace(outcome, returncode=returncode))
    return outcomes


def _read_all(fd: int, end: float) -> bytes:
    import select

    data = b""
    while True:
        ready, _, _ = select.select([fd], [], [], max(0.0, end - time.monotonic()))
        assert ready, "a rank did not finish before the deadline"
        piece = os.read(fd, 1 << 20)
        if not piece:
            return data
        data += piece


def rank_main(task: Task, fd: int, result_fd: int) -> None:
    """Runs one rank: a pickled `Outcome` goes to `result_fd`."""
    try:
        function = getattr(importlib.import_module(task.function[0]), task.function[1])
        outcome = Outcome(value=function(task.spec, task.rank, fd, *task.arguments))
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        outcome = Outcome(error=text, traceback=traceback.format_exc())
    with os.fdopen(result_fd, "wb") as file:
        file.write(pickle.dumps(outcome))
