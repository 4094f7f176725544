"""No part of a job outlives its parent after Ctrl-C or another end."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import tensorflow as tf
from input_data import PyDataset
from parity import digits, small_cnn
from processes import ROOT, SECONDS
from waiting import wait_until

import nanotf
from nanotf.parent import callbacks
from nanotf.parent.fit import fit_call
from nanotf.pool import warm
from nanotf.shipping import state
from nanotf.wire.own_threads import OwnThread

pytestmark = pytest.mark.own_pool


HEAD = """
import ctypes, json, os, pathlib, signal, sys, threading
import numpy as np
import tensorflow as tf
import nanotf
from nanotf.keras import Sequential

HERE = pathlib.Path(sys.argv[1])
x, y = np.random.rand(400, 8).astype("float32"), np.random.rand(400, 1).astype("float32")

def model(loss="mse"):
    made = Sequential([tf.keras.layers.Input((8,)), tf.keras.layers.Dense(1)])
    made.compile("sgd", loss)
    return made

class Tell(tf.keras.callbacks.Callback):
    after = None
    def on_epoch_begin(self, epoch, logs=None):
        print(json.dumps(list(nanotf.worker_pids())), flush=True)
    def on_epoch_end(self, epoch, logs=None):
        self.after = [np.array(w) for w in self.model.get_weights()]

def fit(made, tell, epochs=100000):
    made.fit(x, y, batch_size=50, epochs=epochs, verbose=0, num_processes=2, callbacks=[tell])
"""

# Long epochs: the signal must not come between the end of an epoch and `Tell`'s record of it.
INTERRUPTED = """
x, y = np.tile(x, (100, 1)), np.tile(y, (100, 1))
tell, made = Tell(), model()
try:
    fit(made, tell)
except KeyboardInterrupt:
    same = all((a == b).all() for a, b in zip(made.get_weights(), tell.after))
    fit(made, Tell(), epochs=1)
    print(json.dumps({"same": same, "workers": len(nanotf.worker_pids())}), flush=True)
"""

TRAINING = """
fit(model(), Tell())
"""

# Rank 1 keeps the GIL forever, and rank 0 waits for it in a collective.
HOLDING_THE_LOCK = """
def loss(y_true, y_pred):
    def hold(value):
        if os.environ.get("NANOTF_RANK") == "1":
            (HERE / "holds").touch()
            ctypes.PyDLL(None).pause()
        return value
    held = tf.numpy_function(hold, [y_pred], y_pred.dtype)
    held.set_shape(y_pred.shape)
    return tf.reduce_mean(tf.square(y_pred - y_true) + 0.0 * held, axis=-1)

fit(model(loss), Tell())
"""

IN_A_THREAD = """
thread = threading.Thread(target=fit, args=(model(), Tell(), 1))
thread.start()
thread.join()
fit(model(), Tell())
"""


IN_A_DAEMON = """
begun = threading.Event()
class Begun(Tell):
    def on_epoch_end(self, epoch, logs=None):
        begun.set()
