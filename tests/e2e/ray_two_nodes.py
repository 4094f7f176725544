"""Tests workers on two Ray nodes, both on this machine: memory is not shared.

`test_ray` runs this in a separate process.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
from collections.abc import Iterator
from typing import Any

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
from ray_one_node import ON_RAY, run_case, shared_memory
from waiting import wait_until

import nanotf
from nanotf.errors import PlacementError, WorkerDied
from nanotf.keras import nano
from nanotf.pool import backends, transports, warm
from nanotf.pool.ray import ray_bridge

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
        {"run_on": functools.partial(nano, transport="grpc", **ON_RAY), "optimizer": "adam"},
    ),
    (loop_metrics.test_metrics_and_validation_steps, {"run_on": functools.partial(nano, **ON_RAY)}),
    (failures.test_loss_that_raises_in_a_worker, {}),
]


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
    monkeypatch.setattr(transports, "DEFAULT_TRANSPORT", "grpc")
    # So that small data also go through the object store, in pieces.
    monkeypatch.setattr(ray_bridge, "INLINE_NBYTES", 256)
    monkeypatch.setattr(ray_bridge, "PIECE_NBYTES", 4096)


def test_shared_memory_ends_at_the_node() -> None:
    x, y = digits(100)
    with pytest.raises(PlacementError, match=r"nodes with \[1\] CPUs.*this process's node"):
        small_cnn().fit(x, y, verbose=0, transport="shm", **ON_RAY)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].__name__)
def test_same_results_as_with_local_workers(case: Any, request: pytest.FixtureRequest) -> None:
    run_case(case, request)
    assert warm._pool is not None
    assert [worker.shares_memory for worker in warm._pool.workers] == [True, False]


def test_log_of_a_worker_on_another_node() -> None:
    x, y = digits(100)
    small_cnn().fit(x, y, verbose=0, **ON_RAY)

    def crash(epoch: int, logs: Any) -> None:
        os.kill(nanotf.worker_pids()[1], signal.SIGSEGV)

    callback = tf.keras.callbacks.LambdaCallback(on_epoch_begin=crash)
    with pytest.raises(WorkerDied, match=r"Worker 1 .* on node .* was killed by SIGSEGV") as caught:
        small_cnn().fit(x, y, verbose=0, epochs=50, callbacks=[callback], **ON_RAY)
    assert "Fatal Python error: Segmentation fault" in caught.value.log_tail


def test_node_that_is_lost(cluster: Any) -> None:
    """Must be the last test, since it leaves the cluster with one node."""
    x, y = digits(100)

    def remove(epoch: int, logs: Any) -> None:
        if epoch == 0:  # on a quiet machine more epochs begin before the loss is noticed
            cluster.remove_node(cluster.list_all_nodes()[1], allow_graceful=False)

    callback = tf.keras.callbacks.LambdaCallback(on_epoch_begin=remove)
    with pytest.raises(WorkerDied, match=r"Worker 1 .* on node .* was lost"):
        small_cnn().fit(x, y, verbose=0, epochs=100_000, callbacks=[callback], **ON_RAY)
