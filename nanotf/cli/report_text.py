"""The report of `nanotf doctor` for people: one block of text to read, and to paste elsewhere."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

from nanotf.cli.picture import count, gigabytes, ranges
from nanotf.cli.shell import printable

_WIDTH = 100  # characters of a line, at most
_NARROWEST = 40  # shorter lines would be unreadable
_FENCE = "```"  # so that issue trackers show the block as it is
_INVITATION = (
    "To report a problem, copy the block below into the issue. Look it over first: it shows paths "
    "and environment variables."
)


def render(report: dict[str, Any]) -> str:
    """Writes a report of `doctor.examine`, as wide as the terminal (or COLUMNS).

    Args:
        report: what `doctor.examine` returned, or the output of `--json` as parsed by `json`.
    """
    parts = [
        "\n".join(_wrapped(f"{name:<12}", text) for name, text in _rows(report)),
        "\n".join([*report["machine"]["picture"], *_workers(report["workers"])]),
        _variables(report["environment"]),
        *_test(report["test"]),
        _findings(report["findings"]),
    ]
    return "\n".join([*_lines(_INVITATION), f"{_FENCE}text", "\n\n".join(parts), _FENCE])


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the title and text of each line of facts; one without a title continues the last."""
    nanotf, python, platform = report["nanotf"], report["python"], report["platform"]
    collectives = nanotf["collectives"]
    kind = "native" if collectives["native"] else "missing"
    yield "nanotf", f"{nanotf['version']} ({nanotf['location']})"
    yield "collectives", f"{kind} ({collectives['reason']})"
    yield "python", f"{python['version']} ({python['executable']})"
    yield "tensorflow", _tensorflow(report["tensorflow"])
    yield "system", ", ".join(filter(None, platform.values())) or "unknown"
    processor, machine = report["processor"], report["machine"]
    features = ", ".join(processor["features"]) or "no features known"
    yield "processor", f"{processor['name'] or 'unknown'}: {features}"
    if gain := _bfloat16(report["tensorflow"]):
        yield "bfloat16", gain
    counted = {
        "sockets": "socket",
        "numa_nodes": "NUMA node",
        "physical_cores": "core",
        "logical_cpus": "logical CPU",
    }
    yield "machine", ", ".join(count(machine[key], noun) for key, noun in counted.items())
    yield "cores", _cores(machine)
    yield from _load(report["load"])
    yield "memory", _memory(report["memory"])
    limits = report["limits"]
    yield (
        "limits",
        f"open files {_limit(limits['open_files'])}, processes {_limit(limits['processes'])}, "
        f"address space {_limit(limits['address_space'])}",
    )
    yield "allocators", _allocators(report["allocators"])


def _tensorflow(build: dict[str, Any]) -> str:
    if not build["tensorflow"]:
        return "cannot be imported"
    parts = [
        f"{build['tensorflow']} ({', '.join(build['packages']) or 'of no package'})",
        f"tf.keras is {build['keras'] or 'missing'}",
        f"oneDNN {'on' if build['onednn'] else 'off'}",
        "OpenMP threads" if build["openmp"] else "its own threads, no OpenMP",
    ]
    if build["gpus"]:
        parts.append(count(build["gpus"], "GPU"))
    return ", ".join(parts)


def _bfloat16(build: dict[str, Any]) -> str:
    if not build["float32"] or not build["bfloat16"]:
        return ""
    times = build["float32"] / build["bfloat16"]
    return f"a convolution runs {times:.2g} times as fast as in float32, measured now"


def _cores(machine: dict[str, Any]) -> str:
    cap = machine["cap"]
    if cap is None or cap >= len(machine["usable_cores"]):  # it leaves no core unused
        return str(machine["summary"])
    return f"{machine['summary']}; OMP_NUM_THREADS or nanotf-init --cores limits nanotf to {cap}"


def _load(load: dict[str, Any]) -> Iterator[tuple[str, str]]:
    averages = ", ".join(f"{average:.2f}" for average in load["averages"]) or "unknown"
    text = f"averages {averages} (1, 5, 15 minutes); {load['busy_cores']:.1f} cores busy in a "
    text += f"sample of {load['sampled_seconds']:g} s"
    if load["stolen_cores"]:
        text += f", and a hypervisor took {load['stolen_cores']:.1f} for others"
    yield "load", text
    for process in load["processes"]:
        notes = ["yours" if process["yours"] else "another user's"]
        if not process["on_usable_cores"]:
            notes.append("on other cores")
        name = f"{process['name']} (pid {process['pid']}, {', '.join(notes)})"
        yield "", f"{process['cores']:.1f} cores: {name}"
    if load["more_processes"]:
        yield "", f"others that were less busy: {load['more_processes']}"


