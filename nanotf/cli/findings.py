"""Problems that `nanotf doctor` finds on a machine, and the fix for each.

Findings do not overlap: one cause gives one finding, with all its consequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from nanotf.cli.facts import PLUGINS_OFF, PLUGINS_ON, Facts, shell_environment, usable_cores
from nanotf.cli.picture import count, gigabytes, ranges
from nanotf.cli.usage import BusyProcess
from nanotf.collectives.native_library import REMEDY
from nanotf.compat.versions import OLDEST_KERAS_3, TESTED_TENSORFLOW, parse_version
from nanotf.machine import environment, shell_state
from nanotf.machine.cpus import Machine
from nanotf.machine.installed import ALLOCATORS
from nanotf.machine.limits import System
from nanotf.machine.tensorflow_build import TensorFlowBuild
from nanotf.machine.topology import Plan, plan

# Most important first: it does not work; it is slower than it could be; worth knowing.
SEVERITIES = ("error", "warning", "note")

_OPEN_FILES = 256  # a worker needs about ten; TensorFlow and a dataset's files need the others
_PROCESS_BYTES = 600 << 20  # a worker with TensorFlow and a small model
_BUSY = 0.5  # cores; other processes that use more make a worker wait
_WORTH = 0.97  # what is not clearly faster is not worth a change
_NAMED = 3  # processes that a finding names
_ONEDNN = "TF_ENABLE_ONEDNN_OPTS"


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that could be better."""

    severity: str  # one of `SEVERITIES`
    text: str  # the problem and its consequences, as sentences
    fix: str  # what to do about it, ending with a period


def find(facts: Facts, chosen: Plan, *, testing: bool = False) -> list[Finding]:
    """Finds problems, most important first.

    Args:
        chosen: the cores of the workers to examine.
        testing: whether a test of two workers was requested. It needs two cores, so having one core
            is an error then.
    """
    found = [
        *_of_tensorflow(facts.build, facts.system),
        *_of_plugins(facts),
        *_of_native(facts),
        *_of_cores(facts, testing),
        *_of_pinning(facts),
        *_of_plan(facts, chosen),
        *_of_usage(facts, chosen),
        *_of_system(facts, len(chosen.placements)),
        *_of_environment(facts, chosen),
    ]
    # A stable sort: findings of one severity stay in this order.
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def _of_tensorflow(build: TensorFlowBuild, system: System) -> Iterator[Finding]:
    if build.tensorflow and len(build.packages) > 1:
        yield Finding("warning", f"{_several(build)}.", _keep_one(build))
    elif not build.tensorflow:
        yield _without_tensorflow(build, system)
    oldest, newest = TESTED_TENSORFLOW
    if build.tensorflow and not oldest <= parse_version(build.tensorflow)[:2] <= newest:
        tested = " to ".join(".".join(map(str, version)) for version in TESTED_TENSORFLOW)
        yield Finding(
            "warning",
            f"nanotf is tested with TensorFlow {tested}, not with {build.tensorflow}.",
            "pip install 'nanotf[cpu]'.",
        )
    version = parse_version(build.keras.partition(" ")[2])  # of "keras 3.12.0"
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
    elif build.tensorflow and build.error:
        fix = "export KERAS_BACKEND=tensorflow, or pip install -U keras."
        yield Finding("error", f"{build.error}.", fix)
    if build.gpus:
        yield Finding(
            "note",
            f"TensorFlow sees {count(build.gpus, 'GPU')}: num_processes falls back to "
            "MirroredStrategy over them.",
            "export CUDA_VISIBLE_DEVICES= to train on the CPU.",
        )


