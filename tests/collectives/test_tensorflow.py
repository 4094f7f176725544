"""`Group` on tensors: eagerly, in tf.function, with the native ops and without."""

from __future__ import annotations

import importlib.util

import pytest
from collective_runner import run_ranks, values

from nanotf.collectives import create_group
from nanotf.wire.failures import Failure, FailureKind

RANKS = "collective_tf_ranks"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)


class Lazily:
    """Names a function of collective_tf_ranks without importing TensorFlow here."""

    __module__ = "collective_tf_ranks"

    def __init__(self, name):
        self.__name__ = name


# Fewer combinations than test_engines.py: each process imports TensorFlow, which takes seconds.
@pytest.mark.parametrize(("with_ops", "size"), [(True, 3), (False, 2)])
def test_everything(with_ops, size):
    with create_group(size, deadline=120) as owner:
        per_rank = values(run_ranks(owner, Lazily("everything"), with_ops, deadline=240))
    for rank, (*different, aborted) in enumerate(per_rank):
        assert {(f.kind, f.rank, f.missing) for f in different} == {
            (FailureKind.DIFFERENT, rank, ())
        }
        assert aborted == Failure(FailureKind.ABORTED, size - 1, "enough")
    assert len({tuple(failure.text for failure in failures) for failures in per_rank}) == 1
    eager, traced, many, _ = per_rank[0]
    for failure in (eager, traced):
        text = failure.message
        assert text.startswith("nanotf collective: all ranks must call the same")
        assert f"rank 0: all_reduce(sum) of float32[2, 4]; rank {size - 1}: " in text
        assert text.endswith("same structure.")
    seventh = "all_reduce(sum) of 7 tensors, tensor 7: float32"
    assert f"rank 0: {seventh}[3]; rank {size - 1}: {seventh}[2] (key 63" in many.text


def test_a_rank_that_raises():
    with create_group(2, deadline=120) as owner:
        first, second = run_ranks(owner, Lazily("rank_that_raises"), deadline=120)
    assert second.error == "RuntimeError: a user's error"
    (failure,) = values([first])
    assert (failure.kind, failure.rank, failure.missing) == (FailureKind.LOST, 0, (1,))
    text = failure.message
    assert text.startswith("nanotf collective: rank 1 (process ")
    assert " ended while rank 0 waited for it in all_reduce(sum) of float32[100000]" in text


def test_unread_results_are_not_exchanged():
    """TensorFlow drops stateless operations from graphs if nothing reads their results."""
    import tensorflow as tf

    from nanotf.collectives import group

    join = group.load_ops().nanotf_join

    @tf.function
    def step(x):
        join(tensor=x, group=0, key=99, moment=tf.constant(0, tf.int64))
        return x + 1

    assert float(step(tf.constant([1.0]))[0]) == 2.0
    assert (
        not step.get_concrete_function(tf.constant([1.0]))
        .graph.get_operation_by_name("NanotfJoin")
        ._is_stateful
    )
