"""`nanotf.smp`: a model-parallel API in the shape of SageMaker's smp v1 for TensorFlow.

What users import; `sagemaker.smp` is behind it. TensorFlow is imported with the first name that
needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanotf import lazy_names

if TYPE_CHECKING:
    from nanotf.sagemaker.smp.communication import (
        allgather,
        barrier,
        broadcast,
        dp_barrier,
        mp_barrier,
        recv_from,
        send,
    )
    from nanotf.sagemaker.smp.distributed import DistributedModel
    from nanotf.sagemaker.smp.model_checkpoints import CheckpointManager
    from nanotf.sagemaker.smp.rank_groups import (
        DP_GROUP,
        MP_GROUP,
        WORLD,
        CommGroup,
        RankType,
    )
    from nanotf.sagemaker.smp.runtime import (
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
        pp_rank,
        pp_size,
        rank,
        register_post_partition_hook,
        size,
    )
    from nanotf.sagemaker.smp.step_output import StepOutput
    from nanotf.sagemaker.smp.step_report import last_report
    from nanotf.sagemaker.smp.steps import gradients, step

_HOMES = {
    "CheckpointManager": "nanotf.sagemaker.smp.model_checkpoints",
    "CommGroup": "nanotf.sagemaker.smp.rank_groups",
    "DP_GROUP": "nanotf.sagemaker.smp.rank_groups",
    "DistributedModel": "nanotf.sagemaker.smp.distributed",
    "MP_GROUP": "nanotf.sagemaker.smp.rank_groups",
    "RankType": "nanotf.sagemaker.smp.rank_groups",
    "StepOutput": "nanotf.sagemaker.smp.step_output",
    "WORLD": "nanotf.sagemaker.smp.rank_groups",
    "allgather": "nanotf.sagemaker.smp.communication",
    "barrier": "nanotf.sagemaker.smp.communication",
    "broadcast": "nanotf.sagemaker.smp.communication",
    "dp_barrier": "nanotf.sagemaker.smp.communication",
    "dp_rank": "nanotf.sagemaker.smp.runtime",
    "dp_size": "nanotf.sagemaker.smp.runtime",
    "get_dp_group": "nanotf.sagemaker.smp.runtime",
    "get_mp_group": "nanotf.sagemaker.smp.runtime",
    "gradients": "nanotf.sagemaker.smp.steps",
    "init": "nanotf.sagemaker.smp.runtime",
    "last_report": "nanotf.sagemaker.smp.step_report",
    "local_rank": "nanotf.sagemaker.smp.runtime",
    "local_size": "nanotf.sagemaker.smp.runtime",
    "mp_barrier": "nanotf.sagemaker.smp.communication",
    "mp_rank": "nanotf.sagemaker.smp.runtime",
    "mp_size": "nanotf.sagemaker.smp.runtime",
    "num_microbatches": "nanotf.sagemaker.smp.runtime",
    "partition": "nanotf.sagemaker.smp.runtime",
    "pp_rank": "nanotf.sagemaker.smp.runtime",
    "pp_size": "nanotf.sagemaker.smp.runtime",
    "rank": "nanotf.sagemaker.smp.runtime",
    "recv_from": "nanotf.sagemaker.smp.communication",
    "register_post_partition_hook": "nanotf.sagemaker.smp.runtime",
    "send": "nanotf.sagemaker.smp.communication",
    "size": "nanotf.sagemaker.smp.runtime",
    "step": "nanotf.sagemaker.smp.steps",
}

__all__ = [
    "DP_GROUP",
    "MP_GROUP",
    "WORLD",
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
    "pp_rank",
    "pp_size",
    "rank",
    "recv_from",
    "register_post_partition_hook",
    "send",
    "size",
    "step",
]

__getattr__, __dir__ = lazy_names.attach(globals(), _HOMES)
