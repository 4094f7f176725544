"""Ranks whose data end earlier than the others'. Ranks are threads of this process."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from test_hosts_engine import engines_of, on_all

from nanotf.collectives.engine import part_of
from nanotf.collectives.native_engine import NativeEngine
from nanotf.collectives.spec import create_group
from nanotf.errors import CollectiveError

KEY, OTHER_KEY, JOIN_KEY = 7, 8, 3
CHUNK = 4096
# By host, the numbers of calls that its ranks make before they join.
CALLS: list[list[list[int]]] = [
    [[1, 3]],
    [[3, 0]],
    [[2, 0, 4, 2]],
    [[2], [0]],
    [[0], [3]],
    [[0, 2], [1, 4]],
    [[4, 2], [0, 0], [1]],
]

pytestmark = pytest.mark.every_case


@contextlib.contextmanager
def _engines(counts: Sequence[int], deadline: float = 30.0) -> Iterator[Sequence[Any]]:
    if len(counts) > 1:
        with engines_of(counts, deadline) as engines:
            yield engines
        return
    sizes = {"chunk_bytes": CHUNK, "symmetric_bytes": 2 * CHUNK}
    with create_group(counts[0], deadline=deadline, **sizes) as owner:  # type: ignore[arg-type]
        own = [NativeEngine(owner.spec, rank, owner.fd) for rank in range(counts[0])]
        try:
            yield own
        finally:
            for engine in own:
                engine.close()


@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("elements", [3, 5000])
def test_the_others_go_on_without_a_rank_that_has_joined(
    calls: list[list[int]], elements: int
) -> None:
    made = [count for host in calls for count in host]
    vectors = np.random.default_rng(0).normal(size=(len(made), elements))

    def run(engine: Any) -> list[Any]:
        rank, found = engine.rank, []
        for _ in range(2):  # the second round begins where all have joined
            for number in range(made[rank]):
                total = engine.all_reduce([vectors[rank] * number, vectors[rank]], KEY)
                least = engine.all_reduce([vectors[rank].astype("f4")], OTHER_KEY, "min")
                most = engine.all_reduce([np.array([-5 - rank])], KEY, "max")
                engine.barrier(OTHER_KEY)
                rows = engine.all_gather(np.full((rank, 2), rank, np.int16), KEY)
                found.append((*total, *least, *most, rows))
            found.append(engine.join(JOIN_KEY))
            found.append(engine.broadcast(np.array([rank]), KEY, 1))
        return found

    with _engines([len(host) for host in calls]) as engines:
        results = on_all(engines, run)
    for rank, found in enumerate(results):
        for _ in range(2):
            for number in range(made[rank]):
                here = [r for r, count in enumerate(made) if count > number]
                scaled, total, least, most, rows = found.pop(0)
                np.testing.assert_allclose(scaled, vectors[here].sum(0) * number, atol=1e-12)
                np.testing.assert_allclose(total, vectors[here].sum(0), atol=1e-12)
                np.testing.assert_array_equal(least, vectors[here].astype("f4").min(0))
                assert most.tolist() == [-5 - here[0]]
                assert rows[:, 0].tolist() == [r for r in here for _ in range(r)]
                assert rows.shape[1] == 2 and rows.dtype == np.int16
            assert made[found.pop(0)] == max(made)
            assert found.pop(0).tolist() == [1]
        assert not found


def _broadcast(engine: Any) -> None:
    engine.broadcast(np.zeros(3), KEY, 0)


def _broadcast_from_last(engine: Any) -> None:
    engine.broadcast(np.zeros(3), KEY, engine.size - 1)


def _reduce_scatter(engine: Any) -> None:
    engine.reduce_scatter([np.zeros(5)], KEY)


def _gather_parts(engine: Any) -> None:
    begin, end = part_of(engine.rank, engine.size, 5)
    engine.gather_parts(np.zeros(end - begin), [np.zeros(5)], KEY)


@pytest.mark.parametrize("counts", [(2,), (3,), (1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize(
    ("call", "what"),
    [
        (_broadcast, "broadcasts"),
        (_broadcast_from_last, "broadcasts"),
        (_reduce_scatter, "scatters"),
        (_gather_parts, "scatters"),
    ],
)
def test_what_needs_all_ranks(counts: tuple[int, ...], call: Any, what: str) -> None:
    """Each rank in turn has joined: the first of a host, another one, all of a host."""
    for host, count in enumerate(counts):
        for place in range(count):
            joined = sum(counts[:host]) + place
            with _engines(counts) as engines:

                def run(engine: Any, joined: int = joined) -> str:
                    with pytest.raises(CollectiveError) as caught:
                        if engine.rank == joined:
                            engine.join(JOIN_KEY)
                        else:
                            call(engine)
                            engine.barrier(KEY)  # a root does not wait for other hosts
                    return str(caught.value)

                found = on_all(engines, run)
            for text in found:
                who = rf"(rank {joined}|host h{host}) has joined"
                assert re.search(rf"Received: {who}, and another rank {what}\.", text), text


@pytest.mark.parametrize("counts", [(2,), (1, 1), (2, 1)])
def test_a_rank_that_leaves_ends_the_wait(counts: tuple[int, ...]) -> None:
    with _engines(counts) as engines:
        leaves = threading.Timer(0.1, engines[-1].close)
        leaves.start()

        def run(engine: Any) -> None:
            with pytest.raises(CollectiveError, match=r"left the group|connection to host"):
                engine.join(JOIN_KEY)

        on_all(engines[:-1], run)
        leaves.join()


@pytest.mark.parametrize("counts", [(2,), (1, 1)])
def test_the_deadline_ends_the_wait(counts: tuple[int, ...]) -> None:
    with (
        _engines(counts, deadline=0.3) as engines,
        pytest.raises(CollectiveError, match=r"waited 0\.3 s"),
    ):
        engines[0].join(JOIN_KEY)


def test_unlike_calls_of_the_others_are_refused() -> None:
    with _engines([3]) as engines:

        def run(engine: Any) -> str:
            with pytest.raises(CollectiveError) as caught:
                if engine.rank == 0:
                    engine.join(JOIN_KEY)
                else:
                    engine.all_reduce([np.zeros(engine.rank)], KEY)
            return str(caught.value)

        found = on_all(engines, run)
    assert all("must call the same collective" in text for text in found)
