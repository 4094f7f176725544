"""`nanotf run -n 4 script.py args...` runs an unchanged script; every `fit` in it uses workers.

The script runs as `python /path/to/script.py args...` would run it: as `__main__`, with its own
`sys.argv`, `sys.path`, exit code and traceback. A module runs as with `python -m module args...`.
TensorFlow is imported and Keras patched before the script begins, so their environment variables
must be set before that, too. The first `fit` names the variables that were set too late.

With `--ranks` or `--smp`, several processes run the script, as ranks (`ranks`).
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import pathlib
import runpy
import shlex
import signal
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nanotf import tracebacks
from nanotf.cli import hosts
from nanotf.console import say
from nanotf.errors import InvalidArgumentError
from nanotf.machine import cluster, topology
from nanotf.machine.cluster import Cluster
from nanotf.machine.own_exit import at_own_exit
from nanotf.parent import defaults
from nanotf.parent.defaults import PRECISIONS
from nanotf.ranks import rank_launch, strategy_hook
from nanotf.sagemaker import script_aliases

# These variables choose the Keras that is patched. Once it is, no other one can be used.
CHOICES_OF_KERAS = ("KERAS_BACKEND", "TF_USE_LEGACY_KERAS")


@dataclass(frozen=True)
class Script:
    """A script to run."""

    name: str  # a path or a module's name, as the user wrote it
    arguments: tuple[str, ...] = ()  # its command-line arguments
    # The default of each `fit`, a number or "auto"; None keeps a `fit` without `num_processes` in
    # one process.
    num_processes: int | str | None = None
    precision: str = "float32"  # as in `patch_tensorflow`
    sparse: bool = False  # as in `patch_tensorflow`
    is_module: bool = False  # whether `name` is a module or a package
    hosts: str | None = None  # the flag `--hosts`
    tune: tuple[str, ...] = ()  # the default of `tune` of each `fit`
    ranks: bool = False  # the flag `--ranks`: `num_processes` counts ranks
    smp: bool = False  # the flag `--smp`: the same, and all ranks print

    def prepare(self) -> int | Script:
        """Imports and patches TensorFlow, and waits for the other hosts.

        Returns:
            The script as it is to run here; or an exit code, if it has run in ranks, or on another
            host, to which this one has lent its workers.

        Raises:
            NanoError: It cannot run here.
        """
        if rank_launch.are_wanted(self.ranks or self.smp, os.environ):
            return self._run_ranks()
        asked = self.num_processes
        found = hosts.enter(
            self.hosts, lambda found: hosts.workers(found, asked), os.environ, self._check
        )
        if isinstance(found, int):
            return found
        from nanotf.keras.patching import patch_tensorflow

        if self.num_processes != 1 and found is None:
            from nanotf.pool import local

            local.begin_here()  # before anything of Keras is replaced
        # Workers divide the work; a strategy of the script's would divide it a second time.
        has_workers = self.num_processes is not None or found is not None
        patch_tensorflow(self.precision, self.sparse, strategies=has_workers)
        strategy_hook.tell_of_ranks(has_workers)
        if found is None:
            return self
        hosts.wait_for_all(found)
        return dataclasses.replace(self, num_processes=found.total())

    def _run_ranks(self) -> int:
        """Runs the script as ranks, here and on other hosts. Returns the exit code."""

        def count(found: Cluster) -> int:
            self._check_file()  # every host needs it
            return rank_launch.number(found, self.num_processes, self.smp, os.environ)

        lender = rank_launch.RankLender(self)
        # Nothing is left to check on the first host alone: `count` does it on each.
        found = hosts.enter(self.hosts, count, os.environ, lambda: None, lender)
        if isinstance(found, int):
            return found
        if found is not None:
            hosts.wait_for_all(found)
        code, is_followed = rank_launch.run(self, count(cluster.cluster()), found)
        hosts.end(code)
        return hosts.own_code(code, os.environ) if is_followed else code

    def _check(self) -> None:
        self._check_file()
        if isinstance(self.num_processes, int):
            topology.plan(self.num_processes)  # raises if there are too few cores

    def _check_file(self) -> None:
        path = pathlib.Path(self.name)
        if not self.is_module and not path.is_file():
            kind = "a directory" if path.is_dir() else "no such file"
            raise InvalidArgumentError(
                f"The script must be a Python file. Received: {self.name} ({kind})."
            )

    @property
    def shows_all_ranks(self) -> bool:
        """True if all ranks print: those of `nanotf.smp` do."""
        return not self.ranks

    def run_as_rank(self, rank: int) -> None:
        """Runs the script in this process, a rank. Imports TensorFlow only if an option needs it.

        Its exceptions propagate.
        """
        if self.precision != PRECISIONS[0] or self.sparse:
            from nanotf.keras.patching import patch_tensorflow

            patch_tensorflow(self.precision, self.sparse)
        script_aliases.install()
        strategy_hook.use_ranks()
        self._set_arguments()
        try:
            self._execute()
        except KeyboardInterrupt as error:
            if rank > 0:  # each rank gets it; rank 0 shows where its own was
                raise SystemExit(128 + signal.SIGINT) from None
            _show_from(error, _begin_of_script(error))
            raise
        except BaseException as error:
            _show_from(error, _begin_of_script(error), in_short=True)
            raise

    def run(self) -> None:
        """Runs the script in this process. Its exceptions propagate, `SystemExit` included."""
        script_aliases.install()
        late = _LateVariables(self.name)
        default = defaults.current = defaults.RunDefault(
            self.num_processes, late.refuse, tune=self.tune
        )
        self._set_arguments()
        # Registered before the script's own handlers, it runs after them, and after all threads
        # that Python waits for. Handlers and threads may also call `fit`.
        note = at_own_exit(lambda: self._note(default, late))
        try:
            self._execute()
        except SystemExit as end:
            code = _exit_code(end)
            hosts.end(code)
            if code:  # a script that failed, such as one with wrong arguments
                _replace_note(note, default, late)
            raise
        except BaseException as error:
            begin = _begin_of_script(error)
            # No entry inside the script: the module itself is missing, not one that it imports.
            if self.is_module and isinstance(error, ImportError) and begin is None:
                say(
                    "`nanotf run -m` takes the name of a module, or of a package that has a module "
                    f"__main__. Received: -m {self.name} ({error}). Pass a name as after `import`, "
                    "or a script's path without -m.",
                    sys.stderr,
                )
                atexit.unregister(note)  # nothing has run that could call `fit`
                raise SystemExit(2) from None  # as for other wrong arguments
            _replace_note(note, default, late)
            _show_from(error, begin)
            raise
        else:
            hosts.end(0)

    def _set_arguments(self) -> None:
        path = pathlib.Path(self.name).absolute()
        # `run_module` replaces -m by the module's path, as Python itself does.
        sys.argv = ["-m" if self.is_module else str(path), *self.arguments]
        if not getattr(sys.flags, "safe_path", False):  # Python 3.11 on; -P, PYTHONSAFEPATH
            # As Python's: of a script that is a link, the folder of its target.
            sys.path[0] = str(pathlib.Path.cwd() if self.is_module else path.resolve().parent)

    def _execute(self) -> None:
        if self.is_module:
            # So that pickle finds the script's classes in `__main__`; `run_path` does it always.
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(pathlib.Path(self.name).absolute()), run_name="__main__")

    def _note(self, default: defaults.RunDefault, late: _LateVariables) -> None:
        if default.fits == 0:  # else the first `fit` has warned
            late.warn()
            if default.used:
                return
            told = f"{self.name} never called fit() of a tf.keras model in this process"
            if self.num_processes is not None and not hosts.are_several():
                told += f", so -n {self.num_processes} did nothing"
                told += _cure(self.num_processes)
            say(f"{told}.", sys.stderr)


def _replace_note(
    note: Callable[[], None], default: defaults.RunDefault, late: _LateVariables
) -> None:
    """Drops the note on `fit`: the script has failed, perhaps before its first call of it."""
    atexit.unregister(note)
    if default.fits == 0:
        late.warn()


def _cure(number: int | str) -> str:
    """Returns the advice for a script that trains, if at all, in a loop of its own."""
    number = number if isinstance(number, int) and number > 1 else 2
    return (
        ". Custom loops run in one process: to divide one, put it into a function under "
        f"`@nanotf.nano(num_processes={number})`. Processes that the script or a library starts, "
        "such as joblib's, train as they do without nanotf"
    )


class _LateVariables:
    """Variables of TensorFlow and Keras that a script sets too late. Created before it begins.

    Args:
        script: its name, as the user wrote it.
    """

    def __init__(self, script: str) -> None:
        self._script = script
        # `patch_tensorflow` rejects other backends, whether a variable or Keras's file names them.
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
            "`nanotf run` imports TensorFlow before the script begins: environment variables of "
            f"TensorFlow and Keras must be set earlier. Received: {received}, set by "
            f"{self._script}. Set them in the shell: `{shell} nanotf run ...`."
        )

    def refuse(self) -> None:
        """Raises `InvalidArgumentError` if the script selects another Keras. Else only warns."""
        found = self._found()
        if found.keys() & set(CHOICES_OF_KERAS):
            raise InvalidArgumentError(self._text(found))
        self.warn()

    def warn(self) -> None:
        """Warns about variables that were set too late, if there are any."""
        found = self._found()
        if found:
            say(f"warning: {self._text(found)}", sys.stderr)


def _exit_code(end: SystemExit) -> int:
    """Returns the exit code that Python makes of an exception."""
    if end.code is None:
        return 0
    return end.code if isinstance(end.code, int) else 1  # Python prints any other object


def _begin_of_script(error: BaseException) -> types.TracebackType | None:
    """Returns the first traceback entry inside the script, or None if there is none."""
    begin = error.__traceback__
    while begin is not None and begin.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        begin = begin.tb_next
    return begin


def _show_from(
    error: BaseException, begin: types.TracebackType | None, in_short: bool = False
) -> None:
    """Makes the printed traceback begin in the script, if this exception ends the process.

    Args:
        in_short: True shows the reason of an error in a step first, and not TensorFlow's stack.
    """
    show = sys.excepthook  # the script may have set its own

    def show_from_script(kind: Any, shown: Any, traceback: Any) -> None:
        if shown is error:
            traceback = begin
            # A hook of the script's own gets the whole error.
            text = _in_short(error, begin) if in_short and show is sys.__excepthook__ else ""
            if text:
                print(text, file=sys.stderr)
                return
        show(kind, shown.with_traceback(traceback), traceback)

    sys.excepthook = show_from_script


def _in_short(error: BaseException, begin: types.TracebackType | None) -> str:
    """Returns the text of an error in a step; empty for another, or if the whole is wanted."""
    step_errors: Any = sys.modules.get("nanotf.compat.step_errors")  # since the first step
    if step_errors is None or tracebacks.shows_whole():
        return ""
    return str(step_errors.in_short(error, begin))
