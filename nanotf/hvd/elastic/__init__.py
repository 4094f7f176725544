"""Horovod's elastic training, which nanotf refuses: its number of ranks is fixed."""

from __future__ import annotations

from typing import Any

from nanotf.errors import UnavailableError


def __getattr__(name: str) -> Any:
    # `import`, `inspect` and others look for such names, and expect this error.
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise UnavailableError(
        f"The number of ranks is fixed while a script runs. Received: hvd.elastic.{name}. Save a "
        "checkpoint on rank 0 and start the script again; or, without Horovod, call "
        'fit(num_processes=N, resume="run1"), which continues after the loss of a worker.'
    )
