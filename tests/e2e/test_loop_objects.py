"""Results of a `@nano` function in the user's objects, in files and in graphs."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import random
import types
from typing import Any

import loops
import numpy as np
import pytest
import tensorflow as tf
from loops import cross_entropy, dense, plain_step

import nanotf
from nanotf import errors
from nanotf.keras import nano, nano_multiprocessing
from nanotf.shipping.objects import user_modules

two = nano(num_processes=2)
COUNT = 0
SEEN: list[int] = []


@dataclasses.dataclass
class Progress:
    """An early-stopping counter, as in users' loops."""

    best: float = 10.0
    waited: int = 0
    history: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Slotted:
    """An object without a dict of attributes."""

    __slots__ = ("value",)
    value: int


class Named(dict[str, Any]):
    """A dict with attributes."""

    size = 0


def _objects(run: Any) -> Any:
    history, by_name, seen = [1.0], {"steps": 0}, {1}
    recent: collections.deque[int] = collections.deque([1], maxlen=2)
    counts: collections.Counter[str] = collections.Counter()
    buffer, progress, slotted = np.zeros((3, 2)), Progress(), Slotted(0)
    named, namespace = Named(a=1), types.SimpleNamespace(step=0)
    generators = [np.random.default_rng(0), np.random.RandomState(1), random.Random(2)]
    shared = [history, history]
    number = 0

    def add() -> None:
        nonlocal number
        number += 1

    @run
    def train(given: Any) -> Any:
        global COUNT
        for step in range(3):
            add()
            COUNT += 1
            SEEN.append(COUNT)
            history.append(float(step))
            by_name["steps"] += 1
            by_name["last"] = history
            seen.add(step)
            recent.append(step)
            counts["steps"] += 1
            buffer[step % 3] = step
            progress.waited += 1
            progress.history.append(step)
            slotted.value = step
            named["b"], named.size = step, step
            namespace.step = number
            given.append(number)
            generators[0].normal(), generators[1].rand(), generators[2].random()
        return shared, number

    given = [buffer]
    returned, same = train(given)
    assert by_name["last"] is history
    assert returned[0] is history
    assert returned is shared
    assert given[0] is buffer
    return (
        [*history, same, number, namespace.step, by_name["steps"], *seen, *recent, *buffer.ravel()],
        [
            counts["steps"],
            progress.waited,
            *progress.history,
            slotted.value,
            named["b"],
            named.size,
        ],
        [generators[0].normal(), generators[1].rand(), generators[2].random()],
        list(by_name),
        given[1:],
    )


@pytest.mark.both_generations
def test_objects_filled_by_the_loop() -> None:
    global COUNT
    expected = _objects(lambda function: function)
    assert COUNT == 3
    assert SEEN == [1, 2, 3]
    COUNT = 0
    SEEN.clear()
    assert _objects(two) == expected
    assert COUNT == 3
    assert SEEN == [1, 2, 3]
    COUNT = 0
    SEEN.clear()


def _objects_of_keras(run: Any) -> Any:
    """A loop that calls Keras's callbacks itself, as loops without `fit` do."""
    model, bar = dense(), tf.keras.utils.Progbar(3, verbose=0)
    stopping = tf.keras.callbacks.EarlyStopping("loss", patience=5, restore_best_weights=True)
    history = tf.keras.callbacks.History()

    @run
    def train() -> None:
        for callback in (stopping, history):
            callback.set_model(model)
            callback.on_train_begin()
        for epoch, loss in enumerate((2.0, 1.0, 3.0)):
            bar.update(epoch + 1, [("loss", loss)])
            for callback in (stopping, history):
                callback.on_epoch_end(epoch, {"loss": loss})

    train()
    assert stopping.model is model
    return (
        (stopping.best, stopping.best_epoch, stopping.wait),
        [weight.tolist() for weight in stopping.best_weights],
        (history.epoch, history.history),
        (bar._seen_so_far, bar._values),
    )


@pytest.mark.both_generations
def test_objects_of_keras_that_the_loop_changes() -> None:
    assert _objects_of_keras(two) == _objects_of_keras(lambda function: function)


