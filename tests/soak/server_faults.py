"""Faults of a server under load, for `make soak` and for a quick test.

Clients ask without a break, and check each answer; bad clients disturb. Meanwhile workers are
killed, versions come, the queue is full, and at the end the server gets SIGTERM.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import random
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import tensorflow as tf
from server_clients import ROWS, Clients, Seen, ask_raw, status_of

from tests.e2e.served import Served, serving

WORKERS = 2
GOOD, BAD = 8, 2  # clients
QUEUE = 32  # requests that may wait; more than the clients send
MOST_WAITING = 500  # requests that fill the queue, and the batches of the workers
MODEL = "digits"
_RESTARTS = "nanotf_worker_restarts_total"
_FULL = 'nanotf_rejected_total{reason="full"}'


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The memory of a process, and what else it holds.

    Args:
        resident: int, bytes that are in memory, shared ones included.
        shared: int, bytes of it that are shared memory, not files.
        descriptors, threads: int.
    """

    resident: int
    shared: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Sizes:
        """Measures a process."""
        fields = dict(
            line.split(":", 1)
            for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        kib = {name: int(fields[name].split()[0]) for name in ("VmRSS", "RssShmem")}
        return cls(
            kib["VmRSS"] << 10,
            kib["RssShmem"] << 10,
            len(list(pathlib.Path(f"/proc/{pid}/fd").iterdir())),
            int(fields["Threads"]),
        )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a run with faults.

    Args:
        seen: `Seen`, by the clients.
        kills, reloads: int, what was done.
        exit_code: int, of the server.
        ended_at: float, when it got SIGTERM.
        before, after: `Sizes` of the front, before the first fault and after the last.
        longest: float, s, until all workers answered again after a kill.
    """

    seen: Seen
    kills: int
    reloads: int
    exit_code: int
    ended_at: float
    before: Sizes
    after: Sizes
    longest: float

    @property
    def lost(self) -> list[str]:
        """The requests without an answer that were sent before SIGTERM."""
        return [
            f"sent {1000 * (self.ended_at - sent):.1f} ms before SIGTERM: {why}"
            for sent, why in self.seen.lost
            if sent < self.ended_at
        ]

    def text(self) -> str:
        """Returns it as lines."""
        seen = self.seen
        return "\n".join(
            [
                f"right answers by version: {seen.answers}; refused: {seen.refused}",
                f"wrong: {len(seen.wrong)}; lost: {len(self.lost)}, and after SIGTERM "
                f"{len(seen.lost) - len(self.lost)}",
                f"bad clients: {dict(sorted(seen.bad.items()))}",
                f"{self.kills} kills, all workers back within {self.longest:.1f} s; "
                f"{self.reloads} new versions; exit code {self.exit_code}",
                f"the front: {self.before} -> {self.after}",
            ]
        )


class Versions:
    """The versions of a model, each with other weights.

    Args:
        base: path of the folder that is served; made.
    """

    def __init__(self, base: pathlib.Path) -> None:
        self._base = base
        base.mkdir()
        self.count = 0

    def add(self, clients: Clients | None = None) -> Any:
        """Makes the next version, whole at once; returns its predictions for `ROWS`.

        Args:
            clients: get to know it before it can answer.
        """
        self.count += 1
        tf.keras.utils.set_random_seed(self.count)
        layers = tf.keras.layers
        model = tf.keras.Sequential(
            [
                tf.keras.Input((8, 8, 1)),
                layers.Conv2D(4, 3, activation="relu"),
                layers.Flatten(),
                layers.Dense(10),
            ]
        )
        expected = model.predict(ROWS, verbose=0)
        if clients is not None:
            clients.expected[self.count] = expected
        part = self._base.parent / "part"
        shutil.rmtree(part, ignore_errors=True)
        model.export(str(part)) if hasattr(model, "export") else tf.saved_model.save(
            model, str(part)
        )
        part.rename(self._base / str(self.count))
        return expected


class Faults:
    """Makes faults.

    Args:
        server: `Served`, which clients ask.
        clients: `Clients`.
        versions: `Versions` that it serves.
        seed: int.
    """

    def __init__(self, server: Served, clients: Clients, versions: Versions, seed: int) -> None:
        self._server, self._clients, self._versions = server, clients, versions
        self._draw = random.Random(seed)

    def kill(self) -> float:
        """Kills a worker at a random moment; returns the seconds until all answer again."""
        time.sleep(self._draw.uniform(0.0, 0.3))
        before = self._server.metric(_RESTARTS)
        target = self._draw.choice(self._server.workers())
        os.kill(target, signal.SIGKILL)
        began = time.monotonic()
        self._server.wait_until(
            lambda: (
                self._server.metric(_RESTARTS) > before
                and self._server.metric("nanotf_workers") == WORKERS
            ),
            "no other worker has come",
        )
        return time.monotonic() - began

    def reload(self) -> None:
        """Adds a version; returns when all answers come from it."""
        self._versions.add(self._clients)
        number = self._versions.count
        path = f"/v1/models/{MODEL}/versions/{number - 1}"

        def is_over() -> bool:
            (state,) = self._server.ask(path).json["model_version_status"]
            return bool(state["state"] == "END")

        self._server.wait_until(is_over, f"version {number - 1} is still served")

    def fill_queue(self) -> None:
        """Stops the workers, asks until a request is refused, and lets them continue."""
        before = self._server.metric(_FULL)
        stopped = self._server.workers()
        with contextlib.ExitStack() as stack:
            sockets = []
            try:
                for pid in stopped:
                    os.kill(pid, signal.SIGSTOP)
                # One by one, as each must have come before the next look.
                while self._server.metric(_FULL) == before:
                    assert len(sockets) < MOST_WAITING, "no request is refused"
                    sockets.append(stack.enter_context(ask_raw(self._server.port)))
            finally:
                for pid in stopped:
                    with contextlib.suppress(ProcessLookupError):  # it was about to leave
                        os.kill(pid, signal.SIGCONT)
            statuses = [status_of(sock) for sock in sockets]
            assert set(statuses) <= {200, 429}, statuses

    def wait_for_answers(self, number: int = 50) -> None:
        """Waits for more right answers."""
        enough = self._clients.count + number
        self._server.wait_until(lambda: self._clients.count >= enough, "no answers")

    def end(self) -> int:
        """Ends the server while clients ask; returns its exit code."""
        self._clients.is_ending = True
        code = self._server.stop()
        self._clients.join()
        return code


@contextlib.contextmanager
def asked_server(folder: pathlib.Path, seed: int) -> Iterator[tuple[Served, Clients, Faults]]:
    """Serves a first version in this context, with clients that ask."""
    versions = Versions(folder / MODEL)
    first = versions.add()
    words = [str(folder / MODEL), "-n", str(WORKERS), "--poll", "0.2"]
    words += ["--queue", str(QUEUE)]
    with (
        serving(folder / "server", *words) as server,
        Clients(server.port, GOOD, BAD, seed, first) as clients,
    ):
        yield server, clients, Faults(server, clients, versions, seed)


def run(folder: pathlib.Path, kills: int, reloads: int, seed: int) -> Outcome:
    """Runs a server with faults, in random order.

    Args:
        folder: an empty directory.
        kills, reloads: int, how many.
        seed: int.
    """
    with asked_server(folder, seed) as (server, clients, faults):
        front = server.process.pid
        faults.wait_for_answers()
        before = Sizes.of(front)
        todo = ["kill"] * kills + ["reload"] * reloads + ["full"]
        random.Random(seed).shuffle(todo)
        longest = 0.0
        for what in todo:
            if what == "kill":
                longest = max(longest, faults.kill())
            elif what == "reload":
                faults.reload()
            else:
                faults.fill_queue()
            faults.wait_for_answers()
        after = Sizes.of(front)
        ended_at = time.monotonic()
        code = faults.end()
    return Outcome(clients.seen, kills, reloads, code, ended_at, before, after, longest)


@dataclasses.dataclass(frozen=True)
class Growth:
    """The memory of a process at two moments under load."""

    name: str
    pid: int
    then: Sizes
    now: Sizes

    def __str__(self) -> str:
        then, now = self.then, self.now
        mib = 1 << 20
        return (
            f"{self.name} {self.pid}: resident {then.resident / mib:.1f} -> "
            f"{now.resident / mib:.1f} MiB, of it shared {then.shared / mib:.1f} -> "
            f"{now.shared / mib:.1f}; descriptors {then.descriptors} -> {now.descriptors}, "
            f"threads {then.threads} -> {now.threads}"
        )


def growths(folder: pathlib.Path, first: float, last: float, seed: int) -> tuple[
    list[Growth], Seen
]:  # fmt: skip
    """Keeps a server busy, and measures the memory of all of its processes.

    Args:
        first, last: float, s after the start of the load, the moments of the measurements.

    Returns:
        The growth of each process, and what the clients saw.
    """
    with asked_server(folder, seed) as (server, clients, faults):
        began = time.monotonic()
        pids = _processes(server)
        found: Sequence[Any] = ()
        for moment in (first, last):
            time.sleep(max(0.0, began + moment - time.monotonic()))
            found = [*found, {pid: Sizes.of(pid) for pid in pids}]
        assert pids == _processes(server), f"workers died: {server.log()}"
        faults.end()
    then, now = found
    return [Growth(name, pid, then[pid], now[pid]) for pid, name in pids.items()], clients.seen


def _processes(server: Served) -> dict[int, str]:
    workers = dict.fromkeys(server.workers(), "worker")
    below = psutil.Process(server.process.pid).children(recursive=True)
    others = {process.pid: "other" for process in below if process.pid not in workers}
    return {server.process.pid: "front", **others, **workers}
