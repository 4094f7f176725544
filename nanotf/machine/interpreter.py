"""The command that starts another Python: all of nanotf's child interpreters are started by it."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

from nanotf.errors import NanoError

# `-m` and `-c` put the current folder before the standard library, where anybody's files may lie;
# `-P` came with Python 3.11. Before the first line of this, Python imports nothing from there, and
# that line needs nothing but what is built in. The package comes from where this one came from:
# its folder (site-packages) on the path would add what lies beside it, or come before the standard
# library.
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


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of nanotf as `__main__`, and imports as this process does.

    The child has this process's `sys.path`, element by element, this nanotf, and the options that
    this interpreter was started with (`-I`, `-E`, `-s`, `-X`, ...). PYTHONPATH is left alone: it is
    the user's, for processes of their own.

    Args:
        module: str, its name; a word of the command line, by which `neighbours` knows workers.
        *arguments: str, what the module finds in `sys.argv[1:]`.

    Returns:
        list of str, for `subprocess`.

    Raises:
        NanoError: `sys.executable` names no program.
    """
    if not shutil.which(sys.executable or ""):
        raise NanoError(
            "nanotf starts processes with the interpreter that `sys.executable` names. Received: "
            f"sys.executable={sys.executable!r}, which is no program. Set it to the path of this "
            "Python (as an application that embeds Python has to)."
        )
    code = _BOOT.format(
        path=[entry for entry in sys.path if isinstance(entry, str)],  # Python ignores others, too
        root=str(pathlib.Path(__file__).parents[2]),
    )
    # As `multiprocessing` does for its processes.
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *options, "-c", code, module, *arguments]
