"""Measures servers: `python -m benchmarks.serving [--help]`.

A model answers requests for one row, as JSON over HTTP:

- `predict`: FastAPI and `model.predict`, as most users begin.
- `function`: Starlette, orjson and a `tf.function`, what an experienced user writes.
- `nanotf ENGINE`: `nanotf serve --engine ENGINE`, for each engine that is installed.

All start once and stay. In each round each answers clients for a few seconds, in turn. **Processor
time per request** is user and system time of all processes of the server; it hardly depends on what
else the machine does, unlike requests per second, of which the clients take a part, too.

Then, for nanotf alone: **one client**, whose time per request is compared with the worker's for the
same requests; **70 %** of the requests per second of the rounds, at random moments: the 99th
percentile is compared with the time of a batch; **overload**: twice the requests that it can answer
to many clients, at a server with `--max-latency`: how many of them it answers, and how late.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import ratios, report
from benchmarks.apart import ROOT
from benchmarks.goals import RIVALS
from benchmarks.served_models import MODELS
from benchmarks.servers import BenchmarkedServer, Block, Files, ServerError
from nanotf.errors import NanoError

OVERLOAD_CONNECTIONS = 512
LEAST_BATCHES = 4  # `--max-latency` under overload, in times of a batch


@dataclasses.dataclass(frozen=True)
class Plan:
    """The measurements to make.

    Args:
        models: tuple of str, keys of `MODELS`.
        engines: tuple of str.
        processes: int, workers.
        cores: int or None, of each worker; None for an equal part of all.
        connections: int, clients.
        seconds: float, of a block.
        rounds: int.
    """

    models: tuple[str, ...] = ("cnn8", "lstm")
    engines: tuple[str, ...] = ("tensorflow",)
    processes: int = 2
    cores: int | None = None
    connections: int = 32
    seconds: float = 4.0
    rounds: int = 3


def installed_engines() -> tuple[str, ...]:
    """Returns the engines to compare: those of TensorFlow's default, and of installed packages."""
    from nanotf.inference.engines import engine_table

    found = []
    for name in ("tensorflow", "openvino", "onnxruntime", "litert"):
        try:
            engine_table.check_engine(name)
        except NanoError:
            continue
        found.append(name)
    return tuple(found)


