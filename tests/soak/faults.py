"""Kills workers at random moments, for `make soak` and for a quick test.

A run makes a call on two workers and kills one of them somewhere in a phase of it. The run must end
in time with `WorkerDied` and the model in the promised state, or restart and return the result of
an undisturbed run. Nothing may stay behind. An undisturbed run of every case comes first. It gives
the correct result and the length of the phase, from which the moment is drawn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pathlib
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import psutil
import tensorflow as tf

import nanotf
from nanotf.errors import WorkerDied, WorkerError
from nanotf.keras import Sequential, nano, nano_multiprocessing
from nanotf.pool import forks, warm

EPOCHS = 3
KILLED_EPOCH = 1  # the epoch with the phases of training
TOLERANCE = 1e-10  # relative, in float64
SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM)
PROMISED_SECONDS = 2.0  # from a worker's death to the error, or to the restart
LEFT_SECONDS = 10.0  # for threads and processes that are ending
SHUTDOWN_LEAD = 0.003  # seconds from the start of the phase to the call
PHASES = (
    "start",
    "transfer",
    "training",
    "validation",
    "checkpoint",
    "training of @nano",
    "checkpoint of @nano",
    "evaluate",
    "predict",
    "shutdown",
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of one run.

    Args:
        phase: str, one of `PHASES`.
        result: str, "raised", "restarted", "ended" (a shutdown), "too late" (the worker was
            done) or a description of the failure.
        seconds: float or None, the time from the signal to the exception, the restart or the end.
        left: leaked processes, threads and files.
    """

    phase: str
    result: str
    seconds: float | None
    left: tuple[str, ...]

    def is_as_promised(self, seconds: float | None = None) -> bool:
        """Returns True if the result is allowed and came within `seconds`, if given."""
        in_time = seconds is None or self.seconds is None or self.seconds <= seconds
        right = self.result in ("raised", "restarted", "ended", "too late")
        return right and in_time and not self.left


class _Killer:
    """Sends a signal to a worker some time after `begin`, unless `stop` comes first.

    Args:
        number: int, the signal; 0 for an undisturbed run, whose phase is timed.
        rank: int.
        part: float, fraction of the phase to wait.
        seconds: float, length of the phase.
        marker: path of a file; a worker also begins the phase by making it.
    """

    def __init__(
        self, number: int, rank: int, part: float, seconds: float, marker: pathlib.Path
    ) -> None:
        self.sent_at: float | None = None
        self.seconds = 0.0  # of the phase, if it has ended
        self.marker = marker
        self._number, self._rank, self._delay = number, rank, part * seconds
        self._begun_at = 0.0
        self._begun, self._ended = threading.Event(), threading.Event()
        self.process: Any = None  # the process that was hit
        self._thread = threading.Thread(target=self._run, name="nanotf-soak-killer")
        self._thread.start()

    def begin(self) -> None:
        """Marks the beginning of the phase."""
        if not self._begun.is_set():
            self._begun_at = time.monotonic()
            self._begun.set()

    def end(self) -> None:
        """Marks the end of the phase."""
        if self._begun.is_set() and not self.seconds:
            self.seconds = time.monotonic() - self._begun_at

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def was_killed(self) -> bool:
        """Returns True if the signal ended the worker; False if it ended by itself before."""
        if self.process is None:
            return False
        with contextlib.suppress(Exception):
            self.process.wait(LEFT_SECONDS)
        code = getattr(self.process, "returncode", -self._number)
        return bool(code == -self._number)

    def _run(self) -> None:
        while not self._begun.wait(0.001):
            if self.marker.exists():
                self.begin()
            if self._ended.is_set():
                return
        if not self._number:
            while not self._ended.wait(0.001) and not self.seconds:
                if self.marker.with_suffix(".end").exists():
                    self.end()
            return
        if self._ended.wait(self._delay):
            return
        while not self._ended.is_set() and not self._kill():
            time.sleep(0.001)  # the worker has not started yet

    def _kill(self) -> bool:
        pool = warm._pool
        if pool is not None:  # at once, since a shutdown takes milliseconds
            self.process = pool.workers[self._rank].process
        else:
            self.process = next(iter(sorted(_workers(), key=_pid)[self._rank :]), None)
        if self.process is None:
            return False
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            # Before the kill, since the parent may notice it before this thread continues.
            self.sent_at = time.monotonic()
            self.process.send_signal(self._number)
        return True


