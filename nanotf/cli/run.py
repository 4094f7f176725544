"""`nanotf run -n 4 script.py args...`: an unchanged script, in which every `fit` uses workers.

The script runs as `python /path/to/script.py args...` would run it: as `__main__`, with its own
`sys.argv`, `sys.path`, exit code and traceback; a module as by `python -m module args...`.
TensorFlow is imported, and Keras patched, before the script begins. So what TensorFlow and Keras
read from the environment has to be set before, too: the first `fit` says which variables came late.
"""

from __future__ import annotations

import atexit
import os
import pathlib
import runpy
import shlex
import sys
import types
from dataclasses import dataclass
from typing import Any

from nanotf.console import say
from nanotf.errors import InvalidArgumentError
from nanotf.machine import topology
from nanotf.parent import defaults

# The variables that choose the Keras which has been patched: another one cannot be had any more.
CHOICES_OF_KERAS = ("KERAS_BACKEND", "TF_USE_LEGACY_KERAS")


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

    def prepare(self) -> None:
        """Imports and patches TensorFlow. Raises a `NanoError` where this cannot be run here."""
        path = pathlib.Path(self.name)
        if not self.is_module and not path.is_file():
            kind = "a directory" if path.is_dir() else "no such file"
            raise InvalidArgumentError(
                f"The script must be a Python file. Received: {self.name} ({kind})."
            )
        if isinstance(self.num_processes, int):
            topology.plan(self.num_processes)
        from nanotf.keras.patching import patch_tensorflow

        patch_tensorflow(self.precision, self.sparse)

    def run(self) -> None:
        """Runs the script in this process. Raises what it raises, `SystemExit` included."""
        late = _LateVariables(self.name)
        default = defaults.current = defaults.RunDefault(self.num_processes, late.refuse)
        path = pathlib.Path(self.name).absolute()
        sys.argv = ["-m" if self.is_module else str(path), *self.arguments]
        if not getattr(sys.flags, "safe_path", False):  # Python 3.11 on; -P, PYTHONSAFEPATH
            sys.path[0] = str(pathlib.Path.cwd() if self.is_module else path.resolve().parent)
        # Registered ahead of the script's own handlers, it runs after them, and after all threads
        # that Python waits for: they may call `fit`, too.
        process = os.getpid()
        note = atexit.register(lambda: self._note(default, late, process))
        try:
            if self.is_module:
                runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(path), run_name="__main__")
        except SystemExit:
            raise
        except BaseException as error:
            atexit.unregister(note)  # it did not come as far as that
            begin = _begin_of_script(error)
            if self.is_module and isinstance(error, ImportError) and begin is None:
                say(
                    "`nanotf run -m` takes the name of a module, or of a package that has a module "
                    f"__main__. Received: -m {self.name} ({error}). Pass a name as after `import`, "
                    "or a script's path without -m.",
                    sys.stderr,
                )
                raise SystemExit(2) from None
            if default.fits == 0:
                late.warn()
            _show_from(error, begin)
            raise

    def _note(self, default: defaults.RunDefault, late: _LateVariables, process: int) -> None:
        if default.fits == 0 and os.getpid() == process:  # no fork of it
            late.warn()
            told = f"{self.name} never called fit() of a tf.keras model"
            if self.num_processes is not None:
                told += f", so -n {self.num_processes} did nothing"
            say(f"{told}.", sys.stderr)


class _LateVariables:
    """Variables of TensorFlow and Keras that a script sets, made before it begins.

    Args:
        script: str, its name, for people.
    """

    def __init__(self, script: str) -> None:
        self._script = script
        # `patch_tensorflow` takes no other backend, whichever the variable or Keras's file names.
        self._in_force = {**os.environ, "KERAS_BACKEND": "tensorflow"}

    def _found(self) -> dict[str, str]:
        return {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("TF_", "KERAS_")) and self._in_force.get(name) != value
        }

    def _text(self, found: dict[str, str]) -> str:
        received = ", ".join(f"{name}={value!r}" for name, value in found.items())
        shell = " ".join(f"{name}={shlex.quote(value)}" for name, value in found.items())
        return (
            "`nanotf run` imports TensorFlow before the script begins: what it and Keras read from "
            f"the environment must be set before. Received: {received}, set by {self._script}. Set "
            f"it in the shell: `{shell} nanotf run ...`."
        )

    def refuse(self) -> None:
        """Raises `InvalidArgumentError` where the script wants another Keras; warns of the rest."""
        found = self._found()
        if found.keys() & set(CHOICES_OF_KERAS):
            raise InvalidArgumentError(self._text(found))
        self.warn()

    def warn(self) -> None:
        """Says which variables came too late, if any did."""
        found = self._found()
        if found:
            say(f"warning: {self._text(found)}", sys.stderr)


def _begin_of_script(error: BaseException) -> types.TracebackType | None:
    """Where an exception's traceback enters the script; None where it does not."""
    begin = error.__traceback__
    while begin is not None and begin.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        begin = begin.tb_next
    return begin


def _show_from(error: BaseException, begin: types.TracebackType | None) -> None:
    """Makes the traceback that ends this process begin in the script, if that is where it ends."""
    show = sys.excepthook  # the script may have set its own

    def show_from_script(kind: Any, shown: Any, traceback: Any) -> None:
        if shown is error:
            traceback = begin
        show(kind, shown.with_traceback(traceback), traceback)

    sys.excepthook = show_from_script