def _of_plugins(facts: Facts) -> Iterator[Finding]:
    """Says what TensorFlow's plug-ins are worth here."""
    if facts.switched is None:
        return
    names = ", ".join(facts.plugins)
    without, on = (build.float32 for build in facts.switched)
    if not without or not on:  # 0 where it cannot be imported
        text = f"TensorFlow loads plug-ins: {names}. With them or without, it cannot be imported."
        yield Finding("warning", text, "Run `python -c 'import tensorflow'`, or uninstall them.")
        return
    wanted = PLUGINS_ON if on < _WORTH * without else PLUGINS_OFF
    settings = " ".join(f"{name}={value}" for name, value in wanted.items())
    has_all = all(facts.environ.get(name) == value for name, value in wanted.items())
    yield Finding(
        "note" if has_all else "warning",
        f"TensorFlow loads plug-ins: {names}. A convolution takes {1000 * on:.1f} ms with "
        f"TF_ENABLE_ZENDNN_OPTS=1 and {1000 * without:.1f} ms without, on this machine.",
        f"export {settings}." if not has_all else "Nothing: the faster of the two is set.",
    )


def _without_tensorflow(build: TensorFlowBuild, system: System) -> Finding:
    if not build.packages:
        fix = "pip install 'nanotf[cpu]', or 'nanotf[intel]', or 'nanotf[gpu]'."
        return Finding("error", "No TensorFlow is installed.", fix)
    text = f"TensorFlow cannot be imported: the attempt {build.error}."
    fix = "Run `python -c 'import tensorflow'`, then reinstall it."
    if len(build.packages) > 1:
        text, fix = f"{text} {_several(build)}.", _keep_one(build)
    if system.address_space is not None:
        text, fix = f"{text} {_address_space(system.address_space)}", f"{_UNLIMITED} {fix}"
    return Finding("error", text, fix)


def _several(build: TensorFlowBuild) -> str:
    return (
        f"Several packages provide the module tensorflow: {', '.join(build.packages)}. The order "
        "of installation decides whose files are there"
    )


def _keep_one(build: TensorFlowBuild) -> str:
    return f"pip uninstall {' '.join(p.split()[0] for p in build.packages)}, then install one."


def _of_cores(facts: Facts, testing: bool) -> Iterator[Finding]:
    machine, environ = facts.machine, facts.environ
    usable, causes, fix = usable_cores(machine, environ), *_caps(machine, environ)
    if usable < 2:
        has = f"{count(usable, 'core')}, because of {causes}" if causes else machine.explain()
        yield Finding(
            "error" if testing else "warning",
            f"Two workers need two cores, but this process has {has}"
            + ("; the test was skipped." if testing else "."),
            fix
            or "Give it more cores with `taskset`, the container's --cpus or --cpuset-cpus, or the "
            "scheduler's request.",
        )
        return  # the fix for one core covers its causes: one cause gives one finding
    if causes:
        free = len(machine.usable_cores())
        text = f"nanotf uses {count(usable, 'core')} of {free}, because of {causes}."
        yield Finding("warning", text, fix)
    if machine.is_quota_limited() and machine.can_pin:  # else `_of_pinning` tells of the quota
        cores = machine.usable_cores()
        yield Finding(
            "note",
            f"{_quota(machine)}. Workers are not pinned, and pause when the quota is used up.",
            f"Give the container its own cores: --cpuset-cpus={ranges(c.id for c in cores)} "
            "instead of --cpus (Kubernetes: the static CPU manager policy).",
        )


def _caps(machine: Machine, environ: Mapping[str, str]) -> tuple[str, str]:
    """Returns the user's settings that leave cores unused, and the fix; empty for none."""
    free, causes, fixes = len(machine.usable_cores()), [], []
    state = shell_state.read_state(environ)
    # `nanotf-init` sets it, too: only the user's own value is a cap.
    by_user = shell_state.thread_count(shell_state.user_environ(environ).get("OMP_NUM_THREADS"))
    by_option = state.options.cores if state else None
    if by_user is not None and by_user < free:
        causes.append(f"OMP_NUM_THREADS={by_user}")
        fixes.append("unset OMP_NUM_THREADS")
    if by_option is not None and by_option < free:
        causes.append(f"nanotf-init --cores {by_option}")
        fixes.append("source nanotf-init again, without --cores")
    return " and ".join(causes), f"{', then '.join(fixes)}." if fixes else ""


