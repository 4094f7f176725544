"""Cases of Keras's own trainer tests, with two processes compared to plain Keras."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_history, assert_same_state, fit_both

from nanotf.compat.versions import is_keras_3
from nanotf.keras import Model, Sequential

L = tf.keras.layers
FLOAT = "float64"

pytestmark = pytest.mark.usefixtures("float64")


def example(**compile_arguments: Any) -> Any:
    """Returns two dense layers, the same at every call."""
    tf.keras.utils.set_random_seed(4)
    model = Sequential([L.Input((4,)), L.Dense(5, activation="tanh"), L.Dense(3)])
    model.compile(**{"optimizer": tf.keras.optimizers.SGD(0.1), "loss": "mse", **compile_arguments})
    return model


def rows_of(rows: int, width: int = 4, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, width)).astype(FLOAT)


def targets_of(x: np.ndarray, width: int = 3) -> np.ndarray:
    return np.stack([x.sum(1) * (i + 1) for i in range(width)], axis=1)


X = rows_of(46)
Y = targets_of(X)


# ----------------------------------------------------------------------- fit, evaluate, predict
@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("steps_per_epoch", [None, 3])
@pytest.mark.both_generations
def test_fit_flow(run_eagerly: bool, steps_per_epoch: int | None) -> None:
    fit_both(
        lambda: example(metrics=["mae"], run_eagerly=run_eagerly),
        x=X, y=Y, batch_size=12, steps_per_epoch=steps_per_epoch,
    )  # fmt: skip


class Named(Model):  # type: ignore[misc]
    """Takes a list, a tuple or a dict of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = L.Dense(3)
        self.second = L.Dense(3)

    def call(self, inputs: Any) -> Any:
        a, b = (inputs["a"], inputs["b"]) if isinstance(inputs, dict) else inputs
        return self.first(a) + self.second(b)


@pytest.mark.parametrize("kind", ["list", "tuple", "dict"])
def test_fit_takes_structures_of_inputs(kind: str) -> None:
    x: Any = {"a": X, "b": rows_of(46, 2, seed=1)}
    if kind != "dict":
        x = (tuple if kind == "tuple" else list)(x.values())

    def make() -> Any:
        tf.keras.utils.set_random_seed(1)
        model = Named()
        model.compile("sgd", "mse", metrics=["mae"])
        model(tf.nest.map_structure(lambda v: v[:1], x))
        return model

    fit_both(make, x=x, y=Y, batch_size=12)


def nested() -> Any:
    """Returns a model with inputs in a nested structure, and outputs in a dict."""
    tf.keras.utils.set_random_seed(2)
    inputs = {"a": L.Input((4,), name="a"), "b": L.Input((2,), name="b")}
    hidden = L.Concatenate()([inputs["a"], L.Dense(3)(inputs["b"])])
    outputs = {"c": L.Dense(3, name="c")(hidden), "d": L.Dense(1, name="d")(hidden)}
    return Model(inputs, outputs)


@pytest.mark.both_generations
def test_nested_inputs_and_outputs_with_loss_weights() -> None:
    def make() -> Any:
        model = nested()
        model.compile(
            "sgd",
            loss={"c": "mse", "d": "mae"},
            loss_weights={"c": 0.5, "d": 2.0},
            metrics={"c": ["mae"], "d": ["mse"]},
        )
        return model

    x = {"a": X, "b": rows_of(46, 2, seed=1)}
    found, expected = fit_both(make, x=x, y={"c": Y, "d": Y[:, :1]}, batch_size=12)
    theirs, ours = expected.predict(x, verbose=0), found.predict(x, verbose=0)
    for name in ("c", "d"):
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-9)


def test_a_loss_for_one_of_two_outputs_only() -> None:
    def make() -> Any:
        model = nested()
        model.compile("sgd", loss={"c": "mse", "d": None} if is_keras_3() else {"c": "mse"})
        return model

    x = {"a": X, "b": rows_of(46, 2, seed=1)}
    fit_both(make, x=x, y={"c": Y, "d": Y[:, :1]}, batch_size=12)


