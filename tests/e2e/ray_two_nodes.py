"""Tests workers on two Ray nodes, both on this machine: memory is not shared.

`test_ray` runs this in a separate process.
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
import test_arguments as arguments
import test_array_data as array_data
import test_callbacks as callbacks
import test_custom_loop as custom_loop
import test_evaluate as evaluate
import test_failures as failures
import test_loop_metrics as loop_metrics
import test_parity as parity
import test_predict as predict
import test_python_data as python_data
from parity import digits, small_cnn
from ray.cluster_utils import Cluster
from waiting import wait_until

import nanotf
from nanotf.errors import InvalidArgumentError, NanoError, WorkerDied
from nanotf.keras import nano
from nanotf.pool import backends, warm
from nanotf.pool.hosts import members, remote
from nanotf.pool.plans import HostsPlan
from nanotf.pool.ray import ray_hosts

ON_RAY = {"num_processes": 2, "backend": "ray"}
CASES = [
    (parity.test_arrays_float64, {"rows": 201, "batch_size": 50}),
    (parity.test_arrays_float64, {"rows": 3, "batch_size": 1}),
    (parity.test_two_processes_one_process_and_two_again, {}),
    (python_data.test_generator, {"form": "x, y, w"}),
    (array_data.test_strings, {"source": "tensor"}),
    (arguments.test_validation_uses_the_mean_of_moving_statistics, {}),
    (callbacks.test_callback_that_sets_weights, {}),
    (callbacks.test_batch_hooks_see_the_state_and_the_logs_of_all_workers, {}),
    (callbacks.test_changes_by_a_batch_hook_hold_from_the_next_step, {}),
    (evaluate.test_two_outputs_with_stateful_metrics, {"return_dict": True}),
    (predict.test_arrays, {}),
    (predict.test_many_pieces, {}),
    (
        custom_loop.test_follows_one_process,
        {"run_on": functools.partial(nano, **ON_RAY), "optimizer": "adam"},
    ),
    (loop_metrics.test_metrics_and_validation_steps, {"run_on": functools.partial(nano, **ON_RAY)}),
    (failures.test_loss_that_raises_in_a_worker, {}),
]


def shared_memory() -> set[str]:
    """Returns the shared memory that this process has descriptors for."""
    found = set()
    for entry in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this listing itself
            found.add(f"{entry.name} {entry.readlink()}")
    return {name for name in found if "/memfd:nanotf" in name}


@pytest.fixture(autouse=True, scope="module")
def _nothing_leaks_from_a_module() -> Iterator[Any]:
    """Overrides the fixture of all modules: Ray's sockets in this process stay."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    made.add_node(num_cpus=1)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    nanotf.shutdown()
    wait_until(lambda: gc.collect() >= 0 and not shared_memory(), "shared memory is released")
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def cluster(_nothing_leaks_from_a_module: Any) -> Any:
    return _nothing_leaks_from_a_module


@pytest.fixture(autouse=True)
def _defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "DEFAULT_BACKEND", "ray")
    monkeypatch.setattr(remote, "PIECE_NBYTES", 4096)  # so that small data travel in pieces


def workers_here() -> list[bool]:
    """Returns, by rank, whether a worker of the warm pool is on this process's node."""
    assert warm._pool is not None
    assert warm._pool.plan == HostsPlan(2, None, "ray"), "the test ran on other workers"
    return [worker.shares_memory for worker in warm._pool.workers]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].__name__)
def test_same_results_as_with_local_workers(case: Any, request: pytest.FixtureRequest) -> None:
    """Runs tests of other modules: all that workers on another host are sent, and send."""
    test, given = case
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "usefixtures":
            request.getfixturevalue(mark.args[0])
    names = inspect.signature(test).parameters
    test(
        **{name: given[name] if name in given else request.getfixturevalue(name) for name in names}
    )
    assert workers_here() == [True, False]


def test_the_listener_is_this_machines_if_all_nodes_are() -> None:
    x, y = digits(100)
    small_cnn().fit(x, y, verbose=0, **ON_RAY)
    (kept,) = ray_hosts._kept
    assert kept._hosts is not None
    assert kept._hosts.address[0] == "127.0.0.1"
    assert [member.address[0] for member in kept._hosts.members()] == ["127.0.0.1"]


def test_grpc_ends_at_the_node() -> None:
    x, y = digits(100)
    with pytest.raises(InvalidArgumentError, match=r"on several hosts .*transport='grpc'"):
        small_cnn().fit(x, y, verbose=0, transport="grpc", **ON_RAY)


