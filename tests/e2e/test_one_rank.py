"""`nanotf.hvd` in a process that no launcher has started, and its callbacks."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from nanotf import hvd
from nanotf.compat import one_replica
from nanotf.errors import InvalidArgumentError, InvalidArgumentTypeError, UnavailableError
from nanotf.hvd import dataparallel, rank_facts
from nanotf.hvd import keras as hvd_keras
from nanotf.ranks import loss_scales, strategy_hook, this_rank

pytestmark = pytest.mark.both_generations
keras = tf.keras


@pytest.fixture(autouse=True)
def _initialized(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(this_rank._here, "uses", set())
    hvd.init()
    yield
    hvd.shutdown()


def _model(optimizer: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    return model


def _fit(model: Any, epochs: int = 1, **given: Any) -> Any:
    rows = np.arange(24, dtype="float32").reshape(8, 3) / 24
    given = {"batch_size": 2, "shuffle": False, "verbose": 0} | given
    return model.fit(rows, rows[:, :1], epochs=epochs, **given).history


def test_collectives_of_one_rank() -> None:
    value = tf.constant([1.0, 2.0])
    for found in (
        hvd.allreduce(value),
        hvd.allreduce(value, op=hvd.Max),
        hvd.allgather(value),
        hvd.broadcast(value, 0),
        hvd.alltoall(value),
        hvd.reducescatter(value),
        hvd.grouped_allreduce([value])[0],
        hvd_keras.allreduce(value),
        hvd_keras.broadcast(value, 0),
        dataparallel.allreduce(value, 0, 1, op=dataparallel.ReduceOp.SUM),
    ):
        np.testing.assert_array_equal(found, value)
    assert hvd.broadcast_object("a") == "a" and hvd.allgather_object("a") == ["a"]
    assert (hvd.join(), int(hvd.size_op()), int(hvd.rank_op())) == (0, 1, 0)
    with pytest.raises(InvalidArgumentError, match="root_rank must be a rank, 0 to 0"):
        hvd.broadcast(value, 1)
    with pytest.raises(UnavailableError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="divides all rows"):
        hvd.alltoall(value, [1])


def test_a_wrapped_optimizer_is_saved_as_its_own_class(tmp_path: pathlib.Path) -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    assert hvd.DistributedOptimizer(optimizer) is optimizer  # and reduces once
    assert isinstance(optimizer, keras.optimizers.SGD)
    model, plain = _model(optimizer), _model(keras.optimizers.SGD(0.1))
    assert _fit(model)["loss"] == _fit(plain)["loss"]
    path = tmp_path / "model.keras"
    model.save(path)
    assert type(keras.models.load_model(path).optimizer) is keras.optimizers.SGD
    loaded = hvd_keras.load_model(path)
    assert type(loaded.optimizer) is not keras.optimizers.SGD
    assert _fit(loaded)["loss"] == _fit(plain)["loss"]


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"optimizer": object()}, InvalidArgumentTypeError, r"Received: builtins\.object"),
        ({"backward_passes_per_step": 0}, InvalidArgumentError, "must be at least 1"),
        ({"op": hvd.Adasum}, UnavailableError, r"Received: op=hvd\.Adasum"),
        (
            {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
            InvalidArgumentError,
            "gradient_predivide_factor=2.0",
        ),
        ({"process_set": object()}, UnavailableError, "All ranks take part"),
    ],
    ids=["optimizer", "passes", "op", "factor", "process_set"],
)
def test_wrong_arguments(given: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        hvd.DistributedOptimizer(**{"optimizer": keras.optimizers.SGD()} | given)


def test_parts_of_a_model_that_are_updated_in_turn_have_their_own_passes() -> None:
    parts = [keras.layers.Dense(units, kernel_initializer="zeros") for units in (1, 2)]
    for part in parts:
        part.build((None, 1))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    optimizer.build([part.kernel for part in parts])

    def step(part: Any) -> None:
        optimizer.apply_gradients([(tf.ones(part.kernel.shape), part.kernel)])

    # Of each part: a `tf.function` may create variables in its first trace alone.
    steps = [tf.function(lambda part=part: step(part)) for part in parts]
    for applied in (0, 2, 2, 4):
        for place, part in enumerate(parts):
            steps[place]()
            np.testing.assert_array_equal(part.get_weights()[0], [[-applied] * (place + 1)])


def test_learning_rates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By hand: four batches an epoch."""
    schedule = hvd_keras.callbacks.LearningRateScheduleCallback(
        0.4, lambda epoch: 0.5**epoch, momentum_correction=False
    )
    assert _fit(_model("sgd"), 2, callbacks=[schedule])["lr"] == pytest.approx([0.4, 0.2])
    monkeypatch.setattr(rank_facts, "size", lambda: 4)
    warmup = hvd_keras.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2, verbose=1)
    model = _model("sgd")
    rates: list[float] = []
    noting = keras.callbacks.LambdaCallback(
        on_batch_end=lambda batch, logs: rates.append(float(model.optimizer.learning_rate))
    )
    _fit(model, 3, callbacks=[warmup, noting])
    steps = [0.1 * (1 + 3 * (step + 1) / 8) for step in range(8)]
    assert rates == pytest.approx([*steps, *[0.4] * 4])
    assert "Epoch 2: finished gradual learning rate warmup to 0.4." in capsys.readouterr().out


