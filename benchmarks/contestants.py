"""Starts, commands and ends the contestants' processes, from the driver."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import nanotf
from benchmarks import timeline
from benchmarks.apart import ROOT
from nanotf.machine import environment

# One process each; nanotf and the peer start their own workers or ranks.
ALONE = (
    "plain",
    "plain_16",
    "one",
    "shm",
    "auto",
    "grpc",
    "ranks",
    "peer",
    "plain_bf16",
    "shm_bf16",
)
TOGETHER = ("ideal", "stock")  # N processes, started by the driver
# In the order of a round; the peer is optional.
CONTESTANTS = (
    "plain",
    "plain_16",
    "ideal",
    "one",
    "shm",
    "auto",
    "grpc",
    "stock",
    "ranks",
    "plain_bf16",
    "shm_bf16",
)
HEAD_START = 0.05  # seconds between a command and the agreed start, for pipes and wake-ups
DEADLINE = 600.0  # seconds for one command


class ContestantError(Exception):
    """A contestant failed; the text is one line."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Settings shared by all contestants.

    Args:
        num_processes: int.
        logs: path of a directory for logs.
        optimizer: str, one of `models.OPTIMIZERS`, "" for each model's own.
        batch_size: int, 0 for each model's own.
    """

    num_processes: int
    logs: pathlib.Path
    optimizer: str = ""
    batch_size: int = 0


class Process:
    """One process that runs `benchmarks.task`, or starts the ranks that run it.

    Args:
        command: sequence of str, runs a module that follows it.
        setup: dict, for `task`.
        variables: dict, its whole environment.
        log: path, receives its output.
    """

    def __init__(
        self,
        command: Sequence[str],
        setup: dict[str, Any],
        variables: dict[str, str],
        log: pathlib.Path,
    ) -> None:
        self.log = log
        with log.open("w") as output:
            self.popen = subprocess.Popen(
                [*command, "-m", "benchmarks.task", json.dumps(setup)],
                cwd=ROOT,
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )
        self._rest = b""

    def send(self, command: dict[str, Any]) -> None:
        assert self.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended; `answer` reports it
            self.popen.stdin.write(json.dumps(command).encode() + b"\n")
            self.popen.stdin.flush()

    def answers(self, deadline: float) -> list[dict[str, Any]]:
        """Waits for the answers to a command until `deadline` on the monotonic clock."""
        assert self.popen.stdout is not None
        descriptor = self.popen.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise ContestantError(f"no answer within {DEADLINE:.0f} s; see {self.log}")
                data = os.read(descriptor, 1 << 16)
                if not data:
                    code = self.popen.wait()
                    raise ContestantError(f"ended with exit code {code}; see {self.log}")
                self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        found = json.loads(line)
        if "error" in found:
            raise ContestantError(f"{found['error'].splitlines()[0]}; see {self.log}")
        return list(found)

    def end(self) -> None:
        """Ends the process and its children."""
        assert self.popen.stdin is not None and self.popen.stdout is not None
        with contextlib.suppress(OSError):
            self.popen.stdin.close()
        try:
            # Gives nanotf a moment to stop its workers, which run in their own sessions. They
            # notice the end of their parent in any case.
            self.popen.wait(5)
        except subprocess.TimeoutExpired:
            pass
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self.popen.stdout.close()


class Contestant:
    """A contestant on one model: its processes, timed as one.

    Args:
        name: str, one of `ALONE` or `TOGETHER`.
        model: str, a key of `models.MODELS`.
        setting: `Setting`.
        python: str, the interpreter; "" for this one.
        cores: tuple of int, cores of plain Keras; the workers' cores if empty.

    Attributes:
        ready: dict, the first process's report at its start.
    """

    def __init__(
        self,
        name: str,
        model: str,
        setting: Setting,
        python: str = "",
        cores: tuple[int, ...] = (),
    ) -> None:
        self.name = name
        self.processes: list[Process] = []
        self.setting = setting
        setting.logs.mkdir(parents=True, exist_ok=True)
        plan = nanotf.plan(setting.num_processes)
        try:
            for rank, variables, its_cores in _places(name, plan):
                log = setting.logs / f"{model}-{name}-{rank}.log"
                setup = {
                    "role": name,
                    "rank": rank,
                    "cores": cores or its_cores,
                    **self._model(model),
                }
                setup["size"] = setting.num_processes
                command = [python or sys.executable]
                if name == "ranks":
                    command += ["-m", "nanotf", "run", "--ranks", "-n", str(setting.num_processes)]
                self.processes.append(Process(command, setup, variables, log))
            self.ready = self._answers()[0]
        except BaseException:
            self.end()
            raise

    def change(self, model: str, num_processes: int = 0) -> None:
        """Switches all processes to another model, and nanotf to `num_processes` workers.

        Not for "stock", "ranks" and "peer"; with 0 workers, the setting's number is used.
        """
        size = num_processes or self.setting.num_processes
        self._command({"do": "use", "size": size, **self._model(model)})

    def _model(self, model: str) -> dict[str, Any]:
        setting = self.setting
        return {
            "model": model,
            "optimizer": setting.optimizer,
            "batch_size": setting.batch_size,
        }

    def prepare(self, steps: int) -> None:
        """Makes all processes prepare data for blocks of up to `steps` steps per epoch."""
        self._command({"do": "prepare", "steps": steps})

    def run(self, steps: int, epochs: int) -> timeline.Block:
        """Runs one block, started on all processes at the same moment."""
        answers = self._command(
            {"do": "run", "steps": steps, "epochs": epochs, "at": time.monotonic() + HEAD_START}
        )
        if self.name == "peer":
            return timeline.read_calls(answers[0]["calls"])
        return timeline.slowest([timeline.read(answer, steps) for answer in answers])

    def pids(self) -> list[int]:
        """Returns the processes started by the driver; others are their children."""
        return [process.popen.pid for process in self.processes]

    def end(self) -> None:
        """Ends all processes."""
        for process in self.processes:
            process.end()

    def _command(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        for process in self.processes:
            process.send(command)
        return self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        deadline = time.monotonic() + DEADLINE
        return [answer for process in self.processes for answer in process.answers(deadline)]


def _places(name: str, plan: Any) -> list[tuple[int, dict[str, str], tuple[int, ...]]]:
    """Returns rank, environment and cores of each process that the driver starts."""
    base = dict(os.environ)
    paths = [str(ROOT), *(p for p in base.get("PYTHONPATH", "").split(os.pathsep) if p)]
    base["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    if name == "ranks":
        base["NANOTF_STALL_SECONDS"] = "86400"  # the other contestants' blocks take long
    if name in ALONE:
        # Plain Keras gets the cores that the workers share; nanotf pins its workers itself.
        cores = plan.cores() if name == "one" or name.startswith("plain") else ()
        return [(0, base, cores)]
    made = []
    cluster = _free_addresses(len(plan.placements)) if name == "stock" else []
    for placement in plan.placements:
        variables = environment.worker_environment(placement, base).apply(base)
        if cluster:
            task = {"type": "worker", "index": placement.rank}
            variables["TF_CONFIG"] = json.dumps({"cluster": {"worker": cluster}, "task": task})
        made.append((placement.rank, variables, placement.cores if placement.pin else ()))
    return made


def _free_addresses(count: int) -> list[str]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]