def test_the_parents_variables_stay_on_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests variables that the other node lacks and that do not configure TensorFlow."""
    monkeypatch.setenv("SOME_SERVICE_TOKEN", "hunter2")
    monkeypatch.setenv("TF_SOME_OPTION", "1")

    @nano(**ON_RAY)
    def check() -> None:
        assert os.environ["TF_SOME_OPTION"] == "1"
        if nanotf.rank() == 1:
            assert "SOME_SERVICE_TOKEN" not in os.environ

    check()


def test_log_of_a_worker_on_another_node() -> None:
    x, y = digits(100)
    small_cnn().fit(x, y, verbose=0, **ON_RAY)

    def crash(epoch: int, logs: Any) -> None:
        os.kill(nanotf.worker_pids()[1], signal.SIGSEGV)

    callback = tf.keras.callbacks.LambdaCallback(on_epoch_begin=crash)
    with pytest.raises(WorkerDied, match=r"Worker 1 .* on host ray-1 .* by SIGSEGV") as caught:
        small_cnn().fit(x, y, verbose=0, epochs=50, callbacks=[callback], **ON_RAY)
    assert "Fatal Python error: Segmentation fault" in caught.value.log_tail


def fit_until_restarted(disturb: Callable[[], None]) -> None:
    """Disturbs the workers in the second epoch, and trains until others have done an epoch."""
    x, y = digits(100)
    pools: list[Any] = []

    def begin(epoch: int, logs: Any) -> None:
        if epoch == 1 and not pools:
            pools.append(warm._pool)
            disturb()

    def end(epoch: int, logs: Any) -> None:
        if pools and warm._pool is not pools[0]:
            model.stop_training = True

    model = small_cnn()
    callback = tf.keras.callbacks.LambdaCallback(on_epoch_begin=begin, on_epoch_end=end)
    # On a quiet machine many epochs pass before a loss is noticed.
    model.fit(x, y, verbose=0, epochs=100_000, callbacks=[callback], max_restarts=1, **ON_RAY)


def test_actor_that_is_killed_comes_back_for_the_restart(caplog: pytest.LogCaptureFixture) -> None:
    pids: list[int] = []

    def kill() -> None:
        pids.extend(nanotf.worker_pids())
        _zygote, actor = psutil.Process(pids[1]).parents()[:2]
        assert "RayAgent" in "".join(actor.cmdline())
        os.kill(actor.pid, signal.SIGKILL)

    fit_until_restarted(kill)
    assert len(pids) == 2
    assert "was lost with host ray-1" in caplog.text
    assert workers_here() == [True, False]
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "the old workers end")


class _Batches(tf.keras.utils.Sequence):  # type: ignore[misc]
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return tuple(array[:10] for array in digits(20))


def test_readers_work_beside_the_pool() -> None:
    for _ in range(2):
        small_cnn().fit(_Batches(), verbose=0, read_processes=1, **ON_RAY)
        assert ray_hosts.holds(warm._pool.plan)  # type: ignore[union-attr, arg-type]
    pids = nanotf.worker_pids()
    small_cnn().evaluate(_Batches(), verbose=0, read_processes=1)
    small_cnn().fit(*digits(20), verbose=0, **ON_RAY)
    assert nanotf.worker_pids() == pids


def test_shutdown_returns_everything() -> None:
    x, y = digits(100)
    small_cnn().fit(x, y, verbose=0, **ON_RAY)
    pids = nanotf.worker_pids()
    assert ray.available_resources().get("CPU", 0) == 0
    nanotf.shutdown()
    assert not any(map(psutil.pid_exists, pids))
    wait_until(lambda: ray.available_resources().get("CPU", 0) == 2, "Ray has its CPUs back")
    groups = ray.util.placement_group_table().values()
    assert {group["state"] for group in groups} <= {"REMOVED"}


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node's error reaches this process, and Ray gets its CPUs back."""
    nanotf.shutdown()
    monkeypatch.setattr(members, "versions", lambda: [("nanotf", "0.0.9")])
    x, y = digits(100)
    with pytest.raises(NanoError, match=r"same versions\. Host ray-1 .* has .* 0\.0\.9 here"):
        small_cnn().fit(x, y, verbose=0, **ON_RAY)
    wait_until(lambda: ray.available_resources().get("CPU", 0) == 2, "Ray has its CPUs back")


def test_workers_of_a_lost_node_run_on_the_rest(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Must be the last test, since it leaves the cluster with one node."""

    def remove() -> None:
        monkeypatch.setattr(ray_hosts, "RETURN_SECONDS", 1.0)
        cluster.remove_node(cluster.list_all_nodes()[1], allow_graceful=False)

    fit_until_restarted(remove)
    assert "nothing from ray-1" in caplog.text
    assert workers_here() == [True, True]