@pytest.mark.skipif(is_keras_3(), reason="Keras 3 requires one for each output with a loss")
@pytest.mark.parametrize("loss", ["mse", ["mse", None]])
def test_one_target_for_two_outputs(loss: Any) -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(3)
        inputs = L.Input((4,))
        model = Model(inputs, [L.Dense(3, name="a")(inputs), L.Dense(3, name="b")(inputs)])
        model.compile("sgd", loss, metrics=["mae"] if loss == "mse" else [["mae"], []])
        return model

    fit_both(make, x=X, y=Y, batch_size=12)


@pytest.mark.skipif(is_keras_3(), reason="Keras 3 requires the target of every output")
def test_target_of_one_of_two_named_outputs() -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(3)
        inputs = L.Input((4,))
        model = Model(inputs, {"a": L.Dense(3, name="a")(inputs), "b": L.Dense(3)(inputs)})
        model.compile("sgd", loss={"a": "mse"}, metrics={"a": ["mae"]})
        return model

    fit_both(make, x=X, y={"a": Y}, batch_size=12)


@pytest.mark.both_generations
def test_evaluate_and_predict_in_this_process_after_fit() -> None:
    found, expected = fit_both(lambda: example(metrics=["mae"]), x=X, y=Y, batch_size=12)
    ours = found.evaluate(X, Y, batch_size=7, verbose=0, return_dict=True)
    theirs = expected.evaluate(X, Y, batch_size=7, verbose=0, return_dict=True)
    assert_same_history({k: [v] for k, v in ours.items()}, {k: [v] for k, v in theirs.items()})
    np.testing.assert_allclose(
        found.predict(X, batch_size=7, verbose=0),
        expected.predict(X, batch_size=7, verbose=0),
        rtol=1e-9,
    )
    assert found.metrics_names == expected.metrics_names
    np.testing.assert_allclose(found.train_on_batch(X, Y), expected.train_on_batch(X, Y))
    np.testing.assert_allclose(found.test_on_batch(X, Y), expected.test_on_batch(X, Y))


class _Params(tf.keras.callbacks.Callback):
    """Stores its parameters at the beginning of training."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.begun = dict(self.params)


@pytest.fixture
def limits() -> Iterator[Any]:
    """Sets the limits for debugging runs in Keras's `config`."""
    config = getattr(tf.keras, "config", None)
    if not hasattr(config, "set_max_epochs"):
        pytest.skip("this Keras has none")
    config.set_max_epochs(2)
    config.set_max_steps_per_epoch(3)
    yield config
    config.set_max_epochs(None)
    config.set_max_steps_per_epoch(None)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_limits_for_debugging_runs(limits: Any) -> None:
    def run(processes: int | None) -> list[Any]:
        found: list[Any] = []
        for data in (
            {"x": X[:32], "y": Y[:32], "batch_size": 8, "shuffle": False},
            {"x": tf.data.Dataset.from_tensor_slices((X[:32], Y[:32])).batch(8)},
        ):
            model = example(metrics=["mae"])
            callback = _Params()
            with pytest.warns(UserWarning, match="Limiting epochs to 2") as caught:
                history = model.fit(
                    **data, epochs=4, verbose=0, callbacks=[callback], num_processes=processes,
                    validation_data=(X[:32], Y[:32]), validation_batch_size=8,
                )  # fmt: skip
            assert any("Limiting steps_per_epoch to 3" in str(w.message) for w in caught)
            found += history.history.values()
            found.append([callback.begun["epochs"], callback.begun["steps"]])
            found.append([int(model.optimizer.iterations)])
        found.append(model.evaluate(X[:32], Y[:32], 8, verbose=0, num_processes=processes))
        found.append(model.predict(X[:32], 8, verbose=0, num_processes=processes).shape)
        return found

    for ours, keras in zip(run(2), run(None), strict=True):
        np.testing.assert_allclose(ours, keras, rtol=1e-4)
    limits.set_max_epochs(None)
    limits.set_max_steps_per_epoch(None)
    model = example(metrics=["mae"])
    history = model.fit(X[:32], Y[:32], 8, 3, verbose=0, num_processes=2)
    assert len(history.epoch) == 3
    assert int(model.optimizer.iterations) == 12


