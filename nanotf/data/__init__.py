"""Data of users' programs: `from nanotf.data import PipeModeDataset`.

What users import; `sagemaker.pipes` and `sagemaker.padding` are behind it. `python -m
nanotf.data.feed` is the other end of the pipes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanotf import lazy_names

if TYPE_CHECKING:
    from nanotf.sagemaker.padding import pad_batches
    from nanotf.sagemaker.pipes.pipe_files import PipeModeDatasetException
    from nanotf.sagemaker.pipes.pipe_mode import PipeModeDataset

__all__ = ["PipeModeDataset", "PipeModeDatasetException", "pad_batches"]

_HOMES = {
    "PipeModeDataset": "nanotf.sagemaker.pipes.pipe_mode",
    "PipeModeDatasetException": "nanotf.sagemaker.pipes.pipe_files",
    "pad_batches": "nanotf.sagemaker.padding",
}

__getattr__, __dir__ = lazy_names.attach(globals(), _HOMES)
