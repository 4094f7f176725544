"""Run by `test_smp_partitions.py` with `nanotf run --smp -n 2`: a model in two partitions.

Each rank compares its part with a model that it trains alone.

    partitions.py FOLDER FLOATX CASE...       a case: pipeline,partition,gradients,microbatches
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from nanotf import smp
from nanotf.compat import step_errors
from nanotf.compat.keras_common import tf_variable
from nanotf.compat.keras_optimizers import optimizer_variables
from nanotf.errors import CollectiveError, UnavailableError
from nanotf.sagemaker.smp import runtime, schedule

STEPS, BATCH = 20, 32
FOLDER, FLOATX, CASES = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
TOLERANCE = {"float32": 1e-4, "float64": 1e-10}[FLOATX]
tf.keras.backend.set_floatx(FLOATX)  # before the loss, which keeps it
LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def batches() -> Iterator[tuple[Any, Any]]:
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(FLOATX)
    for begin in range(0, STEPS * BATCH, BATCH):
        yield tf.constant(x[begin : begin + BATCH]), tf.constant(y[begin : begin + BATCH])


def digits(base: Any) -> Any:
    layers = tf.keras.layers

    class Digits(base):  # type: ignore[misc]
        """Two blocks, and a connection that skips the second's first layer."""

        def __init__(self) -> None:
            super().__init__(dtype=FLOATX)
            self.first = layers.Dense(24, activation="tanh", dtype=FLOATX)
            self.norm = layers.LayerNormalization(dtype=FLOATX)
            self.second = layers.Dense(24, activation="relu", dtype=FLOATX)
            self.out = layers.Dense(10, dtype=FLOATX)

        def call(self, x: Any, training: bool | None = None) -> Any:
            with smp.partition(1), smp.partition(0):  # the innermost wins
                hidden = self.norm(self.first(x))
                skip = tf.reduce_mean(x, axis=1, keepdims=True)
            with smp.partition(1):
                return self.out(self.second(hidden) + hidden) + skip

    tf.keras.utils.set_random_seed(1)
    return Digits()


def optimizer() -> Any:
    return tf.keras.optimizers.SGD(0.1, momentum=0.9)


def plain() -> tuple[Any, Any, list[float]]:
    model, update, losses = digits(tf.keras.Model), optimizer(), []
    for x, y in batches():
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x, training=True))
        weights = model.trainable_variables
        update.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        losses.append(float(loss))
    return model, update, losses


def stepping(model: Any, with_tape: bool) -> Any:
    @smp.step
    def get_gradients(x: Any, y: Any) -> Any:
        if not with_tape:
            predictions = model(x, training=True)
            loss = LOSS(y, predictions)
            return smp.gradients(loss, model.trainable_variables), loss, predictions
        with tf.GradientTape() as tape:
            predictions = model(x, training=True)
            loss = LOSS(y, predictions)
        return tape.gradient(loss, model.trainable_variables), loss, predictions

    return get_gradients


def training(model: Any, update: Any, with_tape: bool) -> Any:
    get_gradients = stepping(model, with_tape)

    @tf.function
    def train_step(x: Any, y: Any) -> Any:
        gradients, loss, predictions = get_gradients(x, y)
        averaged = [gradient.accumulate() for gradient in gradients]
        update.apply_gradients(zip(averaged, model.trainable_variables, strict=True))
        return loss.reduce_mean(), predictions.merge()

    return train_step


def all_weights(model: Any) -> list[Any]:
    return [tf_variable(w) for layer in model.layers for w in layer.weights]


def resident(variables: list[Any]) -> int:
    """Returns the bytes that the values of variables take in this process."""
    total = 0
    for variable in variables:
        handle = variable.handle
        if tf.raw_ops.VarIsInitializedOp(resource=handle):
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=variable.dtype)
            total += int(tf.size(value)) * variable.dtype.size
    return total


