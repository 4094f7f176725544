"""Servers for `benchmarks.serving`: starts them, asks them, and reads their processor time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

import psutil

from benchmarks.apart import ROOT
from benchmarks.clock import Processor
from benchmarks.load_generator import LAST_SECONDS, Load
from benchmarks.others import Others

START_SECONDS = 300.0
TOLERANCE = 1e-3  # of an answer; engines differ from Keras in the last digits of float32
_METRICS = "/monitoring/prometheus/metrics"
_TIME_OF_BATCHES = ":tensorflow:serving:runtime_latency_{}{{"


class ServerError(Exception):
    """A server failed; the text is one line."""


@dataclasses.dataclass(frozen=True)
class Files:
    """The files of a model that `benchmarks.served_models` has written."""

    model: pathlib.Path
    request: pathlib.Path  # the body of a request
    answer: pathlib.Path  # the predictions for it


@dataclasses.dataclass(frozen=True)
class Block:
    """The answers of a block, and their cost.

    Args:
        rate: float, answers with status 200 per second.
        front, workers: float, processor time in seconds per answer: of the process that listens,
            and of all others.
        batch: float or None, seconds that a worker took for a batch, on average.
        others: float, the share of all cores that other programs used.
        seen: dict, see `load_generator.Generator.result`, without the last answer.
    """

    rate: float
    front: float
    workers: float
    batch: float | None
    others: float
    seen: dict[str, Any]


class BenchmarkedServer:
    """A server, from its start to its end.

    Args:
        name: str, for messages and the log.
        command: list of str, the arguments of `python -m`, without the file that gets the port.
        path: str, where it answers.
        files: `Files`.
        folder: path of a directory for its files.
    """

    def __init__(
        self, name: str, command: Sequence[str], path: str, files: Files, folder: pathlib.Path
    ) -> None:
        self._path, self._files = path, files
        self._log = folder / f"{name}.log"
        ready = folder / f"{name}.ready"
        variables = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
        paths = [str(ROOT), *filter(None, [variables.get("PYTHONPATH")])]
        variables["PYTHONPATH"] = os.pathsep.join(paths)
        with self._log.open("wb") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", *command, str(ready)],
                env=variables,
                cwd=folder,
                stdout=log,
                stderr=log,
            )
        try:
            self._port = self._wait(ready)
            self._wait_for_answer()
            self.run(1, 0.5)  # finds what is done at the first requests
        except BaseException:
            self.end()
            raise

    def _wait(self, ready: pathlib.Path) -> int:
        end = time.monotonic() + START_SECONDS
        while not ready.is_file():
            if self.popen.poll() is not None:
                raise ServerError(f"ended with exit code {self.popen.returncode}: {self._tail()}")
            if time.monotonic() > end:
                raise ServerError(f"not ready within {START_SECONDS:g} s: {self._tail()}")
            time.sleep(0.05)
        return int(json.loads(ready.read_text())["port"])

    def _wait_for_answer(self) -> None:
        """Waits until it listens; uvicorn does so after its port is known."""
        end = time.monotonic() + START_SECONDS
        body = self._files.request.read_bytes()
        while True:
            try:
                self._check(self._fetch(self._path, body))
                return
            except (urllib.error.URLError, ConnectionError) as error:
                if time.monotonic() > end or isinstance(error, urllib.error.HTTPError):
                    raise ServerError(f"{error}: {self._tail()}") from error
                time.sleep(0.1)

    def _fetch(self, path: str, body: bytes | None = None) -> str:
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}{path}", body, headers)
        with urllib.request.urlopen(request, timeout=START_SECONDS) as answer:
            return str(answer.read().decode())

    def _check(self, text: str) -> None:
        found = json.loads(text)["predictions"][0]
        expected = json.loads(self._files.answer.read_text())[0]
        if max(abs(a - b) for a, b in zip(found, expected, strict=True)) > TOLERANCE:
            raise ServerError(f"another answer than Keras's: {found}, not {expected}")

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"{' '.join(lines[-1:])[-300:]} (see {self._log})"

    def run(self, connections: int, seconds: float, rate: float = 0.0) -> Block:
        """Lets clients ask; see `load_generator.Load`. Checks the last answer.

        Raises:
            ServerError: A request was not answered, no answer was right, or an answer was an error
                other than that there is too much to do.
        """
        load = Load(self._port, self._path, str(self._files.request), connections, seconds, rate)
        command = [sys.executable, "-m", "benchmarks.load_generator"]
        command.append(json.dumps(dataclasses.asdict(load)))
        others_pids = [p.pid for p in psutil.Process(self.popen.pid).children(recursive=True)]
        front, workers = Processor([self.popen.pid]), Processor(others_pids)
        before = front.seconds(), workers.seconds() or 0.0, self._batches()
        with Others([self.popen.pid]) as others:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, check=False,
                timeout=seconds + 2 * LAST_SECONDS,
            )  # fmt: skip
        if done.returncode:
            raise ServerError(f"the clients failed: {done.stderr.strip()[-300:]}")
        seen = json.loads(done.stdout)
        last = seen.pop("body")
        good = seen["answers"].get("200", {"count": 0})["count"]
        if not good or seen["lost"] or set(seen["answers"]) - {"200", "429"}:
            raise ServerError(f"clients saw {seen}: {self._tail()}")
        self._check(last)
        time_of_front = front.seconds() - before[0]
        time_of_workers = (workers.seconds() or 0.0) - before[1]
        return Block(
            rate=good / seen["seconds"],
            front=time_of_front / good,
            workers=time_of_workers / good,
            batch=_mean(before[2], self._batches()),
            others=others.share,
            seen=seen,
        )

    def _batches(self) -> tuple[float, float]:
        """Returns the seconds that workers have taken for batches, and their number."""
        try:
            lines = self._fetch(_METRICS).splitlines()
        except urllib.error.HTTPError:
            return 0.0, 0.0  # not nanotf's

        def total(of: str) -> float:
            name = _TIME_OF_BATCHES.format(of)
            return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

        return total("sum") / 1e6, total("count")

    def front_by_wrk(self, wrk: str, connections: int, seconds: int) -> float | None:
        """Returns the front's processor time per answer in seconds, with the clients of `wrk`.

        Args:
            wrk: path of the program.
        """
        body = json.dumps(self._files.request.read_text())
        script = self._log.with_suffix(".lua")
        script.write_text(
            f'wrk.method = "POST"\nwrk.body = {body}\n'
            'wrk.headers["Content-Type"] = "application/json"\n'
        )
        front = Processor([self.popen.pid])
        before = front.seconds()
        address = f"http://127.0.0.1:{self._port}{self._path}"
        options = ["-t1", f"-c{connections}", f"-d{seconds}s", "-s", str(script)]
        done = subprocess.run(
            [wrk, *options, address], capture_output=True, text=True, check=True,
            timeout=seconds + LAST_SECONDS,
        )  # fmt: skip
        (line,) = [line for line in done.stdout.splitlines() if " requests in " in line]
        return float((front.seconds() - before) / int(line.split()[0]))

    def end(self) -> None:
        """Ends it."""
        self.popen.terminate()
        try:
            self.popen.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                self.popen.kill()
            self.popen.wait()


def _mean(before: tuple[float, float], after: tuple[float, float]) -> float | None:
    seconds, count = after[0] - before[0], after[1] - before[1]
    return seconds / count if count else None