threading.Thread(target=fit, args=(model(), Begun()), daemon=True).start()
begun.wait()
"""


class _Script:
    """A user's script, in a separate session, as in its own terminal."""

    def __init__(self, directory: pathlib.Path, body: str) -> None:
        path = directory / "script.py"
        path.write_text(textwrap.dedent(HEAD + body))
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, str(path), str(directory)],
            cwd=directory,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def line(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the script has ended with {self.process.wait()}"
        return json.loads(line)

    def rest(self) -> list[Any]:
        assert self.process.stdout is not None
        return [json.loads(line) for line in self.process.stdout]

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def scripts(tmp_path: pathlib.Path) -> Iterator[Any]:
    made: list[_Script] = []

    def make(body: str) -> _Script:
        made.append(_Script(tmp_path, body))
        return made[-1]

    yield make
    for script in made:
        script.end()


def _all_gone(pids: list[int]) -> bool:
    return not any(_runs(pid) for pid in pids)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.thorough
def test_ctrl_c(scripts: Any) -> None:
    """A terminal sends SIGINT to the process group; workers are not members; training ends."""
    script = scripts(INTERRUPTED)
    pids = script.line()
    script.line()  # the first epoch is complete
    assert {os.getsid(pid) for pid in pids} == set(pids)
    os.killpg(script.process.pid, signal.SIGINT)
    wait_until(lambda: _all_gone(pids), "the workers end")
    result = script.rest()[-1]
    assert script.process.wait() == 0
    assert result == {"same": True, "workers": 2}


class _Looking(tf.keras.callbacks.Callback):
    """A user's callback, before Keras's `History`."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.get_weights()


# Steps between the workers' report of an epoch's end and their next epoch, in this order.
MOMENTS = [
    (state.SharedVariables, "load"),
    (callbacks.ParentCallbacks, "call"),
    (_Looking, "on_epoch_end"),
    (tf.keras.callbacks.History, "on_epoch_end"),
    (dict, "setdefault"),  # `History` has recorded one name and not yet the next
    (fit_call.FitCall, "_tell_data"),
    (fit_call.FitCall, "_changes"),
    (state.SharedVariables, "differs"),
]
ONLY_WITH_USERS = [
    (state.SharedVariables, "load"),
    (_Looking, "on_epoch_end"),
    (state.SharedVariables, "differs"),
]


class _Interrupted(dict[str, Any]):
    """The dict of a `History`, interrupted in the middle."""

    calls = 0

    def setdefault(self, name: str, default: Any) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise KeyboardInterrupt
        return super().setdefault(name, default)


def _interrupt(patch: pytest.MonkeyPatch, owner: Any, name: str, before: bool) -> None:
    stock = getattr(owner, name)

    def interrupted(*arguments: Any, **named: Any) -> Any:
        if not before:
            stock(*arguments, **named)
        raise KeyboardInterrupt

    patch.setattr(owner, name, interrupted)


@pytest.mark.every_case
@pytest.mark.parametrize("looks", [False, True])
def test_model_and_history_agree_whenever_an_interrupt_comes(
    looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupts one epoch's end at each moment, each time from the same initial state."""
    x, y = digits(40)
    fit = {"batch_size": 20, "epochs": 3, "shuffle": False, "verbose": 0}
    plain = small_cnn()
    weights = [plain.get_weights()]
    after = tf.keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: weights.append(plain.get_weights())
    )
    plain.fit(x, y, **fit, callbacks=[after])
    model, stock = small_cnn(), fit_call.FitCall.reply
    users = [_Looking()] if looks else []
    kept_epochs = []

    def check(call: Any, first: Any, owner: Any, name: str, before: bool) -> None:
        history, optimizer = model.history, model.optimizer
        recorded = {name: list(values) for name, values in history.history.items()}
        attributes, epochs = dict(vars(call)), list(history.epoch)
        attributes |= {"progress": copy.copy(call.progress), "sent": copy.copy(call.sent)}
        held, steps = model.get_weights(), int(optimizer.iterations)
        with monkeypatch.context() as patch:
            if owner is dict:
                history.history = _Interrupted(history.history)
            else:
                _interrupt(patch, owner, name, before)
            with pytest.raises(KeyboardInterrupt):
                stock(call, first)
        call.fail()
        kept = len(history.epoch)
        assert {len(values) for values in history.history.values()} == {kept}, (owner, name)
        assert int(optimizer.iterations) == 2 * kept
        for now, then in zip(model.get_weights(), weights[kept], strict=True):
            np.testing.assert_allclose(now, then, rtol=1e-4, atol=1e-6)
        kept_epochs.append(kept)
        vars(call).update(attributes)
        model.set_weights(held)
        optimizer.iterations.assign(steps)
        history.history, history.epoch = recorded, epochs

    def reply(call: Any, first: Any) -> Any:
        if (first.hook, first.index) == ("on_epoch_end", 1):
            for owner, name in MOMENTS:
                if looks or (owner, name) not in ONLY_WITH_USERS:
                    check(call, first, owner, name, before=True)
                    check(call, first, owner, name, before=False)
        return stock(call, first)

    monkeypatch.setattr(fit_call.FitCall, "reply", reply)
    model.fit(x, y, **fit, num_processes=2, callbacks=users)
    # The workers have stored the epoch's state by then.
    assert kept_epochs == [2] * len(kept_epochs)
    assert len(kept_epochs) == 2 * (len(MOMENTS) - (0 if looks else len(ONLY_WITH_USERS)))


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_parent_that_is_killed(scripts: Any, number: signal.Signals) -> None:
    script = scripts(TRAINING)
    pids = script.line()
    script.line()
    os.kill(script.process.pid, number)
    assert script.process.wait() == -number
    wait_until(lambda: _all_gone(pids), "the workers end")


