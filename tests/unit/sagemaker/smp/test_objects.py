"""Ranks, objects and averages of real processes, without TensorFlow."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import numpy as np
import pytest
from forked_ranks import end_well, forked

from nanotf import smp
from nanotf.errors import CollectiveError, InvalidArgumentError, ShippingError, WorkerDied
from nanotf.sagemaker.smp import replicas, runtime
from nanotf.sagemaker.smp.mailboxes.mailbox import Mailbox
from nanotf.sagemaker.smp.rank_groups import CommGroup, RankType

GROUPS = {"cluster": ([0, 1], [0, 2]), "spread": ([0, 2], [0, 1])}  # of rank 0


def _of_ranks(size: int, function: Callable[[], None], strategy: str = "cluster") -> None:
    """Runs a function on all ranks of two partitions."""

    def run(mailbox: Mailbox) -> None:
        runtime.enter(mailbox)
        smp.init({"partitions": 2, "placement_strategy": strategy})
        function()

    with forked(size, run) as (_, pids):
        assert end_well(pids)


@pytest.mark.parametrize("strategy", GROUPS)
def test_groups_of_four_processes(strategy: str) -> None:
    def run() -> None:
        rank = smp.rank()
        mp_group, dp_group = smp.get_mp_group(), smp.get_dp_group()
        if rank == 0:
            assert (mp_group, dp_group) == GROUPS[strategy]
        assert (smp.size(), smp.local_size(), smp.local_rank()) == (4, 4, rank)
        assert mp_group[smp.mp_rank()] == dp_group[smp.dp_rank()] == rank
        assert smp.allgather(rank) == [0, 1, 2, 3]
        assert smp.allgather(rank, CommGroup.MP_GROUP) == mp_group
        assert smp.allgather(rank, CommGroup.DP_GROUP) == dp_group
        for kind, own in ((RankType.MP_RANK, smp.mp_rank()), (RankType.DP_RANK, smp.dp_rank())):
            if own == 0:
                smp.send({"from": rank}, 1, kind)
                continue
            group = mp_group if kind == RankType.MP_RANK else dp_group
            assert smp.recv_from(0, kind) == {"from": group[0]}
        if rank == 2:
            smp.broadcast("all")
        else:
            assert smp.recv_from(2) == "all"
        smp.mp_barrier()
        smp.dp_barrier()
        smp.barrier()

    _of_ranks(4, run, strategy)


def test_averages_have_the_same_bits_on_all_copies() -> None:
    def run() -> None:
        rng = np.random.default_rng(smp.rank())
        own = [rng.normal(size=(30, 20)), np.float32(smp.dp_rank()).reshape(())]
        means = replicas.average_over_replicas(own)
        values = smp.allgather(own, CommGroup.DP_GROUP)
        right = (values[0][0] + values[1][0] + values[2][0]) / 3
        assert np.array_equal(means[0], right)
        assert means[1].dtype == np.float32 and means[1] == 1.0
        halves = replicas.average_over_replicas([np.full(3, 60000, "float16")])
        assert np.array_equal(halves[0], np.full(3, 60000, "float16"))  # their sum overflows

    _of_ranks(6, run)


def test_averages_of_different_arrays() -> None:
    def run() -> None:
        with pytest.raises(CollectiveError, match=r"the same arrays. Received: float64\[\d\]"):
            replicas.average_over_replicas([np.ones(1 + smp.dp_rank())])

    _of_ranks(4, run)


def test_one_copy_averages_nothing() -> None:
    def run() -> None:
        own = [np.ones(2)]
        assert replicas.average_over_replicas(own)[0] is own[0]

    _of_ranks(2, run)


def test_what_cannot_be_sent() -> None:
    def run() -> None:
        with pytest.raises(InvalidArgumentError, match=r"dest_rank=2 .*number of processes is 2"):
            smp.send("it", 2)
        with pytest.raises(InvalidArgumentError, match=rf"src_rank={smp.rank()} "):
            smp.recv_from(smp.rank())
        with pytest.raises(ShippingError, match=r"must be picklable.*type function"):
            smp.broadcast(lambda: None)
        with pytest.raises(InvalidArgumentError, match="2 processes, partitions=3"):
            smp.init({"partitions": 3})

    _of_ranks(2, run)


def test_calls_that_do_not_match() -> None:
    def run() -> None:
        wait = r"rank 0 waits in smp.send\(dest_rank=1.*; rank 1 waits in smp.barrier\(group=WORLD"
        with pytest.raises(CollectiveError, match=wait):
            if smp.rank() == 0:
                smp.send("it", 1)
            smp.barrier()

    _of_ranks(2, run)


def test_a_dead_rank_has_a_partition() -> None:
    def run(mailbox: Mailbox) -> None:
        runtime.enter(mailbox)
        smp.init({"partitions": 2})
        if smp.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(WorkerDied) as caught:
            smp.barrier()
        assert (caught.value.rank, caught.value.partition) == (1, 1)

    with forked(2, run) as (owner, pids):
        assert os.waitpid(pids[1], 0)[1] == signal.SIGKILL
        owner.read()
        owner.fail(WorkerDied("rank 1 is gone", rank=1, partition=owner.partitions[1]))
        assert end_well(pids[:1])
