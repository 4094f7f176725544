"""`nanotf.smp` with one partition: the same training as plain Keras, in microbatches."""

from __future__ import annotations

import collections
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from processes import SECONDS, run_ranks
from sklearn.datasets import load_digits

from nanotf import hvd, smp
from nanotf.compat.versions import is_keras_3
from nanotf.errors import InvalidArgumentError, JobError, ModelError
from nanotf.sagemaker.smp import runtime

pytestmark = pytest.mark.both_generations

STEPS, BATCH = 20, 32
TOLERANCE = {"float32": 1e-4, "float64": 1e-10}


@pytest.fixture(autouse=True)
def _begins_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(runtime._here, "config", None)
    before = tf.keras.backend.floatx()
    yield
    tf.keras.backend.set_floatx(before)


def _batches() -> Iterator[tuple[Any, Any]]:
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(tf.keras.backend.floatx())
    for begin in range(0, STEPS * BATCH, BATCH):
        yield tf.constant(x[begin : begin + BATCH]), tf.constant(y[begin : begin + BATCH])


def _model(base: Any) -> Any:
    class Digits(base):  # type: ignore[misc]
        """Two layers, and a connection that skips the first."""

        def __init__(self) -> None:
            dtype = tf.keras.backend.floatx()  # Keras 3 keeps its first policy otherwise
            super().__init__(dtype=dtype)
            self.first = tf.keras.layers.Dense(16, activation="tanh", dtype=dtype)
            self.second = tf.keras.layers.Dense(10, dtype=dtype)

        def call(self, x: Any, training: bool | None = None) -> Any:
            with smp.partition(0):
                hidden = self.first(x)
            with smp.partition(1):
                return self.second(hidden) + tf.reduce_mean(x, axis=1, keepdims=True)

    tf.keras.utils.set_random_seed(1)
    return Digits()


def _loss() -> Any:
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _plain() -> tuple[list[Any], list[float]]:
    """Trains with one whole batch a step; returns the weights and the losses."""
    model, loss_object = _model(tf.keras.Model), _loss()
    optimizer, losses = tf.keras.optimizers.SGD(0.1, momentum=0.9), []
    for x, y in _batches():
        with tf.GradientTape() as tape:
            loss = loss_object(y, model(x, training=True))
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        losses.append(float(loss))
    return [np.array(w) for w in model.get_weights()], losses


def _with_tape(model: Any) -> Callable[..., Any]:
    loss_object = _loss()

    @smp.step
    def get_gradients(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            predictions = model(x, training=True)
            loss = loss_object(y, predictions)
        return tape.gradient(loss, model.trainable_variables), loss, predictions

    return get_gradients


def _with_gradients(model: Any) -> Callable[..., Any]:
    loss_object = _loss()

    @smp.step(autograph=True)
    def get_gradients(x: Any, y: Any) -> Any:
        predictions = model(x, training=True)
        loss = loss_object(y, predictions)
        return smp.gradients(loss, model.trainable_variables), loss, predictions

    return get_gradients


def _train(model: Any, get_gradients: Callable[..., Any]) -> tuple[list[Any], list[float]]:
    optimizer, losses = tf.keras.optimizers.SGD(0.1, momentum=0.9), []
    accuracy = tf.keras.metrics.SparseCategoricalAccuracy()

    @tf.function
    def train_step(x: Any, y: Any) -> Any:
        gradients, loss, predictions = get_gradients(x, y)
        averaged = [gradient.accumulate() for gradient in gradients]
        optimizer.apply_gradients(zip(averaged, model.trainable_variables, strict=True))
        accuracy.update_state(y, predictions.merge())
        return loss.reduce_mean()

    for x, y in _batches():
        losses.append(float(train_step(x, y)))
    assert 0.3 < float(accuracy.result()) < 1  # learned: a guess is right in 0.1
    return [np.array(w) for w in model.get_weights()], losses


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("microbatches", "floatx", "make"),
    [
        (1, "float32", _with_tape),
        (2, "float64", _with_gradients),
        (4, "float32", _with_gradients),
        (4, "float64", _with_tape),
    ],
)
def test_same_weights_as_whole_batches(
    microbatches: int, floatx: str, make: Callable[..., Any]
) -> None:
    tf.keras.backend.set_floatx(floatx)
    smp.init({"partitions": 1, "microbatches": microbatches})
    model = _model(smp.DistributedModel)
    weights, losses = _train(model, make(model))
    expected, expected_losses = _plain()
    np.testing.assert_allclose(losses, expected_losses, rtol=TOLERANCE[floatx])
    for found, right in zip(weights, expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=TOLERANCE[floatx], atol=TOLERANCE[floatx])


