"""The process that workers are forked from: its speed-up, and its failures."""

from __future__ import annotations

import os
import pathlib
import signal
from typing import Any

import psutil
import pytest
import tensorflow as tf
from parity import digits, small_cnn
from processes import last_json, run_script
from waiting import wait_until

import nanotf
from nanotf.errors import InvalidArgumentError, WorkerDied, WorkerError
from nanotf.pool import forks, local, warm

pytestmark = pytest.mark.own_pool

FIT: dict[str, Any] = {"epochs": 1, "batch_size": 50, "verbose": 0, "num_processes": 2}


def _fit(**more: Any) -> Any:
    return small_cnn().fit(*digits(100), **FIT, **more)


def test_later_workers_need_no_import() -> None:
    _fit()
    origin, first = forks.pid(), nanotf.worker_pids()
    warm.end_pool()
    os.environ["NANOTF_TEST"] = "nanotf's own variables change nothing"
    try:
        _fit()
    finally:
        del os.environ["NANOTF_TEST"]
    assert forks.pid() == origin
    assert not set(first) & set(nanotf.worker_pids())


@pytest.mark.thorough
def test_variables_that_libraries_read_when_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a user sets TF_ENABLE_ONEDNN_OPTS, workers must see it."""
    _fit()
    origin = forks.pid()
    warm.end_pool()
    monkeypatch.setenv("SOME_TRACKER", "1")
    _fit()
    assert forks.pid() == origin
    warm.end_pool()
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    _fit()
    assert forks.pid() not in (origin, None)
    monkeypatch.undo()
    nanotf.shutdown()
    assert forks.pid() is None


def test_a_variable_that_changes_while_workers_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trackers set some, and users others: a running job keeps the zygote that it has."""
    origin, results = 0, []
    with nanotf.imap(_environ, ["TF_TEST"] * 6, 2, recycle_after=1, ordered=True) as found:
        for number, result in enumerate(found):
            if not number:
                origin = forks.pid() or 0
                monkeypatch.setenv("TF_TEST", "set")
            results.append(result)
            assert psutil.pid_exists(origin)
    assert results == [None] * 6, "items see the variables of the call"
    assert nanotf.map(_environ, ["TF_TEST"], 1) == ["set"]
    wait_until(lambda: not psutil.pid_exists(origin), "the zygote ends after its last job")


def _environ(name: str) -> str | None:
    return os.environ.get(name)


@pytest.mark.thorough
def test_workers_end_with_the_zygote() -> None:
    """The kernel ends them, as it does when the parent is killed."""

    def kill(*_: Any) -> None:
        origin = forks.pid()
        assert origin is not None
        os.kill(origin, signal.SIGKILL)

    with pytest.raises(WorkerDied, match=r"was killed by SIGKILL while a call ran"):
        _fit(callbacks=[tf.keras.callbacks.LambdaCallback(on_epoch_begin=kill)])
    assert _fit().epoch == [0]


@pytest.mark.thorough
def test_it_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    nanotf.shutdown()
    for module in (forks, local):
        monkeypatch.setattr(module, "FORK_SECONDS", 0.01)
    with pytest.raises(WorkerError, match=r"within 0\.01 s\. Received: process [0-9]+"):
        _fit()
    monkeypatch.undo()
    wait_until(lambda: forks.pid() is None, "it is stopped")
    assert _fit().epoch == [0]


def test_a_deleted_working_directory(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "gone"
    place.mkdir()
    monkeypatch.chdir(place)
    place.rmdir()
    warm.end_pool()
    assert _fit().epoch == [0]


def test_other_ways_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOTF_START", "spawn")
    warm.end_pool()
    assert _fit().epoch == [0]
    assert forks.pid() is None
    nanotf.shutdown()
    monkeypatch.setenv("NANOTF_START", "thread")
    with pytest.raises(InvalidArgumentError, match="Received: NANOTF_START='thread'"):
        _fit()


CRASH = """
import json, os, pathlib, sys
import tensorflow as tf
import nanotf
broken = pathlib.Path("tensorflow"); broken.mkdir()
(broken / "__init__.py").write_text({text!r})
sys.path.insert(0, str(pathlib.Path.cwd()))
model = nanotf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
model.compile("sgd", "mse")
try:
    model.fit(tf.ones((4, 2)), tf.ones((4, 1)), verbose=0, num_processes=2)
except nanotf.errors.NanoError as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""


@pytest.mark.thorough
@pytest.mark.every_case
@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("raise ImportError('no such library')", "SetupError", "ImportError: no such library"),
        ("import os; os.abort()", "WorkerDied", "was killed by SIGABRT while starting"),
    ],
    ids=["raises", "crashes"],
)
def test_tensorflow_cannot_be_imported(
    text: str, name: str, said: str, tmp_path: pathlib.Path
) -> None:
    kind, message = last_json(run_script(tmp_path, CRASH.replace("{text!r}", repr(text))))
    assert kind == name
    assert said in message