@pytest.mark.parametrize("steps_per_execution", [1, 3, 8])
@pytest.mark.both_generations
def test_steps_per_execution(steps_per_execution: int) -> None:
    """Batch hooks run once per execution, with Keras's indices."""
    calls: dict[int, list[Any]] = {}

    def make() -> Any:
        return example(metrics=["mae"], steps_per_execution=steps_per_execution)

    models = []
    for processes in (None, 2):
        seen = calls.setdefault(processes or 1, [])
        model = make()
        callback = tf.keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs, seen=seen: seen.append(batch),
            on_train_batch_end=lambda batch, logs, seen=seen: seen.append((batch, logs["mae"])),
        )
        model.fit(
            X[:32], Y[:32], batch_size=4, epochs=2, shuffle=False, verbose=0,
            callbacks=[callback], num_processes=processes,
        )  # fmt: skip
        models.append(model)
    assert_same_state(models[1], models[0])
    assert_same_history(models[1].history.history, models[0].history.history)
    batches = [[c[0] if isinstance(c, tuple) else c for c in calls[n]] for n in (1, 2)]
    assert batches[1] == batches[0]
    values = [[c[1] for c in calls[n] if isinstance(c, tuple)] for n in (1, 2)]
    np.testing.assert_allclose(values[1], values[0], rtol=1e-10)


@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.thorough
def test_dataset_of_unknown_length(steps: int | None) -> None:
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(12).filter(lambda *_: True)
    fit_both(lambda: example(metrics=["mae"]), x=dataset, steps_per_epoch=steps, epochs=1)


@pytest.mark.thorough
def test_endless_dataset_for_training_and_validation() -> None:
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(12).repeat()
    fit_both(
        example, x=dataset, steps_per_epoch=5, epochs=3, validation_data=dataset,
        validation_steps=2,
    )  # fmt: skip


@pytest.mark.thorough
def test_validation_with_a_short_last_batch() -> None:
    fit_both(
        lambda: example(metrics=["mae"]), x=X, y=Y, batch_size=12,
        validation_data=(X[:13], Y[:13]), validation_batch_size=4,
    )  # fmt: skip


def test_validation_of_some_steps() -> None:
    fit_both(
        example, x=X, y=Y, batch_size=12, validation_data=(X[:20], Y[:20]),
        validation_batch_size=4, validation_steps=2,
    )  # fmt: skip