class Holder(tf.keras.layers.Layer):  # type: ignore[misc]
    """A layer that holds objects whose state is not in their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = tf.data.Dataset.range(3).batch(2)
        self.strategy = tf.distribute.get_strategy()
        self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)
        self.seen = {"steps": 0}

    def call(self, inputs: Any) -> Any:
        return inputs


@pytest.mark.both_generations
def test_a_layer_that_holds_datasets_and_tables(tmp_path: pathlib.Path) -> None:
    layer, log = Holder(), tf.keras.callbacks.CSVLogger(str(tmp_path / "log.csv"))
    log.set_model(layer)

    @two
    def train() -> int:
        log.on_train_begin()  # it holds an open file from now on
        layer.seen["steps"] += len(list(layer.rows))
        log.keys = ["loss"]
        return 7

    assert train() == 7
    assert layer.seen["steps"] == 2
    assert log.keys == ["loss"]
    assert int(layer.table.size()) == 0


class Trainer:
    """All parts of a loop, in one object."""

    def __init__(self) -> None:
        self.model, self.optimizer = dense(), tf.keras.optimizers.SGD(0.1)
        self.losses: list[float] = []
        self.epoch = 0
        self.best: Any = None

    @nano_multiprocessing
    @tf.function
    def step(self, inputs: Any) -> Any:
        return plain_step(inputs, self.model, cross_entropy(), self.optimizer)

    @two
    def train(self, data: Any) -> None:
        for inputs in data:
            self.losses.append(float(self.step(inputs)))
        self.epoch += 1
        self.best = self.model.get_weights()


def test_attributes_of_self() -> None:
    trainer = Trainer()
    for epoch in range(2):
        trainer.train(loops.dataset())
        assert trainer.epoch == epoch + 1
        assert len(trainer.losses) == 4 * (epoch + 1)
        loops.assert_same_variables(trainer.best, trainer.model.get_weights())


def test_objects_filled_by_the_loop_cause_no_retracing() -> None:
    history: list[float] = []
    traced = {"number": 0}
    factor = tf.Variable(2.0)

    @tf.function
    def step(x: Any) -> Any:
        traced["number"] += 1
        return factor * tf.reduce_mean(x)

    @two
    def train(data: Any) -> None:
        for x, _ in data:
            history.append(float(step(x)))

    data = loops.dataset(32, 16)
    for call in range(3):
        train(data)
        assert len(history) == 2 * (call + 1)
        assert traced == {"number": 1}


def test_contents_that_cannot_be_sent_back() -> None:
    kept: list[Any] = []

    @two
    def train() -> None:
        kept.append(i for i in range(3))

    with pytest.raises(
        errors.ShippingError, match=r"leaves in an object of its caller's.*generator"
    ):
        train()
    assert kept == []


class _Anything:
    """An object that has every attribute, as mocks and SQLAlchemy's `func` do."""

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


def test_a_global_with_every_attribute() -> None:
    anything = _Anything()
    assert user_modules.unwrapped(anything) is anything
    assert user_modules.unwrapped(tf.function(dense)) is dense


