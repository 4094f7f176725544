"""Environment variables for a plan. The pool and `nanotf-init` share this one source.

| variable | set for | value |
| --- | --- | --- |
| `OMP_NUM_THREADS` | both | the number of cores |
| `KMP_AFFINITY` | both, where pinned | `granularity=fine,proclist=[...],explicit` |
| `KMP_BLOCKTIME` | both | 1 ms; then idle OpenMP threads leave their core to TensorFlow's |
| `TF_NUM_INTRAOP_THREADS` | both | the number of cores |
| `TF_NUM_INTEROP_THREADS` | both | 2 in a worker; 2, or one per socket, in a shell |
| `TF_ENABLE_ONEDNN_OPTS` | shell | 1, or 0 with `--disable-onednn` |
| `LD_PRELOAD` | both | the allocator, and libiomp5 for a TensorFlow that uses OpenMP |
| `TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD` | with tcmalloc | 1 TiB: no line for each big tensor |
| `MALLOC_CONF` | with jemalloc | memory is kept, and purged by background threads |
| `TCMALLOC_RELEASE_RATE`, `GLIBC_TUNABLES` | `--perf` | see `PERF_HELP` |
| `NANOTF_ENV` | shell | the values that `nanotf-init` set, and the previous ones (JSON) |

Rules: a value that the user set wins, and is reported in `Environment.kept`. Variables exported
by `nanotf-init` are not the user's: `NANOTF_ENV` lists them, and they are computed again. In a
worker the user's thread counts are upper bounds, since they were meant for the whole machine.
oneDNN changes the last digits of results, so a worker uses it if its parent does.

All functions here are pure, except that `None` for `installed` examines this machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from nanotf.machine import topology
from nanotf.machine.installed import ALLOCATORS, Installed, find_installed
from nanotf.machine.shell_state import (
    STATE_VARIABLE,
    Options,
    ShellState,
    read_state,
    thread_count,
    user_environ,
)

# A collective blocks its inter-op thread until the other workers have arrived. The second thread
# runs the operations that do not depend on it.
WORKER_INTEROP_THREADS = 2

PERF_HELP = (
    "keep memory and ask for huge pages: TCMALLOC_RELEASE_RATE=0 with tcmalloc, thp:always in "
    "MALLOC_CONF with jemalloc, GLIBC_TUNABLES=glibc.malloc.hugetlb=1 without an allocator. Fewer "
    "page faults; processes may hold more memory. Never changes results"
)

_MALLOC_CONF = "background_thread:true,metadata_thp:auto,dirty_decay_ms:-1,muzzy_decay_ms:-1"
_OPENMP_VARIABLES = ("OMP_NUM_THREADS", "KMP_AFFINITY", "KMP_BLOCKTIME")
_ALLOCATOR_FILE = re.compile(r"lib(tcmalloc|jemalloc|mimalloc|tbbmalloc|hoard|snmalloc)")


@dataclass(frozen=True)
class Advice:
    """A setting that should be changed."""

    text: str  # the problem, without the final period
    fix: str  # the remedy, without the final period

    def __str__(self) -> str:
        return f"{self.text}; {self.fix}."


@dataclass(frozen=True)
class Environment:
    """Environment variables for a process."""

    variables: dict[str, str] = field(default_factory=dict)  # to be set
    kept: dict[str, str] = field(default_factory=dict)  # left as they are because the user set them
    # To be unset: `nanotf-init` set them, and they are not wanted here.
    removed: tuple[str, ...] = ()
    warnings: tuple[Advice, ...] = ()

    def apply(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Returns a whole environment: `environ` with the changes of this one."""
        rest = {name: value for name, value in environ.items() if name not in self.removed}
        return {**rest, **self.variables}


def initialised(environ: Mapping[str, str], options: Options, found: Environment) -> dict[str, str]:
    """Returns a shell's environment after `source nanotf-init`, `NANOTF_ENV` included.

    Args:
        environ: the shell's environment before; it may already be initialized.
        options: `Options` of `nanotf-init`.
        found: the result of `shell_environment` for the two.
    """
    mine = user_environ(environ)
    before = {name: mine.get(name) for name in found.variables}
    state = ShellState(options, found.variables, before)
    return {**mine, **found.variables, STATE_VARIABLE: state.dump()}


