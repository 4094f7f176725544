"""`smp.DistributedModel.from_keras`: Keras's `fit` in microbatches, partitions and copies."""

from __future__ import annotations

import os
import pathlib
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from processes import run_ranks
from sklearn.datasets import load_digits

from nanotf import smp
from nanotf.compat import eager_context, keras_optimizers
from nanotf.compat.versions import is_keras_3
from nanotf.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    JobError,
    ModelError,
    UnavailableError,
    WorkerDied,
)
from nanotf.machine import topology
from nanotf.pool import backends
from nanotf.sagemaker.smp import runtime

PROGRAM = pathlib.Path(__file__).with_name("keras_partitions.py")

needs_two_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores"
)


@pytest.fixture(autouse=True)
def _begins_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(runtime._here, "config", None)
    yield


@pytest.mark.thorough
@pytest.mark.both_generations
@needs_two_cores
@pytest.mark.parametrize("partitions", [1, 2])
def test_a_script_of_ranks(partitions: int, tmp_path: pathlib.Path) -> None:
    """History with validation, predictions, memory, and a file that plain Keras loads.

    With one partition, the two ranks hold copies of the model, and share each batch.
    """
    done = run_ranks(PROGRAM, str(tmp_path), str(partitions))
    for rank in (0, 1):
        assert f"rank {rank}: done" in done.stdout, done.stdout + done.stderr


@pytest.mark.both_generations
def test_slots_are_in_the_order_of_the_variables() -> None:
    """Keras saves and restores an optimizer's variables in this order."""
    smp.init({"partitions": 1, "microbatches": 2})
    layers, shapes = tf.keras.layers, []
    for is_divided in (False, True):
        model = tf.keras.Sequential([tf.keras.Input((3,)), layers.Dense(5), layers.Dense(2)])
        if is_divided:
            model = smp.DistributedModel.from_keras(model)
        model.compile("adam", "mse")
        model.fit(np.ones((8, 3)), np.ones((8, 2)), batch_size=4, verbose=0)
        variables = keras_optimizers.optimizer_variables(model.optimizer)
        shapes.append([tuple(each.shape) for each in variables])
    assert shapes[0] == shapes[1]


def _dense(**options: object) -> tf.keras.Model:
    return tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1, **options)])


def _check_equal(mine: Any, plain: Any) -> None:
    """Checks the weights of a model in partitions against those of plain Keras."""
    tf.nest.map_structure(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-8), mine, plain
    )


def _digits() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    x, y = load_digits(return_X_y=True)
    return x[:150] / 16, y[:150]


def _classifier(dtype: str = "float64") -> tf.keras.Model:
    tf.keras.utils.set_random_seed(1)
    layers = tf.keras.layers
    inputs = tf.keras.Input((64,), dtype=dtype)
    first = layers.Dense(24, activation="tanh", dtype=dtype)(inputs)
    second = layers.Dense(24, activation="relu", dtype=dtype)(first)
    joined = layers.Add(dtype=dtype)([first, second])
    return tf.keras.Model(inputs, layers.Dense(10, dtype=dtype)(joined))


def _compile(model: Any) -> None:
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])


def _train(model: Any) -> Any:
    """Trains twice, as scripts do that look at the model in between; returns all numbers."""
    x, y = _digits()
    _compile(model)
    tf.keras.utils.set_random_seed(3)
    first = model.fit(x, y, batch_size=59, epochs=2, validation_split=0.2, verbose=0).history
    model.optimizer.learning_rate = 0.003
    stop = tf.keras.callbacks.EarlyStopping("loss")
    second = model.fit(x, y, batch_size=59, verbose=0, callbacks=[stop]).history
    tested = model.evaluate(x, y, verbose=0)
    predicted = model.predict(x, verbose=0)
    return first, second, tested, predicted, model.get_weights(), stop.best, np.random.rand()


