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


@pytest.mark.both_generations
def test_an_optimizer_built_by_the_first_call_causes_no_retracing() -> None:
    model, optimizer, traced = dense(), tf.keras.optimizers.Adam(0.1), {"number": 0}

    @tf.function
    def step(inputs: Any) -> Any:
        traced["number"] += 1
        return plain_step(inputs, model, cross_entropy(), optimizer)

    @two
    def train(data: Any) -> int:
        for inputs in data:
            step(inputs)
        return int(optimizer.iterations)

    data, after = loops.dataset(32, 16), []
    for _ in range(3):
        assert train(data) == int(optimizer.iterations)
        after.append(traced["number"])
    assert after[0] == after[1] == after[2]
    assert int(optimizer.iterations) == 6


@pytest.mark.both_generations
def test_a_new_optimizer_of_the_same_code() -> None:
    model = dense()

    @two
    def train(data: Any, optimizer: Any) -> int:
        for inputs in data:
            plain_step(inputs, model, cross_entropy(), optimizer)
        return int(optimizer.iterations)

    data = loops.dataset(32, 16)
    first, other = (tf.keras.optimizers.Adam(0.1) for _ in range(2))
    assert [train(data, first) for _ in range(2)] == [2, 4]
    assert [train(data, other) for _ in range(2)] == [2, 4], "the code equals the first one's"
    assert int(first.iterations) == int(other.iterations) == 4


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
        return paths, all(same), nanotf.get_strategy().reduce("SUM", tf.ones([]), axis=None)

    paths, same, _ = train(loops.dataset())
    assert same
    assert [pathlib.Path(path).name for path in paths] == [
        *("c-1", "ckpt-2", "c-3", "ckpt-4", "c-5", "ckpt-6", "c-7", "ckpt-8")
    ]
    assert int(checkpoint.save_counter) == 7, "as in the last that was restored"
    assert [p.name for p in (tmp_path / "kept").glob("*.index")] == ["ckpt-8.index"]
    assert manager.checkpoints == [str(tmp_path / "kept" / "ckpt-8")]
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


# ------------------------------------------------------------------------- undivided calls
class Centred(tf.keras.layers.Layer):  # type: ignore[misc]
    """A layer whose rows depend on each other."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x: Any) -> Any:
        return self.scale * (x - tf.reduce_mean(x, axis=0))


def test_layers_whose_rows_depend_on_each_other(
    float64: None, capfd: pytest.CaptureFixture[str]
) -> None:
    def program(run: Any) -> Any:
        layer, marked = Centred(), nanotf.whole(Centred())

        @run
        def outputs(x: Any) -> Any:
            return layer(x), marked(x)

        x = loops.rows(7)[0]
        layer(x), marked(x)
        return outputs(x)

    for ours, theirs in zip(program(two), program(lambda f: f), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_fit_says_that_a_layer_runs_undivided(capfd: pytest.CaptureFixture[str]) -> None:
    layers = [tf.keras.layers.Input((loops.rows(7)[0].shape[-1],)), Centred()]
    model = nanotf.accelerate(tf.keras.Sequential(layers))
    x = loops.rows(7)[0]
    expected = model.predict(x, batch_size=7, verbose=0)
    found = model.predict(x, batch_size=7, verbose=0, num_processes=2)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    said = [line for line in capfd.readouterr().err.splitlines() if "undivided" in line]
    assert len(said) == 1
    assert said[0].startswith("nanotf: ")


class MoreInGraphs(tf.keras.layers.Layer):  # type: ignore[misc]
    """A layer that returns one tensor outside a tf.function, and two inside."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x: Any) -> Any:
        scaled = self.scale * x
        return [scaled] if tf.executing_eagerly() else [scaled, 2.0 * scaled]


