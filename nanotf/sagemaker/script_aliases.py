"""Lets scripts import nanotf's modules by the names of the packages that they replace.

`nanotf run` adds a finder to the script's process. A job's script may run in plain Python: its
PYTHONPATH ends with a folder that has a package for each name, which adds the finder.
A package of that name that the script can import, installed or its own, comes first.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import pathlib
import sys
import types
from collections.abc import Iterable, Sequence

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
    "sagemaker": "nanotf.estimator",
    "sagemaker.deserializers": "nanotf.estimator.deserializers",
    "sagemaker.inputs": "nanotf.estimator",
    "sagemaker.serializers": "nanotf.estimator.serializers",
    "sagemaker.session": "nanotf.estimator",
    "sagemaker.tensorflow": "nanotf.estimator",
    "sagemaker.tensorflow.estimator": "nanotf.estimator",
    "sagemaker.tensorflow.model": "nanotf.estimator",
    "sagemaker.tensorflow.serving": "nanotf.estimator.serving",
    "sagemaker_tensorflow": "nanotf.data",
    "smdistributed": None,
    "smdistributed.dataparallel": None,
    "smdistributed.dataparallel.tensorflow": "nanotf.hvd.dataparallel",
    "smdistributed.modelparallel": None,
    "smdistributed.modelparallel.tensorflow": "nanotf.smp",
}
PACKAGES = tuple(sorted({name.partition(".")[0] for name in NAMES}))
# An import returns what `sys.modules` has once the module's code has ended.
_STAND_IN = """\
import sys

from nanotf.sagemaker import script_aliases

sys.modules[__name__] = script_aliases.take_over(sys.modules[__name__])
"""


class _Aliases(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads the modules of some packages.

    Args:
        packages: those that are known to have no module of their own. Of others it decides that
            when they are imported: the script may have changed `sys.path` before.
    """

    def __init__(self, packages: Iterable[str] = ()) -> None:
        self._packages = set(packages)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in NAMES:
            return None
        if fullname in PACKAGES and _found_elsewhere(fullname, path) is None:
            self._packages.add(fullname)
        if fullname.partition(".")[0] not in self._packages:
            return None
        # A package: else Python would look for no names below it.
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: types.ModuleType) -> None:
        # Python's documentation lets a loader replace the module, so that both names refer to
        # one module.
        sys.modules[module.__name__] = _behind(module)


def _found_elsewhere(
    package: str, path: Sequence[str] | None
) -> importlib.machinery.ModuleSpec | None:
    """Returns what other finders find by a package's name; None if that is no code.

    Args:
        path: folders to search; None for `sys.path`.
    """
    for finder in sys.meta_path:
        spec = None if isinstance(finder, _Aliases) else finder.find_spec(package, path)
        # A folder of that name without code has neither.
        if spec is not None and spec.loader is not None and spec.origin is not None:
            return spec
    return None


def _behind(module: types.ModuleType) -> types.ModuleType:
    real = NAMES[module.__name__]
    return module if real is None else importlib.import_module(real)


def install() -> None:
    """Makes the names importable in this process, except those that have a package."""
    # First: a module's real package would otherwise be searched for names beside it.
    sys.meta_path.insert(0, _Aliases())


def take_over(module: types.ModuleType) -> types.ModuleType:
    """Returns what a package that `write` has written stands for, and adds the finder for it.

    That is an installed package of its name, which `sys.path` has further back, if there is one.
    """
    assert module.__file__ is not None
    folder = pathlib.Path(module.__file__).resolve().parents[1]
    others = [path for path in sys.path if pathlib.Path(path).resolve() != folder]
    spec = _found_elsewhere(module.__name__, others)
    if spec is not None and spec.loader is not None:
        installed = importlib.util.module_from_spec(spec)
        sys.modules[module.__name__] = installed
        spec.loader.exec_module(installed)
        return sys.modules[module.__name__]
    sys.meta_path.insert(0, _Aliases([module.__name__]))
    return _behind(module)


def write(folder: pathlib.Path) -> None:
    """Writes a package for each name, for the end of a PYTHONPATH."""
    for name in PACKAGES:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(_STAND_IN, encoding="utf-8")
