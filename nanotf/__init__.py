"""Multi-instance CPU acceleration for TensorFlow.

Importing this package imports neither TensorFlow nor anything else that takes time, and
changes nothing; the names below are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "CheckpointManager": "nanotf.checkpoints",
    "Model": "nanotf.keras",
    "Sequential": "nanotf.keras",
    "accelerate": "nanotf.models",
    "get_strategy": "nanotf.context",
    "is_chief": "nanotf.context",
    "last_report": "nanotf.report",
    "nano": "nanotf.keras",
    "nano_bf16": "nanotf.keras",
    "nano_multiprocessing": "nanotf.keras",
    "nano_multiprocessing_loss": "nanotf.keras",
    "patch_tensorflow": "nanotf.patching",
    "plan": "nanotf.topology",
    "rank": "nanotf.context",
    "shutdown": "nanotf.warm",
    "size": "nanotf.context",
    "unpatch_tensorflow": "nanotf.patching",
    "warm_up": "nanotf.warm",
    "worker_pids": "nanotf.warm",
    "errors": None,
    "keras": None,
    "optimizers": None,
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nanotf' has no attribute {name!r}")
    home = _HOMES[name]
    if home is None:
        return importlib.import_module(f"nanotf.{name}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
