"""The error names workers without progress, and shows every stack."""

from __future__ import annotations

import logging
import os
import pathlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import tensorflow as tf
from parity import digits, small_cnn
from waiting import freeze, wait_until

import nanotf
from nanotf.errors import NanoError, WorkerError, WorkerStuck
from nanotf.pool import handshake, local, stalls, warm
from nanotf.pool.pool import Pool

pytestmark = pytest.mark.own_pool

FIT = {"batch_size": 50, "verbose": 0, "num_processes": 2, "epochs": 3}
STALL_SECONDS = 20  # longer than ranks wait for each other's first step on a busy machine


@pytest.fixture(autouse=True, scope="module")
def _short_patience() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(stalls.STALL_VARIABLE, str(STALL_SECONDS))
        warm.end_pool()
        yield
    warm.end_pool()


def _waiting(place: pathlib.Path) -> Any:
    """Returns a loss in which rank 1 waits forever, and rank 0 until rank 1 has come to it.

    A busy machine may trace rank 1's step long after that of rank 0.
    """
    come = str(place / "come")

    def _wait_in_rank_1(value: Any) -> Any:
        if os.environ.get("NANOTF_RANK") == "1":
            pathlib.Path(come).touch()
            threading.Event().wait()
        while os.environ.get("NANOTF_RANK") and not pathlib.Path(come).exists():
            time.sleep(0.02)
        return value

    def loss(y_true: Any, y_pred: Any) -> Any:
        held = tf.numpy_function(_wait_in_rank_1, [y_pred], y_pred.dtype)
        held.set_shape(y_pred.shape)
        return tf.reduce_mean(y_pred + 0.0 * held, axis=-1)

    return loss


def test_worker_that_waits_forever_in_the_users_code(tmp_path: pathlib.Path) -> None:
    x, y = digits(100)
    model = small_cnn()
    model.compile("sgd", _waiting(tmp_path))
    with pytest.raises(WorkerStuck, match=f"has made no progress for {STALL_SECONDS} s") as caught:
        model.fit(x, y, **FIT)
    error, text = caught.value, str(caught.value)
    assert error.rank == 1
    assert error.cores == nanotf.plan(2).placements[1].cores
    assert "rank 1 (did not come)" in text
    assert "Python stacks of worker 0:" in text
    stack = text.split("Python stacks of worker 1:")[1]
    assert "_wait_in_rank_1" in stack
    assert nanotf.worker_pids() == ()
    assert len(small_cnn().fit(x, y, **FIT).epoch) == 3


@pytest.mark.parametrize("kind", ["fit", "loop"])
@pytest.mark.thorough
def test_step_that_does_not_end_over_grpc(kind: str, tmp_path: pathlib.Path) -> None:
    """TensorFlow's collectives wait forever, so the workers check the clock."""
    x, y = digits(100)
    model, loss = small_cnn(), _waiting(tmp_path)
    model.compile("sgd", loss)

    @nanotf.keras.nano_multiprocessing
    @tf.function
    def step(images: Any, labels: Any) -> Any:
        return tf.reduce_mean(loss(labels, model(images)))

    @nanotf.keras.nano(num_processes=2, transport="grpc")
    def loop(data: Any) -> None:
        for images, labels in data:
            step(images, labels)

    with pytest.raises(
        WorkerStuck,
        match=rf"has made no progress for {STALL_SECONDS} s: (their step|the workers \[)",
    ) as caught:
        if kind == "fit":
            model.fit(x, y, **FIT, transport="grpc")
        else:
            loop(tf.data.Dataset.from_tensor_slices((x, y)).batch(50))
    stack = str(caught.value).split("Python stacks of worker 1:")[1]
    assert "_wait_in_rank_1" in stack
    assert nanotf.worker_pids() == ()


@pytest.mark.parametrize("kind", ["fit", "loop"])
@pytest.mark.thorough
def test_slow_data_are_waited_for(kind: str) -> None:
    """Data may be slow within Keras's or the user's step; over "grpc" workers check its clock."""
    x, y = digits(100)

    def batches() -> Iterator[Any]:
        yield x[:50], y[:50]
        time.sleep(STALL_SECONDS + 3)
        yield x[50:], y[50:]

    if kind == "fit":
        options = {"steps_per_epoch": 2, "num_processes": 2, "transport": "grpc", "verbose": 0}
        assert small_cnn().fit(batches(), **options).epoch == [0]
        return
    factor = tf.Variable(2.0)

    @nanotf.keras.nano_multiprocessing
    def both(iterator: Any) -> Any:
        return sum(factor * tf.reduce_mean(next(iterator)[0]) for _ in range(2))

    @nanotf.keras.nano(num_processes=2, transport="grpc")
    def loop(data: Any) -> float:
        return float(both(iter(data)))

    expected = 2.0 * (x[:50].mean() + x[50:].mean())
    assert abs(loop(batches()) - expected) < 1e-4


