"""Compiles the native library: `python -m nanotf.collectives.build`.

It makes two files next to this module: `_shm.so`, the protocol, which is independent of
TensorFlow, and `_ops.so`, the TensorFlow ops on top of it. Neither needs TensorFlow's headers.
One build serves every supported TensorFlow and Python on this machine.

Uses only the standard library, because `setup.py` runs it in an empty environment.

Environment variables read: `CXX` (the compiler; default: the first of `COMPILERS` that
compiles C++17, else that of the package ziglang), `CXXFLAGS`.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

COMPILERS = ("c++", "g++", "clang++")
# The package ziglang has clang and all headers. Its own default is the processor of this machine,
# but pip keeps wheels, and images move. -s strips 7 MB of symbols of its C++ library.
_ZIG = ("c++", "-mcpu=baseline", "-s")
_SECONDS = 1800  # for a command: zig, on a busy machine, compiles its C++ library before it links
SOURCES = Path(__file__).with_name("native")

_FLAGS = [
    # Hidden: only functions marked NANOTF_EXPORT can be mistaken for those of another library.
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"),
    # Allow vectorized comparisons. Neither flag changes a result.
    *("-fno-trapping-math", "-fno-math-errno"),
]
_SHM = (
    *("wait", "description", "group", "call", "collectives", "shm", "reduce", "reduce_baseline"),
    "records",
    "shared_values",
)
# Only these files have such instructions; `native/reduce.cc` picks one when the library runs.
_X86_VARIANTS = {
    "reduce_avx2": ["-mavx2"],
    "reduce_avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"],
}
_OPS = ("ops", "tf_c_api")


class BuildError(Exception):
    """The native library could not be compiled."""


def compiler() -> list[str]:
    """Returns the C++ compiler as the first words of a command."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in COMPILERS:
        if (found := shutil.which(name)) and _is_usable(found):
            return [found]
    package = importlib.util.find_spec("ziglang")
    if package is not None and package.origin is not None:
        return [os.fspath(Path(package.origin).with_name("zig")), *_ZIG]
    raise BuildError(
        f"a C++17 compiler is needed. Received: none of {', '.join(COMPILERS)} on PATH compiles "
        "C++17, and there is no package ziglang. `pip install ziglang`, or install a compiler, or "
        "set CXX."
    )


def _is_usable(command: str) -> bool:
    """Returns True unless a compiler is too old, or lacks the headers of its library."""
    checked = ("-std=c++17", "-fsyntax-only", "-include", "atomic", "-x", "c++", os.devnull)
    try:
        _run([command, *checked])
    except BuildError:
        return False
    return True


def target_macros(command: list[str]) -> set[str]:
    """Returns the names of a compiler's predefined macros, which identify its target.

    `-dumpmachine` does not work: zig rejects it if the target names a glibc version.
    """
    lines = _run([*command, "-E", "-dM", "-x", "c++", os.devnull]).splitlines()
    return {line.split()[1] for line in lines if line.startswith("#define ")}


def build(target: Path | None = None) -> tuple[Path, Path]:
    """Compiles both files.

    Args:
        target: output directory; default: the directory of this module.

    Returns:
        The paths of both files.

    Raises:
        BuildError: with the compiler's message.
    """
    target = target or Path(__file__).parent
    command = compiler()
    macros = target_macros(command)
    if "_WIN32" in macros:
        raise BuildError("nanotf runs on Linux. On Windows, install it in WSL 2.")
    flags = _FLAGS + shlex.split(os.environ.get("CXXFLAGS", ""))
    extra: dict[str, list[str]] = {}
    if "__x86_64__" in macros:
        flags = [*flags, "-DNANOTF_X86_VARIANTS"]
        extra = _X86_VARIANTS
    with tempfile.TemporaryDirectory() as name, concurrent.futures.ThreadPoolExecutor(2) as pool:
        directory = Path(name)

        def compile_one(source: str) -> str:
            out = os.fspath(directory / f"{source}.o")
            options = extra.get(source, [])
            _run([*command, *flags, *options, "-c", f"{SOURCES / source}.cc", "-o", out])
            return out

        shm_objects = pool.map(compile_one, (*_SHM, *extra))
        ops_objects = pool.map(compile_one, _OPS)
        shm, ops = directory / "_shm.so", directory / "_ops.so"
        mac = "__APPLE__" in macros
        # The ops load the protocol from their own directory, wherever the package is installed.
        own_name = "-Wl,-install_name,@rpath/_shm.so" if mac else "-Wl,-soname,_shm.so"
        origin = "@loader_path" if mac else "$ORIGIN"
        link = [*command, "-shared", "-pthread"]
        _run([*link, *shm_objects, own_name, "-o", os.fspath(shm)])
        # The ops look TensorFlow's functions up, which before glibc 2.34 takes libdl.
        libraries = [os.fspath(shm), f"-Wl,-rpath,{origin}", *([] if mac else ["-ldl"])]
        _run([*link, *ops_objects, *libraries, "-o", os.fspath(ops)])
        return _install(shm, target), _install(ops, target)


def _install(source: Path, target: Path) -> Path:
    """Replaces a library atomically: a process that has mapped the old file keeps it."""
    beside = target / f".{source.name}.{os.getpid()}"  # a rename replaces only within a file system
    shutil.copy(source, beside)
    return beside.replace(target / source.name)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{shlex.join(command)}: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)}\n{done.stderr.strip()}")
    return done.stdout.strip()


def main() -> int:
    """Runs the command: builds and prints the paths. Returns 1 on failure."""
    try:
        for path in build():
            print(path)
    except BuildError as error:
        print(f"nanotf: the native library was not built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
