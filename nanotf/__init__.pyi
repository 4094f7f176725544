"""The public names as type checkers and editors see them.

At run time they are imported when they are first used. tests/unit/test_names.py compares the two,
tests/packaging/test_types.py the arguments.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from nanotf import data, errors, estimator, hvd, inference, keras, optimizers, smp
from nanotf.keras import (
    Model,
    Sequential,
    nano,
    nano_bf16,
    nano_multiprocessing,
    nano_multiprocessing_loss,
)
from nanotf.machine.cluster import cluster, set_tf_config
from nanotf.machine.topology import plan
from nanotf.parent.map.mapping import imap, map
from nanotf.pool.warm import shutdown, worker_pids
from nanotf.region.checkpoint_manager import CheckpointManager
from nanotf.region.context import get_strategy, is_chief, rank, size
from nanotf.report.call_report import last_report
from nanotf.sagemaker.jobs.job import job
from nanotf.searching.search import search

__all__ = [
    "CheckpointManager",
    "Model",
    "Sequential",
    "__version__",
    "accelerate",
    "by_rows",
    "cluster",
    "data",
    "errors",
    "estimator",
    "get_strategy",
    "hvd",
    "imap",
    "inference",
    "is_chief",
    "job",
    "keras",
    "last_report",
    "map",
    "nano",
    "nano_bf16",
    "nano_multiprocessing",
    "nano_multiprocessing_loss",
    "optimizers",
    "patch_tensorflow",
    "plan",
    "rank",
    "search",
    "set_tf_config",
    "shutdown",
    "size",
    "smp",
    "unpatch_tensorflow",
    "warm_up",
    "whole",
    "worker_pids",
]

_Layer = TypeVar("_Layer")

__version__: str

def accelerate(model: Any) -> Model: ...
def by_rows(layer: _Layer) -> _Layer: ...
def patch_tensorflow(
    precision: Literal["float32", "mixed_bfloat16"] = "float32",
    sparse: bool = False,
    strategies: bool = False,
) -> None: ...
def unpatch_tensorflow(
    precision: Literal["float32", "mixed_bfloat16"] | None = None,
) -> None: ...
def warm_up(
    num_processes: int,
    cores_per_process: int | None = None,
    transport: Literal["shm", "grpc"] | None = None,
    cores: Sequence[int] | None = None,
    backend: Literal["local", "multiprocessing", "ray", "hosts"] | None = None,
) -> None: ...
def whole(layer: _Layer) -> _Layer: ...
