"""Multi-instance CPU acceleration for TensorFlow.

Importing this package is fast, does not import TensorFlow, and changes nothing. The names below
are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "CheckpointManager",
    "Model",
    "Sequential",
    "__version__",
    "accelerate",
    "errors",
    "get_strategy",
    "is_chief",
    "keras",
    "last_report",
    "nano",
    "nano_bf16",
    "nano_multiprocessing",
    "nano_multiprocessing_loss",
    "optimizers",
    "patch_tensorflow",
    "plan",
    "rank",
    "shutdown",
    "size",
    "unpatch_tensorflow",
    "warm_up",
    "whole",
    "worker_pids",
]

# The module that holds each name, for `__getattr__`. Type checkers and editors read the imports
# below this table; tests/unit/test_names.py compares the two.
_HOMES = {
    "CheckpointManager": "nanotf.region.checkpoints",
    "Model": "nanotf.keras",
    "Sequential": "nanotf.keras",
    "accelerate": "nanotf.keras.models",
    "errors": "nanotf",
    "get_strategy": "nanotf.region.context",
    "is_chief": "nanotf.region.context",
    "keras": "nanotf",
    "last_report": "nanotf.parent.report",
    "nano": "nanotf.keras",
    "nano_bf16": "nanotf.keras",
    "nano_multiprocessing": "nanotf.keras",
    "nano_multiprocessing_loss": "nanotf.keras",
    "optimizers": "nanotf",
    "patch_tensorflow": "nanotf.keras.patching",
    "plan": "nanotf.machine.topology",
    "rank": "nanotf.region.context",
    "shutdown": "nanotf.pool.warm",
    "size": "nanotf.region.context",
    "unpatch_tensorflow": "nanotf.keras.patching",
    "warm_up": "nanotf.pool.warm",
    "whole": "nanotf.region.decorators",
    "worker_pids": "nanotf.pool.warm",
}

if TYPE_CHECKING:
    from nanotf import errors, keras, optimizers
    from nanotf.keras import (
        Model,
        Sequential,
        nano,
        nano_bf16,
        nano_multiprocessing,
        nano_multiprocessing_loss,
    )
    from nanotf.keras.models import accelerate
    from nanotf.keras.patching import patch_tensorflow, unpatch_tensorflow
    from nanotf.machine.topology import plan
    from nanotf.parent.report import last_report
    from nanotf.pool.warm import shutdown, warm_up, worker_pids
    from nanotf.region.checkpoints import CheckpointManager
    from nanotf.region.context import get_strategy, is_chief, rank, size
    from nanotf.region.decorators import whole


def _import(name: str) -> Any:
    """Imports a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'nanotf' has no attribute {name!r}")
    if _HOMES[name] == "nanotf":
        return importlib.import_module(f"nanotf.{name}")
    return getattr(importlib.import_module(_HOMES[name]), name)


if not TYPE_CHECKING:  # type checkers would accept every name, even a misspelt one
    __getattr__ = _import


def __dir__() -> list[str]:
    return sorted(__all__)