# --------------------------------------------------------------------------------------- files
@pytest.mark.both_generations
def test_files_are_written_once(tmp_path: pathlib.Path) -> None:
    model, optimizer = dense(), tf.keras.optimizers.SGD(0.1)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    outside = tf.summary.create_file_writer(str(tmp_path / "outside"))
    manager = tf.train.CheckpointManager(checkpoint, str(tmp_path / "kept"), max_to_keep=1)

    @two
    def train(data: Any) -> Any:
        inside = tf.summary.create_file_writer(str(tmp_path / "inside"))
        paths = []
        for number, inputs in enumerate(data):
            loss = plain_step(inputs, model, cross_entropy(), optimizer)
            for writer in (outside, inside):
                with writer.as_default(step=number):
                    tf.summary.write("loss", loss)
            paths += [checkpoint.save(str(tmp_path / "alone" / "c")), manager.save()]
        inside.close()
        model.save_weights(str(tmp_path / "saved.weights.h5"))
        before = model.get_weights()
        model.load_weights(str(tmp_path / "saved.weights.h5"))
        model.save(str(tmp_path / "saved.keras"))
        same = [np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True)]
        checkpoint.restore(tf.train.latest_checkpoint(str(tmp_path / "alone")))
        knows = manager.checkpoints == [manager.latest_checkpoint] == paths[-1:]
        return paths, all(same), nanotf.get_strategy().reduce("SUM", float(knows), axis=None)

    paths, same, knowing = train(loops.dataset())
    assert same
    assert knowing == 2.0, "each worker's manager knows what it has saved"
    assert [pathlib.Path(path).name for path in paths] == [
        *("c-1", "ckpt-2", "c-3", "ckpt-4", "c-5", "ckpt-6", "c-7", "ckpt-8")
    ]
    assert int(checkpoint.save_counter) == 7, "as in the last that was restored"
    assert [p.name for p in (tmp_path / "kept").glob("*.index")] == ["ckpt-8.index"]
    assert manager.checkpoints == [manager.latest_checkpoint] == [str(tmp_path / "kept/ckpt-8")]
    outside.flush()
    for directory in ("outside", "inside"):
        paths = [path.name for path in (tmp_path / directory).iterdir()]
        assert len(paths) == 1, (directory, paths)
        path = str(tmp_path / directory / paths[0])
        records = [tf.compat.v1.Event.FromString(r.numpy()) for r in tf.data.TFRecordDataset(path)]
        assert [event.step for event in records if event.HasField("summary")] == [0, 1, 2, 3]
    restored = dense(seed=9)
    restored.load_weights(str(tmp_path / "saved.weights.h5"))
    loops.assert_same_variables(restored.get_weights(), model.get_weights())


# --------------------------------------------------------------------------------- tf.function
def test_options_of_functions(float64: None) -> None:
    traced: list[int] = []
    model = dense()
    x = tf.TensorSpec([None, loops.FEATURES], tf.float64)

    @nano_multiprocessing
    @tf.function(input_signature=[x], autograph=False)
    def step(x: Any) -> Any:
        traced.append(1)
        return tf.reduce_mean(model(x))

    @tf.function(jit_compile=True)
    def compiled(x: Any) -> Any:
        return tf.reduce_mean(model(x))

    @two
    def run() -> list[float]:
        rows = [loops.rows(n)[0].astype("float64") for n in (3, 4, 5, 1)]
        return [float(f(x)) for x in rows for f in (step, compiled)]

    found = run()
    assert traced == [1]
    assert len(found) == 8
    np.testing.assert_allclose(found[::2], found[1::2], rtol=1e-10)


# ---------------------------------------------------------------------------------- divergence
def test_workers_that_get_different_results() -> None:
    model = dense()

    @nano_multiprocessing
    def step(x: Any) -> Any:
        return {"loss": tf.reduce_mean(model(x)) * (1.0 + nanotf.rank()), "rows": len(x)}

    @two
    def train(data: Any) -> None:
        for x, _ in data:
            step(x)

    rule = r"after step 1, step, the workers differ in value 0 of what it returns"
    with pytest.raises(errors.DivergedError, match=rule):
        train(loops.dataset())


def test_variables_that_differ() -> None:
    @two
    def train(model: Any) -> None:
        model.trainable_variables[1].assign_add(tf.ones([6]) * float(nanotf.rank()))

    with pytest.raises(errors.DivergedError, match=r"they differ in the variable '.*bias"):
        train(dense())


@pytest.mark.both_generations
def test_keras_own_loops_inside(float64: None) -> None:
    def program(run: Any) -> Any:
        @run
        def train(x: Any, y: Any) -> Any:
            model = dense()
            model.compile("sgd", cross_entropy(), metrics=["accuracy"])
            history = model.fit(x, y, batch_size=7, epochs=2, shuffle=False, verbose=0).history
            return (
                history,
                model.evaluate(x, y, verbose=0),
                model.predict(x, verbose=0),
                model.train_on_batch(x[:5], y[:5]),
                model.predict_on_batch(x[:3]),
                model.get_weights(),
            )

        return train(*loops.rows(19))

    ours, theirs = (tf.nest.flatten(program(run)) for run in (two, lambda f: f))
    for found, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9)
