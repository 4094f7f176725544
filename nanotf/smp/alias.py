"""Lets scripts import `nanotf.smp` as `smdistributed.modelparallel.tensorflow`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types

NAMES = ("smdistributed", "smdistributed.modelparallel", "smdistributed.modelparallel.tensorflow")


def install() -> None:
    """Adds the modules to this process, unless a package of that name is installed."""
    if NAMES[0] in sys.modules or importlib.util.find_spec(NAMES[0]) is not None:
        return
    made = [types.ModuleType(name) for name in NAMES[:-1]] + [importlib.import_module("nanotf.smp")]
    for name, module, parent in zip(NAMES, made, [None, *made], strict=False):
        if parent is not None:
            setattr(parent, name.rpartition(".")[2], module)
        if module is not made[-1]:
            module.__path__ = []
        sys.modules[name] = module
