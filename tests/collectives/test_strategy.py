"""`WorkerStrategy` with transport "shm" behaves like a MultiWorkerMirroredStrategy for users."""

from __future__ import annotations

import contextlib
import importlib.util
import socket

import pytest
from collective_runner import run_ranks, values
from test_tensorflow import Lazily

from nanotf.collectives import create_group

RANKS = "strategy_ranks"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)


class InStrategy(Lazily):
    """Names a function of strategy_ranks without importing TensorFlow here."""

    __module__ = "strategy_ranks"


@pytest.mark.parametrize(
    ("with_ops", "size"), [(True, 2), pytest.param(False, 3, marks=pytest.mark.thorough)]
)
def test_everything(with_ops, size):
    with create_group(size, deadline=120) as owner:
        per_rank = values(run_ranks(owner, InStrategy("everything"), with_ops, deadline=240))
    for other in per_rank[1:]:
        assert other == per_rank[0], "ranks agree to the last bit"


@pytest.mark.thorough
def test_tensorflows_own_collectives_sum_16_bit_floats_in_float32():
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for bound in sockets:
            bound.bind(("127.0.0.1", 0))
        cluster = tuple(f"127.0.0.1:{bound.getsockname()[1]}" for bound in sockets)
    with create_group(3, deadline=120) as owner:
        run = run_ranks(owner, InStrategy("pieces_that_vanish"), cluster, deadline=240)
        for float16, bfloat16, _ in values(run):
            assert float16 == [2.0**-10] * 3
            assert bfloat16 == [2.0**-7] * 3