def _quota(machine: Machine) -> str:
    return (
        f"A CPU quota of {machine.quota:g} CPUs limits the number of cores, but does not reserve "
        "any"
    )


def _of_pinning(facts: Facts) -> Iterator[Finding]:
    machine = facts.machine
    if not machine.can_pin:
        text = "Workers cannot be pinned to cores here, so they may slow each other down."
        if machine.is_quota_limited():
            text += f" {_quota(machine)}."
        yield Finding("warning", text, "Run on Linux, where sched_setaffinity is allowed.")
    elif machine.notes:
        text = f"Some facts about the cores are unknown: {'; '.join(machine.notes)}."
        yield Finding("warning", text, "Mount /sys in the container.")


def _of_plan(facts: Facts, chosen: Plan) -> Iterator[Finding]:
    machine, size = facts.machine, len(chosen.placements)
    by_id = {cpu.id: cpu for cpu in machine.cpus}
    astride = [
        str(placement.rank)
        for placement in chosen.placements
        if placement.pin and len({by_id[core].numa_node for core in placement.cores}) > 1
    ]
    texts = []
    if astride and size > 1:  # a single worker has all cores, and waits for nobody
        texts.append(
            f"worker {', '.join(astride)} has cores of several NUMA nodes, and reading the other "
            "node's memory slows it down"
        )
    slow = [core for core in chosen.cores() if by_id[core].efficiency]
    if 0 < len(slow) < len(chosen.cores()):  # efficiency cores alone are equally fast
        texts.append(f"workers use the efficiency cores {ranges(slow)}")
    if texts:
        better = ", ".join(map(str, _even_sizes(facts, size)))
        yield Finding(
            "warning",
            f"With -n {size}, {'; '.join(texts)}. Every step waits for the slowest worker.",
            f"Use another number of workers, such as {better}." if better else "Use fewer workers.",
        )


def _even_sizes(facts: Facts, size: int) -> list[int]:
    """Returns up to two numbers of workers, closest to `size`, that have equally fast cores."""
    machine, cap = facts.machine, shell_state.cores_cap(facts.environ)
    slow = {cpu.id for cpu in machine.cpus if cpu.efficiency}
    even = []
    for n in range(2, min(usable_cores(machine, facts.environ), 2 * size) + 1):
        made = plan(n, machine=machine, max_cores=cap)
        if not made.straddles() and slow.isdisjoint(made.cores()):
            even.append(n)
    return sorted(sorted(even, key=lambda n: abs(n - size))[:2])


def _of_usage(facts: Facts, chosen: Plan) -> Iterator[Finding]:
    """Finds processes that keep cores busy, and other pools' workers, which may be among them."""
    busy = [process for process in facts.usage.processes if process.on_usable_cores]
    used = sum(process.cores for process in busy)
    pools = [pool for pool in facts.usage.pools if set(pool.cores) & set(chosen.cores())]
    texts, fixes = [], []
    if used >= _BUSY:
        texts.append(
            f"Other processes keep {used:.1f} cores busy that workers may use: {_named(busy)}."
        )
        fixes.append("wait until they end, or stop them")
    for pool in pools:
        texts.append(
            f"The nanotf workers of {pool.program} are pinned to the cores {ranges(pool.cores)}."
        )
    if pools:
        pids = ", ".join(str(pool.pid) for pool in pools)
        fixes.append(f"call nanotf.shutdown() in process {pids} when it has no more work for them")
    if texts:
        texts.append("Every step waits for the slowest worker.")
        fix = "; or ".join(fixes)
        severity = "warning" if used >= _BUSY else "note"  # an idle pool delays nobody yet
        yield Finding(severity, " ".join(texts), f"{fix[:1].upper()}{fix[1:]}.")


