"""During a call your process may get Ctrl-C or fork; it cannot end the workers or call again."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import threading
from typing import Any

import psutil
import pytest
import tensorflow as tf
from failing_losses import FIT, assert_next_fit_works
from parity import digits, small_cnn
from processes import run_script
from waiting import wait_until

import nanotf
from nanotf.errors import NanoError
from nanotf.keras import nano
from nanotf.pool import pool

pytestmark = pytest.mark.own_pool


def test_keyboard_interrupt() -> None:
    """Ctrl-C reaches the parent alone; the call ends, and the next works."""
    x, y = digits(100)
    pids: list[int] = []

    def interrupt(epoch: int, logs: Any) -> None:
        pids.extend(nanotf.worker_pids())
        os.kill(os.getpid(), signal.SIGINT)

    callback = tf.keras.callbacks.LambdaCallback(on_epoch_begin=interrupt)
    with pytest.raises(KeyboardInterrupt):
        small_cnn().fit(x, y, **FIT, epochs=50, callbacks=[callback])
    assert_next_fit_works(tuple(pids) if set(pids) != set(nanotf.worker_pids()) else ())


def test_interrupts_of_workers_alone() -> None:
    """Schedulers signal every process: the parent decides, programs in workers get it."""
    x, y = digits(100)

    def interrupt(number: int, logs: Any) -> None:
        for pid in nanotf.worker_pids():
            os.kill(pid, signal.SIGINT)

    callback = tf.keras.callbacks.LambdaCallback(
        on_epoch_begin=interrupt, on_epoch_end=interrupt, on_train_batch_end=interrupt
    )
    history = small_cnn().fit(x, y, **FIT, epochs=3, callbacks=[callback])
    assert history.epoch == [0, 1, 2]

    @nano(num_processes=2)
    def program() -> int:
        assert nanotf.rank() in (0, 1)
        return subprocess.run(["sh", "-c", "kill -INT $$"], check=False).returncode

    assert program() == -signal.SIGINT


@pytest.mark.thorough
def test_shutdown_in_a_callback() -> None:
    x, y = digits(100)
    callback = tf.keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: nanotf.shutdown())
    with pytest.raises(NanoError, match=r"stay until .* Received: nanotf.shutdown\(\)"):
        small_cnn().fit(x, y, **FIT, epochs=2, callbacks=[callback])
    assert_next_fit_works(())


@pytest.mark.thorough
def test_a_second_interrupt_ends_the_call_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A second Ctrl-C waits for no worker, and loses no completed epoch."""
    free, returned = pool.Pool._free, threading.Event()
    pids: list[int] = []

    def slow_free(workers: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        returned.wait()
        free(workers)

    def interrupt(epoch: int, logs: Any) -> None:
        if epoch == 1:
            pids.extend(nanotf.worker_pids())
            monkeypatch.setattr(pool.Pool, "_free", slow_free)
            os.kill(os.getpid(), signal.SIGINT)

    x, y = digits(100)
    model = small_cnn()
    callback = tf.keras.callbacks.LambdaCallback(on_epoch_begin=interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, **FIT, epochs=50, callbacks=[callback])
    monkeypatch.undo()
    returned.set()
    assert "nanotf: the call ends at once. Its workers were killed." in capfd.readouterr().err
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "the workers end")
    assert int(model.optimizer.iterations) == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_next_fit_works(())


FORK_IN_CALLBACK = """
import os, sys, numpy as np, tensorflow as tf
from nanotf.keras import Sequential

x = np.arange(40.0).reshape(20, 2) / 40

def fit(*callbacks):
    layers = tf.keras.layers
    model = Sequential([layers.Input((2,)), layers.Dense(1, kernel_initializer="ones")])
    model.compile(tf.keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    options = {"epochs": 4, "batch_size": 4, "shuffle": False, "verbose": 0, "num_processes": 2}
    return model.fit(x, x[:, 0], **options, callbacks=list(callbacks)).history["loss"]

class Forks(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        child = os.fork()
        if child == 0:
            sys.exit(0)  # passes through fit() in the child; the parent's job continues
        os.waitpid(child, 0)

expected = fit()
print("RESULT", fit(Forks()) == expected)
"""


@pytest.mark.thorough
def test_a_callback_that_forks(tmp_path: pathlib.Path) -> None:
    done = run_script(tmp_path, FORK_IN_CALLBACK)
    assert [line for line in done.stdout.splitlines() if "RESULT" in line] == ["RESULT True"]


def test_workers_of_workers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = digits(50)
    model = small_cnn()
    with monkeypatch.context() as patch:
        patch.setenv("NANOTF_RANK", "1")
        with pytest.raises(NanoError, match=r"fit\(num_processes=2\) inside worker 1"):
            model.fit(x, y, **FIT)


def test_a_call_inside_another_is_refused() -> None:
    """The workers wait for the callback that makes the inner call."""
    x, y = digits(100)

    def call(epoch: int, logs: Any) -> None:
        small_cnn().fit(x, y, **FIT)

    callback = tf.keras.callbacks.LambdaCallback(on_epoch_end=call)
    with pytest.raises(NanoError, match="Leave num_processes out there"):
        small_cnn().fit(x, y, **FIT, callbacks=[callback])


FORKED = """
import os, threading, tensorflow as tf, numpy as np, nanotf
from nanotf.pool import warm
from nanotf.keras import Sequential

model = Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(1)])
model.compile("sgd", "mse")
x, y = np.ones((20, 4)), np.ones((20, 1))
model.fit(x, y, verbose=0, num_processes=2)
pids = nanotf.worker_pids()

def run_a_job():
    with warm._lock:
        runs.set()
        forked.wait()

runs, forked = threading.Event(), threading.Event()
thread = threading.Thread(target=run_a_job)
thread.start()
runs.wait()
child = os.fork()
if child == 0:
    seen = nanotf.worker_pids()
    nanotf.shutdown()
    os._exit(len(seen))
print("RESULT", os.waitpid(child, 0)[1])
forked.set()
thread.join()
model.fit(x, y, verbose=0, num_processes=2)
print("RESULT", nanotf.worker_pids() == pids)
"""


@pytest.mark.thorough
def test_forked_process_leaves_the_workers_alone(tmp_path: pathlib.Path) -> None:
    done = run_script(tmp_path, FORKED)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines == ["RESULT 0", "RESULT True"]