def worker_environment(
    placement: topology.Placement,
    environ: Mapping[str, str],
    installed: Installed | None = None,
) -> Environment:
    """Returns the variables of one worker.

    Args:
        placement: of the worker.
        environ: the parent's environment. Options of `nanotf-init` recorded in it hold for the
            workers, too.
        installed: None to examine this machine.

    Returns:
        Its `apply` returns the worker's whole environment.
    """
    state = read_state(environ)
    builder = _Builder(
        user_environ(environ),
        state.options if state else Options(),
        find_installed() if installed is None else installed,
        threads_are_bounds=True,
    )
    builder.add_threads(placement, WORKER_INTEROP_THREADS)
    if state:
        builder.add_onednn()
    builder.add_libraries()
    if builder.kept.get("TF_NUM_INTEROP_THREADS") == "1":
        builder.warn(
            "TF_NUM_INTEROP_THREADS=1 leaves a worker no thread beside the one that waits for the "
            "other workers",
            "unset it",
        )
    return builder.build(environ)


def shell_environment(
    machine: topology.Machine,
    environ: Mapping[str, str],
    options: Options | None = None,
    installed: Installed | None = None,
) -> Environment:
    """Returns the variables of a shell in which single processes use the whole machine.

    Args:
        environ: the shell's environment; `nanotf-init` may have changed it already.
        options: None for the defaults.
        installed: None to examine this machine.

    Returns:
        The changes, without `NANOTF_ENV`.

    Raises:
        PlacementError: The machine has fewer cores than the options ask for.
    """
    options = options or Options()
    mine = user_environ(environ)
    cap = thread_count(mine.get("OMP_NUM_THREADS"))
    wanted = options.cores
    if wanted is not None:
        topology.plan(1, wanted, machine)  # raises if it does not fit, whatever the cap
        wanted = min(wanted, cap or wanted)
    placement = topology.plan(1, wanted, machine, max_cores=cap).placements[0]
    sockets = {cpu.socket for cpu in machine.cpus if cpu.id in placement.cores}
    installed = find_installed() if installed is None else installed
    builder = _Builder(mine, options, installed, threads_are_bounds=False)
    builder.add_threads(placement, max(2, len(sockets)))
    builder.add_onednn()
    builder.add_libraries()
    if wanted != options.cores:
        builder.warn(
            f"OMP_NUM_THREADS={mine['OMP_NUM_THREADS']} was set by you and wins over "
            f"--cores {options.cores}",
            "unset it to use more cores",
        )
    return builder.build(mine)


