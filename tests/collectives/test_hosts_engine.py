"""Collectives over hosts. Ranks are threads of this process, hosts are groups of them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import numpy as np
import pytest
from waiting import SECONDS, wait_until

from nanotf.collectives import hosts_engine
from nanotf.collectives.engine import part_of
from nanotf.collectives.hosts_engine import HostsEngine
from nanotf.collectives.native_engine import NativeEngine
from nanotf.collectives.spec import HostsSpec, create_group, write_abort_record
from nanotf.errors import CollectiveError
from nanotf.wire.failures import Failure, FailureKind

COUNTS = [(1, 1), (2, 2), (2, 1), (1, 3, 2)]
KEY = 7

pytestmark = pytest.mark.every_case


@contextlib.contextmanager
def engines_of(
    counts: Sequence[int], deadline: float = 30.0, names: Any = None
) -> Iterator[list[HostsEngine]]:
    names = names or tuple(f"h{host}" for host in range(len(counts)))
    links: list[dict[int, int]] = [{} for _ in counts]
    for one in range(len(counts)):
        for other in range(one):
            ends = socket.socketpair()
            links[one][other], links[other][one] = (end.detach() for end in ends)
    engines = []
    with contextlib.ExitStack() as stack:
        for host, count in enumerate(counts):
            owner = stack.enter_context(create_group(count, deadline=deadline + 10))
            spec = HostsSpec(host, tuple(counts), names, deadline)
            for rank in range(count):
                local = NativeEngine(owner.spec, rank, owner.fd)
                fds = [links[host][other] for other in sorted(links[host])] if rank == 0 else []
                engine = HostsEngine(local, spec, fds, owner.fd)
                stack.callback(engine.close)
                engines.append(engine)
        yield engines


def on_all(engines: Sequence[Any], function: Callable[[Any], Any]) -> list[Any]:
    with futures.ThreadPoolExecutor(len(engines)) as pool:
        return list(pool.map(function, engines))


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("elements", [1, 5, 3000, 40_001])
def test_all_reduce_gives_equal_bits_on_all_ranks(counts: tuple[int, ...], elements: int) -> None:
    rng = np.random.default_rng(elements)
    values = rng.normal(size=(sum(counts), elements))
    with engines_of(counts) as engines:
        found = on_all(engines, lambda e: e.all_reduce([values[e.rank]], KEY)[0])
    np.testing.assert_allclose(found[0], values.sum(0), rtol=1e-13, atol=1e-13)
    assert all(np.array_equal(found[0], other) for other in found)


@pytest.mark.parametrize("op", ["min", "max"])
def test_min_and_max_of_several_tensors(op: str) -> None:
    with engines_of((2, 1)) as engines:
        found = on_all(
            engines,
            lambda e: e.all_reduce(
                [np.array([[e.rank, 5]], np.int64), np.array(-e.rank, np.int64)], KEY, op
            ),
        )
    first, second = found[2]
    assert first.tolist() == [[0 if op == "min" else 2, 5]]
    assert second.tolist() == (-2 if op == "min" else 0)


def test_16_bit_floats_are_rounded_once() -> None:
    # 2048 + 1 + 1 is 2050 in float32, and 2048 if each sum is rounded to float16.
    parts = [np.array([v], np.float16) for v in (2048, 1, 1)]
    with engines_of((1, 1, 1)) as engines:
        found = on_all(engines, lambda e: e.all_reduce([parts[e.rank]], KEY)[0])
    assert [f.tolist() for f in found] == [[2050.0]] * 3
    assert found[0].dtype == np.float16


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("elements", [1, 3, 10_000])
def test_reduce_scatter_and_back(counts: tuple[int, ...], elements: int) -> None:
    size = sum(counts)
    values = np.random.default_rng(0).normal(size=(size, elements))
    shapes = [values[0][: elements // 2], values[0][elements // 2 :].reshape(-1, 1)]

    def run(engine: Any) -> tuple[Any, Any]:
        mine = values[engine.rank]
        arrays = [mine[: elements // 2], mine[elements // 2 :].reshape(-1, 1)]
        part = engine.reduce_scatter(arrays, KEY)
        return part, engine.gather_parts(part, shapes, KEY)

    with engines_of(counts) as engines:
        found = on_all(engines, run)
    total = values.sum(0)
    for rank, (part, whole) in enumerate(found):
        np.testing.assert_allclose(part, total[slice(*part_of(rank, size, elements))], atol=1e-12)
        np.testing.assert_allclose(np.concatenate([w.ravel() for w in whole]), total, atol=1e-12)
        assert [w.shape for w in whole] == [s.shape for s in shapes]


@pytest.mark.parametrize("counts", COUNTS)
def test_gather_broadcast_and_barrier(counts: tuple[int, ...]) -> None:
    size = sum(counts)

    def run(engine: Any) -> tuple[Any, list[Any]]:
        rows = np.full((engine.rank, 2), engine.rank, np.int16)  # rank 0 has none
        gathered = engine.all_gather(rows, KEY)
        engine.barrier(KEY)
        return gathered, [
            *(engine.broadcast(np.array([engine.rank, 1.5]), KEY, root) for root in range(size)),
            engine.broadcast(np.zeros((3, 0)), KEY, size - 1),
        ]

    with engines_of(counts) as engines:
        found = on_all(engines, run)
    for gathered, roots in found:
        assert gathered[:, 0].tolist() == [rank for rank in range(size) for _ in range(rank)]
        assert gathered.dtype == np.int16 and gathered.shape[1] == 2
        *roots, empty = roots
        assert [root.tolist() for root in roots] == [[rank, 1.5] for rank in range(size)]
        assert empty.shape == (3, 0)


@pytest.mark.parametrize("counts", COUNTS)
def test_gathered_rows_without_elements_are_counted(counts: tuple[int, ...]) -> None:
    with engines_of(counts) as engines:
        found = on_all(engines, lambda e: e.all_gather(np.empty((e.rank + 1, 0, 3)), KEY))
    assert {rows.shape for rows in found} == {(sum(range(sum(counts) + 1)), 0, 3)}


def test_keys_in_different_orders() -> None:
    keys = [3, 4, 5]

    def run(engine: Any) -> dict[int, float]:
        turned = keys if engine.rank % 2 else keys[::-1]
        with futures.ThreadPoolExecutor(len(keys)) as pool:
            asked = {
                key: pool.submit(
                    engine.all_reduce, [np.array([float(key * 10 + engine.rank)])], key
                )
                for key in turned
            }
            return {key: float(future.result()[0][0]) for key, future in asked.items()}

    with engines_of((2, 2)) as engines:
        found = on_all(engines, run)
    assert found == [{key: 40 * key + 6.0 for key in keys}] * 4


def _failures(engines: Sequence[Any], run: Callable[[Any], Any]) -> list[Any]:
    def failing(engine: Any) -> Any:
        with pytest.raises(CollectiveError) as caught:
            run(engine)
        count, failure = engine.failures()
        assert count == 1 and failure is not None
        assert failure.message == str(caught.value)
        return failure

    return on_all(engines, failing)


def test_a_difference_between_hosts_is_an_error_on_every_rank() -> None:
    with engines_of((2, 1)) as engines:
        found = _failures(engines, lambda e: e.all_reduce([np.zeros(2 + (e.rank == 2))], KEY))
    assert {failure.kind for failure in found} == {FailureKind.DIFFERENT}
    assert "float64[3]" in found[0].text and "float64[2]" in found[0].text


def test_a_host_that_is_gone() -> None:
    with engines_of((2, 1), names=("here", "there")) as engines:
        gone = threading.Timer(0.1, engines[2].close)
        gone.start()
        found = _failures(engines[:2], lambda e: e.barrier(KEY))
        gone.join()
    assert {failure.kind for failure in found} == {FailureKind.LOST}
    assert all("host there" in failure.text for failure in found)


def test_a_rank_of_another_host_that_leaves() -> None:
    with engines_of((1, 2)) as engines:
        engines[2].close()
        found = _failures(engines[:2], lambda e: e.barrier(KEY))
    assert {failure.kind for failure in found} == {FailureKind.LOST}
    assert all("left the group" in failure.text for failure in found)


def test_the_deadline_names_the_ranks_of_the_missing_host() -> None:
    with engines_of((2, 1, 2), deadline=2.0) as engines:
        found = _failures(engines[:3], lambda e: e.barrier(KEY))
    assert {failure.kind for failure in found} == {FailureKind.EXPIRED}
    assert {failure.missing for failure in found} == {(3, 4)}
    assert all("for host h2" in failure.text for failure in found)


def test_a_failed_group_stays_failed() -> None:
    with engines_of((1, 1)) as engines:
        engines[0].abort("for a test")
        with pytest.raises(CollectiveError, match="for a test"):
            engines[0].barrier(KEY)
        with pytest.raises(CollectiveError, match="for a test"):
            engines[1].barrier(KEY)


def _abort_by_owner(engine: Any, text: str) -> None:
    places, failure = engine._local.spec.layout, Failure(FailureKind.ABORTED, -1, text)
    write_abort_record(engine._memory, places, places.common_record, failure)


@pytest.mark.parametrize("abort", [HostsEngine.abort, _abort_by_owner])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_abort_reaches_a_leader_that_waits_for_another_host(abort: Any, rank: int) -> None:
    """It would wait there for much longer than this test does."""
    # In this order: engines that are closed raise, and the threads end.
    with futures.ThreadPoolExecutor(2) as pool, engines_of((2, 1), deadline=3600) as engines:
        waiting = [pool.submit(engine.barrier, KEY) for engine in engines[:2]]
        wait_until(lambda: engines[2]._peers._frames, "the leader waits: it has sent its frame")
        abort(engines[rank], "for a test")
        for call in waiting:
            with pytest.raises(CollectiveError, match="for a test"):
                call.result(timeout=SECONDS)
        wait_until(lambda: engines[2]._peers._failure, "the leader tells the other host")


def test_long_vectors_take_two_steps() -> None:
    assert 40_001 * 8 > hosts_engine.ONE_STEP_BYTES > 3000 * 8
