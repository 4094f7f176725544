"""`nanotf doctor`: this machine, how nanotf would use it, problems found, and how to fix each.

`examine` returns a `Report`; `render` and `as_json` show it. Only child processes import
TensorFlow.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nanotf.cli import findings, shell, trial
from nanotf.cli.findings import Facts, Finding, gigabytes
from nanotf.cli.picture import count, draw, headline, ranges
from nanotf.collectives.native_library import native_status
from nanotf.machine import environment, shell_state, topology
from nanotf.machine.installed import find_installed
from nanotf.machine.limits import read_system
from nanotf.machine.processor import read_processor
from nanotf.machine.tensorflow_build import read_build

_WIDTH = 100  # characters of a line, at most
_NARROWEST = 40  # shorter lines would be unreadable


@dataclass(frozen=True)
class Report:
    """The doctor's report.

    Args:
        facts: `Facts`, the examined facts.
        plan: `Plan`, the cores of the requested workers.
        shell: `Environment`, the variables that `nanotf-init` would set.
        checks: tuple of `trial.Check`, the results of `--test`; empty without it or with one core.
        findings: tuple of `Finding`, most important first.
    """

    facts: Facts
    plan: topology.Plan
    shell: environment.Environment
    checks: tuple[trial.Check, ...]
    findings: tuple[Finding, ...]

    def has_errors(self) -> bool:
        """Returns True if something does not work."""
        return any(finding.severity == "error" for finding in self.findings)


def gather() -> Facts:
    """Gathers the facts about this machine. Takes as long as importing TensorFlow."""
    return Facts(
        machine=topology.describe_machine(),
        processor=read_processor(),
        system=read_system(),
        build=read_build(os.environ),
        installed=find_installed(),
        native=native_status(),
        environ=dict(os.environ),
    )


def examine(
    num_processes: int | None = None, *, test: bool = False, facts: Facts | None = None
) -> Report:
    """Examines a machine.

    Args:
        num_processes: int or None, the workers whose cores are shown; None for two, or one
            if there is one core.
        test: bool, default False; True trains with two workers on this machine.
        facts: `Facts`, or None to examine this machine.

    Returns:
        `Report`.

    Raises:
        InvalidArgumentError, PlacementError: This machine cannot run that many workers.
    """
    if facts is None:
        # Rejects bad requests before TensorFlow is imported, which takes seconds.
        _plan(num_processes, topology.describe_machine(), os.environ)
        facts = gather()
    plan = _plan(num_processes, facts.machine, facts.environ)
    state = shell_state.read_state(facts.environ)
    wanted = environment.shell_environment(
        facts.machine, facts.environ, state.options if state else None, facts.installed
    )
    can_test = findings.usable_cores(facts.machine, facts.environ) >= trial.WORKERS
    checks = trial.run_trial() if test and can_test else ()
    failed = [
        Finding("error", f"The test of {check.name} failed: {check.text}", _MEND_OF_TEST)
        for check in checks
        if not check.passed
    ]
    found = (*failed, *findings.find(facts, plan, skipped=test and not can_test))
    return Report(facts, plan, wanted, checks, found)


def _plan(
    num_processes: int | None, machine: topology.Machine, environ: Mapping[str, str]
) -> topology.Plan:
    if num_processes is None:
        num_processes = min(2, findings.usable_cores(machine, environ))
    cap = shell_state.cores_cap(environ)
    return topology.plan(num_processes, machine=machine, max_cores=cap)


_MEND_OF_TEST = "Fix the other findings first; then report it, with `nanotf doctor --test --json`."


# ----------------------------------------------------------------------------- showing it
def render(report: Report) -> str:
    """Writes a report for people: some 40 lines, as wide as the terminal (or COLUMNS)."""
    facts = report.facts
    parts = [
        "\n".join(_wrapped(f"{name:<12}", text) for name, text in _rows(facts)),
        draw(facts.machine, report.plan) + "\n" + _workers(report.plan),
        _variables(report),
    ]
    if report.checks:
        lines = [
            _wrapped(f"  {'pass' if c.passed else 'FAIL'}  ", f"{c.name}: {c.text}")
            for c in report.checks
        ]
        parts.append("\n".join(["test", *lines]))
    parts.append(_findings(report.findings))
    return "\n\n".join(parts)


def _rows(facts: Facts) -> list[tuple[str, str]]:
    build, installed, system = facts.build, facts.installed, facts.system
    yes, why = facts.native
    allocators = [f"{name} ({path})" for name, path in installed.allocators]
    features = ", ".join(facts.processor.features()) or "no features known"
    tensorflow = [
        f"{build.tensorflow} ({', '.join(build.packages) or 'of no package'})",
        f"tf.keras is {build.keras}",
        f"oneDNN {'on' if build.onednn else 'off'}",
        "OpenMP threads" if installed.tensorflow_uses_openmp else "its own threads, no OpenMP",
    ]
    return [
        ("machine", headline(facts.machine)),
        ("cores", facts.machine.explain()),
        ("processor", f"{facts.processor.name or 'unknown'}: {features}"),
        ("memory", _memory(facts)),
        (
            "limits",
            f"open files {_limit(system.open_files)}, processes {_limit(system.processes)}, "
            f"address space {_limit(system.address_space)}",
        ),
        ("python", f"{sys.version.split()[0]} ({sys.executable})"),
        ("tensorflow", ", ".join(tensorflow) if build.tensorflow else "cannot be imported"),
        ("collective", f"native ({why})" if yes else f"pure Python ({why})"),
        ("allocators", ", ".join(allocators) or "none but the system's"),
    ]


def _memory(facts: Facts) -> str:
    system = facts.system
    parts = [] if system.memory is None else [gigabytes(system.memory)]
    if system.memory_limit is not None:
        parts.append(f"of which the cgroup allows {gigabytes(system.memory_limit)}")
    if system.shm is not None:
        parts.append(f"/dev/shm {gigabytes(system.shm)} (sets nanotf no limit)")
    return ", ".join(parts)


def _limit(value: int | None) -> str:
    return "unlimited" if value is None else str(value)


def _workers(plan: topology.Plan) -> str:
    lines = []
    for placement in plan.placements:
        where = "" if placement.numa_node is None else f", NUMA node {placement.numa_node}"
        number = len(placement.cores)
        cores = f"core{'' if number == 1 else 's'} {ranges(placement.cores)}{where}"
        if not placement.pin:
            cores = f"as many threads as {count(number, 'core')} can run, on any core (not pinned)"
        lines.append(_wrapped(f"  worker {placement.rank}: ", cores))
    return "\n".join(lines)


def _variables(report: Report) -> str:
    environ, wanted = report.facts.environ, report.shell
    sourced = shell_state.read_state(environ) is not None
    title = "environment (nanotf-init was sourced)" if sourced else "environment"
    rows = [(name, value, environ.get(name)) for name, value in wanted.variables.items()]
    lines = []
    for name, value, now in sorted(rows):
        if now == value:
            note = "  (set)"
        else:
            note = "  (nanotf-init would set it" + (f"; now {now})" if now else ")")
        lines.append((name, value, note))
    lines += [(name, value, "  (yours, kept)") for name, value in sorted(wanted.kept.items())]
    width = max((len(name) for name, _, _ in lines), default=0)
    texts = [_wrapped(f"  {name:{width}}  ", _shortened(v) + note) for name, v, note in lines]
    return "\n".join([title, *texts])


def _shortened(value: str) -> str:
    """Shortens a value to fit on a line; `nanotf env` shows a list of 56 cores in full."""
    text = shell.printable(value)
    most = _width() // 2
    return text if len(text) <= most else text[: most - 3] + "..."


def _findings(found: tuple[Finding, ...]) -> str:
    if not found:
        return "findings    none: nothing to fix"
    lines = ["findings"]
    for number, finding in enumerate(found, 1):
        lines.append(_wrapped(f"  {number}. ", f"{finding.severity}: {finding.text}"))
        lines.append(_wrapped("     -> ", finding.fix))
    return "\n".join(lines)


def _width() -> int:
    columns = shutil.get_terminal_size((_WIDTH, 0)).columns
    return max(_NARROWEST, min(_WIDTH, columns))


def _wrapped(start: str, text: str) -> str:
    return textwrap.fill(
        text,
        _width(),
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )


def as_json(report: Report) -> dict[str, Any]:
    """Returns a report as plain values, for programs."""
    facts = report.facts
    environ = facts.environ
    return {
        "machine": {
            "summary": facts.machine.explain(),
            "cpus": [asdict(cpu) for cpu in facts.machine.cpus],
            "usable_cores": [core.id for core in facts.machine.usable_cores()],
            "affinity": _sorted(facts.machine.affinity),
            "cpuset": _sorted(facts.machine.cpuset),
            "quota": facts.machine.quota,
            "can_pin": facts.machine.can_pin,
            "notes": facts.machine.notes,
        },
        "processor": {
            "name": facts.processor.name,
            "features": facts.processor.features(),
            "bfloat16": facts.processor.has_bfloat16,
        },
        "system": asdict(facts.system),
        "python": {"version": sys.version.split()[0], "executable": sys.executable},
        "tensorflow": {**asdict(facts.build), "openmp": facts.installed.tensorflow_uses_openmp},
        "collective": {"native": facts.native[0], "reason": facts.native[1]},
        "allocators": dict(facts.installed.allocators),
        "workers": [asdict(placement) for placement in report.plan.placements],
        "environment": {
            "initialised": shell_state.read_state(environ) is not None,
            "wanted": report.shell.variables,
            "now": {name: environ.get(name) for name in report.shell.variables},
            "kept": report.shell.kept,
        },
        "test": [asdict(check) for check in report.checks],
        "findings": [asdict(finding) for finding in report.findings],
    }


def _sorted(mask: frozenset[int] | None) -> list[int] | None:
    return None if mask is None else sorted(mask)