class _Builder:
    """Collects variables. Those that the user set go to `kept`.

    Args:
        user: the environment without the variables that `nanotf-init` exported.
        threads_are_bounds: whether the user's higher thread counts are lowered.
    """

    def __init__(
        self,
        user: dict[str, str],
        options: Options,
        installed: Installed,
        *,
        threads_are_bounds: bool,
    ) -> None:
        self.user = user
        self.options = options
        self.installed = installed
        self.threads_are_bounds = threads_are_bounds
        self.variables: dict[str, str] = {}
        self.kept: dict[str, str] = {}
        self.warnings: list[Advice] = []

    def build(self, environ: Mapping[str, str]) -> Environment:
        """Returns the changes to `environ`, which `nanotf-init` may have changed already."""
        variables = dict(self.variables)
        removed = []
        for name in sorted(set(environ) | set(self.user)):
            # What is left was exported by `nanotf-init` before, and is not set this time.
            if name in variables or environ.get(name) == self.user.get(name):
                continue
            if name in self.user:
                variables[name] = self.user[name]
            elif name != STATE_VARIABLE:
                removed.append(name)
        return Environment(variables, self.kept, tuple(removed), tuple(self.warnings))

    def warn(self, text: str, fix: str) -> None:
        self.warnings.append(Advice(text, fix))

    def set(self, name: str, value: str) -> None:
        # An empty value counts as unset; OpenMP runtimes warn about it.
        if self.user.get(name):
            self.kept[name] = self.user[name]
        else:
            self.variables[name] = value

    def set_threads(self, name: str, count: int) -> None:
        given = thread_count(self.user.get(name))
        if self.threads_are_bounds and given is not None and given > count:
            self.variables[name] = str(count)
        else:
            self.set(name, str(count))

    def add_threads(self, placement: topology.Placement, interop: int) -> None:
        cores = len(placement.cores)
        if self.options.openmp:
            self.set_threads("OMP_NUM_THREADS", cores)
            if placement.pin and not self.installed.foreign_openmp:
                # A libiomp5 other than TensorFlow's (NumPy's MKL) would bind the main thread to
                # one core, and TensorFlow's threads, started by it, would inherit that core.
                self.set("KMP_AFFINITY", kmp_affinity(placement.cores))
            self.set("KMP_BLOCKTIME", "1")
        else:
            self.kept.update({n: self.user[n] for n in _OPENMP_VARIABLES if self.user.get(n)})
        self.set_threads("TF_NUM_INTRAOP_THREADS", cores)
        self.set("TF_NUM_INTEROP_THREADS", str(interop))

    def add_onednn(self) -> None:
        value = "1" if self.options.onednn else "0"
        self.set("TF_ENABLE_ONEDNN_OPTS", value)
        kept = self.kept.get("TF_ENABLE_ONEDNN_OPTS", value)
        if kept != value and not self.options.onednn:
            self.warn(
                f"TF_ENABLE_ONEDNN_OPTS={kept} was set by you and wins over --disable-onednn",
                "unset it to disable oneDNN",
            )

    def add_libraries(self) -> None:
        given = [entry for entry in re.split(r"[:\s]+", self.user.get("LD_PRELOAD", "")) if entry]
        names = [entry.rpartition("/")[2] for entry in given]
        ours = []
        if self.options.openmp and self.installed.tensorflow_uses_openmp:
            library = self.installed.libiomp5
            if library and library.rpartition("/")[2] not in names:
                ours.append(library)
        theirs = next((name for name in names if _ALLOCATOR_FILE.match(name)), None)
        allocator = self._choose_allocator(theirs)
        if allocator:
            ours.append(allocator[1])
        if ours:
            self.variables["LD_PRELOAD"] = ":".join([*ours, *given])
        elif given:
            self.kept["LD_PRELOAD"] = self.user["LD_PRELOAD"]
        if not theirs:  # the user's allocator is the user's to tune
            self._tune_allocator(allocator[0] if allocator else None)

    def _choose_allocator(self, theirs: str | None) -> tuple[str, str] | None:
        wanted = self.options.allocator
        if wanted == "none":
            return None
        if theirs:
            if wanted != "auto" and wanted not in theirs:
                self.warn(
                    f"LD_PRELOAD has {theirs}, which was set by you and wins over "
                    f"--enable-{wanted}",
                    "a process can have only one allocator",
                )
            return None
        name = "tcmalloc" if wanted == "auto" else wanted
        path = self.installed.allocator(name)
        if path is not None:
            return name, path
        if wanted != "auto":
            self.warn(
                f"{name} was requested but is not installed, so no allocator is preloaded",
                f"install the package {ALLOCATORS[name][1]}",
            )
        return None

    def _tune_allocator(self, name: str | None) -> None:
        if name == "tcmalloc":
            self.set("TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD", str(1 << 40))
            if self.options.perf:
                self.set("TCMALLOC_RELEASE_RATE", "0")
        elif name == "jemalloc":
            self.set("MALLOC_CONF", _MALLOC_CONF + (",thp:always" if self.options.perf else ""))
        elif self.options.perf:
            self.set("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")


def kmp_affinity(cores: tuple[int, ...]) -> str:
    """Returns the `KMP_AFFINITY` that gives each OpenMP thread one of these logical CPUs."""
    return f"granularity=fine,proclist=[{','.join(map(str, cores))}],explicit"
