"""A model-parallel API in the shape of SageMaker's smp v1 for TensorFlow.

    smp.init(config)         `runtime`: the configuration (`config`), this process's rank (`ranks`)
    @smp.step                `steps`: splits a batch (`slicing`), runs the body once per
                             microbatch, one after the other, and returns `StepOutput`s (`outputs`)
    smp.DistributedModel     `distributed`, on top of `models` and of `from_keras`: Keras's loops
                             (`shares`: their batches; `in_workers`: for a script that is no rank;
                             `keras_checks`)
    smp.CheckpointManager    `checkpoints`
    smp.send, smp.barrier    `objects`, through mailboxes (`collectives.mailbox`)
    StepOutput.accumulate    `replicas`: averages over the copies of the model
    smp.last_report          `report` (`rank_report`, `report_chart`): a step's times, and `memory`

With one partition, a step needs the activations of one microbatch only, and gives the whole batch's
gradients. With several, `pipeline` makes the step:

    bodies       the step's function, traced in a thread for each microbatch
    schedule     what this partition does, in order
    partitioned  a model's cuts and variables
      trace        the model's call, with the partition of each operation
      auto         chooses partitions (`measure`, `balance`)
      cut          one stage for each partition
      variables    without values, but for those of this partition
    passes       a microbatch's way through this partition's stage (`exchange`: its messages)
    times        when this partition computed and waited (`advice`: what to do about it)

Called by users' scripts; `cli` starts their processes (`cli.ranks`), and makes this package
importable under its original name (`alias`). May import everything below `keras`. TensorFlow is
imported with the first name that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanotf import lazy_names

if TYPE_CHECKING:
    from nanotf.smp.checkpoints import CheckpointManager
    from nanotf.smp.distributed import DistributedModel
    from nanotf.smp.objects import (
        allgather,
        barrier,
        broadcast,
        dp_barrier,
        mp_barrier,
        recv_from,
        send,
    )
    from nanotf.smp.outputs import StepOutput
    from nanotf.smp.ranks import CommGroup, RankType
    from nanotf.smp.report import last_report
    from nanotf.smp.runtime import (
        dp_rank,
        dp_size,
        get_dp_group,
        get_mp_group,
        init,
        local_rank,
        local_size,
        mp_rank,
        mp_size,
        num_microbatches,
        partition,
        rank,
        register_post_partition_hook,
        size,
    )
    from nanotf.smp.steps import gradients, step

_HOMES = {
    "CheckpointManager": ".checkpoints",
    "CommGroup": ".ranks",
    "DistributedModel": ".distributed",
    "RankType": ".ranks",
    "StepOutput": ".outputs",
    "allgather": ".objects",
    "barrier": ".objects",
    "broadcast": ".objects",
    "dp_barrier": ".objects",
    "dp_rank": ".runtime",
    "dp_size": ".runtime",
    "get_dp_group": ".runtime",
    "get_mp_group": ".runtime",
    "gradients": ".steps",
    "init": ".runtime",
    "last_report": ".report",
    "local_rank": ".runtime",
    "local_size": ".runtime",
    "mp_barrier": ".objects",
    "mp_rank": ".runtime",
    "mp_size": ".runtime",
    "num_microbatches": ".runtime",
    "partition": ".runtime",
    "rank": ".runtime",
    "recv_from": ".objects",
    "register_post_partition_hook": ".runtime",
    "send": ".objects",
    "size": ".runtime",
    "step": ".steps",
}

__all__ = [
    "CheckpointManager",
    "CommGroup",
    "DistributedModel",
    "RankType",
    "StepOutput",
    "allgather",
    "barrier",
    "broadcast",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "get_dp_group",
    "get_mp_group",
    "gradients",
    "init",
    "last_report",
    "local_rank",
    "local_size",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "num_microbatches",
    "partition",
    "rank",
    "recv_from",
    "register_post_partition_hook",
    "send",
    "size",
    "step",
]

__getattr__, __dir__ = lazy_names.attach(globals(), _HOMES)