class Comparison:
    """The servers of one model.

    Args:
        model: str, a key of `MODELS`.
        plan: `Plan`.
        folder: path of an empty directory.
        say: function that prints a line of progress.
    """

    def __init__(
        self, model: str, plan: Plan, folder: pathlib.Path, say: Callable[[str], None]
    ) -> None:
        self._model, self._plan, self._folder, self._say = model, plan, folder, say
        self._files = Files(
            *(folder / f"{model}.{end}" for end in ("keras", "request.json", "answer.json"))
        )
        self._servers: dict[str, BenchmarkedServer] = {}
        self._blocks: dict[str, list[Block]] = {}
        self.problems: list[str] = []

    def run(self) -> list[dict[str, Any]]:
        """Measures; returns a row for each server, see `measure`."""
        command = [sys.executable, "-m", "benchmarks.served_models"]
        subprocess.run([*command, str(self._folder), self._model], cwd=ROOT, check=True)
        names = [*RIVALS, *(f"nanotf {engine}" for engine in self._plan.engines)]
        try:
            for name in names:
                self._attempt(name, self._start)
            for number in range(self._plan.rounds):
                for name in list(self._servers):
                    self._attempt(name, self._block)
                self._say(f"{self._model}: round {number + 1}/{self._plan.rounds}: {self._last()}")
            rows = {name: self._row(name) for name in self._servers}
            for name in [name for name in self._servers if name not in RIVALS]:
                self._attempt(name, lambda name: self._add_latencies(name, rows[name]))
        finally:
            for server in self._servers.values():
                server.end()
        return list(rows.values())

    def _attempt(self, name: str, action: Callable[[str], None]) -> None:
        """Runs `action(name)`; a server that fails is ended and left out."""
        try:
            action(name)
        except (ServerError, subprocess.SubprocessError, OSError) as error:
            self.problems.append(f"{self._model}, {name}: {error}")
            self._say(self.problems[-1])
            if name in self._servers:
                self._servers.pop(name).end()

    def _start(self, name: str) -> None:
        self._say(f"{self._model}: {name} starts")
        self._servers[name] = self._started(name)

    def _started(self, name: str, *words: str) -> BenchmarkedServer:
        model = str(self._files.model)
        label = "-".join([self._model, *name.split(), *words])
        if name in RIVALS:
            command = ["benchmarks.web_servers", name, model]
            return BenchmarkedServer(label, command, "/predict", self._files, self._folder)
        engine, number = name.split()[1], str(self._plan.processes)
        command = ["nanotf", "serve", model, "--engine", engine, "-n", number, "--port", "0"]
        if self._plan.cores is not None:  # clients and the front have the others for themselves
            command += ["--cores-per-process", str(self._plan.cores)]
        command += ["--poll", "0", *words, "--ready-file"]
        path = f"/v1/models/{self._model}:predict"
        return BenchmarkedServer(label, command, path, self._files, self._folder)

    def _block(self, name: str) -> None:
        block = self._servers[name].run(self._plan.connections, self._plan.seconds)
        self._blocks.setdefault(name, []).append(block)

    def _last(self) -> str:
        return ", ".join(f"{name} {self._blocks[name][-1].rate:.0f}/s" for name in self._servers)

    def _row(self, name: str) -> dict[str, Any]:
        blocks = self._blocks[name]
        return {
            "model": self._model,
            "server": name,
            "rates": [block.rate for block in blocks],
            "fronts": [block.front for block in blocks],
            "processors": [block.front + block.workers for block in blocks],
            "others": [block.others for block in blocks],
        }

    def _add_latencies(self, name: str, row: dict[str, Any]) -> None:
        server, plan = self._servers[name], self._plan
        capacity = ratios.median(row["rates"]) or 0.0
        self._say(f"{self._model}: {name}: latencies")
        row["one"] = _as_json(server.run(1, plan.seconds))
        row["70 %"] = _as_json(server.run(plan.connections, plan.seconds, 0.7 * capacity))
        wrk = shutil.which("wrk")
        if wrk is not None:
            seconds = max(1, round(plan.seconds))
            row["front, wrk"] = server.front_by_wrk(wrk, plan.connections, seconds)
        # More clients make larger batches.
        capacity = server.run(OVERLOAD_CONNECTIONS, plan.seconds).rate
        # Each client waits for its answer before it asks again: if the server may let all of them
        # wait at once, it has nothing to refuse.
        all_clients = OVERLOAD_CONNECTIONS / capacity
        limit = math.ceil(1e3 * max(all_clients / 4, LEAST_BATCHES * row["70 %"]["batch"]))
        limited = self._started(name, "--max-latency", str(limit))
        try:
            limited.run(plan.connections, plan.seconds)  # it learns how long a batch takes
            block = limited.run(OVERLOAD_CONNECTIONS, plan.seconds, 2 * capacity)
        finally:
            limited.end()
        row["overload"] = {**_as_json(block), "limit": limit / 1e3, "capacity": capacity}


def _as_json(block: Block) -> dict[str, Any]:
    return dataclasses.asdict(block)


def measure(plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """Compares the servers.

    Returns:
        A dict: `problems`, a list of str; `rows`, a list of a dict for each model and server:
        `model`, `server`; lists with a value for each round: `rates` in requests per second,
        `processors` and `fronts`, processor time in s per request, of all processes and of the one
        that listens, `others`; and for nanotf the blocks `one`, `70 %`, `overload` (with `limit` in
        s and `capacity`), see `servers.Block`, and `front, wrk` if wrk is installed.
    """
    rows, problems = [], []
    for model in plan.models:
        with tempfile.TemporaryDirectory(prefix="nanotf-serving-") as folder:
            comparison = Comparison(model, plan, pathlib.Path(folder), say)
            rows += comparison.run()
            problems += comparison.problems
    return {"rows": rows, "problems": problems}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    add = parser.add_argument
    add("--models", default=",".join(Plan.models), help=f"of {', '.join(MODELS)}")
    add("--engines", help="default: all that are installed")
    add("--processes", type=int, default=Plan.processes, help="workers, default %(default)s")
    add("--cores-per-process", type=int, help="default: an equal part of all for each worker")
    add("--connections", type=int, default=Plan.connections, help="clients, default %(default)s")
    add("--seconds", type=float, default=Plan.seconds, help="of a block, default %(default)g")
    add("--rounds", type=int, default=Plan.rounds, help="default %(default)s")
    add("--json", action="store_true", help="print JSON instead")
    given = parser.parse_args(arguments)
    models = tuple(given.models.split(","))
    if unknown := set(models) - set(MODELS):
        parser.error(f"--models must be of {', '.join(MODELS)}. Received: {', '.join(unknown)}.")
    engines = tuple(given.engines.split(",")) if given.engines else installed_engines()
    plan = Plan(
        models,
        engines,
        given.processes,
        given.cores_per_process,
        given.connections,
        given.seconds,
        given.rounds,
    )

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    found = measure(plan, say)
    print(json.dumps(found) if given.json else report.serving(found))


if __name__ == "__main__":
    main()
