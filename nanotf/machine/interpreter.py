"""The command that starts another Python. It starts all of nanotf's child interpreters."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence

from nanotf.errors import NanoError

# `-m` and `-c` put the current folder before the standard library, and it may hold any files;
# `-P` came with Python 3.11. Python imports nothing from there before the first line of this code,
# and that line needs only built-in modules. The package is loaded from this one's location.
# Putting its folder (site-packages) on the path would add the packages next to it, or shadow the
# standard library.
_BOOT = "; ".join(
    (
        "import sys",
        "sys.path[:] = {path!a}",
        "from importlib import machinery, util",
        "spec = machinery.PathFinder.find_spec('nanotf', [{root!a}])",
        "package = sys.modules['nanotf'] = util.module_from_spec(spec)",
        "spec.loader.exec_module(package)",
        "import runpy",
        "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)",
    )
)

_HOME = pathlib.Path(os.__file__).parent
_STANDARD = (str(_HOME), str(_HOME / "lib-dynload"))
# As `-m nanotf`, but that the standard library comes first, whatever modules the current folder and
# PYTHONPATH hold. `os` is there when an interpreter begins. The first entry is the script's.
_COMMAND = "; ".join(
    (
        "import os, sys",
        "home = os.path.dirname(os.__file__)",
        "standard = home, os.path.join(home, 'lib-dynload')",
        "own = [] if getattr(sys.flags, 'safe_path', False) else [sys.prefix]",
        "rest = sys.path[len(own):]",
        "sys.path[:] = own + sorted(rest, key=lambda entry: entry not in standard)",
        "import runpy",
        "runpy.run_module('nanotf', run_name='__main__', alter_sys=True)",
    )
)


def nanotf_command(python: str) -> list[str]:
    """Returns the command `nanotf` of an interpreter, to be run in a folder of the user's."""
    return [python, "-c", _COMMAND]


def with_standard_first(path: Sequence[str]) -> list[str]:
    """Returns a path to import from with the standard library first."""
    return sorted(path, key=lambda entry: entry not in _STANDARD)


def python_command(module: str, *arguments: str, standard_first: bool = False) -> list[str]:
    """Returns the command that runs a module as `__main__`, with this process's imports.

    The module is nanotf's own, or one of a library that nanotf needs in a process of its own, such
    as pip. The child has this process's `sys.path`, element by element, this nanotf, and the
    options that this interpreter was started with (`-I`, `-E`, `-s`, `-X`, ...). PYTHONPATH is left
    alone: it is for the user's own processes.

    Args:
        *arguments: its `sys.argv[1:]`, the last words of the command line. Those of workers name
            their parent, see `neighbours.taken_cores`.
        standard_first: whether the standard library comes first: a script's folder may hold a
            `queue.py` that is not meant for the libraries that the child imports.

    Raises:
        NanoError: `sys.executable` names no program.
    """
    if not shutil.which(sys.executable or ""):
        raise NanoError(
            "nanotf starts processes with the interpreter that `sys.executable` names. Received: "
            f"sys.executable={sys.executable!r}, which is no program. Set it to the path of this "
            "Python (as an application that embeds Python has to)."
        )
    entries = [entry for entry in sys.path if isinstance(entry, str)]  # Python, too, ignores others
    code = _BOOT.format(
        path=with_standard_first(entries) if standard_first else entries,
        root=str(pathlib.Path(__file__).parents[2]),
    )
    # `multiprocessing` does this for its processes, too.
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *options, "-c", code, module, *arguments]
