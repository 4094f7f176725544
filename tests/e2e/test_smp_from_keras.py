"""`smp.DistributedModel.from_keras`: Keras's `fit` in microbatches, partitions and copies."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
import tensorflow as tf

from nanotf import smp
from nanotf.errors import JobError, ModelError, UnavailableError
from nanotf.smp import runtime

PROGRAM = pathlib.Path(__file__).with_name("keras_partitions.py")


@pytest.fixture(autouse=True)
def _begins_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(runtime, "_config", None)
    yield


def _run(ranks: int, partitions: int, folder: pathlib.Path) -> None:
    command = [sys.executable, "-m", "nanotf", "run", "--smp", "-n", str(ranks), str(PROGRAM)]
    done = subprocess.run(
        [*command, str(folder), str(partitions)],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(ranks):
        assert f"rank {rank}: done" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
def test_fit_in_two_partitions_equals_one_process(tmp_path: pathlib.Path) -> None:
    """History with validation, predictions, memory, and a file that plain Keras loads."""
    _run(2, 2, tmp_path)


@pytest.mark.thorough
@pytest.mark.both_generations
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
@pytest.mark.parametrize("partitions", [1, 2])
def test_fit_in_both_generations(partitions: int, tmp_path: pathlib.Path) -> None:
    """With one partition, the two ranks hold copies of the model, and share each batch."""
    _run(2, partitions, tmp_path)


def _dense(**options: object) -> tf.keras.Model:
    return tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1, **options)])


def test_partitions_need_processes() -> None:
    with pytest.raises(JobError, match="nanotf run --smp -n 2"):
        smp.DistributedModel.from_keras(_dense(), partitions=2)


def test_fit_takes_the_number_of_processes_that_run() -> None:
    model = smp.DistributedModel.from_keras(_dense(), partitions=1, microbatches=2)
    with pytest.raises(JobError, match="nanotf run --smp -n 4"):
        model.fit(tf.ones((4, 3)), tf.ones((4, 1)), num_processes=4)


def test_what_from_keras_refuses() -> None:
    smp.init({"partitions": 1, "microbatches": 2})
    with pytest.raises(ModelError, match=r"Begin a Sequential model with tf\.keras\.Input"):
        smp.DistributedModel.from_keras(tf.keras.Sequential([tf.keras.layers.Dense(1)]))
    words = tf.keras.layers.Embedding(5, 2, mask_zero=True)
    with pytest.raises(UnavailableError, match="masked outputs"):
        smp.DistributedModel.from_keras(tf.keras.Sequential([tf.keras.Input((3,)), words]))
    model = smp.DistributedModel.from_keras(_dense())
    with pytest.raises(UnavailableError, match="no jit_compile"):
        model.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(JobError, match=r"Use predict\(x\)"):
        model(tf.ones((4, 3)))


def test_a_loss_that_is_no_mean_is_refused() -> None:
    model = smp.DistributedModel.from_keras(_dense(), partitions=1, microbatches=2)
    model.compile("sgd", tf.keras.losses.MeanSquaredError(reduction="sum"))
    with pytest.raises(tf.errors.OpError, match="must be a mean over rows"):
        model.fit(tf.ones((4, 3)), tf.ones((4, 1)), verbose=0)