def _check_report(model: Any) -> None:
    """A report of the last step; no worker keeps variables of earlier calls, or of other parts."""
    history = model.fit(*_digits(), batch_size=59, verbose=0)
    assert smp.last_report() is history.nanotf
    ranks, whole = history.nanotf.ranks, 8 * model.count_params()
    assert [len(each.blocks) for each in ranks] == [8, 8]
    assert sum(each.weight_bytes for each in ranks) == whole
    assert sum(each.other_variable_bytes for each in ranks) <= 1.1 * 2 * whole  # Adam's slots
    assert all(each.peak_bytes > 2**20 for each in ranks)


@needs_two_cores
@pytest.mark.both_generations
def test_a_plain_script_trains_in_partitions(tmp_path: pathlib.Path) -> None:
    """`fit` starts the ranks; weights, slots, callbacks and random states come back."""
    floats = tf.keras.backend.floatx()
    tf.keras.backend.set_floatx("float64")
    try:
        model = smp.DistributedModel.from_keras(_classifier(), partitions=2, microbatches=4)
        found, expected = _train(model), _train(_classifier())
        tf.nest.map_structure(
            lambda mine, plain: np.testing.assert_allclose(mine, plain, rtol=1e-10, atol=1e-10),
            found,
            expected,
        )
        assert int(model.optimizer.iterations) == 9
        _check_report(model)
        model.save_model(tmp_path / "digits.keras")
        loaded = tf.keras.models.load_model(tmp_path / "digits.keras")
        np.testing.assert_allclose(
            loaded.predict(_digits()[0], verbose=0), model.predict(_digits()[0], verbose=0)
        )
    finally:
        tf.keras.backend.set_floatx(floats)


@needs_two_cores
@pytest.mark.both_generations
@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_optimizers_that_keep_unlike_slots(name: str) -> None:
    """Slots of some variables alone come back, too, so that a second `fit` continues with them."""
    kind = getattr(tf.keras.optimizers, name, None)
    if kind is None:
        pytest.skip(f"this Keras has no {name}")
    x, y = _digits()
    found = []
    for change in (lambda m: smp.DistributedModel.from_keras(m, 2, microbatches=2), lambda m: m):
        model = change(_classifier("float32"))  # Keras's Muon takes no other dtype
        model.compile(kind(0.01), tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        calls = [model.fit(x, y, batch_size=50, shuffle=False, verbose=0) for _ in range(2)]
        found.append(([call.history for call in calls], model.get_weights()))
    tf.nest.map_structure(
        lambda mine, plain: np.testing.assert_allclose(mine, plain, rtol=1e-5, atol=1e-6), *found
    )


class CountsUpdates(tf.keras.optimizers.SGD):  # type: ignore[misc]
    """An optimizer with a variable that is no slot: in each partition, it counts other updates."""

    def build(self, variables: Any) -> None:
        if not hasattr(self, "seen"):
            self.seen = self.add_variable(shape=(), name="seen", dtype="float32")
        super().build(variables)

    def update_step(self, gradient: Any, variable: Any, *rate: Any) -> None:
        self.seen.assign_add(tf.cast(tf.size(gradient), "float32"))
        super().update_step(gradient, variable, *rate)


@needs_two_cores
@pytest.mark.both_generations
def test_state_that_differs_between_partitions_is_not_taken_for_one() -> None:
    x, y = _digits()
    model = smp.DistributedModel.from_keras(_classifier(), partitions=2)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(CountsUpdates(0.01), loss)
    with pytest.raises(UnavailableError, match=r"seen.* of CountsUpdates, which differ"):
        model.fit(x, y, verbose=0)


@needs_two_cores
@pytest.mark.both_generations
def test_an_optimizer_that_compile_gets_again_keeps_its_slots() -> None:
    x, y = _digits()
    loss, found = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), []
    for change in (lambda m: smp.DistributedModel.from_keras(m, 2), lambda m: m):
        model, optimizer = change(_classifier()), tf.keras.optimizers.Adam(0.01)
        for metrics in ([], ["accuracy"]):
            model.compile(optimizer, loss, metrics=metrics)
            model.fit(x, y, batch_size=50, shuffle=False, verbose=0)
        found.append(model.get_weights())
    _check_equal(*found)