def test_learning_rates_of_callbacks_of_older_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 0.20, Horovod's callbacks took the optimizer's rate at the beginning of `fit`."""
    own = hvd_keras.callbacks
    schedule = own.LearningRateScheduleCallback(multiplier=0.5, start_epoch=1)
    model = _model(keras.optimizers.SGD(0.4))
    assert _fit(model, 2, callbacks=[schedule])["lr"] == pytest.approx([0.4, 0.2])
    assert _fit(model, 2, callbacks=[schedule])["lr"] == pytest.approx([0.2, 0.1])
    monkeypatch.setattr(rank_facts, "size", lambda: 4)
    warmup = own.LearningRateWarmupCallback(warmup_epochs=1)
    found = _fit(_model(keras.optimizers.SGD(0.4)), 2, callbacks=[warmup])["lr"]
    assert found == pytest.approx([0.4, 0.4])


def test_callbacks_that_are_misused() -> None:
    own = hvd_keras.callbacks
    with pytest.raises(InvalidArgumentError, match="filepath=None"):
        own.BestModelCheckpoint()


def test_the_best_model_is_kept(tmp_path: pathlib.Path) -> None:
    best = hvd_keras.callbacks.BestModelCheckpoint(str(tmp_path / "best.keras"), "loss")
    _fit(_model("sgd"), 2, callbacks=[best, hvd_keras.callbacks.MetricAverageCallback()])
    assert (tmp_path / "best.keras").exists()


def test_a_strategy_in_one_process_names_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    strategy_hook.tell_of_ranks(True)
    try:
        strategy = tf.distribute.MirroredStrategy()
        tf.distribute.OneDeviceStrategy("cpu:0")
    finally:
        one_replica.restore()
    assert strategy.num_replicas_in_sync == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "--ranks" in line]
    assert line.startswith("nanotf: MirroredStrategy() has one replica in this process.")


@pytest.mark.parametrize("kept", [0, 2])
def test_a_rank_without_rows_of_an_embedding_skips_a_step_with_the_others(kept: int) -> None:
    """Its gradient is sparse, and has as many values as the rank has rows of the batch."""
    rows = tf.IndexedSlices(tf.ones((kept, 3)), tf.zeros(kept, tf.int64), tf.constant([5, 3]))
    for overflows in (False, True):
        (found,) = loss_scales._alike([rows], lambda tensor, over=overflows: tensor + float(over))
        assert bool(tf.reduce_all(tf.math.is_finite(found.values))) != overflows
        assert found.dense_shape is rows.dense_shape
        assert len(found.values) == len(found.indices) == kept + overflows
        grads = loss_scales._alike([None, rows, tf.ones(2)], lambda _, over=overflows: float(over))
        assert grads[0] is None and grads[1] is rows
        assert bool(tf.reduce_all(tf.math.is_finite(grads[2]))) != overflows
