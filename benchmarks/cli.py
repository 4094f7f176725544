"""`python -m benchmarks`: measures, prints the report, writes JSON and a chart."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import platform
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import nanotf
from benchmarks import apart, chart, collectives, memory, options, report, start_up
from benchmarks.contestants import ContestantError, Setting
from benchmarks.rounds import ModelRun
from nanotf import errors
from nanotf.machine import processor


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns 0, 1 if a measurement failed, 2 if an option is invalid."""
    chosen = options.parse(arguments)
    try:
        nanotf.plan(chosen.num_processes)
    except errors.NanoError as error:
        print(f"python -m benchmarks: {error}", file=sys.stderr)
        return 2
    chosen.output.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {line}", file=sys.stderr, flush=True)

    result = measure(chosen, say)
    text = report.render(result)
    (chosen.output / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    (chosen.output / "report.txt").write_text(text + "\n")
    print(text)
    written = "results.json and report.txt"
    try:
        chart.draw(result, chosen.output / "chart.png")
        written = "results.json, report.txt and chart.png"
    except ImportError:
        print(
            "No chart: matplotlib is not installed. pip install 'matplotlib>=3.8'", file=sys.stderr
        )
    print(f"\n{written} are in {chosen.output}")
    return 1 if result["problems"] else 0


def measure(chosen: options.Options, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs the chosen measurements. Returns the content of `results.json`."""
    problems: list[str] = []
    result: dict[str, Any] = {
        "options": {**dataclasses.asdict(chosen), "output": str(chosen.output)},
        "machine": machine(),
        "models": {},
        "problems": problems,
    }

    def attempt(what: str, action: Callable[[], Any]) -> Any:
        say(what)
        try:
            return action()
        except (ContestantError, RuntimeError, errors.NanoError) as error:
            problems.append(f"{what}: {error}")
            say(problems[-1])
            return None

    size = chosen.num_processes
    logs = chosen.output / "logs"
    setting = Setting(size, logs, chosen.optimizer, chosen.batch_size)
    at_start = dataclasses.replace(setting, logs=logs / "start-up")
    if "collectives" in chosen.parts:
        sizes = collectives.QUICK_SIZES if chosen.quick else collectives.SIZES
        result["collectives"] = attempt("all-reduce", lambda: collectives.measure(size, sizes))
    if "start-up" in chosen.parts:
        found = {}
        for name in start_up.NAMES:
            run = attempt(f"start-up of {name}", lambda n=name: start_up.measure(n, at_start))  # type: ignore[misc]
            if run is not None:
                found[name] = run
        result["start_up"] = found
    if "memory" in chosen.parts:
        result["memory"] = attempt("memory for a 1 GB array", lambda: memory.measure(size))
    result |= _measure_apart(chosen, attempt)
    for model in chosen.models if "models" in chosen.parts else ():
        run = ModelRun(model, setting, chosen.peer_python, say)
        made = run.run(chosen.contestants, chosen.rounds, chosen.epoch_seconds)
        result["models"][model] = made
        problems += [f"{model} {name}: {why}" for name, why in made["failed"].items()]
        for contestant in made["contestants"].values():
            for name in ("tensorflow", "keras"):
                result["machine"].setdefault(name, contestant["ready"][name])
    return result


def _measure_apart(
    chosen: options.Options, attempt: Callable[[str, Callable[[], Any]], Any]
) -> dict[str, Any]:
    """Runs the chosen ones of the measurements that have programs of their own."""
    of_hosts = ("--hosts", report.BENCH_HOSTS, "--ranks", chosen.num_processes)
    of_items = ("--processes", chosen.num_processes)
    of_records = ("--quick",) if chosen.quick else ()
    of_readers = ("--batches", 40, "--rounds", 1) if chosen.quick else ()
    of_partitions = ("--units", 512) if chosen.quick else ()
    of_serving = ("--models", "cnn8", "--rounds", 1) if chosen.quick else ()
    programs = {
        "hosts": ("all-reduce between hosts", "benchmarks.hosts", of_hosts),
        "records": ("Pipe mode", "benchmarks.records", of_records),
        "items": ("small models", "benchmarks.items", of_items),
        "readers": ("datasets decoded in Python", "benchmarks.readers", of_readers),
        "partitions": ("a model in parts", "benchmarks.partitions", of_partitions),
        "serving": ("servers", "benchmarks.serving", (*of_serving, *of_items)),
    }
    return {
        part: attempt(what, functools.partial(apart.run, module, "--json", *arguments))
        for part, (what, module, arguments) in programs.items()
        if part in chosen.parts
    }


def machine() -> dict[str, Any]:
    """Describes this machine for the results."""
    cpu = platform.processor()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    return {
        "cpu": cpu,
        "bfloat16": _bfloat16(),
        "cores": len(nanotf.plan(1).cores()),
        "load": ", ".join(f"{load:.1f}" for load in os.getloadavg()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "nanotf": nanotf.__version__,
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _bfloat16() -> str | None:
    """Returns the bfloat16 instructions, "" if there are none, None if unknown."""
    found = processor.read_processor()
    if not found.flags:
        return None
    return ", ".join(name for name in found.features() if "BF16" in name)
