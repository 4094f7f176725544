"""Losses, metrics and steps, from `compile` or of the model's own, are those of plain Keras."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_history, assert_same_state, fit_both
from trainer_model import L, X, Y, example

from nanotf.compat.versions import is_keras_3
from nanotf.keras import Model, Sequential

pytestmark = pytest.mark.usefixtures("float64")


# ------------------------------------------------------------------------------------------- losses
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


# ------------------------------------------------------------------------------ steps of the user's
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


# ---------------------------------------------------------------------------- metrics and compiling
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
