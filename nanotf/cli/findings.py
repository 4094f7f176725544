"""Problems that `nanotf doctor` finds on a machine, and the fix for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nanotf.cli.picture import count, ranges
from nanotf.collectives.native_library import python_wanted
from nanotf.compat.versions import OLDEST_KERAS_3, parse_version
from nanotf.machine import environment, shell_state
from nanotf.machine.cpus import Machine
from nanotf.machine.installed import ALLOCATORS, Installed
from nanotf.machine.limits import System
from nanotf.machine.processor import Processor
from nanotf.machine.tensorflow_build import TensorFlowBuild
from nanotf.machine.topology import Plan, plan

# Most important first: it does not work; it is slower than it could be; worth knowing.
SEVERITIES = ("error", "warning", "note")

_OPEN_FILES = 256  # a worker needs about ten; TensorFlow and a dataset's files need the others
_PROCESS_BYTES = 600 << 20  # a worker with TensorFlow and a small model


@dataclass(frozen=True)
class Finding:
    """Something that could be better.

    Args:
        severity: str, one of `SEVERITIES`.
        text: str, the problem.
        fix: str, how to fix it.
    """

    severity: str
    text: str
    fix: str


@dataclass(frozen=True)
class Facts:
    """The facts that the doctor examines.

    Args:
        machine: `Machine`.
        processor: `Processor`.
        system: `System`.
        build: `TensorFlowBuild`.
        installed: `Installed`.
        native: tuple of bool and str, whether the compiled collectives can be used, and why.
        environ: mapping, the environment variables.
    """

    machine: Machine
    processor: Processor
    system: System
    build: TensorFlowBuild
    installed: Installed
    native: tuple[bool, str]
    environ: Mapping[str, str]


def find(facts: Facts, chosen: Plan, *, skipped: bool = False) -> list[Finding]:
    """Finds problems, most important first.

    Args:
        facts: `Facts`.
        chosen: `Plan`, the cores of the workers to examine.
        skipped: bool, default False, whether the requested test needs more cores.
    """
    found = [
        *_of_tensorflow(facts.build),
        *_of_machine(facts, skipped),
        *_of_plan(facts, chosen),
        *_of_system(facts.system, len(chosen.placements)),
        *_of_environment(facts, chosen),
        *_of_speed(facts),
    ]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def _of_tensorflow(build: TensorFlowBuild) -> Iterator[Finding]:
    install = "pip install 'nanotf[cpu]', or 'nanotf[intel]', or 'nanotf[gpu]'"
    if not build.tensorflow and not build.packages:
        yield Finding("error", "No TensorFlow is installed.", f"{install}.")
    elif not build.tensorflow:
        text = f"TensorFlow cannot be imported: the attempt {build.error}."
        yield Finding("error", text, "Run `python -c 'import tensorflow'`, then reinstall it.")
    if len(build.packages) > 1:
        yield Finding(
            "warning",
            f"Several packages provide the module tensorflow: {', '.join(build.packages)}. The "
            "order of installation decides whose files are there.",
            f"pip uninstall {' '.join(p.split()[0] for p in build.packages)}, then install one.",
        )
    version = parse_version(build.keras.partition(" ")[2])
    if (3,) <= version < OLDEST_KERAS_3:
        yield Finding(
            "error",
            f"{build.keras} trains wrongly, without an error, when several workers share the work.",
            "pip install -U 'keras>=3.10', or pip install --no-deps tf_keras and "
            "TF_USE_LEGACY_KERAS=1.",
        )
    if build.backend not in ("", "tensorflow"):
        yield Finding(
            "error",
            f"Keras runs on {build.backend}; nanotf supports only TensorFlow.",
            "export KERAS_BACKEND=tensorflow.",
        )
    if build.gpus:
        yield Finding(
            "note",
            f"TensorFlow sees {count(build.gpus, 'GPU')}: num_processes falls back to "
            "MirroredStrategy over them.",
            "export CUDA_VISIBLE_DEVICES= to train on the CPU.",
        )


def usable_cores(machine: Machine, environ: Mapping[str, str]) -> int:
    """Counts the cores that workers may use: the free ones, up to the environment's limit."""
    return len(machine.usable_cores()[: shell_state.cores_cap(environ)])


def _of_machine(facts: Facts, skipped: bool) -> Iterator[Finding]:
    machine, environ = facts.machine, facts.environ
    free, cap = len(machine.usable_cores()), shell_state.cores_cap(environ)
    usable = usable_cores(machine, environ)
    if usable < 2:
        yield Finding(
            "error" if skipped else "warning",
            f"Two workers need two cores, but this process has {count(usable, 'core')}"
            + ("; the test was skipped." if skipped else "."),
            "Give it more cores with `taskset`, the container's --cpus or --cpuset-cpus, or the "
            "scheduler's request. See the next findings, too.",
        )
    if not machine.can_pin:
        text = "Workers cannot be pinned to cores here, so they may slow each other down."
        yield Finding("warning", text, "Run on Linux, where sched_setaffinity is allowed.")
    elif machine.notes:
        text = f"Some facts about the cores are unknown: {'; '.join(machine.notes)}."
        yield Finding("warning", text, "Mount /sys in the container.")
    if cap is not None and cap < free:
        yield Finding(
            "warning",
            f"nanotf uses {count(cap, 'core')} of {free}, because of OMP_NUM_THREADS or "
            "nanotf-init --cores.",
            "unset OMP_NUM_THREADS, or source nanotf-init again, without --cores.",
        )
    if machine.is_quota_limited():
        cores = machine.usable_cores()
        yield Finding(
            "note",
            f"A CPU quota of {machine.quota:g} CPUs limits the number of cores, but does not "
            "reserve any. Workers are not pinned, and pause when the quota is used up.",
            f"Give the container its own cores: --cpuset-cpus={ranges(c.id for c in cores)} "
            "instead of --cpus (Kubernetes: the static CPU manager policy).",
        )


