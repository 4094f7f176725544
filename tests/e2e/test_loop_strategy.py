"""TensorFlow's own tf.distribute pattern, unchanged, inside `@nano`."""

from __future__ import annotations

import functools
import pathlib
import sys
from typing import Any

import loops
import numpy as np
import pytest
import tensorflow as tf
from loops import cross_entropy, dense, plain_step, plain_train
from processes import run_script

import nanotf
from nanotf.keras import nano, nano_multiprocessing

L = tf.keras.layers
BATCH = 16


@pytest.fixture(
    scope="module",
    params=["shm", "grpc"],
)
def run_on(request: pytest.FixtureRequest) -> Any:
    """Returns `nano` for two workers on one of the transports."""
    return functools.partial(nano, num_processes=2, transport=request.param)


def _official(x: Any, y: Any, directory: str) -> Any:
    """Runs TensorFlow's guide to custom training with tf.distribute, in float64."""
    strategy = nanotf.get_strategy()
    with strategy.scope():
        model = dense(regularizer="l2")
        optimizer = tf.keras.optimizers.SGD(0.1)
        loss_object = cross_entropy(reduction="none")
        accuracy = tf.keras.metrics.SparseCategoricalAccuracy()
        mean = tf.keras.metrics.Mean()
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)

    def compute_loss(labels: Any, predictions: Any) -> Any:
        per_example = loss_object(labels, predictions)
        loss = tf.nn.compute_average_loss(per_example, global_batch_size=BATCH)
        return loss + tf.nn.scale_regularization_loss(tf.add_n(model.losses))

    def train_step(inputs: Any) -> Any:
        images, labels = inputs
        with tf.GradientTape() as tape:
            predictions = model(images, training=True)
            loss = compute_loss(labels, predictions)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(labels, predictions)
        return loss

    def test_step(inputs: Any) -> None:
        images, labels = inputs
        mean.update_state(loss_object(labels, model(images, training=False)))

    @tf.function
    def distributed_train_step(inputs: Any) -> Any:
        losses = strategy.run(train_step, args=(inputs,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    @tf.function
    def distributed_test_step(inputs: Any) -> None:
        strategy.run(test_step, args=(inputs,))

    @tf.function
    def epoch_in_graph(data: Any) -> Any:
        total, batches = tf.constant(0.0, tf.float64), 0
        for inputs in data:
            losses = strategy.run(train_step, args=(inputs,))
            total += strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)
            batches += 1
        return total / tf.cast(batches, tf.float64)

    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    train = strategy.experimental_distribute_dataset(data)
    numbers = []
    for _ in range(2):
        total, batches = 0.0, 0
        for inputs in train:
            total += float(distributed_train_step(inputs))
            batches += 1
        for inputs in train:
            distributed_test_step(inputs)
        numbers += [total / batches, float(accuracy.result()), float(mean.result())]
    iterator = iter(train)
    for _ in range(2):  # a fixed number of steps
        numbers.append(float(distributed_train_step(next(iterator))))
    numbers.append(float(epoch_in_graph(train)))
    path = None
    if nanotf.is_chief():
        path = checkpoint.write(directory + "/chief")
    return numbers, model.get_weights(), path


def test_official_pattern(run_on: Any, float64: None, tmp_path: pathlib.Path) -> None:
    x, y = loops.rows(48)
    ours, weights, path = run_on()(_official)(x, y, str(tmp_path))
    theirs, expected, _ = _official(x, y, str(tmp_path / "alone"))
    np.testing.assert_allclose(ours, theirs, rtol=1e-9)
    loops.assert_same_variables(weights, expected)
    # Restored here, without a strategy.
    model = dense(seed=9)
    tf.train.Checkpoint(model=model).read(path).expect_partial()
    loops.assert_same_variables(model.get_weights(), expected)


@pytest.mark.thorough
def test_short_last_batches(run_on: Any, float64: None, tmp_path: pathlib.Path) -> None:
    x, y = loops.rows(39)
    ours, weights, _ = run_on()(_official)(x, y, str(tmp_path))
    theirs, expected, _ = _official(x, y, str(tmp_path / "alone"))
    np.testing.assert_allclose(ours, theirs, rtol=1e-9)
    loops.assert_same_variables(weights, expected)


def test_passed_model_under_the_strategy(run_on: Any) -> None:
    optimizer, loss_object = tf.keras.optimizers.SGD(0.1), cross_entropy(reduction="sum")

    @run_on()
    def train(model: Any, data: Any) -> None:
        strategy = nanotf.get_strategy()
        for inputs in strategy.experimental_distribute_dataset(data):
            strategy.run(plain_step, args=(inputs, model, loss_object, optimizer))

    with pytest.raises(nanotf.errors.WorkerError, match="made outside its scope"):
        train(dense(), loops.dataset())


def test_rank_and_size(run_on: Any) -> None:
    @run_on()
    def look(model: Any, data: Any) -> Any:
        strategy = nanotf.get_strategy()
        ranks = strategy.gather(tf.constant([nanotf.rank()]), axis=0).numpy().tolist()
        return (
            ranks,
            nanotf.size(),
            nanotf.is_chief(),
            isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy),
            strategy.num_replicas_in_sync,
        )

    assert look(dense(), loops.dataset()) == ([0, 1], 2, True, True, 2)