def test_microbatches_run_in_order_and_hold_the_function_once() -> None:
    """A variable that the function assigns sees each microbatch; the function is traced once."""
    smp.init({"partitions": 1, "microbatches": 4})
    seen, traces = tf.Variable(0.0), []

    @smp.step(non_split_inputs=["scale"], input_split_axes={"columns": 1})
    def look(rows: Any, columns: Any, scale: Any, more: Any = None) -> Any:
        traces.append((rows.shape, columns.shape, scale.shape))
        if tf.reduce_sum(scale) > 0:  # converted by AutoGraph
            seen.assign(seen * 10 + rows[0])
        return {"sum": tf.reduce_sum(columns) + rows[0], "seen": seen, "none": None}, more["x"]

    rows, ones = tf.range(1.0, 9.0), tf.ones((3, 8))
    found, more = look(rows, ones, tf.ones(2), more={"x": rows})
    assert traces == [((2,), (3, 2), (2,))]
    assert float(seen) == 1357.0
    assert found["none"] is None
    assert [float(o) for o in found["sum"].outputs] == [7.0, 9.0, 11.0, 13.0]
    assert [float(o) for o in found["seen"].outputs] == [1.0, 13.0, 135.0, 1357.0]
    assert more.merge().numpy().tolist() == rows.numpy().tolist()
    assert more.stack().shape == (4, 2)


def test_step_output() -> None:
    parts = [tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0])]
    output = smp.StepOutput(parts)
    assert output.reduce_sum().numpy().tolist() == [4.0, 6.0]
    assert output.concat().numpy().tolist() == [1.0, 2.0, 3.0, 4.0]
    var = tf.Variable([0.0, 0.0])
    found = [output.accumulate(m) for m in ("variable", "add_n", "accumulate_n")]
    for mean in [output.reduce_mean(), output.accumulate(var=var), *found]:
        assert tf.convert_to_tensor(mean).numpy().tolist() == [2.0, 3.0]
    rows = [
        tf.IndexedSlices(tf.ones((1, 2)), tf.constant([i]), tf.constant([3, 2])) for i in (0, 2)
    ]
    sparse = smp.StepOutput(rows).accumulate()
    assert isinstance(sparse, tf.IndexedSlices)
    assert tf.convert_to_tensor(sparse).numpy().tolist() == [[0.5, 0.5], [0, 0], [0.5, 0.5]]
    with pytest.raises(InvalidArgumentError, match=r"accumulate_n.*Received: method='sum'"):
        output.accumulate("sum")
    with pytest.raises(TypeError, match="Received: scalars"):
        smp.StepOutput([tf.constant(1.0)]).merge()


def test_arguments_of_all_kinds() -> None:
    """Nests, ragged and sparse tensors, text, None and numbers; each row reaches one microbatch."""
    smp.init({"partitions": 1, "microbatches": 2})
    pair = collections.namedtuple("pair", "left right")

    @smp.step
    def look(rows: Any, sparse: Any, text: Any, nest: Any, scale: Any, nothing: Any = None) -> Any:
        assert nothing is None
        assert scale.shape == ()  # the whole number
        assert isinstance(nest["both"], pair)
        doubled = nest["both"].left + nest["both"].right
        dense = tf.sparse.to_dense(sparse)
        return rows.row_lengths(), dense, tf.strings.length(text), doubled * scale, nest["list"][0]

    rows = tf.ragged.constant([[1], [2, 3], [], [4, 5, 6]])
    dense = np.arange(8.0).reshape(4, 2)
    numbers = np.arange(4.0, dtype="float32")
    nest = {"both": pair(numbers, tf.constant(numbers)), "list": [numbers]}
    text = tf.constant(["a", "bc", "", "def"])
    lengths, back, letters, scaled, listed = look(
        rows, tf.sparse.from_dense(dense), text, nest, np.float32(2), nothing=None
    )
    assert lengths.merge().numpy().tolist() == [1, 2, 0, 3]
    assert back.merge().numpy().tolist() == dense.tolist()
    assert letters.merge().numpy().tolist() == [1, 2, 0, 3]
    assert scaled.merge().numpy().tolist() == (4 * numbers).tolist()
    assert [part.numpy().tolist() for part in listed.outputs] == [[0, 1], [2, 3]]
    with pytest.raises(InvalidArgumentError, match="along their first axis"):
        smp.step(lambda rows: rows, input_split_axes={"rows": 1})(rows)


