"""`nanotf run -n 4 script.py args...`: an unchanged script, in which every `fit` uses workers.

The script runs as `python script.py args...` would run it: as `__main__`, with its own `sys.argv`,
`sys.path`, exit code and traceback. `nanotf run -m module args...` is to `python -m` the same.
Keras is patched at the moment when the script has imported it, not before: what the script sets in
`os.environ` ahead of that import still counts, and a script that needs no TensorFlow does not wait
for it.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pathlib
import sys
import types
from dataclasses import dataclass
from typing import Any

from nanotf.console import say
from nanotf.errors import InvalidArgumentError
from nanotf.machine import topology
from nanotf.parent import defaults

# The modules after which Keras may be complete: the packages, what the lazy loader `tf.keras`
# loads for each generation, and what an `import nanotf.keras` of the script's own is in the midst
# of when it imports Keras.
_WATCHED = frozenset(
    {
        "tensorflow",
        "tensorflow.keras",
        "keras",
        "keras._tf_keras.keras",
        "keras.api._v2.keras",
        "tf_keras",
        "tf_keras.api._v2.keras",
        "nanotf.keras.models",
    }
)


@dataclass(frozen=True)
class Script:
    """A script to run.

    Args:
        name: str, a path or a module's name, as the user wrote it.
        arguments: tuple of str, of its command line.
        num_processes: int, "auto" or None, what a `fit` uses that does not say it; None leaves
            such a `fit` in one process.
        precision, sparse: str and bool, as in `patch_tensorflow`.
        is_module: bool, whether `name` is that of a module or a package.
    """

    name: str
    arguments: tuple[str, ...] = ()
    num_processes: int | str | None = None
    precision: str = "float32"
    sparse: bool = False
    is_module: bool = False

    def check(self) -> None:
        """Raises `InvalidArgumentError` or `PlacementError` where this cannot be run here."""
        path = pathlib.Path(self.name)
        if not self.is_module and not path.is_file():
            kind = "a directory" if path.is_dir() else "no such file"
            raise InvalidArgumentError(
                f"The script must be a Python file. Received: {self.name} ({kind})."
            )
        if isinstance(self.num_processes, int):
            topology.plan(self.num_processes)

    def run(self) -> None:
        """Runs the script in this process. Raises what it raises, `SystemExit` included."""
        default = defaults.RunDefault(self.num_processes)
        defaults.current = default
        sys.meta_path.insert(0, _PatchAfterKeras(self.precision, self.sparse))
        sys.argv = ["-m" if self.is_module else self.name, *self.arguments]
        if not getattr(sys.flags, "safe_path", False):  # Python 3.11 on; -P, PYTHONSAFEPATH
            script = pathlib.Path(self.name).resolve()
            sys.path[0] = str(pathlib.Path.cwd() if self.is_module else script.parent)
        # Registered ahead of the script's own handlers, it runs after them, and after all threads
        # that Python waits for: they may call `fit`, too.
        process = os.getpid()
        note = atexit.register(lambda: self._note(default, process))
        # `runpy` would take the module away again when the script has ended, while its threads and
        # exit handlers still run.
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__annotations__ = {}
        try:
            code = _code_of_module(self.name, main) if self.is_module else _code_of(self.name, main)
            exec(code, vars(main))
        except SystemExit:
            raise
        except _NoModule as error:
            atexit.unregister(note)
            say(
                "`nanotf run -m` takes the name of a module, or of a package that has a module "
                f"__main__. Received: -m {self.name} ({error}). Pass a name as after `import`, or "
                "a script's path without -m.",
                sys.stderr,
            )
            raise SystemExit(2) from None
        except BaseException as error:
            atexit.unregister(note)  # it did not come as far as that
            _hide_own_frames(error)
            raise

    def _note(self, default: defaults.RunDefault, process: int) -> None:
        if default.fits == 0 and os.getpid() == process:  # no fork of it
            told = f"{self.name} never called fit() of a tf.keras model"
            if self.num_processes is not None:
                told += f", so -n {self.num_processes} did nothing"
            say(f"{told}.", sys.stderr)


def _code_of(name: str, main: Any) -> types.CodeType:
    """The code of a script; tells `__main__` where it is from."""
    path = str(pathlib.Path(name).absolute())
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    main.__cached__ = None
    return compile(pathlib.Path(path).read_bytes(), path, "exec", dont_inherit=True)


class _NoModule(Exception):
    """There is no module of that name that can be run; its text says why."""


def _code_of_module(name: str, main: Any) -> Any:
    """The code of a module, whose package is imported first; tells `__main__` where it is from."""
    spec = _spec_of(name)
    if spec.submodule_search_locations is not None:
        spec = _spec_of(f"{name}.__main__")
    code = spec.loader.get_code(spec.name) if hasattr(spec.loader, "get_code") else None
    if code is None:
        raise _NoModule(f"{spec.name} has no Python code")
    main.__file__ = sys.argv[0] = spec.origin
    main.__loader__ = spec.loader
    main.__cached__ = spec.cached
    main.__package__ = spec.parent
    main.__spec__ = spec
    return code


def _spec_of(name: str) -> Any:
    package = name.rpartition(".")[0]
    if package:
        try:
            __import__(package)
        except ImportError as error:
            # Of what the package itself imports, its traceback tells.
            if error.name is None or not f"{package}.".startswith(f"{error.name}."):
                raise
            raise _NoModule(error) from None
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # as in `runpy`
        raise _NoModule(error) from None
    if spec is None:
        raise _NoModule(f"No module named {name!r}")
    return spec


def _hide_own_frames(error: BaseException) -> None:
    """Makes the traceback that ends this process begin in the script, if that is where it ends."""
    begin = error.__traceback__
    while begin is not None and begin.tb_frame.f_code.co_filename == __file__:
        begin = begin.tb_next
    show = sys.excepthook  # the script may have set its own

    def show_from_script(kind: Any, shown: Any, traceback: Any) -> None:
        if shown is error:
            traceback = begin
        show(kind, shown.with_traceback(traceback), traceback)

    sys.excepthook = show_from_script


class _PatchAfterKeras(importlib.abc.MetaPathFinder):
    """Calls `patch_tensorflow` when the script's import of Keras is complete.

    Args:
        precision, sparse: as in `patch_tensorflow`.
    """

    def __init__(self, precision: str, sparse: bool) -> None:
        self._precision = precision
        self._sparse = sparse
        self._loading: set[str] = set()

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Finds what the others find, and has an eye on it while it is executed."""
        if name not in _WATCHED:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            self._watch(name, spec.loader)
        return spec

    def _watch(self, name: str, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            self._loading.add(name)
            try:
                execute(module)
            finally:
                del loader.exec_module  # this function; the loader is the import system's own
                self._loading.discard(name)
            self._patch_if_complete()

        # A loader of another class would be asked for the package's data files later on.
        loader.exec_module = exec_module

    def _patch_if_complete(self) -> None:
        if self._loading or "tensorflow" not in sys.modules or self not in sys.meta_path:
            return
        if not sys.modules.keys() & {"keras", "tf_keras"}:
            return
        from nanotf.compat.versions import is_choosing_keras

        if is_choosing_keras():
            return  # `tf.keras` cannot be used yet; the module that it loads next is watched
        sys.meta_path.remove(self)
        from nanotf.keras.patching import patch_tensorflow

        patch_tensorflow(self._precision, self._sparse)