def test_a_layer_with_more_outputs_in_a_graph(
    float64: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each graph has its own proof, and eager code another."""
    layer, x = MoreInGraphs(), loops.rows(7)[0]
    layer(x)
    traced = [tf.function(lambda x: layer(x)), tf.function(lambda x: layer(x + 0.0))]
    for one, double in two(lambda x: [function(x) for function in traced])(x):
        np.testing.assert_allclose(one, x)
        np.testing.assert_allclose(double, 2.0 * x)
    assert "undivided" not in capfd.readouterr().err


def test_whole_takes_layers() -> None:
    with pytest.raises(errors.InvalidArgumentTypeError, match=r"whole\(\) takes a layer"):
        nanotf.whole(3)


def test_a_function_that_calls_no_layer(caplog: pytest.LogCaptureFixture) -> None:
    two(lambda: 3)()
    assert "called no layer that could be divided" in caplog.text
    caplog.clear()
    model = dense()
    two(lambda x: model(x))(loops.rows(4)[0])
    assert "no layer" not in caplog.text


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


# ------------------------------------------------------------------------- contents of the heap
class Pair(tf.keras.Model):  # type: ignore[misc]
    """Has a layer that other models may share, a layer of its own, and attributes for notes."""

    def __init__(self, shared: Any) -> None:
        super().__init__()
        self.shared, self.own = shared, tf.keras.layers.Dense(1, kernel_initializer="ones")
        self.calls, self.seen, self.best = 0, [0.0], {"epoch": {"number": 0}}

    def call(self, x: Any) -> Any:
        return self.own(self.shared(x))


@pytest.mark.both_generations
def test_models_that_share_a_layer(float64: None) -> None:
    def program(run: Any) -> Any:
        tf.keras.utils.set_random_seed(1)
        shared = tf.keras.layers.Dense(2)
        first, second = Pair(shared), Pair(shared)
        x = loops.rows(8)[0]
        optimizer = tf.keras.optimizers.Adam(0.1)
        first(x), second(x)

        @run
        def train(models: Any) -> Any:
            assert models[0].shared is models[1].shared is shared
            for model in models:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(model(x)))
                variables = shared.trainable_variables
                gradients = tape.gradient(loss, variables)
                optimizer.apply_gradients(zip(gradients, variables, strict=True))

        train([first, second])
        assert first.shared is shared
        return [w.numpy() for w in (*first.weights, *second.weights)], int(optimizer.iterations)

    (ours, steps), (theirs, expected) = program(two), program(lambda f: f)
    assert steps == expected == 2
    for found, value in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-9)


@pytest.mark.both_generations
def test_attributes_that_the_loop_sets_on_a_model() -> None:
    def program(run: Any) -> Any:
        model = Pair(tf.keras.layers.Dense(2, kernel_initializer="ones"))
        seen = model.seen
        x = tf.ones([4, 3])
        model(x)

        @run
        def train() -> None:
            model.calls += 1
            model.seen.append(float(tf.reduce_sum(model(x))))
            model.best["epoch"]["number"] = model.calls
            model.note = "new"

        for _ in range(3):
            train()
        assert model.seen is seen
        return model.calls, list(model.seen), dict(model.best["epoch"]), model.note

    assert program(two) == program(lambda f: f)


class Attending(tf.keras.layers.Layer):  # type: ignore[misc]
    """Keeps the scores of its last call, as tutorials plot them, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.scores, self.calls = tf.keras.layers.Dense(3), None, 0

    def call(self, x: Any) -> Any:
        self.scores = tf.nn.softmax(self.dense(x))
        self.calls += 1
        return tf.reduce_sum(self.scores * x[:, :3], -1, keepdims=True)


@pytest.mark.both_generations
def test_attributes_that_a_call_sets_are_of_the_whole_batch(float64: None) -> None:
    def program(run: Any) -> Any:
        tf.keras.utils.set_random_seed(1)
        model = tf.keras.Sequential([tf.keras.layers.Dense(4), Attending()])
        x = loops.rows(7)[0]
        model(x)

        @run
        def outputs() -> Any:
            before = model.layers[1].calls
            model(x)
            return model.layers[1].scores, model.layers[1].calls - before

        scores, calls = outputs()
        np.testing.assert_array_equal(model.layers[1].scores, scores)
        return scores, calls, model.layers[1].calls

    (ours, *counted), (theirs, *expected) = program(two), program(lambda f: f)
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    assert counted == expected


@dataclasses.dataclass
class Best:
    loss: float
    epoch: int


class Blocks(tf.keras.layers.Layer):
    """Makes its layers when it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[Any] = []

    def build(self, shape: Any) -> None:
        for _ in range(2):
            self.blocks.append(tf.keras.layers.Dense(shape[-1]))
            self.blocks[-1].build(shape)
        self.shift = np.linspace(0.0, 1.0, shape[-1])
        self.relu = lambda x: tf.maximum(x, 0)
        super().build(shape)

    def call(self, x: Any) -> Any:
        for block in self.blocks:
            x = self.relu(block(x))
        return x + tf.cast(self.shift, x.dtype)


class Counting(tf.keras.Model):
    """An unbuilt model, with attributes that a loop fills."""

    def __init__(self, first: Any) -> None:
        super().__init__()
        self.parts = [first, Blocks(), tf.keras.layers.Dense(1)]
        self.epochs, self.best, self.totals = 0, None, []

    def call(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        return x


@pytest.mark.both_generations
@pytest.mark.parametrize("decorate", [tf.function, lambda step: step], ids=["graph", "eager"])
def test_attributes_of_models_built_by_the_call(float64: None, decorate: Any) -> None:
    def program(run: Any) -> Any:
        tf.keras.utils.set_random_seed(1)
        first = tf.keras.layers.Dense(4)
        models = [Counting(first), Counting(first)]
        optimizers = [tf.keras.optimizers.SGD(0.01) for _ in models]
        x = loops.rows(7)[0]

        def step(model: Any, optimizer: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        steps = [decorate(step) for _ in models]

        @run
        def train() -> Any:
            for model, optimizer, one_step in zip(models, optimizers, steps, strict=True):
                model.last = one_step(model, optimizer)
                model.totals.append(float(model.last))
                model.epochs += 1
                if model.best is None or model.best.loss > model.totals[-1]:
                    model.best = Best(model.totals[-1], model.epochs)
            return models[0].parts, models[0].trainable_variables

        for _ in range(2):
            parts, weights = train()
            assert all(map(lambda a, b: a is b, parts, models[0].parts))
            assert all(map(lambda a, b: a is b, weights, models[0].trainable_variables))
        noted = [(m.epochs, len(m.totals), m.best.epoch, len(m.parts[1].blocks)) for m in models]
        numbers = [(m.totals, m.best.loss, m.last, m.parts[1].shift, m(x)) for m in models]
        return noted, tf.nest.flatten(numbers)

    (noted, ours), (expected, theirs) = program(two), program(lambda f: f)
    assert noted == expected == [(2, 2, 2, 2)] * 2
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)


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


class Measured(tf.keras.layers.Layer):  # type: ignore[misc]
    """A layer that makes parts, and notes what it has seen, when it is built."""

    def build(self, shape: Any) -> None:
        self.parts = {f"part{i}": tf.keras.layers.Dense(2) for i in range(2)}
        self.seen, self.kept = types.SimpleNamespace(shape=tuple(shape)), [np.ones(2)]
        for part in self.parts.values():
            part.build(shape)
        super().build(shape)

    def call(self, x: Any) -> Any:
        return sum(part(x) for part in self.parts.values())


@pytest.mark.both_generations
def test_what_a_layer_makes_when_it_is_built_comes_home() -> None:
    layer, x = Measured(), tf.ones((4, 3))

    @two
    def train(x: Any) -> Any:
        return layer(x)

    first = train(x)
    assert layer.built and layer.seen.shape == (4, 3) and layer.kept[0].tolist() == [1.0, 1.0]
    assert list(layer.parts) == ["part0", "part1"] and len(layer.trainable_variables) == 4
    assert all(part.built for part in layer.parts.values())
    np.testing.assert_allclose(layer(x), first, rtol=1e-6)
    layer.parts["part0"].kernel.assign_add(tf.ones((3, 2)))
    np.testing.assert_allclose(train(x), first + 3.0, rtol=1e-6)
    model = tf.keras.Sequential([tf.keras.Input((3,)), layer])
    np.testing.assert_allclose(model.predict(np.ones((4, 3)), verbose=0), layer(x), rtol=1e-6)


@pytest.mark.both_generations
def test_layers_built_by_the_first_call_cause_no_retracing() -> None:
    layers, traced = [tf.keras.layers.Dense(8), tf.keras.layers.Dense(10)], {"number": 0}
    optimizer = tf.keras.optimizers.SGD(0.1)

    @tf.function
    def step(x: Any) -> Any:
        traced["number"] += 1
        with tf.GradientTape() as tape:
            out = layers[1](layers[0](x))
            loss = tf.reduce_mean(out**2)
        variables = [*layers[0].trainable_variables, *layers[1].trainable_variables]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    @two
    def train(x: Any) -> float:
        layers[1](layers[0](x))
        return float(step(x))

    losses, after = [], []
    for _ in range(3):
        losses.append(train(tf.ones((4, 3))))
        after.append(traced["number"])
    assert after[0] == after[1] == after[2]
    assert losses[0] > losses[1] > losses[2]