def test_errors_of_a_step() -> None:
    smp.init({"partitions": 1, "microbatches": 4})
    model = _model(smp.DistributedModel)
    step = _with_tape(model)
    with pytest.raises(ValueError, match=r"argument 'x' with 30 rows, microbatches=4"):
        step(tf.zeros((30, 64)), tf.zeros(30, tf.int64))
    with pytest.raises(JobError, match="outside one"):
        model(tf.zeros((4, 64)))
    with pytest.raises(ModelError, match="no step has called"):
        model.save_model("anywhere")
    with pytest.raises(InvalidArgumentError, match=r"'z', and the function has \['x', 'y'\]"):
        smp.step(lambda x, y: x, non_split_inputs=["z"])
    with pytest.raises(InvalidArgumentError, match=r"Use a tf\.GradientTape"):
        smp.gradients(tf.constant(1.0), [])
    with pytest.raises(ModelError, match="returns None"):
        smp.step(lambda x: None)(tf.zeros(4))
    with pytest.raises(JobError, match=r"accumulate\(\) replaces hvd\.allreduce"):
        hvd.allreduce(tf.zeros(4))


def test_a_saved_model_loads_in_plain_keras(tmp_path: pathlib.Path) -> None:
    smp.init({"partitions": 1, "microbatches": 2})
    model = _model(smp.DistributedModel)
    x, _ = next(_batches())

    @smp.step
    def predict(x: Any) -> Any:
        return model(x, training=False)

    expected = predict(x).merge().numpy()
    model.save_model(tmp_path / "saved")
    model.save_model(tmp_path / "digits.weights.h5")
    plain = _model(tf.keras.Model)
    plain(x)
    plain.load_weights(str(tmp_path / "digits.weights.h5"))
    np.testing.assert_allclose(plain(x), expected, rtol=1e-5, atol=1e-6)
    if is_keras_3():
        loaded = tf.keras.layers.TFSMLayer(str(tmp_path / "saved"), call_endpoint="serve")
    else:
        loaded = tf.keras.models.load_model(str(tmp_path / "saved"), compile=False)
    np.testing.assert_allclose(loaded(x[:7]), expected[:7], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("restored", ["before", "after", "in a hook"])
def test_checkpoints_restore_around_the_first_step(restored: str, tmp_path: pathlib.Path) -> None:
    x, y = next(_batches())

    def begin() -> tuple[Any, Any, Any]:
        smp.init({"partitions": 1, "microbatches": 2})
        model = _model(smp.DistributedModel)
        optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.5)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
        return model, _with_tape(model), smp.CheckpointManager(checkpoint, tmp_path, max_to_keep=2)

    model, step, manager = begin()
    assert manager.restore() is None
    step(x, y)
    optimizer = manager.checkpoint.optimizer
    weights = model.trainable_variables
    optimizer.apply_gradients(zip([tf.ones(w.shape) for w in weights], weights, strict=True))
    path, expected = manager.save(), [np.array(w) for w in model.get_weights()]

    model, step, manager = begin()
    found = []
    if restored == "before":
        found.append(manager.restore())
    if restored == "in a hook":
        smp.register_post_partition_hook(lambda: found.append(manager.restore()))
    step(x, y)
    if restored == "after":
        found.append(manager.restore())
    assert found == [path]
    for weight, right in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(weight, right)
    if restored != "after":  # the optimizer continues, too: its momentum is that of the first one
        continued = manager.checkpoint.optimizer
        weights, ones = model.trainable_variables, [tf.ones(w.shape) for w in expected]
        continued.apply_gradients(zip(ones, weights, strict=True))
        for weight, right in zip(model.get_weights(), expected, strict=True):
            np.testing.assert_allclose(weight, right - 0.15, rtol=1e-5, atol=1e-6)


