"""Load and faults, many times over: what `make soak` and a quick test run.

A run of `kill_once` trains a small model on two workers and kills one of them at a random moment
of a phase. It has to end as promised: with `WorkerDied`, or with a restart and the whole history;
and nothing may stay behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import psutil
import tensorflow as tf

import nanotf
from nanotf.errors import WorkerDied, WorkerError
from nanotf.keras import Sequential

EPOCHS = 3
SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM)

# Phase -> the longest time in seconds from its begin to the signal; some signals come too late.
PHASES = {
    "start": 4.0,
    "transfer": 0.5,
    "training": 0.3,
    "validation": 0.1,
    "checkpoint": 0.1,
    "shutdown": 0.05,
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one run ended.

    Args:
        phase: str, one of `PHASES`.
        result: str, "raised", "restarted", "finished" (the signal came too late, or hit a pool
            that was ending) or what went wrong.
        seconds: float or None, from the signal to the exception, where one was raised.
        left: what stayed behind: processes, files.
    """

    phase: str
    result: str
    seconds: float | None
    left: tuple[str, ...]

    @property
    def is_as_promised(self) -> bool:
        """Whether this may happen."""
        return self.result in ("raised", "restarted", "finished") and not self.left


def _rows(count: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    rows = np.random.default_rng(3).random((count, width), np.float32)
    return rows, rows[:, :1]


def _model(width: int) -> Any:
    model = Sequential(
        [
            tf.keras.layers.Input((width,)),
            tf.keras.layers.Dense(32, activation="relu"),
            tf.keras.layers.Dense(1),
        ]
    )
    model.compile("adam", "mse")
    return model


def _workers() -> list[psutil.Process]:
    """The worker processes of this process, those included that are just starting."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "nanotf.worker" in child.cmdline():
                found.append(child)
    return found


class _Killer:
    """Sends a signal to a worker some time after `begin`, unless `stop` comes first."""

    def __init__(self, number: int, rank: int, delay: float) -> None:
        self.sent_at: float | None = None
        self._number, self._rank, self._delay = number, rank, delay
        self._begun, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="nanotf-soak-killer")
        self._thread.start()

    def begin(self) -> None:
        self._begun.set()

    def stop(self) -> None:
        self._ended.set()
        self._begun.set()
        self._thread.join()

    def _run(self) -> None:
        self._begun.wait()
        if self._ended.wait(self._delay):
            return
        workers = sorted(_workers(), key=lambda worker: worker.pid)[self._rank :][:1]
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                # Before, since the parent may notice before this thread goes on.
                self.sent_at = time.monotonic()
                worker.send_signal(self._number)


def _callbacks(phase: str, killer: _Killer, directory: str) -> list[Any]:
    class Begin(tf.keras.callbacks.Callback):
        epoch = -1

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch
            if phase == "training" and epoch == 1:
                killer.begin()

        def on_test_begin(self, logs: Any = None) -> None:
            if phase == "validation" and self.epoch == 1:
                killer.begin()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if phase == "checkpoint" and epoch == 1:
                killer.begin()

    path = str(pathlib.Path(directory) / "model.keras")
    return [Begin(), tf.keras.callbacks.ModelCheckpoint(path)]


def kill_once(phase: str, dice: random.Random) -> Outcome:
    """One run: trains, kills, and says how that ended."""
    x, y = _rows(200_000 if phase == "transfer" else 400, 64)
    if phase == "start":
        nanotf.shutdown()
    elif not nanotf.worker_pids():  # a warm pool, so that the phase is where the signal hits
        small, target = _rows(100, 64)
        _model(64).fit(small, target, batch_size=50, verbose=0, num_processes=2)
    files = _files()
    restarts = dice.choice((0, 1))
    killer = _Killer(dice.choice(SIGNALS), dice.randrange(2), dice.uniform(0.0, PHASES[phase]))
    seconds = None
    with tempfile.TemporaryDirectory() as directory:
        try:
            if phase in ("start", "transfer"):
                killer.begin()
            history = _model(64).fit(
                x,
                y,
                batch_size=len(x) // 8,
                epochs=EPOCHS,
                verbose=0,
                validation_data=(x[:200], y[:200]),
                callbacks=_callbacks(phase, killer, directory),
                num_processes=2,
                max_restarts=restarts,
            )
            if phase == "shutdown":
                killer.begin()
                nanotf.shutdown()
            restarted = killer.sent_at is not None and phase not in ("shutdown",)
            result = "restarted" if restarted and restarts else "finished"
            if history.epoch != list(range(EPOCHS)):
                result = f"a history of epochs {history.epoch}"
        except WorkerDied:
            now = time.monotonic()
            seconds = None if killer.sent_at is None else now - killer.sent_at
            result = "raised" if killer.sent_at is not None else "raised without a signal"
        except WorkerError as error:
            result = f"{type(error).__name__}: {str(error)[:300]}"
        finally:
            killer.stop()
    return Outcome(phase, result, seconds, tuple(_left(files)))


def _files() -> set[str]:
    found = set()
    for directory in (tempfile.gettempdir(), "/dev/shm"):
        if pathlib.Path(directory).is_dir():
            found |= {path.name for path in pathlib.Path(directory).iterdir()}
    return {name for name in found if "nanotf" in name}


def _left(files: set[str]) -> Iterator[str]:
    pool = set(nanotf.worker_pids())
    for worker in _workers():
        if worker.pid not in pool:
            yield f"process {worker.pid}"
    yield from sorted(_files() - files)


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes by phase, as text."""
    lines = [
        f"{'fault':<22}{'runs':>5}{'raised':>8}{'restarted':>11}{'too late':>10}"
        f"{'detected within':>17}{'left behind':>13}{'wrong':>7}"
    ]
    for phase in dict.fromkeys(outcome.phase for outcome in outcomes):
        runs = [outcome for outcome in outcomes if outcome.phase == phase]
        counts = [sum(o.result == r for o in runs) for r in ("raised", "restarted", "finished")]
        times = [o.seconds for o in runs if o.seconds is not None]
        within = f"{max(times):.2f} s" if times else "-"
        left, wrong = sum(len(o.left) for o in runs), sum(not o.is_as_promised for o in runs)
        lines.append(
            f"{'killed in ' + phase:<22}{len(runs):>5}{counts[0]:>8}{counts[1]:>11}{counts[2]:>10}"
            f"{within:>17}{left:>13}{wrong:>7}"
        )
    return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Footprint:
    """What the processes of a pool hold: memory in bytes and file descriptors, by process."""

    memory: tuple[int, ...]
    descriptors: tuple[int, ...]

    @classmethod
    def now(cls) -> Footprint:
        """The workers' memory of their own; the descriptors of workers and parent."""
        workers = [psutil.Process(pid) for pid in nanotf.worker_pids()]
        return cls(
            tuple(worker.memory_full_info().uss for worker in workers),
            tuple(process.num_fds() for process in [*workers, psutil.Process()]),
        )


def warm_jobs(rounds: int) -> list[Footprint]:
    """Runs a `fit`, an `evaluate` and a `predict` per round; returns what was held after each."""
    x, y = _rows(4000, 64)
    model = _model(64)
    footprints = []
    for _ in range(rounds):
        model.fit(x, y, batch_size=400, verbose=0, num_processes=2)
        model.evaluate(x, y, batch_size=400, verbose=0, num_processes=2)
        model.predict(x, batch_size=400, verbose=0, num_processes=2)
        footprints.append(Footprint.now())
    return footprints


def kills(count: int, seed: int, phases: Sequence[str] = tuple(PHASES)) -> list[Outcome]:
    """`count` runs, the phases in turn, with moments that `seed` chooses."""
    dice = random.Random(seed)
    return [kill_once(phases[number % len(phases)], dice) for number in range(count)]


def seed_of_today() -> int:
    """A seed for another hundred moments; NANOTF_SOAK_SEED repeats those of a run."""
    return int(os.environ.get("NANOTF_SOAK_SEED", time.time_ns() % 2**32))
