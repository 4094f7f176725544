"""`Group` on tensors: eagerly, in tf.function, with both implementations."""

from __future__ import annotations

import importlib.util

import pytest
from collective_runner import run_ranks, values

from nanotf.collectives import create_group, native_status

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
needs_native = pytest.mark.skipif(not native_status()[0], reason=native_status()[1])


class Lazily:
    """Names a function of collective_tf_ranks without importing TensorFlow here."""

    __module__ = "collective_tf_ranks"

    def __init__(self, name):
        self.__name__ = name


# Fewer combinations than test_engines.py: each process imports TensorFlow, which takes seconds.
@pytest.mark.parametrize(
    ("implementation", "size"),
    [pytest.param("native", 3, marks=needs_native), ("python", 2)],
)
def test_everything(implementation, size):
    with create_group(size, implementation=implementation, deadline=120) as owner:
        per_rank = values(run_ranks(owner, Lazily("everything"), deadline=240))
    assert len(set(map(tuple, per_rank))) == 1
    eager, traced, many, aborted = per_rank[0]
    for text in (eager, traced):
        assert text.startswith("nanotf collective: all ranks must call the same")
        assert f"rank 0: all_reduce(sum) of float32[2, 4]; rank {size - 1}: " in text
        assert text.endswith("same structure.")
    seventh = "all_reduce(sum) of 7 tensors, tensor 7: float32"
    assert f"rank 0: {seventh}[3]; rank {size - 1}: {seventh}[2] (key 63" in many
    assert aborted == "nanotf collective: enough"


def test_a_rank_that_raises():
    with create_group(2, deadline=120) as owner:
        first, second = run_ranks(owner, Lazily("rank_that_raises"), deadline=120)
    assert second.error == "RuntimeError: a user's error"
    (text,) = values([first])
    assert text.startswith("nanotf collective: rank 1 (process ")
    assert " ended while rank 0 waited for it in all_reduce(sum) of float32[100000]" in text