def test_script_of_the_original(tmp_path: pathlib.Path) -> None:
    """`nanotf run` lets a script import smp by its original name, configured by the job."""
    script = tmp_path / "script.py"
    script.write_text(
        "import smdistributed.modelparallel.tensorflow as smp\n"
        "import tensorflow as tf\n"
        "smp.init()\n"
        "double = smp.step(lambda x: x * 2)\n"
        "print('merged', double(tf.constant([1, 2, 3, 4])).merge().numpy().tolist())\n"
    )
    environ = {
        **os.environ,
        "SM_HP_MP_PARAMETERS": '{"partitions": 1, "microbatches": 2}',
    }
    done = subprocess.run(
        [sys.executable, "-m", "nanotf", "run", str(script)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert "merged [2, 4, 6, 8]" in done.stdout, done.stderr


COPIES = """
import json, pathlib, sys, time
import numpy as np
import tensorflow as tf
from nanotf import smp

smp.init({"partitions": 1, "microbatches": 2})
tf.keras.backend.set_floatx("float64")
tf.keras.utils.set_random_seed(smp.dp_rank())  # first weights that differ

class Words(smp.DistributedModel):
    def __init__(self):
        super().__init__(dtype="float64")
        self.embed = tf.keras.layers.Embedding(20, 4, dtype="float64")
        self.out = tf.keras.layers.Dense(1, dtype="float64")

    def call(self, x, training=None):
        return self.out(tf.reduce_mean(self.embed(x), axis=1))

model, optimizer = Words(), tf.keras.optimizers.SGD(0.5)

@smp.step
def get_gradients(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
    return tape.gradient(loss, model.trainable_variables)

@tf.function
def train_step(x, y):
    gradients = [gradient.accumulate() for gradient in get_gradients(x, y)]
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))

rng = np.random.default_rng(0)
x, y = rng.integers(0, 20, (5, 16, 3)), rng.normal(size=(5, 16, 1))
rows, firsts = slice(smp.dp_rank() * 8, smp.dp_rank() * 8 + 8), []
smp.register_post_partition_hook(lambda: firsts.extend(w.tolist() for w in model.get_weights()))
for step in range(5):
    train_step(tf.constant(x[step, rows]), tf.constant(y[step, rows]))
own = [firsts, [w.tolist() for w in model.get_weights()]]
found = smp.allgather(own)
manager = smp.CheckpointManager(
    tf.train.Checkpoint(model=model), pathlib.Path(sys.argv[0]).with_name("checkpoints")
)
if smp.rank() == 1:  # when it looks into the folder, rank 0 has saved once more
    stock = tf.train.get_checkpoint_state
    tf.train.get_checkpoint_state = lambda *args: time.sleep(0.5) or stock(*args)
paths, kept = [manager.save(), manager.save()], model.get_weights()
for weight in model.trainable_variables:
    weight.assign(weight + 1.0)
assert manager.restore() == paths[-1] != paths[0], paths  # on both ranks
assert all((now == then).all() for now, then in zip(model.get_weights(), kept))
if smp.rank() == 0:
    assert found[0] == found[1]  # to the last bit
    print(json.dumps(found[0]))
"""


def test_copies_of_a_model_train_as_one(tmp_path: pathlib.Path) -> None:
    """Two copies with half of each batch get the weights of one with whole batches."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two ranks need two cores")
    script = tmp_path / "script.py"
    script.write_text(COPIES)
    firsts, lasts = json.loads(run_ranks(script).stdout)
    embed, kernel, bias = (tf.Variable(first, dtype=tf.float64) for first in firsts)
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 20, (5, 16, 3)), rng.normal(size=(5, 16, 1))
    for rows, right in zip(x, y, strict=True):
        with tf.GradientTape() as tape:
            means = tf.reduce_mean(tf.gather(embed, rows), axis=1)
            loss = tf.reduce_mean((means @ kernel + bias - right) ** 2)
        for variable, slope in zip(
            (embed, kernel, bias), tape.gradient(loss, [embed, kernel, bias]), strict=True
        ):
            variable.assign_sub(0.5 * tf.convert_to_tensor(slope))
    for found, variable in zip(lasts, (embed, kernel, bias), strict=True):
        np.testing.assert_allclose(found, variable, rtol=1e-10, atol=1e-12)