@pytest.mark.thorough
def test_workers_that_cannot_run_python_end_with_their_parent(
    scripts: Any, tmp_path: pathlib.Path
) -> None:
    """One worker holds the GIL forever, the other waits for it; only the kernel can end them."""
    script = scripts(HOLDING_THE_LOCK)
    pids = script.line()
    wait_until((tmp_path / "holds").exists, "rank 1 holds the lock", SECONDS)
    os.kill(script.process.pid, signal.SIGKILL)
    script.process.wait()
    wait_until(lambda: _all_gone(pids), "the workers end")


@pytest.mark.thorough
def test_exit_does_not_wait_for_a_daemon_thread(scripts: Any) -> None:
    script = scripts(IN_A_DAEMON)
    pids = script.line()
    assert script.process.wait(SECONDS) == 0
    wait_until(lambda: _all_gone(pids), "the workers end")


@pytest.mark.thorough
def test_pool_outlives_the_thread_that_started_it(scripts: Any) -> None:
    """On request, the kernel ends a process together with the thread that started it."""
    script = scripts(IN_A_THREAD)
    first, second = script.line(), script.line()
    assert first == second
    os.kill(script.process.pid, signal.SIGKILL)
    script.process.wait()
    wait_until(lambda: _all_gone(first), "the workers end")


class _Batches(PyDataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return tuple(array[:10] for array in digits(20))


def _fit(*data: Any, **options: Any) -> None:
    small_cnn().fit(*data, verbose=0, **options)


STARTING: dict[str, Callable[[], object]] = {
    "workers": lambda: _fit(*digits(20), num_processes=2),
    "readers": lambda: _fit(_Batches(), read_processes=2),
    "both": lambda: _fit(_Batches(), num_processes=2, read_processes=2),
    "map": lambda: nanotf.map(abs, [1, 2, 3], num_processes=2),
}


def _remains() -> tuple[set[threading.Thread], set[psutil.Process]]:
    """Returns nanotf's threads and all processes, once there is no pool."""
    warm.end_pool()
    threads = set(filter(lambda thread: isinstance(thread, OwnThread), threading.enumerate()))
    return threads, set(psutil.Process().children(recursive=True))


def _has_no_more_than(before: tuple[set[Any], set[Any]]) -> bool:
    # What an earlier `fit` has left to a thread may end later than it.
    return all(now <= then for now, then in zip(_remains(), before, strict=True))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("what", STARTING)
def test_a_start_of_a_thread_that_fails_leaves_nothing(
    what: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever it is: Ctrl-C just after a thread has begun, or a system that allows no more."""
    stock, left = threading.Thread.start, [0]
    main = threading.main_thread()

    def start(thread: threading.Thread) -> None:
        is_interrupt = error is KeyboardInterrupt
        counts = not is_interrupt or threading.current_thread() is main
        left[0] -= counts and isinstance(thread, OwnThread)
        fails = counts and left[0] == 0
        if fails:
            left[0] = -1
        if is_interrupt or not fails:
            stock(thread)
        if fails:
            raise error

    STARTING[what]()
    before = _remains()
    monkeypatch.setattr(threading.Thread, "start", start)
    for number in itertools.count(1):
        left[0] = number
        with contextlib.suppress(error):
            STARTING[what]()
        if left[0] > 0:
            break
        wait_until(lambda: _has_no_more_than(before), f"all ends, start {number}")
    assert number > 1, "no thread was started"
