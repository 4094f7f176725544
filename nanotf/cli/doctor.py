"""`nanotf doctor`: this machine, how nanotf would use it, problems found, and how to fix each.

`examine` returns a `Report`. `nanotf doctor --json` prints exactly that, and `report_text.render`
writes it for people. Only child processes import TensorFlow.
"""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import nanotf
from nanotf.cli import facts as facts_module
from nanotf.cli import findings, self_test
from nanotf.cli.facts import Facts
from nanotf.cli.findings import Finding
from nanotf.cli.picture import draw
from nanotf.cli.privacy import home_directories, redacted, shown_variables
from nanotf.cli.usage import SECONDS
from nanotf.machine import environment, shell_state, topology

# A report, as plain values that JSON can hold.
Report = dict[str, Any]

# The keys of a report. `nanotf doctor --help` lists them; they stay the same between versions.
KEYS = {
    "nanotf": "version, location, collectives (native, reason)",
    "python": "version, executable",
    "tensorflow": "tensorflow, keras, packages, backend, onednn, threads, bound_threads, "
    "allocator (the file of its malloc), openmp, gpus, float32 and bfloat16 (seconds of a "
    "convolution), plugins, error",
    "platform": "kernel, distribution, libc",
    "processor": "name, features, bfloat16",
    "machine": "sockets, numa_nodes, physical_cores, logical_cpus, summary, usable_cores, the "
    "limits affinity, cpuset, quota (cgroup) and cap (OMP_NUM_THREADS, nanotf-init --cores), "
    "can_pin, notes (unknown facts), picture (lines)",
    "load": "averages, busy_cores, stolen_cores (by a hypervisor), processes (name, pid, yours, "
    "cores, on_usable_cores), more_processes, sampled_seconds",
    "memory": "total, available, limit (cgroup), shm_total, shm_free, in bytes",
    "limits": "open_files, processes, address_space (bytes); null is unlimited",
    "allocators": "installed (name: path), preloaded_in_workers",
    "workers": "rank, cores, numa_node, pin of each",
    "environment": "nanotf_init_sourced, variables (name, value, nanotf_init)",
    "test": "name, passed, text of each check; null without --test, empty after an error",
    "findings": "severity (error, warning, note), text, fix; most important first",
}

_PROCESSES = 5  # of the busiest processes in a report
_FIX_OF_TEST = "Fix the other findings first; then report it, with `nanotf doctor --test`."


def has_errors(report: Report) -> bool:
    """Returns True if something does not work."""
    return any(finding["severity"] == "error" for finding in report["findings"])


def examine(
    num_processes: int | None = None, *, test: bool = False, facts: Facts | None = None
) -> Report:
    """Examines a machine.

    The home directory is written as ~. Variables that may hold secrets have no value. Hosts, users
    and command lines are not named, except for the script of another program that uses nanotf.

    Args:
        num_processes: the workers whose cores are shown; None for two, or one if there is one core.
        test: True trains with two workers on this machine, unless another finding is an error.
        facts: None examines this machine.

    Returns:
        A dict with the keys of `KEYS`.

    Raises:
        InvalidArgumentError, PlacementError: This machine cannot run that many workers.
    """
    if facts is None:
        # Rejects bad requests before TensorFlow is imported, which takes seconds.
        _plan(num_processes, topology.describe_machine(), os.environ)
        facts = facts_module.gather()
    plan = _plan(num_processes, facts.machine, facts.environ)
    found = findings.find(facts, plan, testing=test)
    checks: Sequence[self_test.Check] | None = None
    if test:
        hopeless = any(finding.severity == "error" for finding in found)  # training would fail, too
        checks = () if hopeless else self_test.run_trial()
        failed = [f"{check.name}: {check.text}" for check in checks if not check.passed]
        if failed:
            # An error comes first, as `findings.find` sorts.
            found.insert(0, Finding("error", f"The test failed: {'; '.join(failed)}", _FIX_OF_TEST))
    report: Report = redacted(_report(facts, plan, checks, found), home_directories())
    return report