@needs_two_cores
@pytest.mark.both_generations
@pytest.mark.parametrize("is_new", [False, True])
def test_variables_that_are_frozen_between_two_fits(is_new: bool) -> None:
    """Plain Keras ignores the change until compile is called; an old optimizer has other slots."""
    x, y = _digits()
    loss, found = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), []
    for change in (lambda m: smp.DistributedModel.from_keras(m, 2), lambda m: m):
        model = change(_classifier())
        model.compile(tf.keras.optimizers.Adam(0.01), loss)
        model.fit(x, y, batch_size=50, shuffle=False, verbose=0)
        model.layers[1].trainable = False
        if is_new:
            model.compile(tf.keras.optimizers.Adam(0.01), loss)
        elif not found:
            with pytest.raises(UnavailableError, match=r"Call compile\(\) with a new optimizer"):
                model.fit(x, y, batch_size=50, shuffle=False, verbose=0)
            return
        model.fit(x, y, batch_size=50, shuffle=False, verbose=0)
        found.append(model.get_weights())
    _check_equal(*found)


@needs_two_cores
@pytest.mark.both_generations
def test_variables_that_are_excluded_from_weight_decay() -> None:
    """The optimizer knows them by keys, which must name the same variables in the ranks."""
    x, y = _digits()
    loss, found = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), []
    for change in (lambda m: smp.DistributedModel.from_keras(m, 2), lambda m: m):
        model = _classifier()
        optimizer = tf.keras.optimizers.AdamW(0.01, weight_decay=0.5)
        optimizer.exclude_from_weight_decay([model.layers[1].kernel, model.layers[-1].kernel])
        model = change(model)
        model.compile(optimizer, loss)
        model.fit(x, y, batch_size=50, shuffle=False, verbose=0)
        found.append(model.get_weights())
    _check_equal(*found)


@needs_two_cores
@pytest.mark.both_generations
@pytest.mark.parametrize(
    ("used", "stops", "given"),
    [
        (0, False, {"weight_decay": 0.5}),
        (1, True, {"weight_decay": 0.5}),
        (0, False, {"use_ema": True, "ema_momentum": 0.9}),
        pytest.param(0, False, None, marks=pytest.mark.skipif(not is_keras_3(), reason="refused")),
    ],
    ids=["decay", "decay-stopped", "ema", "nadam"],
)
def test_variables_that_no_loss_depends_on(
    used: int, stops: bool, given: dict[str, Any] | None
) -> None:
    """With gradients of zeros, they would decay. But once, a partition has none at all.

    Moving averages are those of all variables, and Nadam's product is one for all.
    """
    x, y = _digits()
    loss, found = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), []
    layers = tf.keras.layers
    for partitions in (2, None):
        tf.keras.utils.set_random_seed(1)
        inputs = tf.keras.Input((64,), dtype="float64")
        early = layers.Dense(10, dtype="float64", name="early")(inputs)
        hidden = layers.Dense(40, dtype="float64")(inputs)
        if stops:
            hidden = layers.Lambda(tf.stop_gradient, dtype="float64")(hidden)
        late = layers.Dense(10, dtype="float64", name="late")(hidden)
        model = tf.keras.Model(inputs, [early, late])
        if partitions:
            model = smp.DistributedModel.from_keras(model, partitions, microbatches=2)
        optimizers = tf.keras.optimizers
        optimizer = optimizers.Nadam(0.01) if given is None else optimizers.AdamW(0.01, **given)
        model.compile(optimizer, [loss if used == n else None for n in (0, 1)])
        for _ in range(2):
            model.fit(x, [y, y], batch_size=50, shuffle=False, verbose=0)
        found.append(model.get_weights())
    _check_equal(*found)


@needs_two_cores
@pytest.mark.both_generations
def test_a_loss_that_depends_on_no_variable() -> None:
    layers = [tf.keras.Input((8,)), tf.keras.layers.Dense(8), tf.keras.layers.Dense(8)]
    whole = tf.keras.Sequential([*layers, tf.keras.layers.Lambda(tf.stop_gradient)])
    model = smp.DistributedModel.from_keras(whole, 2)
    model.compile("sgd", "mse")
    with pytest.raises(ModelError, match="no gradients for any variable"):
        model.fit(np.ones((8, 8)), np.ones((8, 8)), verbose=0)


