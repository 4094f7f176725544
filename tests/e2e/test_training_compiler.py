"""Scripts as training compilers ask for them: a strategy, a compiled step, fixed shapes."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import pathlib
import subprocess
import sys
import textwrap
from typing import Any

import loops
import numpy as np
import pytest
import tensorflow as tf
from processes import ROOT, SECONDS, last_json

import nanotf
from nanotf.keras import nano

CLUSTER = {
    "cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]},
    "task": {"type": "worker", "index": 1},
}

# A script that knows nothing of nanotf. The cluster of `TF_CONFIG` would never answer.
FIT = """
import json, sys
import numpy as np
import tensorflow as tf

tf.keras.utils.set_random_seed(1)
strategies = tf.distribute
strategy = eval(sys.argv[1])
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(2)])
    model.compile("sgd", "mse")
x = np.random.default_rng(0).normal(size=(50, 4)).astype("float32")
rows = tf.data.Dataset.from_tensor_slices((x, x[:, :2])).batch(16 * strategy.num_replicas_in_sync)
history = model.fit(strategy.experimental_distribute_dataset(rows), epochs=2, verbose=0)
workers = len(history.nanotf.workers) if hasattr(history, "nanotf") else 0
print(json.dumps([history.history["loss"], workers, isinstance(strategy, tf.distribute.Strategy)]))
"""


def _script(directory: pathlib.Path, source: str, *command: str, **environment: str) -> Any:
    (directory / "script.py").write_text(textwrap.dedent(source))
    variables = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        env=variables,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.own_pool
@pytest.mark.parametrize(
    "made", ["MultiWorkerMirroredStrategy()", "MirroredStrategy(['cpu:0', 'cpu:1'])"]
)
def test_a_fit_in_the_scope_of_a_strategy(made: str, tmp_path: pathlib.Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as plain, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["script.py", "tf.distribute.get_strategy()"])
        exec(FIT, {})
    expected = json.loads(plain.getvalue())[0]
    arguments = ("-m", "nanotf", "run", "-n", "2", "--hosts", "localhost", "script.py")
    config = json.dumps(CLUSTER)
    done = _script(tmp_path, FIT, *arguments, f"strategies.{made}", TF_CONFIG=config)
    losses, workers, is_strategy = last_json(done)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert (workers, is_strategy) == (2, True)


def test_strategies_of_one_replica() -> None:
    stock = type(tf.distribute.MirroredStrategy(["cpu:0"]))
    nanotf.patch_tensorflow(strategies=True)
    try:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        assert isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        assert strategy.cluster_resolver.task_type is None
        with strategy.scope():
            variable = tf.Variable(1.0)
            assert not tf.distribute.has_strategy()
        assert not isinstance(variable, tf.distribute.DistributedValues)
        assert (
            strategy.run(lambda: tf.distribute.get_replica_context().replica_id_in_sync_group) == 0
        )
        rows = tf.data.Dataset.range(3)
        assert strategy.experimental_distribute_dataset(rows) is rows
        assert strategy.reduce("SUM", tf.constant(2.0), axis=None) == 2.0
    finally:
        nanotf.unpatch_tensorflow()
    assert type(tf.distribute.MirroredStrategy(["cpu:0"])) is stock


def _loop(x: Any, y: Any) -> Any:
    """The custom loop that training compilers ask for: only the step's computation is compiled."""
    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        model = loops.dense()
        optimizer = tf.keras.optimizers.SGD(0.1)
        loss_object = loops.cross_entropy(reduction="none")
        mean = tf.keras.metrics.Mean()
    batch = 16 * strategy.num_replicas_in_sync

    @tf.function(jit_compile=True)
    def compiled_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            each = loss_object(y, model(x, training=True))
            loss = tf.nn.compute_average_loss(each, global_batch_size=batch)
        return loss, tape.gradient(loss, model.trainable_variables)

    def train_step(x: Any, y: Any) -> Any:
        loss, gradients = compiled_step(x, y)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        mean.update_state(loss)
        return loss

    train_step_dist = tf.function(lambda x, y: strategy.run(train_step, args=(x, y)))
    rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)
    losses = []
    for inputs in strategy.experimental_distribute_dataset(rows):
        per_replica = train_step_dist(*inputs)
        losses.append(float(strategy.reduce("SUM", per_replica, axis=None)))
    return losses, float(mean.result()), model.get_weights()