def _plan(
    num_processes: int | None, machine: topology.Machine, environ: Mapping[str, str]
) -> topology.Plan:
    if num_processes is None:
        num_processes = min(2, facts_module.usable_cores(machine, environ))
    cap = shell_state.cores_cap(environ)
    return topology.plan(num_processes, machine=machine, max_cores=cap)


def _report(
    facts: Facts,
    plan: topology.Plan,
    checks: Sequence[self_test.Check] | None,
    found: Sequence[Finding],
) -> Report:
    system, usage = facts.system, facts.usage
    return {
        "nanotf": {
            "version": nanotf.__version__,
            "location": str(pathlib.Path(nanotf.__file__).parent),
            "collectives": {"native": facts.native[0], "reason": facts.native[1]},
        },
        "python": {"version": sys.version.split()[0], "executable": sys.executable},
        "tensorflow": {
            **asdict(facts.build),
            "openmp": facts.installed.tensorflow_uses_openmp,
            "plugins": facts.plugins,
        },
        "platform": asdict(facts.platform),
        "processor": {
            "name": facts.processor.name,
            "features": facts.processor.features(),
            "bfloat16": facts.processor.has_bfloat16,
        },
        "machine": _machine(facts, plan),
        "load": {
            "averages": [round(average, 2) for average in usage.load_averages],
            "busy_cores": round(usage.busy_cores, 1),
            "stolen_cores": round(usage.stolen_cores, 1),
            "processes": [
                {**asdict(process), "cores": round(process.cores, 1)}
                for process in usage.processes[:_PROCESSES]
            ],
            "more_processes": len(usage.processes[_PROCESSES:]),
            "sampled_seconds": SECONDS,
        },
        "memory": {
            "total": system.memory,
            "available": usage.memory_available,
            "limit": system.memory_limit,
            "shm_total": system.shm,
            "shm_free": usage.shm_free,
        },
        "limits": {
            "open_files": system.open_files,
            "processes": system.processes,
            "address_space": system.address_space,
        },
        "allocators": {
            "installed": dict(facts.installed.allocators),
            "preloaded_in_workers": _preloaded(facts, plan),
        },
        "workers": [asdict(placement) for placement in plan.placements],
        "environment": _environment(facts),
        "test": None if checks is None else [asdict(check) for check in checks],
        "findings": [asdict(finding) for finding in found],
    }


def _machine(facts: Facts, plan: topology.Plan) -> dict[str, Any]:
    machine = facts.machine
    online = [cpu for cpu in machine.cpus if cpu.online]
    return {
        "sockets": len({cpu.socket for cpu in online}),
        "numa_nodes": len({cpu.numa_node for cpu in online}),
        "physical_cores": len(machine.physical_cores()),
        "logical_cpus": len(online),
        "summary": machine.explain(),
        "usable_cores": [core.id for core in machine.usable_cores()],
        "affinity": _sorted(machine.affinity),
        "cpuset": _sorted(machine.cpuset),
        "quota": machine.quota,
        "cap": shell_state.cores_cap(facts.environ),
        "can_pin": machine.can_pin,
        "notes": machine.notes,
        "picture": draw(machine, plan).splitlines(),
    }


def _sorted(mask: frozenset[int] | None) -> list[int] | None:
    return None if mask is None else sorted(mask)


def _preloaded(facts: Facts, plan: topology.Plan) -> list[str]:
    # All workers preload the same libraries.
    made = environment.worker_environment(plan.placements[0], facts.environ, facts.installed)
    # The dynamic linker accepts colons and spaces between names, see ld.so(8).
    return made.apply(facts.environ).get("LD_PRELOAD", "").replace(":", " ").split()


def _environment(facts: Facts) -> dict[str, Any]:
    """Lists the variables that matter: the present ones, and those that `nanotf-init` would set."""
    now = shown_variables(facts.environ)
    shell = facts_module.shell_environment(facts.machine, facts.environ, facts.installed)
    wanted = shell.variables
    return {
        "nanotf_init_sourced": shell_state.read_state(facts.environ) is not None,
        "variables": [
            {"name": name, "value": now.get(name), "nanotf_init": wanted.get(name)}
            for name in sorted({*now, *wanted})
        ],
    }
