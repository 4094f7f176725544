"""Data of users' programs: `from nanotf.data import PipeModeDataset`.

Called by users' programs, before any nanotf model is involved: a dataset made here is an ordinary
`tf.data.Dataset`, which `fit` reads like any other. `python -m nanotf.data.feed` is the other end
of the pipes.
May import `collectives` (the native library), `compat`, `machine`, `wire`, `errors` and `console`.
Nothing below `cli` imports it.

- `pipe_mode.py`: the dataset, which takes the next pipe for each iterator.
- `channels.py`: the files of a Pipe mode channel: its configuration, its pipes, the next index.
- `records.py`: reads a pipe into records.
- `scanning.py`: finds the records in a buffer, by `collectives/native/records.cc` or in Python.
- `padding.py`: batches of one shape.
- `feeding.py`, `feed.py`: write a channel's files to its pipes; the command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanotf import lazy_names

if TYPE_CHECKING:
    from nanotf.data.channels import PipeModeDatasetException
    from nanotf.data.padding import pad_batches
    from nanotf.data.pipe_mode import PipeModeDataset

__all__ = ["PipeModeDataset", "PipeModeDatasetException", "pad_batches"]

_HOMES = {
    "PipeModeDataset": ".pipe_mode",
    "PipeModeDatasetException": ".channels",
    "pad_batches": ".padding",
}

__getattr__, __dir__ = lazy_names.attach(globals(), _HOMES)