def test_the_custom_loop_under_nano(float64: None, caplog: pytest.LogCaptureFixture) -> None:
    x, y = loops.rows(40)
    *ours, weights = nano(num_processes=2)(_loop)(x, y)
    *theirs, expected = _loop(x, y)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-10)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-10)
    loops.assert_same_variables(weights, expected)
    assert "no layer that could be divided" not in caplog.text


# A script that knows nothing of nanotf, and trains in a loop of its own.
LOOP = """
import json
import numpy as np
import tensorflow as tf

tf.keras.utils.set_random_seed(1)
strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(2)])
    optimizer = tf.keras.optimizers.SGD(0.1)
batch = 16 * strategy.num_replicas_in_sync


@tf.function(jit_compile=True)
def compiled_step(x, y):
    with tf.GradientTape() as tape:
        each = tf.reduce_sum(tf.square(model(x, training=True) - y), axis=-1)
        loss = tf.nn.compute_average_loss(each, global_batch_size=batch)
    return loss, tape.gradient(loss, model.trainable_variables)


def train_step(x, y):
    loss, gradients = compiled_step(x, y)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


train_step_dist = tf.function(lambda x, y: strategy.run(train_step, args=(x, y)))
x = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
rows = tf.data.Dataset.from_tensor_slices((x, x[:, :2])).batch(batch)
losses = [
    float(strategy.reduce("SUM", train_step_dist(*inputs), axis=None))
    for inputs in strategy.experimental_distribute_dataset(rows)
]
print(json.dumps(losses))
"""


@pytest.mark.own_pool
def test_a_custom_loop_runs_unchanged(tmp_path: pathlib.Path) -> None:
    """In one process, which a note says: only `@nano` tells what to divide."""
    done = _script(tmp_path, LOOP, "-m", "nanotf", "run", "-n", "2", "script.py")
    expected: dict[str, Any] = {}
    exec(LOOP, expected)
    assert len(expected["losses"]) == 3
    np.testing.assert_allclose(last_json(done), expected["losses"], rtol=1e-5)
    assert "put it into a function under `@nanotf.nano(num_processes=2)`" in done.stderr


def test_advice_for_functions_that_are_traced_again(capfd: pytest.CaptureFixture[str]) -> None:
    model = loops.dense()

    @nano(num_processes=2)
    def run() -> None:
        @tf.function
        def by_number(x: Any, i: Any) -> Any:
            return tf.reduce_sum(model(x)) * i

        @tf.function
        def by_shape(x: Any) -> Any:
            return tf.reduce_sum(model(x))

        @tf.function
        def fine(x: Any, i: Any) -> Any:
            return tf.reduce_sum(model(x)) + tf.cast(i, x.dtype)

        for i in range(8):
            by_number(tf.ones((4, loops.FEATURES)), i)
            by_shape(tf.ones((4 + i, loops.FEATURES)))
            fine(tf.ones((4 + i % 2, loops.FEATURES)), tf.constant(i))

    run()
    told = [x for x in capfd.readouterr().err.splitlines() if " times. It is called with " in x]
    assert [line.partition(" was traced")[0].split()[-1] for line in told] == [
        "by_number",
        "by_shape",
    ]
    assert "tf.constant(step)" in told[0]
    assert "padding='max_length'" in told[1]


def test_advice_for_compiled_steps_of_varying_length(caplog: pytest.LogCaptureFixture) -> None:
    model = nanotf.Sequential(
        [tf.keras.layers.Input((None, 2)), tf.keras.layers.GlobalAveragePooling1D()]
    )
    model.compile("sgd", "mse", jit_compile=True)

    def make() -> Any:
        for length in (3, 4):
            yield np.ones((2, length, 2), "float32"), np.ones((2, 2), "float32")

    specs = tf.TensorSpec((2, None, 2)), tf.TensorSpec((2, 2))
    data = tf.data.Dataset.from_generator(make, output_signature=specs)
    with caplog.at_level(logging.WARNING, "nanotf"):
        model.fit(data, verbose=0, num_processes=2)
    assert caplog.text.count("XLA compiles a step anew for each shape") == 1