def test_variables_made_inside_start_equal(run_on: Any) -> None:
    @run_on()
    def make(data: Any, optimizer: Any) -> Any:
        weight = tf.Variable(tf.random.normal([3]))
        gathered = nanotf.get_strategy().gather(weight.read_value()[None], axis=0)
        return weight, gathered

    weight, gathered = make(loops.dataset(), tf.keras.optimizers.SGD())
    assert isinstance(weight, tf.Variable)
    np.testing.assert_array_equal(gathered[0], gathered[1])
    np.testing.assert_array_equal(gathered[0], weight.numpy())


# ------------------------------------------------------------------------------ checkpoints
@pytest.mark.both_generations
def test_checkpoint_manager(
    run_on: Any, float64: None, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "checkpoints"
    model, optimizer = dense(), tf.keras.optimizers.Adam(0.01)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    manager = nanotf.CheckpointManager(checkpoint, directory, max_to_keep=2)
    step = nano_multiprocessing(tf.function(plain_step))

    @run_on()
    def train(model: Any, data: Any, loss_object: Any, optimizer: Any, epochs: int) -> Any:
        restored = manager.restore_or_initialize()
        paths = []
        for _ in range(epochs):
            for inputs in data:
                step(inputs, model, loss_object, optimizer)
            paths.append(manager.save())
        total = nanotf.get_strategy().gather(
            tf.reduce_sum(tf.abs(model.trainable_variables[0]))[None], axis=0
        )
        return restored, paths, total.numpy().tolist()

    restored, paths, _ = train(model, loops.dataset(), cross_entropy(), optimizer, 3)
    assert restored is None
    assert paths == [str(directory / f"ckpt-{i}") for i in (1, 2, 3)]
    assert sorted(p.stem for p in directory.glob("*.index")) == ["ckpt-2", "ckpt-3"]
    assert [p for p in tmp_path.iterdir() if p != directory] == []
    after = model.get_weights()
    # The parent's objects count and restore as if they had saved it.
    assert int(checkpoint.save_counter) == 3
    for variable in model.trainable_variables:
        variable.assign(tf.zeros_like(variable))
    assert manager.checkpoints == paths[1:], "the parent's manager knows the workers' checkpoints"
    assert manager.restore_or_initialize() == paths[-1]
    loops.assert_same_variables(model.get_weights(), after)
    # Every worker also restores the same values.
    for variable in model.trainable_variables:
        variable.assign(tf.zeros_like(variable))
    capsys.readouterr()
    again, _, totals = train(model, loops.dataset(), cross_entropy(), optimizer, 0)
    assert again == paths[-1]
    assert capsys.readouterr().out.count(f"nanotf: Continues from {again}.\n") == 1
    np.testing.assert_allclose(totals, [np.abs(after[0]).sum()] * 2)
    loops.assert_same_variables(model.get_weights(), after)


def test_checkpoint_manager_in_one_process(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value, steps = tf.Variable(1.0), tf.Variable(40)
    manager = nanotf.CheckpointManager(
        tf.train.Checkpoint(value=value, steps=steps),
        tmp_path,
        3,
        checkpoint_name="mine",
        step_counter=steps,
    )
    assert manager.latest_checkpoint is None
    path = manager.save()
    value.assign(5.0)
    steps.assign(41)
    assert manager.restore_or_initialize() == path == str(tmp_path / "mine-1")
    assert capsys.readouterr().out == f"nanotf: Continues from {path}, after step 40.\n"
    assert float(value) == 1.0
    assert manager.checkpoints == [path]
    assert manager.directory == str(tmp_path)


def test_saved_by_the_chief_alone(run_on: Any, float64: None, tmp_path: pathlib.Path) -> None:
    """In stock TensorFlow the chief would wait for the others, to make variables with them."""
    model = dense()
    model.compile("adam", cross_entropy())
    other = tf.Variable(0.0)
    checkpoint, places = tf.train.Checkpoint(other=other), list(range(3))
    step = nano_multiprocessing(tf.function(plain_step))
    optimizer = tf.keras.optimizers.SGD(0.1)

    @run_on()
    def train(model: Any, data: Any, loss_object: Any) -> Any:
        with nanotf.get_strategy().scope():
            inner = tf.train.Checkpoint(model=model, optimizer=optimizer)
        paths = []
        for place, inputs in zip(places, data, strict=False):
            step(inputs, model, loss_object, optimizer)
            if nanotf.is_chief():
                paths += [inner.save(f"{tmp_path}/inner"), checkpoint.save(f"{tmp_path}/outer")]
                model.save_weights(f"{tmp_path}/{place}.weights.h5")
                model.save(f"{tmp_path}/{place}.keras")
        return paths

    paths = train(model, loops.dataset(), cross_entropy())
    assert [pathlib.Path(p).name for p in paths[::2]] == ["inner-1", "inner-2", "inner-3"]
    assert int(checkpoint.save_counter) == 3, "the chief's counter counts"
    for suffix in (".weights.h5", ".keras"):
        assert len(list(tmp_path.glob(f"?{suffix}"))) == 3
    restored = dense(seed=9)
    restored.load_weights(str(tmp_path / "2.weights.h5"))
    loops.assert_same_variables(restored.get_weights(), model.get_weights())
    restored = dense(seed=9)
    tf.train.Checkpoint(model=restored).read(paths[-2]).expect_partial()
    loops.assert_same_variables(restored.get_weights(), model.get_weights())


# ----------------------------------------------------------------------------------- prints
def test_prints_of_rank_0_arrive(run_on: Any, capsys: pytest.CaptureFixture[str]) -> None:
    @tf.function
    def in_graph(x: Any) -> Any:
        tf.print("from a graph:", tf.reduce_sum(x))
        return x

    @run_on()
    def talk(data: Any, model: Any) -> None:
        print("first", end="")
        print(" line", nanotf.rank())
        print("an error", file=sys.stderr)
        in_graph(tf.ones([3]))
        tf.print("eagerly", 4)
        for done in range(3):  # as tqdm writes
            sys.stderr.write(f"\r{done}/2 batches")
            sys.stderr.flush()
        sys.stderr.write("\n")
        print("no end of line", end="")

    talk(loops.dataset(), dense())
    out, err = capsys.readouterr()
    assert out == "first line 0\nno end of line"
    assert err == (
        "an error\nfrom a graph: 3\neagerly 4\n\r0/2 batches\r1/2 batches\r2/2 batches\n"
    ), "in the order of the calls"


@pytest.mark.thorough
def test_script_of_the_readme(tmp_path: pathlib.Path) -> None:
    done = run_script(
        tmp_path,
        """
        import tensorflow as tf
        from nanotf.keras import nano, nano_multiprocessing
        from sklearn.datasets import load_digits

        digits = load_digits()
        images, labels = (digits.images[:256] / 16).astype("float32"), digits.target[:256]
        dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(64)
        tf.keras.utils.set_random_seed(0)
        model = tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(10)])
        loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = tf.keras.optimizers.SGD(0.1)

        @nano_multiprocessing
        @tf.function
        def train_step(inputs, model, loss_object, optimizer):
            x, y = inputs
            with tf.GradientTape() as tape:
                loss = loss_object(y, model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return loss

        @nano(num_processes=2)
        def train_whole_data(model, dataset, loss_object, optimizer, train_step):
            for inputs in dataset:
                print(float(train_step(inputs, model, loss_object, optimizer)))

        train_whole_data(model, dataset, loss_object, optimizer, train_step)
        print("weights", len(model.get_weights()), int(optimizer.iterations.numpy()))
        """,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    assert lines[4] == "weights 2 4"
    losses = [float(line) for line in lines[:4]]
    assert losses[3] < losses[0]


@pytest.mark.thorough
def test_module_with_its_own_globals(tmp_path: pathlib.Path) -> None:
    (tmp_path / "mine.py").write_text(
        """
import numpy as np, tensorflow as tf
from nanotf.keras import nano, nano_multiprocessing
model = tf.keras.Sequential([tf.keras.layers.Input((2,)), tf.keras.layers.Dense(1)])
optimizer = tf.keras.optimizers.SGD(0.1)
data = tf.data.Dataset.from_tensor_slices(np.ones((8, 2), "float32")).batch(4)

@nano_multiprocessing
@tf.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss

@nano(num_processes=2)
def train():
    return [float(step(x)) for x in data]
"""
    )
    done = run_script(
        tmp_path,
        """
        import mine
        before = mine.model.get_weights()[0].copy()
        assert len(mine.train()) == 2
        assert (mine.model.get_weights()[0] != before).all()
        print(int(mine.optimizer.iterations.numpy()))
        """,
    )
    assert done.stdout.split() == ["2"]


@pytest.mark.thorough
def test_loss_sequence_follows(run_on: Any) -> None:
    """The promise for float32: 1e-5 relative."""
    step = nano_multiprocessing(tf.function(plain_step))
    found, expected = dense(), dense()
    ours = run_on()(plain_train)(
        found, loops.dataset(), cross_entropy(), tf.keras.optimizers.SGD(0.1), step
    )
    theirs = plain_train(
        expected, loops.dataset(), cross_entropy(), tf.keras.optimizers.SGD(0.1), plain_step
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_weights_made_after_their_checkpoint_was_read(tmp_path: pathlib.Path) -> None:
    """Keras 2 makes them from the checkpoint's values; workers must have the same values."""

    def layer() -> Any:
        return tf.keras.layers.Dense(2, kernel_initializer="ones")

    saved, path = layer(), str(tmp_path / "checkpoint")
    saved.build((None, 3))
    saved.kernel.assign(tf.reshape(tf.range(6.0), (3, 2)))
    tf.train.Checkpoint(layer=saved).write(path)

    @nano(num_processes=2)
    def run(data: Any) -> Any:
        made = layer()
        status = tf.train.Checkpoint(layer=made).read(path)
        with nanotf.get_strategy().scope():
            made.build((None, 3))
        status.assert_existing_objects_matched()
        kernel = tf.convert_to_tensor(made.kernel)
        return kernel, nanotf.get_strategy().reduce("SUM", kernel, axis=None)

    kernel, total = run(tf.data.Dataset.range(2).batch(2))
    np.testing.assert_array_equal(kernel, saved.kernel)
    np.testing.assert_array_equal(total, 2 * kernel)
