"""Functions for the ranks of test_strategy.py: `WorkerStrategy` as in tf.distribute's guides."""

from __future__ import annotations

import os
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import psutil
import tensorflow as tf
from collective_tf_ranks import attached

from nanotf.region.strategy import WorkerStrategy


def everything(spec: Any, rank: int, fd: int, with_ops: bool) -> list[Any]:
    """Runs every check below; returns the values that all ranks must agree on."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    group = attached(spec, rank, fd, with_ops)
    try:
        strategy = WorkerStrategy(rank, spec.size, group=group)
        _is_the_stock_strategy(strategy)
        agreed = [_variables_start_equal(strategy)]
        _reduce_and_gather(strategy)
        _sparse_gradients(strategy)
        _metrics(strategy)
        agreed += _datasets(strategy)
        agreed += _training_loop(strategy)
        _no_socket()
        return agreed
    finally:
        group.close()


def _is_the_stock_strategy(strategy: Any) -> None:
    assert isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    assert strategy.num_replicas_in_sync == strategy.size
    assert strategy.extended._in_multi_worker_mode()


def _variables_start_equal(strategy: Any) -> Any:
    """Every variable starts with rank 0's value, whatever the other ranks' initial values."""
    with strategy.scope():
        variable = tf.Variable(tf.fill([3], float(strategy.rank + 1)))
    assert np.array_equal(strategy.experimental_local_results(variable)[0].numpy(), np.ones(3))
    with strategy.values_known(), strategy.scope():
        own = tf.Variable(float(strategy.rank))
    assert strategy.experimental_local_results(own)[0].numpy() == strategy.rank
    return variable.numpy().tolist()


def _reduce_and_gather(strategy: Any) -> None:
    size, rank = strategy.size, strategy.rank
    for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64):
        mine = tf.fill([2, 3], tf.cast(rank + 1, dtype))
        for summed in (
            strategy.reduce("SUM", mine, axis=None),
            tf.function(lambda value=mine: strategy.reduce("SUM", value, axis=None))(),
        ):
            assert summed.dtype == dtype
            assert np.all(tf.cast(summed, tf.float64).numpy() == size * (size + 1) / 2)
    mean = strategy.reduce("MEAN", tf.constant([float(rank)] * (rank + 1)), axis=0)
    rows = np.repeat(range(size), range(1, size + 1))
    np.testing.assert_allclose(mean.numpy(), rows.mean(), rtol=1e-6)
    for axis in (0, 1):
        shape = [2, 2]
        shape[axis] = rank + 1
        gathered = strategy.gather(tf.fill(shape, rank), axis=axis).numpy()
        expected = np.repeat(rows[:, None], 2, axis=1)
        assert np.array_equal(gathered, expected if axis == 0 else expected.T)
    assert strategy.gather(tf.constant([rank % 2 == 0]), axis=0).numpy().tolist() == [
        r % 2 == 0 for r in range(size)
    ]


def _sparse_gradients(strategy: Any) -> None:
    """IndexedSlices stay sparse; ranks may touch different numbers of rows."""

    @tf.function
    def step() -> Any:
        def in_replica() -> Any:
            context = tf.distribute.get_replica_context()
            count = strategy.rank + 1
            slices = tf.IndexedSlices(tf.ones([count, 2]), tf.range(count), tf.constant([5, 2]))
            return context.all_reduce(tf.distribute.ReduceOp.SUM, slices)

        return strategy.run(in_replica)

    result = step()
    assert isinstance(result, tf.IndexedSlices)
    dense = tf.convert_to_tensor(result).numpy()
    touched = [strategy.size - row for row in range(5)]
    assert np.array_equal(dense[:, 0], np.maximum(touched, 0))


def _metrics(strategy: Any) -> None:
    with strategy.scope():
        mean = tf.keras.metrics.Mean()
        area = tf.keras.metrics.AUC(num_thresholds=10)
    rank = strategy.rank

    @tf.function
    def step() -> None:
        def in_replica() -> None:
            mean.update_state(tf.fill([rank + 1], float(rank)))
            area.update_state([0.0, 1.0], [0.2 * rank, 0.9])

        strategy.run(in_replica)

    step()
    rows = np.repeat(range(strategy.size), range(1, strategy.size + 1))
    np.testing.assert_allclose(float(mean.result()), rows.mean(), rtol=1e-6)
    assert 0 <= float(area.result()) <= 1


def _datasets(strategy: Any) -> list[Any]:
    """Both ways to distribute a dataset give each row to one worker."""
    dataset = tf.data.Dataset.range(24).batch(4 * strategy.size)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    seen = []
    for batch in strategy.experimental_distribute_dataset(dataset.with_options(options)):
        local = strategy.experimental_local_results(batch)[0]
        seen.append(sorted(strategy.gather(local, axis=0).numpy().tolist()))
    assert sorted(row for batch in seen for row in batch) == list(range(24))

    def own(context: Any) -> Any:
        rows = tf.data.Dataset.range(24)
        return rows.shard(context.num_input_pipelines, context.input_pipeline_id).batch(4)

    taken = []
    for batch in strategy.distribute_datasets_from_function(own):
        local = strategy.experimental_local_results(batch)[0]
        taken += strategy.gather(local, axis=0).numpy().tolist()
    assert sorted(taken) == list(range(24))
    return [seen, sorted(taken)]


def _training_loop(strategy: Any) -> list[Any]:
    """The loop of the guide: scope, run, reduce; the ranks' weights stay equal."""
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(2)])
        optimizer = tf.keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    rng = np.random.default_rng(strategy.rank)
    x = tf.constant(rng.normal(size=(6, 4)), tf.float32)

    @tf.function
    def step() -> Any:
        def in_replica() -> Any:
            with tf.GradientTape() as tape:
                each = tf.reduce_sum(tf.square(model(x)), axis=1)
                loss = tf.nn.compute_average_loss(each, global_batch_size=6 * strategy.size)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return strategy.reduce("SUM", strategy.run(in_replica), axis=None)

    losses = [float(step()) for _ in range(5)]
    assert losses[-1] < losses[0]
    return [losses, [w.tolist() for w in model.get_weights()]]


def _no_socket() -> None:
    connections = psutil.Process().net_connections(kind="inet")
    assert connections == [], connections


def pieces_that_vanish(spec: Any, rank: int, fd: int, cluster: tuple[str, ...]) -> list[Any]:
    """Sums 1 on rank 0 and pieces on the others, over TensorFlow's own collectives."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = WorkerStrategy(rank, len(cluster), cluster=cluster)
    found = []
    for dtype, eps in ((tf.float16, 2.0**-10), (tf.bfloat16, 2.0**-7), (tf.float32, 2.0**-23)):
        mine = tf.fill([3], tf.cast(1.0 if rank == 0 else eps / (len(cluster) - 1), dtype))

        @tf.function
        def total(value: Any = mine) -> Any:
            def in_replica() -> Any:
                context = tf.distribute.get_replica_context()
                two = [tf.identity(value), tf.identity(value)]
                return context.all_reduce(tf.distribute.ReduceOp.SUM, two)

            return strategy.run(in_replica)

        summed = [strategy.reduce("SUM", mine, axis=None), *total()]
        assert all(x.dtype == dtype for x in summed)
        found.append([float(x[0]) - 1 for x in summed])
    return found
