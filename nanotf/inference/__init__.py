"""Trained models as programs: converted to the engine that computes them fastest, and called.

- `signature.py`: what a program takes and returns. It imports no TensorFlow.
- `structure.py`: how arrays lie in lists and dicts, as Keras takes and returns them.
- `exported.py`: makes a SavedModel of whatever users have; `saved_model.py` reads its signatures.
- `engines/`: what computes a program.
- `program_folder.py`: a program on the disk.
- `program.py`: `make`, `load`, `Program`; `row_ranges.py` divides the rows of `predict` between
  worker processes.
- `optimizing.py`: `optimize` tries the engines; `optimize_arguments.py` checks what it gets,
  `candidate_runs.py` is what their processes run, `optimize_result.py` the table and the best.
- `nano_names.py`: the same by the names of BigDL-Nano.
- `row_proof.py`: proves that requests may share a batch.
"""

from __future__ import annotations

from nanotf import lazy_names

_HOMES = {
    "InferenceOptimizer": ".nano_names",
    "OptimizeResult": ".optimize_result",
    "Program": ".program",
    "load": ".program",
    "make": ".program",
    "optimize": ".optimizing",
}

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazy_names.attach(globals(), _HOMES)