# ------------------------------------------------------------------------------------ losses
class OnlyAdds(L.Layer):  # type: ignore[misc]
    """A layer with its own loss."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(tf.reduce_mean(tf.square(inputs)) * 0.3)
        return inputs


@pytest.mark.both_generations
def test_internal_loss_next_to_another() -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(3)
        model = Sequential([L.Input((4,)), L.Dense(3), OnlyAdds()])
        model.compile("sgd", "mse", metrics=["mae"])
        return model

    fit_both(make, x=X[:48], y=Y[:48], batch_size=23)


@pytest.mark.thorough
def test_internal_loss_only() -> None:
    """No loss in `compile`, no targets in `fit`."""

    def make() -> Any:
        tf.keras.utils.set_random_seed(3)
        model = Sequential([L.Input((4,)), L.Dense(3), OnlyAdds()])
        model.compile("sgd")
        return model

    found, expected = fit_both(make, x=X, batch_size=23)
    assert found.metrics_names == expected.metrics_names == ["loss"]
    for ours, theirs in zip(found.metrics, expected.metrics, strict=True):
        np.testing.assert_allclose(float(ours.result()), float(theirs.result()), rtol=1e-10)
    found.fit(X, batch_size=23, epochs=1, verbose=0, num_processes=2)  # the model is kept


@pytest.mark.parametrize("last", ["training", "**kwargs", "none"])
@pytest.mark.both_generations
def test_the_users_own_compute_loss(last: str) -> None:
    """Signatures that Keras has accepted: with `training`, with `**kwargs`, and without."""
    if last == "training" and not is_keras_3():
        pytest.skip("Keras 2 passes no `training`")

    def make() -> Any:
        tf.keras.utils.set_random_seed(3)
        model = {"training": Trains, "**kwargs": Anything, "none": Former}[last](3)
        model.compile("sgd", "mse", metrics=["mae"])
        model(X[:1])
        return model

    fit_both(make, x=X, y=Y, batch_size=12, validation_data=(X[:12], Y[:12]))


class Former(Model):  # type: ignore[misc]
    def __init__(self, units: int) -> None:
        super().__init__()
        self.dense = L.Dense(units)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        return 2.0 * super().compute_loss(x, y, y_pred, sample_weight)


class Anything(Former):
    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        return super().compute_loss(x, y, y_pred, sample_weight)


class Trains(Former):
    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None,
        training: bool = True,
    ) -> Any:  # fmt: skip
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        return loss * 0.5 if training else loss


# ------------------------------------------------------------------------- steps of the user's
class OwnStep(Model):  # type: ignore[misc]
    """A `train_step` and a `test_step` with their own metric."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.dense = L.Dense(units)
        self.tracker = tf.keras.metrics.Mean(name="seen")

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def test_step(self, data: Any) -> Any:
        x, y = data
        self.tracker.update_state(tf.abs(y - self(x, training=False)))
        return {"seen": self.tracker.result()}

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(tf.abs(y - y_pred))
        return {"seen": self.tracker.result()}


@pytest.mark.both_generations
def test_the_users_own_steps() -> None:
    seen: dict[int, list[float]] = {}
    models = []
    for processes in (None, 2):
        tf.keras.utils.set_random_seed(3)
        model = OwnStep(3)
        model.compile("sgd", "mse")
        model(X[:1])
        values = seen.setdefault(processes or 1, [])
        callback = tf.keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, values=values: values.append(logs["seen"])
        )
        model.fit(
            X, Y, batch_size=12, epochs=2, verbose=0, shuffle=False, callbacks=[callback],
            validation_data=(X[:15], Y[:15]), num_processes=processes,
        )  # fmt: skip
        models.append(model)
    assert_same_state(models[1], models[0])
    assert_same_history(models[1].history.history, models[0].history.history)
    np.testing.assert_allclose(seen[2], seen[1], rtol=1e-10)


# --------------------------------------------------------------------- metrics and compiling
def test_metrics_before_and_after_training() -> None:
    model, plain = example(metrics=["mae"]), example(metrics=["mae"])
    assert [m.name for m in model.metrics] == [m.name for m in plain.metrics]
    for m, processes in ((model, 2), (plain, None)):
        m.fit(X, Y, batch_size=12, verbose=0, shuffle=False, num_processes=processes)
    assert [m.name for m in model.metrics] == [m.name for m in plain.metrics]
    ours, theirs = model.get_metrics_result(), plain.get_metrics_result()
    assert list(ours) == list(theirs) == ["loss", "mae"]
    for name, value in theirs.items():
        np.testing.assert_allclose(float(ours[name]), float(value), rtol=1e-10)
    model.reset_metrics()
    assert all((np.asarray(v) == 0).all() for m in model.metrics for v in m.variables)


