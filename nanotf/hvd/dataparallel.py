"""The names of SageMaker's smdistributed.dataparallel.tensorflow, on Horovod's."""

from __future__ import annotations

from typing import Any

from nanotf.hvd import tensor_exchange
from nanotf.hvd.distributed_optimizer import DistributedGradientTape, DistributedOptimizer
from nanotf.hvd.object_exchange import broadcast_global_variables, broadcast_variables
from nanotf.hvd.rank_facts import init, local_rank, local_size, rank, shutdown, size
from nanotf.hvd.reductions import Average, Compression, Max, Min, Sum
from nanotf.hvd.tensor_exchange import broadcast

__all__ = [
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "ReduceOp",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "init",
    "local_rank",
    "local_size",
    "oob_allreduce",
    "overlap",
    "rank",
    "shutdown",
    "size",
]


class ReduceOp:
    """The reductions, as values of the argument `op`."""

    AVERAGE, SUM, MIN, MAX = Average, Sum, Min, Max


def allreduce(
    tensor: Any,
    param_index: int = 0,
    num_params: int = 1,
    compression: Any = Compression.none,
    op: Any = ReduceOp.AVERAGE,
) -> Any:
    """Reduces a gradient over all ranks.

    Args:
        tensor: of the same shape on all ranks.
        param_index, num_params: ignored; they tell the original which gradients move together.
        compression: an attribute of `Compression`.
        op: an attribute of `ReduceOp`.
    """
    return tensor_exchange.allreduce(tensor, compression=compression, op=op)


def oob_allreduce(
    tensor: Any, compression: Any = Compression.none, op: Any = ReduceOp.AVERAGE
) -> Any:
    """Reduces a tensor that is no gradient over all ranks.

    Args:
        tensor, compression, op: as in `allreduce`.
    """
    return tensor_exchange.allreduce(tensor, compression=compression, op=op)


def overlap(tensor: Any) -> Any:
    """Returns the tensor: nanotf reduces all gradients in one exchange."""
    return tensor
