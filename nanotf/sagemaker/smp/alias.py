"""Lets scripts import `nanotf.smp` as `smdistributed.modelparallel.tensorflow`."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys

NAMES = ("smdistributed", "smdistributed.modelparallel", "smdistributed.modelparallel.tensorflow")


def install() -> None:
    """Adds the modules to this process, unless a package of that name is installed."""
    if NAMES[0] in sys.modules or importlib.util.find_spec(NAMES[0]) is not None:
        return
    # Libraries look for the package with `find_spec`, which refuses a module without a spec.
    specs = [importlib.machinery.ModuleSpec(name, None, is_package=True) for name in NAMES[:-1]]
    packages = [importlib.util.module_from_spec(spec) for spec in specs]
    made = [*packages, importlib.import_module("nanotf.smp")]
    for name, module, parent in zip(NAMES, made, [None, *made], strict=False):
        if parent is not None:
            setattr(parent, name.rpartition(".")[2], module)
        sys.modules[name] = module