class Counts(L.Layer):  # type: ignore[misc]
    """A layer that has a metric."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.norm = tf.keras.metrics.Mean(name="norm")

    def call(self, inputs: Any) -> Any:
        self.norm.update_state(tf.reduce_mean(tf.abs(inputs), axis=-1))
        return inputs


@pytest.mark.both_generations
def test_metric_of_a_layer() -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(3)
        model = Sequential([L.Input((4,)), L.Dense(3), Counts()])
        model.compile("sgd", "mse")
        return model

    found, expected = fit_both(make, x=X, y=Y, batch_size=12)
    assert "norm" in expected.history.history
    for ours, theirs in zip(found.metrics, expected.metrics, strict=True):
        np.testing.assert_allclose(float(ours.result()), float(theirs.result()), rtol=1e-10)


@pytest.mark.thorough
def test_recompile() -> None:
    """`compile` resets optimizer and metrics; the weights stay."""
    results = []
    for processes in (None, 2):
        fit = {
            "x": X, "y": Y, "batch_size": 12, "verbose": 0, "shuffle": False,
            "num_processes": processes,
        }  # fmt: skip
        model = example(metrics=["mae"])
        first = model.fit(**fit)
        assert list(first.history) == ["loss", "mae"]
        model.compile(tf.keras.optimizers.Adam(0.01), "mae", metrics=["mse"])
        model.fit(**fit)
        model.layers[0].trainable = False
        model.compile(tf.keras.optimizers.SGD(0.1), "mse")
        model.fit(**fit)
        results.append((model, model.history.history))
    (plain, theirs), (model, ours) = results
    assert_same_history(ours, theirs)
    assert_same_state(model, plain)


@pytest.mark.both_generations
def test_adapted_layer_before_fit() -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(3)
        normal = L.Normalization()
        normal.adapt(X * 3 + 1)
        model = Sequential([L.Input((4,)), normal, L.Dense(3)])
        model.compile("sgd", "mse")
        return model

    fit_both(make, x=X, y=Y, batch_size=12)


def test_a_model_never_called_is_built_by_fit() -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(3)
        model = Former(3)
        model.compile("sgd", "mse", metrics=["mae"])
        return model

    model = make()
    model.fit(X, Y, batch_size=12, verbose=0, num_processes=2)
    assert model.built
    assert [w.shape for w in model.get_weights()] == [(4, 3), (3,)]


def test_constraints_hold_after_every_step() -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(3)
        model = Sequential([L.Input((4,)), L.Dense(3, kernel_constraint="non_neg")])
        model.compile(tf.keras.optimizers.SGD(0.5), "mse")
        return model

    found, _ = fit_both(make, x=X, y=-Y, batch_size=12)
    assert (found.get_weights()[0] >= 0).all()


# --------------------------------------------------------------------------------- callbacks
@pytest.mark.both_generations
def test_names_in_the_logs_of_every_hook() -> None:
    names: dict[str, set[tuple[str, ...]]] = {}

    def hook(name: str) -> Any:
        def call(self: Any, *arguments: Any, **named: Any) -> None:
            logs = named.get("logs", arguments[-1] if arguments else None)
            names.setdefault(name, set()).add(tuple(sorted(logs)))  # never None

        return call

    hooks = [
        f"on_{what}_{when}"
        for what in ("train", "test", "epoch", "train_batch", "test_batch")
        for when in ("begin", "end")
    ]
    callback = type("Names", (tf.keras.callbacks.Callback,), {name: hook(name) for name in hooks})()
    example(metrics=["mae"]).fit(
        X, Y, batch_size=12, verbose=0, validation_split=0.3, callbacks=[callback], num_processes=2
    )
    of_step = {("loss", "mae")}
    of_epoch = {("loss", "mae", "val_loss", "val_mae")}
    assert names == {
        **{name: {()} for name in hooks if name.endswith("_begin")},
        "on_train_batch_end": of_step,
        "on_test_batch_end": of_step,
        "on_test_end": of_step,
        "on_epoch_end": of_epoch,
        "on_train_end": of_epoch,
    }


@pytest.mark.both_generations
def test_a_callback_changes_the_state_between_batches() -> None:
    class Set(tf.keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                self.model.set_weights([np.full_like(w, 0.25) for w in self.model.get_weights()])

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = 0.1 / (batch + 1)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.model.layers[-1].bias.assign(np.full(3, epoch, FLOAT))

    def run(processes: int | None) -> Any:
        model = example(metrics=["mae"])
        model.fit(
            X, Y, batch_size=12, epochs=2, verbose=0, shuffle=False, callbacks=[Set()],
            num_processes=processes,
        )  # fmt: skip
        return model

    plain, model = run(None), run(2)
    assert_same_state(model, plain)
    assert_same_history(model.history.history, plain.history.history)


# ------------------------------------------------------------------ more of Keras's own cases
class Tracks(Model):  # type: ignore[misc]
    """A metric in an attribute, updated by its own `compute_loss`."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.dense = L.Dense(units, activity_regularizer="l2")
        self.own = tf.keras.metrics.Mean(name="own")
        self.added = tf.keras.metrics.Mean(name="added")

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None,
        training: bool = True,
    ) -> Any:  # fmt: skip
        more = (training,) if is_keras_3() else ()
        loss = super().compute_loss(x, y, y_pred, sample_weight, *more)
        self.added.update_state(sum(self.losses))
        self.own.update_state(tf.reduce_mean(y_pred, axis=-1))
        return loss


