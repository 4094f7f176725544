"""The installed libraries on which an environment depends: allocators, and TensorFlow's OpenMP.

TensorFlow's files are examined; TensorFlow is never imported.
"""

from __future__ import annotations

import functools
import importlib.util
import mmap
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

# The sonames of each allocator, best first, and the packages that have it. The minimal tcmalloc
# lacks the heap profiler, which is not needed here.
ALLOCATORS = {
    "tcmalloc": (
        (
            "libtcmalloc_minimal.so.4",
            "libtcmalloc_minimal.so",
            "libtcmalloc.so.4",
            "libtcmalloc.so",
        ),
        "libtcmalloc-minimal4 (Debian, Ubuntu) or gperftools-libs (Fedora)",
    ),
    "jemalloc": (
        ("libjemalloc.so.2", "libjemalloc.so"),
        "libjemalloc2 (Debian, Ubuntu) or jemalloc (Fedora)",
    ),
}
_OPENMP = "libiomp5.so"
_LIBRARY_DIRECTORIES = (
    f"/usr/lib/{platform.machine()}-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/lib64",
    "/usr/local/lib",
)


@dataclass(frozen=True)
class Installed:
    """The installed libraries."""

    allocators: tuple[tuple[str, str], ...] = ()  # name and path of those that can be preloaded
    tensorflow_uses_openmp: bool = False  # whether TensorFlow runs its kernels on libiomp5 threads
    libiomp5: str | None = None  # the library to preload for such a TensorFlow
    # Whether this environment has a libiomp5 that is not TensorFlow's (NumPy with MKL, from conda).
    foreign_openmp: bool = False

    def allocator(self, name: str) -> str | None:
        """Returns the path of an allocator, or None if it is missing."""
        return dict(self.allocators).get(name)


@functools.cache
def find_installed() -> Installed:
    """Looks for allocators and for TensorFlow's OpenMP. Cached for this process."""
    package = _tensorflow_package()
    openmp = package is not None and uses_openmp(package)
    prefix = pathlib.Path(sys.prefix) / "lib"
    return Installed(
        allocators=tuple(
            (name, path) for name in ALLOCATORS if (path := _find_allocator(name)) is not None
        ),
        tensorflow_uses_openmp=openmp,
        libiomp5=find_libiomp5(package, prefix) if openmp and package else None,
        foreign_openmp=not openmp and (prefix / _OPENMP).exists(),
    )


def _tensorflow_package() -> pathlib.Path | None:
    try:
        spec = importlib.util.find_spec("tensorflow")
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return pathlib.Path(places[0]) if places else None


def uses_openmp(package: pathlib.Path) -> bool:
    """Returns True if a TensorFlow package is linked against libiomp5.

    Such a library lists the name among the libraries that it needs (intel-tensorflow 2.14). Stock
    builds (2.15 to 2.21) do not contain it anywhere.
    """
    library = package / "libtensorflow_framework.so.2"
    try:
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as m:
            return m.find(b"\0" + _OPENMP.encode() + b"\0") >= 0
    except (OSError, ValueError):  # missing, or empty
        return False


def find_libiomp5(package: pathlib.Path, prefix: pathlib.Path) -> str | None:
    """Finds the libiomp5 that a TensorFlow package loads: its own, else the environment's."""
    candidates = [
        *sorted(package.parent.glob(f"_solib_local/*/{_OPENMP}")),
        package / "include/external/llvm_openmp" / _OPENMP,
        prefix / _OPENMP,
    ]
    return next((str(path) for path in candidates if can_preload(str(path))), None)


def _find_allocator(name: str) -> str | None:
    sonames, _ = ALLOCATORS[name]
    return next((path for path in _library_paths(sonames) if can_preload(path)), None)


def _library_paths(sonames: tuple[str, ...]) -> Iterator[str]:
    # The Python environment's own libraries come first: they were installed there on purpose.
    known = _linker_cache()
    for soname in sonames:
        yield str(pathlib.Path(sys.prefix) / "lib" / soname)
        yield from known.get(soname, ())
        for directory in _LIBRARY_DIRECTORIES:
            yield f"{directory}/{soname}"


@functools.cache
def _linker_cache() -> dict[str, list[str]]:
    """Returns library paths by soname, from `ldconfig -p`; empty if there is no such program."""
    program = shutil.which("ldconfig") or "/sbin/ldconfig"
    try:
        listing = subprocess.run(
            [program, "-p"], capture_output=True, text=True, errors="replace", timeout=10
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    found: dict[str, list[str]] = {}
    for soname, path in re.findall(r"^\s+(\S+) \(.*\) => (\S.*)$", listing, re.MULTILINE):
        found.setdefault(soname, []).append(path)
    return found


def can_preload(path: str) -> bool:
    """Returns True if LD_PRELOAD takes a library: it exists, fits this processor, and loads.

    Tries it on a process that does nothing: with a preload that fails, the dynamic linker prints
    a line before the output of every command in the user's shell.
    """
    if not sys.platform.startswith("linux") or not pathlib.Path(path).is_file():
        return False
    if any(character in path for character in ": \t\n"):  # LD_PRELOAD has no way to quote these
        return False
    environ = {**os.environ, "LD_PRELOAD": path}
    program = shutil.which("true") or "/bin/true"
    try:
        tried = subprocess.run([program], env=environ, capture_output=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return False
    return tried.returncode == 0 and not tried.stderr
