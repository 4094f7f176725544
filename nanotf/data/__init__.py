"""Datasets for training: what users put between their data and `fit`.

Called by users. May import everything below it.

- `padding.py`: batches of one shape.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanotf.data.padding import pad_batches

__all__ = ["pad_batches"]

_HOMES = {"pad_batches": "padding"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