@pytest.mark.thorough
def test_metrics_updated_by_compute_loss() -> None:
    models = []
    for processes in (None, 2):
        tf.keras.utils.set_random_seed(3)
        model = Tracks(3)
        model.compile("sgd", "mse", metrics=["mae"])
        model(X[:1])
        # Every worker has equally many rows: `added` is a mean over batches.
        fit = {"batch_size": 12, "epochs": 2, "shuffle": False, "verbose": 0}
        model.fit(X[:36], Y[:36], **fit, num_processes=processes)
        names = [metric.name for metric in model.metrics]
        logs = model.evaluate(X, Y, 12, verbose=0, return_dict=True, num_processes=processes)
        models.append((model, names, logs))
    (plain, names, expected), (model, ours, found) = models
    assert ours == names
    assert_same_state(model, plain)
    assert_same_history(
        {k: v for k, v in model.history.history.items() if k != "added"},
        {k: v for k, v in plain.history.history.items() if k != "added"},
    )
    assert list(found) == list(expected)
    np.testing.assert_allclose(found["own"], expected["own"], rtol=1e-10)
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-10)
    assert len(model.metrics_names) == len(plain.metrics_names)


@pytest.mark.both_generations
def test_nested_models_that_are_compiled() -> None:
    def make() -> Any:
        inner, other = example(metrics=["mse"]), example()
        inputs = L.Input((4,))
        outputs = [L.Dense(3, name="a")(inner(inputs)), L.Dense(1, name="b")(other(inputs))]
        model = Model(inputs, outputs)
        model.compile("sgd", ["mse", "mae"], metrics=[["mae"], ["mse"]])
        return model

    found, expected = fit_both(make, x=X, y=[Y, Y[:, :1]], batch_size=12)
    assert found.metrics_names == expected.metrics_names
    assert [m.name for m in found.metrics] == [m.name for m in expected.metrics]


@pytest.mark.thorough
def test_no_target_for_some_outputs() -> None:
    inputs_width = 4

    def make() -> Any:
        tf.keras.utils.set_random_seed(2)
        inputs = L.Input((inputs_width,))
        hidden = L.Dense(3, name="a")(inputs)
        others = [L.Dense(2, name="b")(hidden), L.Dense(1, name="c")(hidden)]
        model = Model(inputs, [hidden, *others])
        model.compile("sgd", ["mse", None, None])
        return model

    y: Any = Y if is_keras_3() else [Y, Y[:, :2], Y[:, :1]]
    fit_both(make, x=X, y=y, batch_size=12)


@pytest.mark.thorough
def test_without_an_optimizer_and_without_training() -> None:
    """`compile(loss=...)` chooses an optimizer; a frozen model always has the same loss."""

    def make() -> Any:
        model = example()
        model.compile(loss="mse")
        return model

    fit_both(make, x=X, y=Y, batch_size=12)
    model = make()
    model.trainable = False
    model.compile(loss="mse")
    fit = {"x": X, "y": Y, "epochs": 2, "verbose": 0, "num_processes": 2}
    losses = [model.fit(**fit, batch_size=size).history["loss"] for size in (12, 46, 64)]
    np.testing.assert_allclose(losses, losses[0][0], rtol=1e-12)


class Different(L.Layer):  # type: ignore[misc]
    def call(self, inputs: Any, training: Any = False) -> Any:
        return inputs * (2.0 if training else 1.0)