def check_weights(model: Any, expected: list[Any]) -> None:
    held = {id(tf_variable(w)) for w in model.weights}
    assert 0 < len(held) < len(expected)
    for weight, right in zip(all_weights(model), expected, strict=True):
        if id(weight) in held:
            np.testing.assert_allclose(weight, right, rtol=TOLERANCE, atol=TOLERANCE)


def check_memory(model: Any, update: Any, expected: list[Any]) -> None:
    """No rank has the other's weights or slots."""
    whole = sum(w.nbytes for w in expected)
    weights = sum(smp.allgather(resident(all_weights(model))))
    slots = sum(smp.allgather(resident(optimizer_variables(update))))
    assert whole <= weights <= 1.1 * whole, (weights, whole)
    assert whole <= slots <= 1.1 * whole, (slots, whole)


def check_report(weights: int) -> None:
    """All ranks get the same report, whose passes are those of the schedule."""
    report = smp.last_report()
    assert len(set(smp.allgather(str(report)))) == 1
    assert [each.rank for each in report.ranks] == [0, 1]
    assert report.seconds > 0
    assert weights <= sum(each.weight_bytes for each in report.ranks) <= 1.1 * weights
    config = runtime.current()
    for each in report.ranks:
        passes = [(block.kind, block.microbatch) for block in each.blocks]
        planned = schedule.actions(config, each.partition)
        assert passes == [(action.kind, action.microbatch) for action in planned]
        ends = [each.execution.whole.began]
        for block in each.blocks:
            assert ends[-1] <= block.time.began <= block.time.ended
            ends.append(block.time.ended)
        assert ends[-1] <= each.execution.whole.ended
        assert 0 < each.waiting < report.seconds
        # Slots, and the variables of the model that this rank has trained alone.
        assert each.weight_bytes < each.other_variable_bytes
        assert each.peak_bytes > 100 * 2**20  # TensorFlow itself


def check_whole_model(model: Any, expected: Any) -> None:
    path = FOLDER / "digits.weights.h5"
    model.save_model(path)
    model.save_model(FOLDER / "saved")
    x, _ = next(batches())
    if smp.rank() == 0:
        loaded = digits(tf.keras.Model)
        loaded(x)
        loaded.load_weights(str(path))
        for weight, right in zip(loaded.weights, expected.weights, strict=True):
            np.testing.assert_allclose(np.array(weight), np.array(right), atol=TOLERANCE)
        served = tf.saved_model.load(str(FOLDER / "saved"))
        call = getattr(served, "serve", None) or (lambda x: served(x, training=False))
        # `expected` was trained by itself, so its weights are equal within the tolerance alone.
        atol = max(TOLERANCE, 1e-6)
        np.testing.assert_allclose(call(x), expected(x), rtol=1e-5, atol=atol)


def check_checkpoints(model: Any, update: Any) -> None:
    expected = [np.array(w) for w in model.weights]
    checkpoint = tf.train.Checkpoint(model=model, optimizer=update)
    path = smp.CheckpointManager(checkpoint, FOLDER / "checkpoints").save()

    again, continued, found = digits(smp.DistributedModel), optimizer(), []
    checkpoint = tf.train.Checkpoint(model=again, optimizer=continued)
    manager = smp.CheckpointManager(checkpoint, FOLDER / "checkpoints")
    assert manager.restore() == path  # in the first step, once the model is cut

    @smp.register_post_partition_hook
    def look() -> None:
        found.extend(np.array(w) for w in again.weights)

    x, y = next(batches())
    loss, _ = training(again, continued, True)(x, y)
    for weight, right in zip(found, expected, strict=True):
        np.testing.assert_array_equal(weight, right)
    right, _ = training(model, update, True)(x, y)
    assert float(loss) == float(right)
    for weight, right in zip(again.weights, model.weights, strict=True):  # the momentum, too
        np.testing.assert_allclose(np.array(weight), np.array(right), rtol=TOLERANCE)


