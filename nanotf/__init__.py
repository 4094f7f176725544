"""Multi-instance CPU acceleration for TensorFlow.

Importing this package is fast, does not import TensorFlow, and changes nothing. The names below
are imported when they are first used.
"""

from __future__ import annotations

import os

from nanotf import lazy_names

if os.name != "posix":
    from nanotf.errors import UnsupportedVersionError

    raise UnsupportedVersionError(
        f"nanotf runs on Linux. Received: os.name={os.name!r}. On Windows, install it in WSL 2."
    )

__version__ = "0.2.0"

_HOMES = {
    "CheckpointManager": "nanotf.region.checkpoint_manager",
    "Model": "nanotf.keras",
    "Sequential": "nanotf.keras",
    "accelerate": "nanotf.keras.models",
    "by_rows": "nanotf.region.decorators",
    "cluster": "nanotf.machine.cluster",
    "get_strategy": "nanotf.region.context",
    "imap": "nanotf.parent.map.mapping",
    "is_chief": "nanotf.region.context",
    "job": "nanotf.sagemaker.jobs.job",
    "last_report": "nanotf.report.call_report",
    "map": "nanotf.parent.map.mapping",
    "nano": "nanotf.keras",
    "nano_bf16": "nanotf.keras",
    "nano_multiprocessing": "nanotf.keras",
    "nano_multiprocessing_loss": "nanotf.keras",
    "patch_tensorflow": "nanotf.keras.patching",
    "plan": "nanotf.machine.topology",
    "rank": "nanotf.region.context",
    "search": "nanotf.searching.search",
    "set_tf_config": "nanotf.machine.cluster",
    "shutdown": "nanotf.pool.warm",
    "size": "nanotf.region.context",
    "unpatch_tensorflow": "nanotf.keras.patching",
    "warm_up": "nanotf.pool.warm",
    "whole": "nanotf.region.decorators",
    "worker_pids": "nanotf.pool.warm",
    "data": None,
    "errors": None,
    "estimator": None,
    "hvd": None,
    "inference": None,
    "keras": None,
    "optimizers": None,
    "smp": None,
}

__all__ = ["__version__", *sorted(_HOMES)]

__getattr__, __dir__ = lazy_names.attach(globals(), _HOMES)