@pytest.mark.both_generations
def test_training_argument() -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(3)
        model = Sequential([L.Input((4,)), L.Dense(3), Different()])
        model.compile("sgd", "mse")
        return model

    found, expected = fit_both(make, x=X, y=Y, batch_size=12, validation_data=(X, Y))
    assert found.history.history["val_loss"][-1] != found.history.history["loss"][-1]
    outputs = [m.predict(X, verbose=0, num_processes=n) for m, n in ((found, 2), (expected, None))]
    np.testing.assert_allclose(outputs[0], outputs[1], rtol=1e-9)


class Counting(Model):  # type: ignore[misc]
    """A model with weights that only callbacks change."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = L.Dense(3)
        for name in ("train", "test", "predict"):
            weight = self.add_weight(name=name, shape=(), initializer="zeros", trainable=False)
            setattr(self, f"{name}_counter", weight)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)


class Counter(tf.keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.calls = {"train": 0, "test": 0, "predict": 0}

    def _count(self, name: str) -> None:
        getattr(self.model, f"{name}_counter").assign_add(1.0)
        self.calls[name] += 1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._count("train")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._count("test")

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self._count("predict")


@pytest.mark.thorough
def test_callbacks_count_in_the_model() -> None:
    model, callback = Counting(), Counter()
    model.compile("sgd", "mse")
    arguments: dict[str, Any] = {"verbose": 0, "callbacks": [callback], "num_processes": 2}
    model.fit(X[:16], Y[:16], batch_size=4, epochs=2, validation_data=(X[:6], Y[:6]), **arguments)
    assert callback.calls == {"train": 8, "test": 4, "predict": 0}
    counts = {name: float(np.asarray(getattr(model, f"{name}_counter"))) for name in callback.calls}
    assert counts == callback.calls
    model.evaluate(X[:8], Y[:8], batch_size=4, **arguments)
    model.predict(X[:12], batch_size=4, **arguments)
    assert callback.calls == {"train": 8, "test": 6, "predict": 3}
    counts = {name: float(np.asarray(getattr(model, f"{name}_counter"))) for name in callback.calls}
    assert counts == callback.calls


class Stop(tf.keras.callbacks.Callback):
    """Stops at the third batch, and counts the hooks."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook
        self.diary: list[str] = []

    def _note(self, name: str, batch: int | None = None) -> None:
        self.diary.append(name)
        if name == self.hook and batch == 2:
            self.model.stop_training = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._note("epoch_begin")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._note("epoch_end", epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._note("begin", batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._note("end", batch)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._note("test", batch)

    def on_train_end(self, logs: Any = None) -> None:
        self._note("train_end")


@pytest.mark.parametrize("hook", ["begin", "end", "test", "epoch_end"])
@pytest.mark.both_generations
def test_a_callback_stops_training_where_keras_would(hook: str) -> None:
    results = []
    for processes in (None, 2):
        callback, model = Stop(hook), example()
        history = model.fit(
            X, Y, batch_size=12, epochs=5, verbose=0, shuffle=False, callbacks=[callback],
            validation_data=(X[:20], Y[:20]), validation_batch_size=5, num_processes=processes,
        )  # fmt: skip
        results.append((callback.diary, history, model))
    (theirs, expected, plain), (ours, found, model) = results
    assert ours == theirs
    assert found.epoch == expected.epoch
    assert_same_history(found.history, expected.history)
    assert_same_state(model, plain)


@pytest.mark.parametrize("kind", ["dataset", "generator"])
@pytest.mark.thorough
def test_steps_per_execution_of_data_of_unknown_length(kind: str) -> None:
    """Executions of three steps over five batches: the last execution is cut short."""
    if kind == "dataset" and not is_keras_3():
        pytest.skip("Keras 2 requires the number of steps")

    def data() -> Any:
        batches = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 40, 8)]
        if kind == "generator":
            return (batch for _ in range(2) for batch in batches)
        pairs = tf.data.Dataset.from_tensor_slices((X[:40], Y[:40]))
        return pairs.batch(8).filter(lambda *_: True)

    results = []
    for processes in (None, 2):
        model = example(metrics=["mae"], steps_per_execution=3)
        steps = 5 if kind == "generator" else None
        model.fit(data(), steps_per_epoch=steps, epochs=2, verbose=0, num_processes=processes)
        results.append(model)
    assert_same_history(results[1].history.history, results[0].history.history)
    assert_same_state(results[1], results[0])


