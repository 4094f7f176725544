"""`nanotf run -n 4 script.py args...`: an unchanged script, in which every `fit` uses workers.

The script runs as `python script.py args...` would run it: as `__main__`, with its own `sys.argv`,
`sys.path`, exit code and traceback. Keras is patched at the moment when the script has imported
it, not before: what the script sets in `os.environ` ahead of that import still counts, and a
script that needs no TensorFlow does not wait for it.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import os
import pathlib
import sys
import types
from dataclasses import dataclass
from typing import Any

from nanotf import run_default, topology
from nanotf.errors import InvalidArgumentError

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
        "nanotf.models",
    }
)


@dataclass(frozen=True)
class Script:
    """A script to run.

    Args:
        path: str, as the user wrote it.
        arguments: tuple of str, of its command line.
        num_processes: int, "auto" or None, what a `fit` uses that does not say it; None leaves
            such a `fit` in one process.
        precision, sparse: str and bool, as in `patch_tensorflow`.
    """

    path: str
    arguments: tuple[str, ...] = ()
    num_processes: int | str | None = None
    precision: str = "float32"
    sparse: bool = True

    def check(self) -> None:
        """Raises `InvalidArgumentError` or `PlacementError` where this cannot be run here."""
        if not pathlib.Path(self.path).is_file():
            kind = "a directory" if pathlib.Path(self.path).is_dir() else "no such file"
            raise InvalidArgumentError(
                f"The script must be a Python file. Received: {self.path} ({kind})."
            )
        if isinstance(self.num_processes, int):
            topology.plan(self.num_processes)

    def run(self) -> None:
        """Runs the script in this process. Raises what it raises, `SystemExit` included."""
        default = run_default.RunDefault(self.num_processes)
        run_default.current = default
        sys.meta_path.insert(0, _PatchAfterKeras(self.precision, self.sparse))
        sys.argv = [self.path, *self.arguments]
        if not getattr(sys.flags, "safe_path", False):  # Python 3.11 on; -P, PYTHONSAFEPATH
            sys.path[0] = str(pathlib.Path(self.path).resolve().parent)
        path = str(pathlib.Path(self.path).absolute())
        # Registered ahead of the script's own handlers, it runs after them, and after all threads
        # that Python waits for: they may call `fit`, too.
        process = os.getpid()
        note = atexit.register(lambda: self._note(default, process))
        try:
            _run_as_main(path)
        except SystemExit:
            raise
        except BaseException:
            atexit.unregister(note)  # it did not come as far as that
            _hide_own_frames(path)
            raise

    def _note(self, default: run_default.RunDefault, process: int) -> None:
        if default.fits == 0 and os.getpid() == process:  # no fork of it
            told = f"{self.path} never called fit() of a tf.keras model"
            if self.num_processes is not None:
                told += f", so -n {self.num_processes} did nothing"
            print(f"nanotf: {told}.", file=sys.stderr)


def _run_as_main(path: str) -> None:
    # `runpy.run_path` would take the module away again when the script has ended, while its
    # threads and exit handlers still run.
    main: Any = types.ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    main.__annotations__ = {}
    main.__cached__ = None
    sys.modules["__main__"] = main
    code = compile(pathlib.Path(path).read_bytes(), path, "exec", dont_inherit=True)
    exec(code, vars(main))


def _hide_own_frames(path: str) -> None:
    """Makes the traceback that ends this process begin in the script."""
    show = sys.excepthook  # the script may have set its own

    def show_from_script(kind: Any, error: Any, traceback: Any) -> None:
        while traceback is not None and traceback.tb_frame.f_code.co_filename != path:
            traceback = traceback.tb_next
        show(kind, error.with_traceback(traceback), traceback)

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
        from nanotf.patching import patch_tensorflow

        patch_tensorflow(self._precision, self._sparse)
