"""`nanotf.hvd`: Horovod's API on nanotf's collectives.

Each rank runs the whole script on its own data; gradients are averaged. `nanotf run --ranks -n N`
starts the ranks, and makes this package importable as `horovod.tensorflow`. TensorFlow is imported
with the first name that needs it.

    rank_facts              init, rank, size, ...
    reductions              Average, Sum, ... and Compression
    tensor_exchange         allreduce, allgather, broadcast, ... on tensors
    object_exchange         variables and picklable objects; join
    distributed_optimizer   DistributedOptimizer, DistributedGradientTape
    keras/                  horovod.keras and horovod.tensorflow.keras (`rank_callbacks`)
    elastic/                refused
    dataparallel            the names of smdistributed.dataparallel
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanotf import lazy_names

if TYPE_CHECKING:
    from nanotf.hvd import elastic, keras
    from nanotf.hvd.distributed_optimizer import (
        DistributedGradientTape,
        DistributedOptimizer,
    )
    from nanotf.hvd.object_exchange import (
        allgather_object,
        broadcast_global_variables,
        broadcast_object,
        broadcast_variables,
        join,
    )
    from nanotf.hvd.rank_facts import (
        ccl_built,
        cross_rank,
        cross_size,
        cuda_built,
        ddl_built,
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
        rocm_built,
        shutdown,
        size,
        sycl_built,
    )
    from nanotf.hvd.reductions import (
        Adasum,
        Average,
        Compression,
        Max,
        Min,
        Product,
        Sum,
    )
    from nanotf.hvd.tensor_exchange import (
        allgather,
        allreduce,
        alltoall,
        barrier,
        broadcast,
        grouped_allgather,
        grouped_allreduce,
        grouped_reducescatter,
        local_rank_op,
        local_size_op,
        rank_op,
        reducescatter,
        size_op,
    )

_HOMES: dict[str, str | None] = {
    "Adasum": "nanotf.hvd.reductions",
    "Average": "nanotf.hvd.reductions",
    "Compression": "nanotf.hvd.reductions",
    "DistributedGradientTape": "nanotf.hvd.distributed_optimizer",
    "DistributedOptimizer": "nanotf.hvd.distributed_optimizer",
    "Max": "nanotf.hvd.reductions",
    "Min": "nanotf.hvd.reductions",
    "Product": "nanotf.hvd.reductions",
    "Sum": "nanotf.hvd.reductions",
    "allgather": "nanotf.hvd.tensor_exchange",
    "allgather_object": "nanotf.hvd.object_exchange",
    "allreduce": "nanotf.hvd.tensor_exchange",
    "alltoall": "nanotf.hvd.tensor_exchange",
    "barrier": "nanotf.hvd.tensor_exchange",
    "broadcast": "nanotf.hvd.tensor_exchange",
    "broadcast_global_variables": "nanotf.hvd.object_exchange",
    "broadcast_object": "nanotf.hvd.object_exchange",
    "broadcast_variables": "nanotf.hvd.object_exchange",
    "ccl_built": "nanotf.hvd.rank_facts",
    "cross_rank": "nanotf.hvd.rank_facts",
    "cross_size": "nanotf.hvd.rank_facts",
    "cuda_built": "nanotf.hvd.rank_facts",
    "ddl_built": "nanotf.hvd.rank_facts",
    "global_process_set": "nanotf.hvd.rank_facts",
    "gloo_built": "nanotf.hvd.rank_facts",
    "gloo_enabled": "nanotf.hvd.rank_facts",
    "grouped_allgather": "nanotf.hvd.tensor_exchange",
    "grouped_allreduce": "nanotf.hvd.tensor_exchange",
    "grouped_reducescatter": "nanotf.hvd.tensor_exchange",
    "init": "nanotf.hvd.rank_facts",
    "is_homogeneous": "nanotf.hvd.rank_facts",
    "is_initialized": "nanotf.hvd.rank_facts",
    "join": "nanotf.hvd.object_exchange",
    "local_rank": "nanotf.hvd.rank_facts",
    "local_rank_op": "nanotf.hvd.tensor_exchange",
    "local_size": "nanotf.hvd.rank_facts",
    "local_size_op": "nanotf.hvd.tensor_exchange",
    "mpi_built": "nanotf.hvd.rank_facts",
    "mpi_enabled": "nanotf.hvd.rank_facts",
    "mpi_threads_supported": "nanotf.hvd.rank_facts",
    "nccl_built": "nanotf.hvd.rank_facts",
    "rank": "nanotf.hvd.rank_facts",
    "rank_op": "nanotf.hvd.tensor_exchange",
    "reducescatter": "nanotf.hvd.tensor_exchange",
    "rocm_built": "nanotf.hvd.rank_facts",
    "shutdown": "nanotf.hvd.rank_facts",
    "size": "nanotf.hvd.rank_facts",
    "size_op": "nanotf.hvd.tensor_exchange",
    "sycl_built": "nanotf.hvd.rank_facts",
    "elastic": None,
    "keras": None,
}

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "keras",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rank_op",
    "reducescatter",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "sycl_built",
]

__getattr__, __dir__ = lazy_names.attach(globals(), _HOMES)