class CountsCalls(tf.keras.layers.Layer):  # type: ignore[misc]
    """Counts its calls, and adds noise that differs from call to call."""

    def build(self, _: Any) -> None:
        self.calls = self.add_weight(shape=(), name="calls", initializer="zeros", trainable=False)
        if is_keras_3():
            self.seeds = tf.keras.random.SeedGenerator(3)

    def call(self, x: Any) -> Any:
        self.calls.assign_add(1.0)
        if is_keras_3():
            return x + tf.keras.random.normal(tf.shape(x), seed=self.seeds)
        return x + tf.random.normal(tf.shape(x))


@needs_two_cores
@pytest.mark.both_generations
def test_states_that_a_call_writes_come_back() -> None:
    """Of `predict` and `evaluate`, too; Keras 2's noise has its state in kernels, which cannot."""
    layers, found, data = tf.keras.layers, [], np.ones((8, 8), "float32")
    for partitions in (2, None):
        tf.keras.utils.set_random_seed(1)
        counts, inputs = CountsCalls(), tf.keras.Input((8,))
        outputs = layers.Dense(8)(counts(layers.Dense(8)(inputs)))
        model = tf.keras.Model(inputs, outputs)
        if partitions:
            model = smp.DistributedModel.from_keras(model, partitions)
        model.compile("sgd", "mse")
        drawn = [model.predict(data, verbose=0) for _ in range(2)]
        assert abs(drawn[0] - drawn[1]).min() > 0
        drawn += [np.array(model.evaluate(data, data, verbose=0)), np.array(counts.calls)]
        found.append(drawn if is_keras_3() else [drawn[0], drawn[-1]])
    tf.nest.map_structure(lambda mine, plain: np.testing.assert_allclose(mine, plain, 1e-5), *found)


@needs_two_cores
@pytest.mark.both_generations
@pytest.mark.parametrize("is_seeded", [False, True])
def test_a_further_fit_draws_other_numbers(is_seeded: bool) -> None:
    """Of operations with states in kernels, such as Keras 2's dropout; no seed stays set."""
    tf.keras.utils.set_random_seed(1)
    noise = tf.keras.layers.Lambda(lambda x: x + tf.random.normal(tf.shape(x)))
    layers = [tf.keras.Input((8,)), tf.keras.layers.Dense(8), noise, tf.keras.layers.Dense(8)]
    model = smp.DistributedModel.from_keras(tf.keras.Sequential(layers), 2)
    model.compile(tf.keras.optimizers.SGD(0.0), "mse")
    data = np.ones((8, 8), "float32")
    eager_context.restore_seeds(None)
    if is_seeded:
        tf.random.set_seed(5)
    losses = [model.fit(data, data, verbose=0).history["loss"][0] for _ in range(2)]
    assert losses[0] != losses[1]
    assert (eager_context.seeds() is None) is not is_seeded
    if is_seeded:
        tf.random.set_seed(5)  # in Keras, too, the numbers begin anew
        assert model.fit(data, data, verbose=0).history["loss"][0] == losses[0]


def test_a_loss_that_the_optimizer_scales() -> None:
    found = []
    for change in (lambda m: smp.DistributedModel.from_keras(m, 1, microbatches=2), lambda m: m):
        model = change(_dense(kernel_initializer="ones"))
        model.compile(tf.keras.optimizers.SGD(0.1, loss_scale_factor=100.0), "mse")
        history = model.fit(tf.ones((8, 3)), tf.ones((8, 1)), batch_size=4, verbose=0).history
        found.append((history, model.get_weights()))
    tf.nest.map_structure(
        lambda mine, plain: np.testing.assert_allclose(mine, plain, rtol=1e-5), *found
    )


@pytest.mark.both_generations
def test_an_optimizer_whose_updates_depend_on_the_number_of_variables() -> None:
    model = smp.DistributedModel.from_keras(_classifier(), partitions=2)
    nadam = tf.keras.optimizers.Nadam()
    if is_keras_3():
        model.compile(nadam, "mse")
    else:
        with pytest.raises(UnavailableError, match=r"Received: Nadam of Keras 2"):
            model.compile(nadam, "mse")