def _named(processes: Sequence[BusyProcess]) -> str:
    named = [f"{p.name} (pid {p.pid}) {p.cores:.1f}" for p in processes[:_NAMED]]
    more = len(processes) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


_UNLIMITED = "ulimit -v unlimited."


def _address_space(limit: int) -> str:
    return (
        f"The address space is limited to {gigabytes(limit)}. TensorFlow maps much more than it "
        "uses, so its allocations fail."
    )


def _of_system(facts: Facts, size: int) -> Iterator[Finding]:
    system = facts.system
    # `_without_tensorflow` names the limit where TensorFlow cannot be imported.
    if system.address_space is not None and (facts.build.tensorflow or not facts.build.packages):
        yield Finding("warning", _address_space(system.address_space), _UNLIMITED)
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
    shell = shell_environment(facts.machine, environ, installed)
    worker = environment.worker_environment(chosen.placements[0], environ, installed)
    # Shell and workers share most settings: the same warning counts once.
    for warning in dict.fromkeys([*shell.warnings, *worker.warnings]):
        fix = f"{warning.fix[:1].upper()}{warning.fix[1:]}."
        yield Finding("warning", f"{warning.text}.", fix)
    options = state.options if state else shell_state.Options()
    # Does not recommend tcmalloc to a user who has chosen or preloaded an allocator.
    chosen_one = options.allocator != "auto" or "malloc" in environ.get("LD_PRELOAD", "")
    if installed.allocator("tcmalloc") is None and not chosen_one:
        yield Finding(
            "note",
            "The allocator tcmalloc is not installed. It made convolutional models up to 1.4 "
            "times as fast.",
            f"Install {ALLOCATORS['tcmalloc'][1]}; workers and nanotf-init then use it.",
        )
    yield from _of_build(facts, state)


def _of_build(facts: Facts, state: shell_state.ShellState | None) -> Iterator[Finding]:
    """Finds what `nanotf-init` would change in TensorFlow, and a TensorFlow without oneDNN."""
    now, tuned = facts.build, facts.tuned
    if not now.tensorflow or not tuned.tensorflow or now.error or tuned.error:
        return  # another finding reports it
    slow = not now.onednn and "avx512f" in facts.processor.flags
    if changes := list(_changes(now, tuned)):
        yield Finding(
            "warning" if slow and tuned.onednn else "note",
            f"After nanotf-init, TensorFlow would {', and '.join(changes)} in this shell.",
            "source nanotf-init.",
        )
    if now.onednn or tuned.onednn:
        return
    if facts.environ.get(_ONEDNN) != "0":
        text, fix = "This build of TensorFlow has no oneDNN.", "Install tensorflow-cpu."
    elif state and not state.options.onednn:
        text = "TensorFlow does not use oneDNN, because of nanotf-init --disable-onednn."
        fix = "source nanotf-init without --disable-onednn."
    else:
        text = f"TensorFlow does not use oneDNN, because of {_ONEDNN}=0."
        fix = f"unset {_ONEDNN}."
    yield Finding("warning" if slow else "note", text, fix)


def _changes(now: TensorFlowBuild, tuned: TensorFlowBuild) -> Iterator[str]:
    """Yields what TensorFlow would do otherwise in another environment."""
    if tuned.onednn != now.onednn:
        yield "use oneDNN" if tuned.onednn else "stop using oneDNN"
    if tuned.threads != now.threads:
        yield f"start {tuned.threads} threads instead of {now.threads}"
    if tuned.bound_threads != now.bound_threads:
        yield f"bind {tuned.bound_threads} of its threads to cores instead of {now.bound_threads}"
    if tuned.allocator != now.allocator:
        names = [path.rpartition("/")[2] for path in (tuned.allocator, now.allocator)]
        yield f"take memory from {names[0]} instead of {names[1]}"


def _of_native(facts: Facts) -> Iterator[Finding]:
    usable, why = facts.native
    if not usable:
        yield Finding(
            "error", f"Several workers are refused without nanotf's native library: {why}.", REMEDY
        )
