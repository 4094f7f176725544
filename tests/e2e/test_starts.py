"""Processes that die while they start: they are started again, and no result is lost."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_state, digits, small_cnn
from waiting import wait_until

import nanotf
from nanotf.compat.versions import is_keras_3
from nanotf.errors import ReaderDied, WorkerDied
from nanotf.pool import items, local, starts, warm
from nanotf.pool import pool as pools

pytestmark = pytest.mark.own_pool

_SEQUENCE: Any = tf.keras.utils.PyDataset if is_keras_3() else tf.keras.utils.Sequence


class _Batches(_SEQUENCE):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return tuple(array[:10] for array in digits(20))


FIT: dict[str, Any] = {"epochs": 1, "batch_size": 50, "verbose": 0}


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Returns a function that makes the next processes die before their first word."""
    monkeypatch.setattr(starts, "PAUSE_SECONDS", 0.01)
    greet = pools.greet

    def begin(times: int) -> None:
        left = [times]

        def greeted(worker: Any, *more: Any) -> None:
            if left[0]:
                left[0] -= 1
                worker.process.kill()
            greet(worker, *more)

        monkeypatch.setattr(pools, "greet", greeted)

    return begin


@pytest.mark.usefixtures("float64")
def test_a_worker_dies_at_the_first_start(
    dying: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    expected, found = small_cnn(), small_cnn()
    expected.fit(*digits(100), **FIT)
    warm.end_pool()
    dying(1)
    found.fit(*digits(100), **FIT, num_processes=2)
    assert_same_state(found, expected)
    assert "was killed by SIGKILL" in caplog.text and "try 2 of 3" in caplog.text


def test_all_starts_fail(dying: Callable[[int], None]) -> None:
    warm.end_pool()
    dying(100)
    with pytest.raises(WorkerDied, match=r"Worker 0 .* was killed by SIGKILL.* while starting"):
        small_cnn().fit(*digits(100), **FIT, num_processes=2)
    warm.end_pool()
    with pytest.raises(WorkerDied, match="while starting"):
        nanotf.map(abs, [1], 1, on_error="return")


def _double(item: int) -> Any:
    return np.full(1 << 14, 2.0 * item) if item % 2 else 2 * item


def _as_numbers(results: list[Any]) -> list[Any]:
    return [float(np.mean(r)) if not isinstance(r, Exception) else type(r) for r in results]


@pytest.mark.parametrize("times", [1, 2])
def test_a_replacement_dies(dying: Callable[[int], None], times: int) -> None:
    """The results of `map` are the same, and no item counts it as its own failure."""
    results = []
    with nanotf.imap(_double, range(5), 1, recycle_after=1, ordered=True) as found:
        for result in found:
            results.append(result)
            if len(results) == 1:
                dying(times)
    assert _as_numbers(results) == [0.0, 2.0, 4.0, 6.0, 8.0]


def test_no_replacement_starts(dying: Callable[[int], None]) -> None:
    """The results that are there are delivered."""

    def begin(_: Any) -> None:
        dying(100)

    nanotf.map(_double, [0], 1)
    begin(None)
    found = nanotf.map(_double, range(4), 1, recycle_after=2, on_error="return")
    assert _as_numbers(found) == [0.0, 2.0, WorkerDied, WorkerDied]
    assert [error.index for error in found[2:]] == [2, 3]
    assert "Item 3 of _double (3): Worker 0" in str(found[3])


def test_an_error_carries_the_results(dying: Callable[[int], None]) -> None:
    nanotf.map(_double, [0], 1)
    dying(100)
    with pytest.raises(WorkerDied, match="while starting") as caught:
        nanotf.map(_double, range(4), 1, recycle_after=2)
    assert list(caught.value.results) == [0, 1]
    assert _as_numbers(list(caught.value.results.values())) == [0.0, 2.0]


def test_a_failed_item_carries_the_results() -> None:
    def divide(item: int) -> float:
        return 1 / item

    with pytest.raises(ZeroDivisionError) as caught:
        nanotf.map(divide, [1, 2, 0, 4], 1)
    error: Any = caught.value
    found = dict(error.results)
    found.pop(3, None)  # short items go to a worker together: it may have ended, too
    assert found == {0: 1.0, 1: 0.5}


def test_the_system_allows_no_further_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers that run stay."""
    monkeypatch.setattr(starts, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(pools, "TRIM_SECONDS", 0.0)  # logs are closed meanwhile
    fork, left = local.Zygote.fork, [2]

    def forked(self: Any, *arguments: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork(self, *arguments)

    results = []
    with nanotf.imap(_double, range(4), 1, recycle_after=1, ordered=True) as found:
        for result in found:
            results.append(result)
            monkeypatch.setattr(local.Zygote, "fork", forked)
    assert _as_numbers(results) == [0.0, 2.0, 4.0, 6.0]


def test_a_new_worker_dies_before_it_has_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, left = items.ItemPool._start_threads_of, [2]  # the first worker, then a new one

    def begun(self: Any, worker: Any) -> None:
        begin(self, worker)
        left[0] -= 1
        if not left[0]:
            worker.process.kill()
            self._readers[worker.rank].join()

    monkeypatch.setattr(items.ItemPool, "_start_threads_of", begun)
    nanotf.pool.warm.end_pool()
    found = nanotf.map(_double, range(3), 1, recycle_after=1, verbose=0)
    assert _as_numbers(found) == [0.0, 2.0, 4.0]
    assert left[0] < 0


def test_the_call_itself_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """With on_error="return" the results come all the same, whatever has ended the call."""
    send = items.ItemPool.send_to
    sent: list[int] = []

    def failing(self: Any, rank: int, *more: Any) -> None:
        sent.append(rank)
        if len(sent) == 3:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        send(self, rank, *more)

    nanotf.map(_double, [0], 1)
    monkeypatch.setattr(items.ItemPool, "send_to", failing)
    found = nanotf.map(_double, range(4), 1, on_error="return")
    assert _as_numbers(found) == [0.0, 2.0, nanotf.errors.NanoError, nanotf.errors.NanoError]
    monkeypatch.undo()
    wait_until(lambda: not nanotf.worker_pids(), "its workers end")


def test_a_reader_dies_while_it_starts(dying: Callable[[int], None]) -> None:
    model = small_cnn()
    dying(starts.START_TRIES - 1)
    model.fit(_Batches(), epochs=1, verbose=0, read_processes=1)
    dying(starts.START_TRIES)
    with pytest.raises(ReaderDied, match=r"Reader 0 .*while starting.*It was started 3 times"):
        model.fit(_Batches(), epochs=1, verbose=0, read_processes=1)