def _memory(memory: dict[str, Any]) -> str:
    parts = [
        f"{gigabytes(memory[key])}{text}"
        for key, text in (
            ("total", ""),
            ("available", " available"),
            ("limit", " allowed by the cgroup"),
        )
        if memory[key] is not None
    ]
    if memory["shm_total"] is not None:
        shm = f"/dev/shm {gigabytes(memory['shm_total'])}"
        if memory["shm_free"] is not None:
            shm += f", {gigabytes(memory['shm_free'])} free"
        # nanotf's shared memory is files without names (memfd), which do not lie there.
        parts.append(f"{shm} (sets nanotf no limit)")
    return "; ".join(parts) or "unknown"


def _limit(value: int | None) -> str:
    return "unlimited" if value is None else str(value)


def _allocators(allocators: dict[str, Any]) -> str:
    installed = [f"{name} ({path})" for name, path in allocators["installed"].items()]
    names = [path.rpartition("/")[2] for path in allocators["preloaded_in_workers"]]
    preloaded = f"workers preload {', '.join(names)}" if names else "workers preload none"
    return f"{', '.join(installed) or 'only the system allocator'}; {preloaded}"


def _workers(workers: list[dict[str, Any]]) -> Iterator[str]:
    for worker in workers:
        where = "" if worker["numa_node"] is None else f", NUMA node {worker['numa_node']}"
        number = len(worker["cores"])
        cores = f"core{'' if number == 1 else 's'} {ranges(worker['cores'])}{where}"
        if not worker["pin"]:
            cores = f"as many threads as {count(number, 'core')} can run, on any core (not pinned)"
        yield _wrapped(f"  worker {worker['rank']}: ", cores)


def _variables(environment: dict[str, Any]) -> str:
    title = "environment"
    if environment["nanotf_init_sourced"]:
        title += " (nanotf-init was sourced)"
    variables = environment["variables"]
    width = max((len(variable["name"]) for variable in variables), default=0)
    return "\n".join(
        [title, *(_wrapped(f"  {v['name']:{width}}  ", _variable(v)) for v in variables)]
    )


def _variable(variable: dict[str, Any]) -> str:
    value, wanted = variable["value"], variable["nanotf_init"]
    if wanted is None:
        return _shortened(value)
    if value is None:
        return f"not set; nanotf-init would set {_shortened(wanted)}"
    if value == wanted:
        return f"{_shortened(value)}  (as nanotf-init sets it)"
    return f"{_shortened(value)}; nanotf-init would set {_shortened(wanted)}"


def _shortened(value: str) -> str:
    """Shortens a value to fit on a line; `nanotf env` shows a list of 56 cores in full."""
    text = printable(value)
    most = _width() // 2
    return text if len(text) <= most else text[: most - 3] + "..."


def _test(checks: list[dict[str, Any]] | None) -> Iterator[str]:
    if checks is None:  # without --test
        return
    if not checks:
        yield "test\n  skipped: fix the errors below first"
        return
    lines = [
        _wrapped(f"  {'pass' if c['passed'] else 'FAIL'}  ", f"{c['name']}: {c['text']}")
        for c in checks
    ]
    yield "\n".join(["test", *lines])


def _findings(found: list[dict[str, Any]]) -> str:
    if not found:
        return "findings    none: nothing to fix"
    lines = ["findings"]
    for number, finding in enumerate(found, 1):
        lines.append(_wrapped(f"  {number}. ", f"{finding['severity']}: {finding['text']}"))
        lines.append(_wrapped("     -> ", finding["fix"]))
    return "\n".join(lines)


def _width() -> int:
    columns = shutil.get_terminal_size((_WIDTH, 0)).columns  # `_WIDTH` in a pipe without COLUMNS
    return max(_NARROWEST, min(_WIDTH, columns))


def _lines(text: str) -> list[str]:
    return textwrap.wrap(text, _width())


def _wrapped(start: str, text: str) -> str:
    return textwrap.fill(
        text,
        _width(),
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,  # paths stay whole, for copying
        break_on_hyphens=False,
    )
