"""Trained models as programs: converted to the engine that computes them fastest, and called.

- `signature.py`: what a program takes and returns. It imports no TensorFlow.
- `structure.py`: how arrays lie in lists and dicts, as Keras takes and returns them.
- `exported.py`: makes a SavedModel of whatever users have; `saved_model.py` reads its signatures.
- `engines/`: what computes a program.
- `program_folder.py`: a program on the disk.
- `program.py`: `make`, `load`, `Program`; `row_ranges.py` divides the rows of `predict` between
  worker processes.
"""

from __future__ import annotations

from nanotf import lazy_names

_HOMES = {
    "Program": ".program",
    "load": ".program",
    "make": ".program",
}

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazy_names.attach(globals(), _HOMES)