def _pid(process: psutil.Process) -> int:
    return int(process.pid)


def _workers() -> list[psutil.Process]:
    """Returns the worker processes of this process, including those just starting."""
    origin = forks.pid()
    try:
        return [] if origin is None else psutil.Process(origin).children()
    except psutil.NoSuchProcess:
        return []


# ------------------------------------------------------------------------------------ calls
def rows(count: int, width: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Returns deterministic inputs and targets."""
    made = np.random.default_rng(3).random((count, width))
    return made, made[:, :1]


def small_model(dtype: str = "float64") -> Any:
    """Returns a model whose initial weights depend on the seed alone."""
    tf.keras.utils.set_random_seed(7)
    layers = tf.keras.layers
    model = Sequential(
        [
            layers.Input((64,), dtype=dtype),
            layers.Dense(32, activation="relu", dtype=dtype),
            layers.Dense(1, dtype=dtype),
        ]
    )
    model.compile("adam", "mse")
    return model


class _Call:
    """One call on two workers.

    Args:
        phase: str, the phase in which the killer begins.
        killer: `_Killer`.
        directory: path, for the call's files.
        restarts: int, the maximum number.
    """

    def __init__(self, phase: str, killer: _Killer, directory: pathlib.Path, restarts: int) -> None:
        self.phase, self.killer = phase, killer
        self.directory, self.restarts = directory, restarts
        self.model = small_model()
        self.states = [self.model.get_weights()]  # after each epoch, if the call has epochs
        self.complete = 0  # epochs whose state must survive a failure

    def run(self) -> list[Any]:
        """Makes the call; returns the values that a restart must not change."""
        raise NotImplementedError


class _Fit(_Call):
    def run(self) -> list[Any]:
        x, y = rows(100_000 if self.phase == "transfer" else 400)
        if self.phase in ("start", "transfer"):
            self.killer.begin()
        history = self.model.fit(
            x,
            y,
            batch_size=len(x) // 8,
            epochs=EPOCHS,
            verbose=0,
            validation_data=(x[:200], y[:200]),
            callbacks=self._callbacks(),
            num_processes=2,
            max_restarts=self.restarts,
        )
        assert history.epoch == list(range(EPOCHS)), f"a history of epochs {history.epoch}"
        return [*self.model.get_weights(), np.array(history.history["val_loss"])]

    def _callbacks(self) -> list[Any]:
        call, killer = self, self.killer
        checkpoint = tf.keras.callbacks.ModelCheckpoint(str(self.directory / "model.keras"))

        def at(phase: str, epoch: int, act: Callable[[], None]) -> None:
            if (phase, epoch) == (call.phase, KILLED_EPOCH):
                act()

        class First(tf.keras.callbacks.Callback):
            epoch = 0

            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                self.epoch = epoch
                if call.phase in ("start", "transfer"):
                    killer.end()
                at("training", epoch, killer.begin)

            def on_test_begin(self, logs: Any = None) -> None:
                call.complete = self.epoch + 1
                at("training", self.epoch, killer.end)
                at("validation", self.epoch, killer.begin)

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                call.complete = epoch + 1
                call.states.append(self.model.get_weights())
                at("validation", epoch, killer.end)
                at("checkpoint", epoch, killer.begin)

        class Last(tf.keras.callbacks.Callback):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                at("checkpoint", epoch, killer.end)

        return [First(), checkpoint, Last()]


class _Loop(_Call):
    """A `@nano` call that saves after each epoch. Its workers begin and end the phase."""

    def run(self) -> list[Any]:
        model, optimizer = self.model, tf.keras.optimizers.Adam()
        epoch = tf.Variable(0)
        data = tf.data.Dataset.from_tensor_slices(rows(400)).shuffle(400, seed=5).batch(50)
        saved = tf.train.Checkpoint(model=model, optimizer=optimizer, epoch=epoch)
        manager = nanotf.CheckpointManager(saved, self.directory / "saved", max_to_keep=2)
        begin = str(self.killer.marker)
        end = str(self.killer.marker.with_suffix(".end"))
        in_save = self.phase.startswith("checkpoint")

        @nano_multiprocessing
        @tf.function
        def step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        @nano(num_processes=2, max_restarts=self.restarts)
        def loop(batches: Any) -> None:
            manager.restore_or_initialize()
            for number in range(int(epoch.numpy()), EPOCHS):
                chosen = number == KILLED_EPOCH and nanotf.rank() == 0
                if chosen and not in_save:
                    pathlib.Path(begin).touch()
                for x, y in batches:
                    step(x, y)
                if chosen:
                    pathlib.Path(begin if in_save else end).touch()
                epoch.assign(number + 1)
                manager.save()
                if chosen and in_save:
                    pathlib.Path(end).touch()

        loop(data)
        assert int(epoch.numpy()) == EPOCHS, f"{int(epoch.numpy())} epochs"
        return list(model.get_weights())


class _Pass(_Call):
    """A call of `evaluate` or `predict`."""

    def run(self) -> list[Any]:
        x, y = rows(20_000)
        options: dict[str, Any] = {"batch_size": 50, "verbose": 0, "num_processes": 2}
        self.killer.begin()
        if self.phase == "evaluate":
            result = self.model.evaluate(x, y, **options)
        else:
            result = self.model.predict(x, **options)
        self.killer.end()
        return [np.asarray(result)]


class _Shutdown(_Call):
    def run(self) -> list[Any]:
        self.killer.begin()
        time.sleep(SHUTDOWN_LEAD)  # workers end sooner
        nanotf.shutdown()
        self.killer.end()
        return []


def _call_of(phase: str) -> type[_Call]:
    if "@nano" in phase:
        return _Loop
    return {"evaluate": _Pass, "predict": _Pass, "shutdown": _Shutdown}.get(phase, _Fit)


# ------------------------------------------------------------------------------------- runs
@dataclasses.dataclass(frozen=True)
class _Undisturbed:
    """The correct result, and the length of the phase in seconds."""

    result: list[Any]
    states: list[Any]
    seconds: float


def _same(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    return len(found) == len(expected) and all(
        np.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)
        for a, b in zip(found, expected, strict=True)
    )


def _make_ready(phase: str) -> None:
    """Warms the pool, so that the signal hits the phase; ends it if the phase is the start."""
    if phase == "start":
        nanotf.shutdown()
    elif not nanotf.worker_pids():
        x, y = rows(100)
        small_model().fit(x, y, batch_size=50, verbose=0, num_processes=2)


def _undisturbed(phase: str) -> _Undisturbed:
    _make_ready(phase)
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        killer = _Killer(0, 0, 0.0, 0.0, directory / "begun")
        try:
            call = _call_of(phase)(phase, killer, directory, 0)
            result = call.run()
        finally:
            killer.stop()
    assert killer.seconds > 0.0, f"{phase} has no begin or no end"
    return _Undisturbed(result, call.states, killer.seconds)


@contextlib.contextmanager
def _noting_restarts() -> Iterator[list[float]]:
    """Yields the times at which restarts are announced."""
    times: list[float] = []

    class Note(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "restart 1 of" in record.getMessage():
                times.append(time.monotonic())

    logger, note = logging.getLogger("nanotf"), Note()
    logger.addHandler(note)
    try:
        yield times
    finally:
        logger.removeHandler(note)


def kill_once(phase: str, dice: random.Random, right: _Undisturbed) -> Outcome:
    """Makes one call, kills a worker, and returns the outcome."""
    _make_ready(phase)
    files = _files()
    restarts = dice.choice((0, 1)) if _call_of(phase) in (_Fit, _Loop) else 0
    number, rank, part = dice.choice(SIGNALS), dice.randrange(2), dice.random()
    if phase == "shutdown":  # the kernel takes most of it to free the worker's memory
        part **= 4
    with tempfile.TemporaryDirectory() as name, _noting_restarts() as restarted:
        directory = pathlib.Path(name)
        killer = _Killer(number, rank, part, right.seconds, directory / "begun")
        call = _call_of(phase)(phase, killer, directory, restarts)
        try:
            found = call.run()
            ended = time.monotonic()
            result = "restarted" if restarted else "too late"
            if phase == "shutdown" and killer.was_killed():
                result = "ended"
            if not _same(found, right.result):
                result = f"{result}, with another result than undisturbed"
        except WorkerDied as error:
            ended = time.monotonic()
            result = "raised"
            if killer.sent_at is None:
                result = f"raised without a signal: {error}"
            elif not _same(call.model.get_weights(), right.states[call.complete]):
                result = f"raised, without the state after {call.complete} epochs"
        except (WorkerError, AssertionError) as error:
            ended = time.monotonic()
            result = f"{type(error).__name__}: {str(error)[:300]}"
        finally:
            killer.stop()
    seconds = None
    if killer.sent_at is not None and result != "too late":
        seconds = (restarted[0] if restarted else ended) - killer.sent_at
    return Outcome(phase, result, seconds, _left(files))


def _files() -> set[str]:
    found = set()
    for directory in (tempfile.gettempdir(), "/dev/shm"):
        if pathlib.Path(directory).is_dir():
            found |= {path.name for path in pathlib.Path(directory).iterdir()}
    return {name for name in found if "nanotf" in name}


def _left(files: set[str]) -> tuple[str, ...]:
    deadline = time.monotonic() + LEFT_SECONDS
    while (found := [*_left_now(files)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return tuple(found)


def _left_now(files: set[str]) -> Iterator[str]:
    pool = set(nanotf.worker_pids())
    for worker in _workers():
        if worker.pid not in pool:
            yield f"process {worker.pid}"
    for thread in threading.enumerate():
        # One thread starts all workers of this process, and never ends.
        if thread.name.startswith("nanotf-") and thread.name != "nanotf-starter" and not pool:
            yield f"thread {thread.name}"
    yield from sorted(_files() - files)


def kills(count: int, seed: int, phases: Sequence[str] = PHASES) -> list[Outcome]:
    """Makes `count` runs, phase by phase, at moments drawn from `seed`; prints each end."""
    dice = random.Random(seed)
    right = {phase: _undisturbed(phase) for phase in phases[:count]}
    outcomes = []
    for number in range(count):
        phase = phases[number % len(phases)]
        outcomes.append(kill_once(phase, dice, right[phase]))
        print(f"{number + 1}: {outcomes[-1]}", flush=True)
    return outcomes


def table(outcomes: Sequence[Outcome], seconds: float | None = None) -> str:
    """Returns the outcomes by phase, as text; `seconds` as in `Outcome.is_as_promised`."""
    lines = [
        f"{'fault':<30}{'runs':>5}{'raised':>8}{'restarted':>11}{'ended':>7}{'too late':>10}"
        f"{'detected within':>17}{'left behind':>13}{'wrong':>7}"
    ]
    for phase in dict.fromkeys(outcome.phase for outcome in outcomes):
        runs = [outcome for outcome in outcomes if outcome.phase == phase]
        kinds = ("raised", "restarted", "ended", "too late")
        counts = [sum(o.result == kind for o in runs) for kind in kinds]
        times = [o.seconds for o in runs if o.seconds is not None]
        within = f"{max(times):.2f} s" if times else "-"
        left = sum(len(o.left) for o in runs)
        wrong = sum(not o.is_as_promised(seconds) for o in runs)
        lines.append(
            f"{'killed in ' + phase:<30}{len(runs):>5}{counts[0]:>8}{counts[1]:>11}{counts[2]:>7}"
            f"{counts[3]:>10}{within:>17}{left:>13}{wrong:>7}"
        )
    return "\n".join(lines)


def seed_of_today() -> int:
    """Returns a seed for another hundred moments; NANOTF_SOAK_SEED repeats a run's."""
    return int(os.environ.get("NANOTF_SOAK_SEED", time.time_ns() % 2**32))