@pytest.mark.parametrize("batches", [4, 6])
def test_fewer_batches_than_the_epochs_need(batches: int, recwarn: pytest.WarningsRecorder) -> None:
    """A generator ends in the second of three epochs of three steps: training ends there."""

    def generator() -> Any:
        return ((X[:8] + i, Y[:8]) for i in range(batches))

    results = []
    for processes in (None, 2):
        model = example()
        history = model.fit(
            generator(), steps_per_epoch=3, epochs=3, verbose=0, num_processes=processes
        )
        results.append((model, history))
    (plain, expected), (model, found) = results
    assert found.epoch == expected.epoch
    assert_same_history(found.history, expected.history)
    assert_same_state(model, plain)


@pytest.mark.both_generations
def test_counts_of_an_endless_generator_of_validation_data() -> None:
    def endless() -> Any:
        while True:
            yield X[:2], Y[:2]

    model, callback = Counting(), Counter()
    model.compile("sgd", "mse")
    model.fit(
        endless(), validation_data=endless(), steps_per_epoch=3, validation_steps=4, verbose=0,
        callbacks=[callback], num_processes=2,
    )  # fmt: skip
    assert callback.calls == {"train": 3, "test": 4, "predict": 0}


@pytest.mark.thorough
def test_order_of_metrics_in_a_list() -> None:
    def nothing(y_true: Any, y_pred: Any) -> Any:
        return tf.zeros_like(y_pred[:, 0])

    def one(y_true: Any, y_pred: Any) -> Any:
        return tf.ones_like(y_pred[:, 0])

    for metrics, expected in (([nothing, one], [0.0, 1.0]), ([one, nothing], [1.0, 0.0])):
        model = example(metrics=metrics)
        assert model.evaluate(X, Y, verbose=0, num_processes=2)[1:] == expected
        history = model.fit(X, Y, verbose=0, num_processes=2).history
        assert [history[m.__name__] for m in metrics] == [[value] for value in expected]


@pytest.mark.parametrize("loss_weights", [0.2, [0.2]])
@pytest.mark.both_generations
def test_weight_of_a_single_loss(loss_weights: Any) -> None:
    fit_both(lambda: example(loss_weights=loss_weights, metrics=["mse"]), x=X, y=Y, batch_size=12)


@pytest.mark.thorough
def test_class_weight_with_validation() -> None:
    """Class weights do not apply to validation."""

    def make() -> Any:
        tf.keras.utils.set_random_seed(3)
        model = Sequential([L.Input((4,)), L.Dense(3)])
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, weighted_metrics=["accuracy"])
        return model

    labels = np.arange(46) % 3
    fit_both(
        make, x=X, y=labels, batch_size=12, class_weight={0: 1.0, 1: 0.25, 2: 3.0},
        validation_split=0.3,
    )  # fmt: skip


def test_a_training_step_is_traced_once_for_all_epochs_and_fits() -> None:
    """Counted by Python's side effects in a worker, which a metric of the model reports."""

    class Traced(Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = L.Dense(3)
            self.traces = 0

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs)

        def train_step(self, data: Any) -> Any:
            self.traces += 1
            return {**super().train_step(data), "traces": tf.constant(float(self.traces))}

    model = Traced()
    model.compile("sgd", "mse")
    fit: dict[str, Any] = {"batch_size": 12, "verbose": 0, "num_processes": 2}
    first = model.fit(X[:36], Y[:36], epochs=3, **fit).history["traces"]
    again = model.fit(X[:36], Y[:36], **fit).history["traces"]
    assert first[0] == first[-1]
    assert again == first[:1]