@needs_two_cores
@pytest.mark.both_generations
@pytest.mark.parametrize(("frozen", "passes"), [(0, None), (1, None), (0, 2)])
def test_a_partition_of_frozen_layers_counts_the_steps_of_the_others(
    frozen: int, passes: int | None
) -> None:
    """Two layers in two partitions. The rate depends on the step; Adam's momenta do, too."""
    if passes and not is_keras_3():
        pytest.skip("Keras 2's optimizers add up no gradients")
    options = {"gradient_accumulation_steps": passes} if passes else {}
    x, y = _digits()
    loss, layers, found = "sparse_categorical_crossentropy", tf.keras.layers, []
    for partitions in (None, 2):
        tf.keras.utils.set_random_seed(1)
        parts = [tf.keras.Input((64,), dtype="float64")]
        for units, activation in ((24, "relu"), (10, "softmax")):
            parts.append(layers.Dense(units, activation, dtype="float64"))
        model = tf.keras.Sequential(parts)
        model.layers[frozen].trainable = False
        if partitions:
            model = smp.DistributedModel.from_keras(model, partitions)
        rate = tf.keras.optimizers.schedules.ExponentialDecay(0.01, 1, 0.8)
        model.compile(tf.keras.optimizers.Adam(rate, **options), loss)
        calls = [model.fit(x, y, batch_size=50, shuffle=False, verbose=0) for _ in range(2)]
        counted = int(model.optimizer.iterations)
        found.append(([call.history for call in calls], model.get_weights(), counted))
    _check_equal(*found)


def _crowded(_: Any, size: int, *options: Any) -> topology.Plan:
    """A plan for more workers than two cores should have."""
    return topology.Plan(tuple(topology.Placement(rank, (rank % 2,)) for rank in range(size)))


