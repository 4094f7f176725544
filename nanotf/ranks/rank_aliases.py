"""Lets scripts import nanotf's libraries of ranks by the names of those that they replace."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence

# The module behind each name; None for a package without content.
NAMES: dict[str, str | None] = {
    "horovod": None,
    "horovod.keras": "nanotf.hvd.keras",
    "horovod.keras.callbacks": "nanotf.hvd.keras.callbacks",
    "horovod.keras.elastic": "nanotf.hvd.elastic",
    "horovod.tensorflow": "nanotf.hvd",
    "horovod.tensorflow.elastic": "nanotf.hvd.elastic",
    "horovod.tensorflow.keras": "nanotf.hvd.keras",
    "horovod.tensorflow.keras.callbacks": "nanotf.hvd.keras.callbacks",
    "horovod.tensorflow.keras.elastic": "nanotf.hvd.elastic",
    "smdistributed": None,
    "smdistributed.dataparallel": None,
    "smdistributed.dataparallel.tensorflow": "nanotf.hvd.dataparallel",
    "smdistributed.modelparallel": None,
    "smdistributed.modelparallel.tensorflow": "nanotf.smp",
}


class _Aliases(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads the modules of some packages.

    Args:
        packages: those that are not installed themselves.
    """

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in NAMES or fullname.partition(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: types.ModuleType) -> None:
        real = NAMES[module.__name__]
        if real is not None:
            # Python's documentation lets a loader replace the module, so that both names refer to
            # one module.
            sys.modules[module.__name__] = importlib.import_module(real)


def install() -> None:
    """Makes the names importable in this process, except those of installed packages."""
    packages = {name.partition(".")[0] for name in NAMES}
    free = [n for n in packages if n not in sys.modules and importlib.util.find_spec(n) is None]
    # First: a module's real package would otherwise be searched for names beside it.
    sys.meta_path.insert(0, _Aliases(free))