def check_errors() -> None:
    class Shared(smp.DistributedModel):
        def __init__(self, partitions: tuple[int, ...]) -> None:
            super().__init__()
            self.partitions, self.layer = partitions, tf.keras.layers.Dense(64)
            self.calls = tf.Variable(0.0, trainable=False)

        def call(self, x: Any) -> Any:
            for number in self.partitions:
                with smp.partition(number):
                    x = self.layer(x)
                    self.calls.assign_add(1.0)
            return x

    class Backward(smp.DistributedModel):
        def call(self, x: Any) -> Any:
            with smp.partition(1):
                x = tf.sin(x)
            with smp.partition(0):
                return tf.cos(x)

    smp.init({"partitions": 2, "auto_partition": False, "default_partition": 0})
    for model, text in (
        (Shared((0, 1)), "must be used in one partition"),
        (Backward(), "must flow from a partition to later ones"),
        (Shared((0,)), "no operation in partition 1"),
    ):

        @smp.step
        def predict(x: Any, model: Any = model) -> Any:
            return model(x)

        try:
            predict(tf.ones((4, 64)))
        except ValueError as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)


def check_gradients_outside() -> None:
    """The schedule has no place for gradients that a script computes after the step."""
    smp.init({"partitions": 2})
    model = digits(smp.DistributedModel)
    predict = smp.step(lambda x: model(x, training=True))
    x, _ = next(batches())
    predict(x)  # cuts the model
    try:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(predict(x).merge())
        tape.gradient(loss, model.trainable_variables)
    except UnavailableError as error:
        assert "are computed in the function decorated by smp.step" in str(error), error
    else:
        raise AssertionError


def check_data() -> None:
    smp.init({"partitions": 2})
    predict = smp.step(digits(smp.DistributedModel).__call__)
    try:
        predict(tf.fill((4, 64), float(smp.rank())))
    except CollectiveError as error:  # not TensorFlow's UnknownError
        assert "must read the same data" in str(error), error
    else:
        raise AssertionError


def check_text_of_error() -> None:
    """Checks that an error that ends a rank tells its reason and the line, without stacks."""
    smp.init({"partitions": 2})
    model = digits(smp.DistributedModel)

    @smp.step
    def loss(x: Any, y: Any) -> Any:
        return LOSS(y, model(x, training=True))  # labels out of range

    x, y = next(batches())
    try:
        loss(x, y + 100)
    except tf.errors.InvalidArgumentError as error:
        lines = step_errors.in_short(error, error.__traceback__).splitlines()
        assert len(lines) < 30, lines
        assert lines[-1] == "NANOTF_TRACEBACK=full shows the whole traceback."
        reason = next(number for number, line in enumerate(lines) if "label value" in line)
        assert not lines[reason - 1].startswith("Detected at node"), lines
        assert any(line.endswith("# labels out of range") for line in lines[reason:]), lines
    else:
        raise AssertionError


def main() -> None:
    smp.init({"partitions": 2})
    expected, _, losses = plain()
    weights = [np.array(w) for w in expected.get_weights()]
    for case in CASES:
        pipeline, partition, gradients, microbatches = case.split(",")
        manual = {"auto_partition": False, "default_partition": 1} if partition == "manual" else {}
        config = {"partitions": 2, "microbatches": int(microbatches), "pipeline": pipeline}
        smp.init({**config, **manual})
        model, update = digits(smp.DistributedModel), optimizer()
        train_step, found = training(model, update, gradients == "tape"), []
        for x, y in batches():
            loss, predictions = train_step(x, y)
            found.append(float(loss))
        assert predictions.shape == (BATCH, 10)
        np.testing.assert_allclose(found, losses, rtol=TOLERANCE)
        check_weights(model, weights)
        check_memory(model, update, weights)
        check_report(sum(w.nbytes for w in weights))
        print(f"rank {smp.rank()}: {case}", flush=True)
    check_whole_model(model, expected)
    check_checkpoints(model, update)
    check_errors()
    check_gradients_outside()
    check_data()
    check_text_of_error()
    print(f"rank {smp.rank()}: done", flush=True)


main()