def test_workers_that_hang_outside_collectives_are_reported(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No rank waits for them in a collective, and they may yet make progress.

    They make progress after the report, and so do the data, which this process reads.
    """
    told = str(tmp_path / "told")

    def wait_until_told(value: Any) -> Any:
        while os.environ.get("NANOTF_RANK") and not pathlib.Path(told).exists():
            time.sleep(0.05)
        return value

    def loss(y_true: Any, y_pred: Any) -> Any:
        held = tf.numpy_function(wait_until_told, [y_pred], y_pred.dtype)
        held.set_shape(y_pred.shape)
        return tf.reduce_mean(y_pred + 0.0 * held, axis=-1)

    class Tell(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            # A busy machine may begin a rank's step so late that the first report lacks that rank,
            # or shows what it does before.
            text = record.getMessage()
            waits = ", 1 (pid " in text and text.count("in wait_until_told") >= 2
            if "has done no step" in text and waits:
                pathlib.Path(told).touch()

    x, y = digits(100)

    def slow_batches() -> Iterator[Any]:
        for _ in range(2):  # Keras looks at two batches before training begins
            yield x[:50], y[:50]
        while not pathlib.Path(told).exists():
            time.sleep(0.05)
        yield x[50:], y[50:]

    model, tell = small_cnn(), Tell()
    model.compile("sgd", loss)
    logger = logging.getLogger("nanotf")
    logger.addHandler(tell)
    try:
        with caplog.at_level(logging.WARNING, logger="nanotf"):
            history = model.fit(slow_batches(), steps_per_epoch=3, verbose=0, num_processes=2)
    finally:
        logger.removeHandler(tell)
    assert history.epoch == [0]
    *_, text = [r.getMessage() for r in caplog.records if "has done no step" in r.getMessage()]
    assert text.startswith("Worker 0 (pid ")
    assert ", 1 (pid " in text.splitlines()[0]
    for rank in (0, 1):
        stack = text.split(f"Python stacks of worker {rank}:")[1].split("Python stacks of")[0]
        assert "in wait_until_told" in stack
    assert "in slow_batches" in text.split("This process reads data for them:")[1]


@pytest.mark.thorough
@pytest.mark.parametrize("phase", ["start", "job"])
def test_sending_to_a_worker_that_does_not_read_times_out(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process reads nothing, so writes end when the socket is full."""
    x, y = digits(100)
    if phase == "start":
        nanotf.shutdown()
        start = local.LocalCrew.start

        def start_and_stop(crew: Any) -> None:
            start(crew)
            freeze(crew.workers[0].process.pid)

        monkeypatch.setattr(local.LocalCrew, "start", start_and_stop)
        text = r"Workers \[0\] did not finish starting within 1 s. A signal .* has stopped \[0\]"
        monkeypatch.setattr(handshake, "START_SECONDS", 1.0)
        with pytest.raises(WorkerError, match=text):
            small_cnn().fit(x, y, **FIT)
    else:
        small_cnn().fit(x, y, **FIT)
        freeze(nanotf.worker_pids()[1])
        big = tf.constant(0.0, shape=(2**20,))

        def loss(y_true: Any, y_pred: Any) -> Any:
            return tf.reduce_mean(y_pred, axis=-1) + 0.0 * tf.reduce_sum(big)

        model = small_cnn()
        model.compile("sgd", loss)
        with pytest.raises(WorkerStuck, match="Worker 1 "):
            model.fit(x, y, **FIT)
    assert nanotf.worker_pids() == ()
    monkeypatch.undo()
    assert len(small_cnn().fit(x, y, **FIT).epoch) == 3


class _Stop(tf.keras.callbacks.Callback):
    """Stops a worker in the second epoch, like a debugger."""

    pid = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1 and not self.pid:
            self.pid = nanotf.worker_pids()[1]
            os.kill(self.pid, signal.SIGSTOP)


@pytest.mark.thorough
def test_worker_that_is_stopped() -> None:
    x, y = digits(100)
    stop = _Stop()
    with pytest.raises(WorkerStuck, match="Worker 1 ") as caught:
        small_cnn().fit(x, y, **FIT, callbacks=[stop])
    assert "stopped by a signal" in str(caught.value)
    wait_until(lambda: not psutil.pid_exists(stop.pid), "it has ended")


@pytest.mark.thorough
def test_training_continues_without_a_stopped_worker(caplog: pytest.LogCaptureFixture) -> None:
    x, y = digits(100)
    with caplog.at_level(logging.WARNING, logger="nanotf"):
        history = small_cnn().fit(x, y, **FIT, callbacks=[_Stop()], max_restarts=1)
    assert history.epoch == [0, 1, 2]
    assert any("restart 1 of 1" in record.getMessage() for record in caplog.records)


def test_ranks_that_others_wait_for_in_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is at a hook, and rank 1 is silent; the clock is advanced."""
    x, y = digits(100)
    small_cnn().fit(x, y, **FIT)

    pool: Pool = warm._pool  # type: ignore[assignment]
    clock = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(pool.supervisor, "stuck", lambda ranks, why: WorkerStuck(f"{ranks}: {why}"))

    def look_for(seconds: int, present: tuple[int, ...]) -> None:
        for _ in range(seconds):
            clock[0] += 1
            pool.check_progress(present)

    def hear(*ranks: int) -> None:
        now = pool.supervisor._now()
        pool.supervisor._heard.update(dict.fromkeys(ranks, now))

    hear(0, 1)
    look_for(STALL_SECONDS - 1, (0,))
    clock[0] += 1000.0  # the machine slept, or a callback ran
    hear(0, 1)
    look_for(STALL_SECONDS - 1, (0,))
    clock[0] += 1000.0
    look_for(2 * STALL_SECONDS, ())
    hear(1)
    look_for(STALL_SECONDS - 1, (0,))
    hear(0, 1)
    look_for(STALL_SECONDS - 4, (0,))
    clock[0] += 1000.0  # counts as one or two looks
    look_for(1, (0,))
    with pytest.raises(WorkerStuck, match=r"\[1\]: the workers \[0\] wait for it"):
        look_for(3, (0,))


@pytest.mark.parametrize("text", ["-1", "soon", "nan"])
def test_invalid_stall_seconds(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(stalls.STALL_VARIABLE, text)
    with pytest.raises(NanoError, match=f"NANOTF_STALL_SECONDS='{text}'"):
        stalls.stall_seconds()
