"""Horovod's API for Keras: `horovod.keras` and `horovod.tensorflow.keras`."""

from __future__ import annotations

from typing import Any

from nanotf.hvd import elastic, tensor_exchange
from nanotf.hvd.distributed_optimizer import DistributedOptimizer
from nanotf.hvd.keras import callbacks
from nanotf.hvd.loaded_models import load_model
from nanotf.hvd.object_exchange import (
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    join,
)
from nanotf.hvd.rank_facts import (
    cross_rank,
    cross_size,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    shutdown,
    size,
    sycl_built,
)
from nanotf.hvd.reductions import Adasum, Average, Compression, Max, Min, Sum
from nanotf.hvd.tensor_exchange import barrier

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "callbacks",
    "cross_rank",
    "cross_size",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "shutdown",
    "size",
    "sycl_built",
]


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = Compression.none,
) -> Any:
    """Reduces a value over all ranks.

    Args:
        value: tensor, array or number.
        name, average, prescale_factor, postscale_factor, op, compression: as in
            `nanotf.hvd.allreduce`.
    """
    return tensor_exchange.allreduce(
        value,
        average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Joins values of all ranks along their first axis.

    Args:
        value, name: as `tensor` and `name` of `nanotf.hvd.allgather`.
    """
    return tensor_exchange.allgather(value)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Returns the root's value.

    Args:
        value, root_rank, name: as in `nanotf.hvd.broadcast`.
    """
    return tensor_exchange.broadcast(value, root_rank)


def reducescatter(value: Any, name: str | None = None, op: Any = None) -> Any:
    """Reduces a value over all ranks; each rank gets its part of the first axis.

    Args:
        value, name, op: as in `nanotf.hvd.reducescatter`.
    """
    return tensor_exchange.reducescatter(value, op=op)