def _of_plan(facts: Facts, chosen: Plan) -> Iterator[Finding]:
    machine, size = facts.machine, len(chosen.placements)
    by_id = {cpu.id: cpu for cpu in machine.cpus}
    astride = [
        placement.rank
        for placement in chosen.placements
        if placement.pin and len({by_id[core].numa_node for core in placement.cores}) > 1
    ]
    if astride and size > 1:
        better = ", ".join(str(n) for n in _even_sizes(machine, size))
        yield Finding(
            "warning",
            f"With -n {size}, worker {', '.join(map(str, astride))} has cores of several NUMA "
            "nodes. Reading the other node's memory slows it down, and every step waits for it.",
            f"Use another number of workers, such as {better}." if better else "Use fewer workers.",
        )
    slow = [core for core in chosen.cores() if by_id[core].efficiency]
    if slow:
        fast = sum(not core.efficiency for core in machine.usable_cores())
        yield Finding(
            "warning",
            f"With -n {size}, workers use the efficiency cores {ranges(slow)}. Every step waits "
            "for the slowest worker.",
            f"Use up to {fast} workers: they fit on the performance cores.",
        )


def _even_sizes(machine: Machine, size: int) -> list[int]:
    """Returns up to two numbers of workers, closest to `size`, that keep each on one NUMA node."""
    most = min(len(machine.usable_cores()), 2 * size)
    even = [n for n in range(2, most + 1) if not plan(n, machine=machine).straddles()]
    return sorted(sorted(even, key=lambda n: abs(n - size))[:2])


def _of_system(system: System, size: int) -> Iterator[Finding]:
    if system.address_space is not None:
        yield Finding(
            "warning",
            f"The address space is limited to {gigabytes(system.address_space)}. TensorFlow maps "
            "much more than it uses, so its allocations fail.",
            "ulimit -v unlimited.",
        )
    if system.open_files is not None and system.open_files < _OPEN_FILES:
        text = f"The open-file limit is {system.open_files}, which may be too low."
        yield Finding("warning", text, f"ulimit -n {4 * _OPEN_FILES}.")
    memory = system.usable_memory()
    need = (size + 1) * _PROCESS_BYTES
    if memory is not None and memory < need:
        yield Finding(
            "warning",
            f"{count(size, 'worker')} and your process need about {gigabytes(need)} before any "
            f"data is loaded, but only {gigabytes(memory)} is available.",
            "Use fewer workers, or raise the container's memory limit.",
        )


def _of_environment(facts: Facts, chosen: Plan) -> Iterator[Finding]:
    environ, installed = facts.environ, facts.installed
    state = shell_state.read_state(environ)
    options = state.options if state else None
    shell = environment.shell_environment(facts.machine, environ, options, installed)
    worker = environment.worker_environment(chosen.placements[0], environ, installed)
    for warning in dict.fromkeys([*shell.warnings, *worker.warnings]):
        fix = f"{warning.fix[:1].upper()}{warning.fix[1:]}."
        yield Finding("warning", f"{warning.text}.", fix)
    missing = [n for n, value in shell.variables.items() if environ.get(n) != value]
    if missing:
        yield Finding(
            "note",
            f"nanotf-init would set {count(len(missing), 'variable')} for single processes; "
            "workers have their own settings."
            if state is None
            else f"Variables of nanotf-init were changed later: {', '.join(missing)}.",
            "source nanotf-init.",
        )


def _of_speed(facts: Facts) -> Iterator[Finding]:
    usable, why = facts.native
    if not usable:
        yield Finding(
            "warning",
            f"Gradients are exchanged by the pure-Python implementation: {why}.",
            "unset NANOTF_NATIVE."
            if python_wanted(facts.environ)
            else "Install a C++ compiler (g++), then python -m nanotf.collectives.build.",
        )
    if facts.build.tensorflow and not facts.build.onednn:
        switched_off = facts.environ.get("TF_ENABLE_ONEDNN_OPTS") == "0"
        yield Finding(
            "warning" if "avx512f" in facts.processor.flags else "note",
            "TensorFlow does not use oneDNN"
            + (", since TF_ENABLE_ONEDNN_OPTS=0." if switched_off else "."),
            "unset TF_ENABLE_ONEDNN_OPTS, or source nanotf-init without --disable-onednn."
            if switched_off
            else "export TF_ENABLE_ONEDNN_OPTS=1.",
        )
    if facts.installed.allocator("tcmalloc") is None:
        yield Finding(
            "note",
            "The allocator tcmalloc is not installed. It made convolutional models up to 1.4 "
            "times as fast.",
            f"Install {ALLOCATORS['tcmalloc'][1]}; workers and nanotf-init then use it.",
        )
    if facts.processor.flags and not facts.processor.has_bfloat16:
        yield Finding(
            "note",
            "The processor has no bfloat16 instructions: mixed_bfloat16 would be slower.",
            "Keep float32.",
        )


def gigabytes(number: int) -> str:
    """Writes a number of bytes in GiB, for people."""
    return f"{number / (1 << 30):.1f} GiB"