@needs_two_cores
@pytest.mark.thorough
def test_a_plain_script_trains_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two copies of two partitions: four workers."""
    monkeypatch.setattr(backends, "plan", _crowded)
    x, y = _digits()
    plain = _classifier()
    model = smp.DistributedModel.from_keras(_classifier(), partitions=2, microbatches=2)
    losses = []
    for each, options in ((plain, {}), (model, {"num_processes": 4})):
        _compile(each)
        tf.keras.utils.set_random_seed(3)
        losses.append(each.fit(x, y, batch_size=59, verbose=0, **options).history["loss"])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    for mine, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


class _KillsRank1(tf.keras.callbacks.Callback):  # type: ignore[misc]
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if smp.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


@needs_two_cores
def test_a_rank_that_dies_leaves_the_model_as_it_was(tmp_path: pathlib.Path) -> None:
    x, y = _digits()
    model = smp.DistributedModel.from_keras(_classifier(), partitions=2)
    _compile(model)
    before = model.get_weights()
    with pytest.raises(WorkerDied, match=r"Rank 1 \(partition 1\).*SIGKILL") as caught:
        model.fit(x, y, epochs=2, verbose=0, callbacks=[_KillsRank1()])
    assert (caught.value.rank, caught.value.partition) == (1, 1)
    for mine, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(mine, old)
    saved = tf.keras.callbacks.ModelCheckpoint(str(tmp_path / "best.keras"))
    model.fit(x, y, verbose=0, callbacks=[saved])
    tf.keras.models.load_model(tmp_path / "best.keras")


def test_what_a_plain_script_cannot_do() -> None:
    x, y = _digits()
    model = smp.DistributedModel.from_keras(_classifier(), partitions=2)
    with pytest.raises(InvalidArgumentError, match="Call compile"):
        model.fit(x, y)
    _compile(model)
    with pytest.raises(InvalidArgumentError, match="3 processes, partitions=2"):
        model.fit(x, y, num_processes=3)
    with pytest.raises(InvalidArgumentTypeError, match="num_processes"):
        model.fit(x, y, num_processes="2")
    with pytest.raises(UnavailableError, match="nanotf run --smp"):
        model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(8))
    built = tf.keras.optimizers.Adam()
    built.build(_classifier().trainable_variables)
    with pytest.raises(UnavailableError, match="Pass a new optimizer"):
        model.compile(built, "mse")


@needs_two_cores
@pytest.mark.both_generations
@pytest.mark.parametrize("suffix", ["keras", "h5"])
def test_a_model_that_is_compiled_before(suffix: str, tmp_path: pathlib.Path) -> None:
    """Its own compile arguments are not those of the model in partitions."""
    x, y = _digits()
    whole = _classifier()
    whole.compile(tf.keras.optimizers.SGD(0.5), "mae")
    for partitions in (1, 2):
        model = smp.DistributedModel.from_keras(whole, partitions)
        _compile(model)
        model.save(tmp_path / f"model.{suffix}")
        loaded = tf.keras.models.load_model(tmp_path / f"model.{suffix}")
        assert getattr(loaded, "optimizer", None) is None
        np.testing.assert_allclose(
            loaded.predict(x, verbose=0), model.predict_on_batch(x), 1e-5, 1e-6
        )
    for method, remedy in (("train_on_batch", "fit"), ("test_on_batch", "evaluate")):
        with pytest.raises(UnavailableError, match=f"Received: {method}.*Use {remedy}"):
            getattr(model, method)(x, y)
    model.trainable = False
    assert not model.trainable_variables
    assert not any(layer.trainable for layer in whole.layers)
    assert whole.optimizer.learning_rate == 0.5


def test_compile_makes_another_step() -> None:
    """`fit` after a second `compile` trains with its loss, optimizer and metrics."""
    x, y = _digits()
    found = []
    for change in (lambda m: smp.DistributedModel.from_keras(m, 1, microbatches=2), lambda m: m):
        model = change(_classifier())
        _compile(model)
        tf.keras.utils.set_random_seed(3)
        first = model.fit(x, y, batch_size=50, verbose=0).history
        model.compile(tf.keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        second = model.fit(x, np.eye(10)[y], batch_size=50, verbose=0).history
        found.append((first, second, model.get_weights()))
    tf.nest.map_structure(
        lambda mine, plain: np.testing.assert_allclose(mine, plain, rtol=1e-5, atol=1e-6), *found
    )


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


def _divides_by_targets(y: Any, y_pred: Any) -> Any:
    return tf.reduce_sum((y - y_pred) ** 2) / tf.reduce_sum(y)


@pytest.mark.parametrize("case", ["sum", "small sum", "later batch"])
def test_a_loss_that_is_no_mean_is_refused(case: str) -> None:
    model = smp.DistributedModel.from_keras(_dense(), partitions=1, microbatches=2)
    scale = 1e-4 if case == "small sum" else 1.0
    x, y = np.full((40, 3), scale, "float32"), np.full((40, 1), scale, "float32")
    y[-2:] *= 2
    is_sum = case != "later batch"
    loss = tf.keras.losses.MeanSquaredError(reduction="sum") if is_sum else _divides_by_targets
    model.compile("sgd", loss)
    with pytest.raises(ModelError, match="must be a mean over rows"):
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)


@pytest.mark.parametrize(
    ("scale", "shuffle"), [(1e-12, True), (1.0, True), (1e12, True), (1e-12, False), (1.0, False)]
)
def test_a_mean_that_rounds_is_taken(scale: float, shuffle: bool) -> None:
    """Signs differ from row to row, so that in order the loss is a millionth of its terms."""
    model = smp.DistributedModel.from_keras(_dense(), partitions=1, microbatches=4)
    model.compile(tf.keras.optimizers.SGD(0.0), lambda y, y_pred: scale * (y + 1e-6 * y_pred))
    random = np.random.default_rng(1)
    x, y = random.normal(size=(4096, 3)), np.resize([1.0, -1.0], (4096, 1))
    model.fit(x, y, batch_size=512, shuffle=shuffle, verbose=0)


def test_a_loss_that_diverges_is_none_of_another_kind() -> None:
    """Callbacks such as `TerminateOnNaN` end it, as in one process."""
    model = smp.DistributedModel.from_keras(_dense(), partitions=1, microbatches=4)
    model.compile("sgd", lambda y, y_pred: y * y_pred / tf.zeros([]))
    losses = model.fit(np.ones((6, 3)), np.ones((6, 1)), batch_size=4, verbose=0).history["loss"]
    assert not np.isfinite(losses).any()
