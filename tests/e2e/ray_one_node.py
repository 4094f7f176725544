"""Runs selected tests of each group with Ray workers on this machine.

`test_ray` runs this in a separate process, since threads and sockets of Ray end only with the
process.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import os
import pathlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import ray
import tensorflow as tf
import test_callbacks as callbacks
import test_custom_loop as custom_loop
import test_during_calls as during_calls
import test_evaluate as evaluate
import test_parity as parity
import test_predict as predict
import test_python_data as python_data
import test_restarts as restarts
from parity import digits, small_cnn
from waiting import wait_until

import nanotf
from nanotf.errors import InvalidArgumentError, PlacementError, WorkerDied
from nanotf.keras import nano
from nanotf.pool import backends, plans, warm

ON_RAY = {"num_processes": 2, "backend": "ray"}
CASES: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (parity.test_arrays_float64, {"rows": 201, "batch_size": 50}),
    (python_data.test_generator, {"form": "x, y, w"}),
    (callbacks.test_callback_that_sets_weights, {}),
    (evaluate.test_two_outputs_with_stateful_metrics, {"return_dict": True}),
    (predict.test_arrays, {}),
    (
        custom_loop.test_follows_one_process,
        {"run_on": functools.partial(nano, **ON_RAY), "optimizer": "adam"},
    ),
    (during_calls.test_keyboard_interrupt, {}),
    (restarts.test_killed_in_the_middle_of_an_epoch, {"rank": 1}),
]


def shared_memory() -> set[str]:
    """Returns the shared memory that this process has descriptors for."""
    found = set()
    for entry in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this listing itself
            found.add(f"{entry.name} {entry.readlink()}")
    return {name for name in found if "/memfd:nanotf" in name}


@pytest.fixture(autouse=True, scope="module")
def _nothing_leaks_from_a_module() -> Iterator[None]:
    """Overrides the fixture of all modules: Ray's sockets in this process stay."""
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    nanotf.shutdown()
    assert ray.is_initialized(), "a Ray that was running stays"
    wait_until(lambda: gc.collect() >= 0 and not shared_memory(), "shared memory is released")
    ray.shutdown()


@pytest.fixture(autouse=True)
def _default_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "DEFAULT_BACKEND", "ray")


def run_case(case: Any, request: pytest.FixtureRequest) -> None:
    """Runs a test of another module."""
    test, given = case
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "usefixtures":
            request.getfixturevalue(mark.args[0])
    names = inspect.signature(test).parameters
    test(
        **{name: given[name] if name in given else request.getfixturevalue(name) for name in names}
    )
    assert warm._pool is not None
    assert isinstance(warm._pool.plan, plans.RayPlan), "the test ran on other workers"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].__name__)
def test_same_results_as_with_local_workers(case: Any, request: pytest.FixtureRequest) -> None:
    run_case(case, request)


def test_actor_that_is_killed() -> None:
    x, y = digits(100)
    small_cnn().fit(x, y, verbose=0, **ON_RAY)
    pids = nanotf.worker_pids()

    def kill(epoch: int, logs: Any) -> None:
        os.kill(psutil.Process(pids[1]).parents()[1].pid, signal.SIGKILL)

    callback = tf.keras.callbacks.LambdaCallback(on_epoch_begin=kill)
    with pytest.raises(WorkerDied, match=r"Worker 1 .* was lost with its Ray actor") as caught:
        small_cnn().fit(x, y, verbose=0, epochs=50, callbacks=[callback], **ON_RAY)
    assert caught.value.rank == 1
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "the workers end")
    history = small_cnn().fit(x, y, verbose=0, transport="grpc", **ON_RAY)
    assert len(history.history["loss"]) == 1


def test_the_parents_variables_stay_in_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests variables that the worker's node lacks and that do not configure TensorFlow."""
    nanotf.shutdown()
    monkeypatch.setenv("SOME_SERVICE_TOKEN", "hunter2")
    monkeypatch.setenv("TF_SOME_OPTION", "1")

    @nano(transport="grpc", **ON_RAY)
    def variables() -> tuple[Any, ...]:
        assert nanotf.rank() in (0, 1)
        return tuple(map(os.environ.get, ("SOME_SERVICE_TOKEN", "TF_SOME_OPTION")))

    assert variables() == (None, "1")


def test_shutdown_releases_everything() -> None:
    x, y = digits(100)
    small_cnn().fit(x, y, verbose=0, transport="grpc", **ON_RAY)
    pids = nanotf.worker_pids()
    assert ray.available_resources().get("CPU", 0) == 0
    nanotf.shutdown()
    assert not any(map(psutil.pid_exists, pids))
    wait_until(lambda: ray.available_resources().get("CPU", 0) == 2, "Ray has its CPUs back")
    groups = ray.util.placement_group_table().values()
    assert {group["state"] for group in groups} <= {"REMOVED"}


def test_more_workers_than_cpus() -> None:
    x, y = digits(100)
    with pytest.raises(PlacementError, match=r"num_processes=3, and nodes with \[2\] CPUs"):
        small_cnn().fit(x, y, num_processes=3, backend="ray")
    with pytest.raises(PlacementError, match="cores_per_process=2"):
        small_cnn().fit(x, y, cores_per_process=2, transport="grpc", **ON_RAY)


def test_arguments_that_ray_cannot_take() -> None:
    x, y = digits(100)
    with pytest.raises(InvalidArgumentError, match=r"Received: cores=\[0, 1\]"):
        small_cnn().fit(x, y, cores=[0, 1], **ON_RAY)
    with pytest.raises(InvalidArgumentError, match="measures on the cores of this machine"):
        small_cnn().fit(x, y, num_processes="auto", backend="ray")
