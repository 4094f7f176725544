"""All kinds of losses, metrics and optimizers give the numbers of a single process.

Most batches split unevenly between two workers. The last one has a single row, so one worker has
no row; in a validation, it has rows for both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_history, assert_same_state, fit_both

from nanotf.compat.versions import is_keras_3
from nanotf.keras import Model, Sequential

L = tf.keras.layers
IS_KERAS_3 = is_keras_3()
ROWS, BATCH = 101, 25  # 12 and 13 rows for the workers; a last batch of a single row
HELD_OUT = 32  # a last batch of 7 rows
Compare = Callable[..., tuple[Any, Any]]  # of makes a model, y and arguments of `fit`


def features(rows: int = ROWS) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(rows, 6))


def binary(rows: int = ROWS) -> np.ndarray:
    return (features(rows).sum(1) > 0).astype("float64")[:, None]


def one_hot(rows: int = ROWS) -> np.ndarray:
    return np.eye(3)[np.digitize(features(rows)[:, 0], [-0.5, 0.5])]


def dense(units: int = 1, activation: Any = None, **compiled: Any) -> Any:
    """Returns a small compiled model, the same at every call."""
    tf.keras.utils.set_random_seed(4)
    model = Sequential(
        [L.Input((6,)), L.Dense(5, activation="tanh"), L.Dense(units, activation=activation)]
    )
    model.compile(**{"optimizer": tf.keras.optimizers.SGD(0.1), "loss": "mse", **compiled})
    return model


@pytest.fixture(params=[BATCH, pytest.param(21, marks=pytest.mark.thorough)])
def compare(request: pytest.FixtureRequest) -> Compare:
    """`fit_both` with batches of an odd size; the last one has a single row or, thorough, 17."""
    return functools.partial(fit_both, x=features(), batch_size=request.param)


# ------------------------------------------------------------------------------------- losses
def per_row(y_true: Any, y_pred: Any) -> Any:
    return tf.reduce_mean(tf.abs(y_true - y_pred), axis=-1)


def mean_of_batch(y_true: Any, y_pred: Any) -> Any:
    return tf.reduce_mean(tf.square(y_true - y_pred))


def sum_of_batch(y_true: Any, y_pred: Any) -> Any:
    return tf.reduce_sum(tf.square(y_true - y_pred)) / 10.0


def dice(y_true: Any, y_pred: Any) -> Any:
    p = tf.sigmoid(y_pred)
    return 1.0 - 2.0 * tf.reduce_sum(y_true * p) / (tf.reduce_sum(y_true) + tf.reduce_sum(p))


class Scaled(tf.keras.losses.Loss):
    """A user's loss class, with an argument that get_config() omits."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self.factor * tf.reduce_mean(tf.square(y_true - y_pred), axis=-1)


LOSSES: dict[str, Callable[[], Any]] = {
    "sum": lambda: tf.keras.losses.MeanSquaredError(reduction="sum"),
    "none": lambda: tf.keras.losses.MeanSquaredError(reduction="none"),
    "huber": lambda: tf.keras.losses.Huber(0.5),
    "by_name": lambda: "mae",
    "per_row": lambda: per_row,
    "mean_of_batch": lambda: mean_of_batch,
    "sum_of_batch": lambda: sum_of_batch,
    "dice": lambda: dice,
    "lambda": lambda: lambda y_true, y_pred: tf.reduce_mean(tf.square(y_true - y_pred), axis=-1),
    "class": lambda: Scaled(0.5),
    "weighted_mean": lambda: tf.keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
}


def losses_of_heads() -> dict[str, Any]:
    """Returns losses that are one number: Keras cannot add a loss per row to other outputs."""
    left_out = {"none"} if IS_KERAS_3 else {"none", "weighted_mean"}
    return {name: make() for name, make in LOSSES.items() if name not in left_out}


def dense_with_heads(losses: dict[str, Any]) -> Any:
    """Returns a model that has an output for each loss, the same at every call."""
    tf.keras.utils.set_random_seed(4)
    inputs = L.Input((6,))
    hidden = L.Dense(5, activation="tanh")(inputs)
    model = Model(inputs, {name: L.Dense(1, name=name)(hidden) for name in losses})
    model.compile(tf.keras.optimizers.SGD(0.02), losses)
    return model


@pytest.mark.both_generations
def test_losses(float64: None, compare: Compare) -> None:
    names = list(losses_of_heads())

    def targets(rows: int) -> dict[str, np.ndarray]:
        return {name: binary(rows) for name in names}

    compare(
        lambda: dense_with_heads(losses_of_heads()),
        y=targets(ROWS),
        validation_data=(features(HELD_OUT), targets(HELD_OUT)),
    )
    compare(
        lambda: dense(loss=LOSSES["none"](), optimizer=tf.keras.optimizers.SGD(0.02)), y=binary()
    )


@pytest.mark.both_generations
def test_epsilon(float64: None) -> None:
    """A loss reads it when traced, also in a second model of the same configuration."""
    default = tf.keras.backend.epsilon()
    data = {"x": np.ones((12, 3)), "y": np.array([0.0, 1.0] * 6), "batch_size": 5}
    try:
        for epsilon in (default, 0.1):
            tf.keras.backend.set_epsilon(epsilon)
            fit_both(_for_epsilon, **data)
    finally:
        tf.keras.backend.set_epsilon(default)


def _for_epsilon() -> Any:
    model = Sequential([L.Input((3,)), L.Dense(1, kernel_initializer="ones")])
    model.compile("sgd", "mean_absolute_percentage_error")
    return model


@pytest.mark.parametrize("name", ["sum", "none", "per_row", "class", "weighted_mean"])
def test_losses_with_sample_weights(float64: None, compare: Compare, name: str) -> None:
    if name == "weighted_mean" and not IS_KERAS_3:
        pytest.skip("Keras 2 has no such reduction")
    weights = np.random.default_rng(1).integers(0, 4, ROWS).astype("float64")
    weights[:15] = 0
    compare(
        lambda: dense(loss=LOSSES[name](), optimizer=tf.keras.optimizers.SGD(0.02)),
        y=binary(),
        sample_weight=weights,
    )


def several(losses: list[Any], metrics: list[Any], make_head: Callable[[Any], Any]) -> Any:
    """Returns a compiled model with a head for each loss, the same at every call."""
    tf.keras.utils.set_random_seed(4)
    inputs = L.Input((6,))
    hidden = L.Dense(5, activation="tanh")(inputs)
    heads = [make_head(hidden) for _ in losses]
    named = [L.Activation("linear", name=f"head_{i}")(head) for i, head in enumerate(heads)]
    model = Model(inputs, named)
    model.compile(tf.keras.optimizers.SGD(0.1), losses, metrics=[metrics for _ in losses])
    return model


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 has none")
def test_losses_of_keras_that_are_a_ratio_of_the_batch(float64: None, compare: Compare) -> None:
    k = tf.keras.losses

    def head(hidden: Any) -> Any:
        return L.Dense(3, activation="sigmoid")(hidden)

    def make() -> Any:
        return several([k.Dice(), k.Tversky()], [k.dice, k.tversky, "mae"], head)

    compare(make, y=[one_hot(), one_hot()])


def test_outputs_of_one_dimension(float64: None, compare: Compare) -> None:
    """Keras's own losses and metrics are then one number for the batch."""
    losses = ["mse", "cosine_similarity", "kl_divergence"]

    def head(hidden: Any) -> Any:
        return L.Reshape(())(L.Dense(1, activation="sigmoid")(hidden))

    def make() -> Any:
        return several(losses, ["mae", tf.keras.losses.get("kl_divergence")], head)

    compare(make, y=[binary()[:, 0] + 0.1 for _ in losses])


# ------------------------------------------------------------------------------------ metrics
def scalar_metric(y_true: Any, y_pred: Any) -> Any:
    return tf.reduce_max(y_pred) - tf.reduce_mean(y_true)


class CountAbove(tf.keras.metrics.Metric):
    """A user's metric class."""

    def __init__(self, threshold: float = 0.5, name: str = "above", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.threshold = threshold
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        above = tf.cast(y_pred > self.threshold, self.count.dtype)
        self.count.assign_add(tf.reduce_sum(above))

    def result(self) -> Any:
        return self.count + 0.0


def binary_metrics() -> list[Any]:
    m = tf.keras.metrics
    return [
        m.AUC(name="auc"),
        m.AUC(curve="PR", name="pr"),
        m.Precision(name="precision"),
        m.Recall(name="recall"),
        m.TruePositives(name="tp"),
        m.BinaryAccuracy(name="ba"),
        m.RootMeanSquaredError(name="rmse"),
        m.SensitivityAtSpecificity(0.5, name="sas"),
        m.KLDivergence(name="kl"),
        "mae",
        per_row,
        scalar_metric,
        CountAbove(0.4),
    ]


def class_metrics() -> list[Any]:
    m = tf.keras.metrics
    return [
        m.OneHotMeanIoU(num_classes=3, name="iou"),
        m.OneHotIoU(num_classes=3, target_class_ids=[0, 2], name="iou2"),
        m.AUC(multi_label=True, num_labels=3, name="auc"),
        m.CategoricalCrossentropy(name="ce"),
        m.CosineSimilarity(name="cosine"),
        "accuracy",
    ]


@pytest.mark.both_generations
def test_metrics_of_two_classes(float64: None, compare: Compare) -> None:
    compare(
        lambda: dense(1, "sigmoid", loss="binary_crossentropy", metrics=binary_metrics()),
        y=binary(),
        validation_data=(features(HELD_OUT), binary(HELD_OUT)),
    )


def test_metrics_of_three_classes(float64: None, compare: Compare) -> None:
    compare(
        lambda: dense(3, "softmax", loss="categorical_crossentropy", metrics=class_metrics()),
        y=one_hot(),
        validation_data=(features(HELD_OUT), one_hot(HELD_OUT)),
    )


def test_metrics_that_are_float32() -> None:
    """In Keras 3 the first metric supports no other type, in Keras 2 the second."""
    m = tf.keras.metrics
    fit_both(
        lambda: dense(
            3,
            "softmax",
            loss="categorical_crossentropy",
            metrics=[m.TopKCategoricalAccuracy(2), m.F1Score("macro", threshold=0.4)],
        ),
        x=features().astype("float32"),
        y=one_hot().astype("float32"),
        batch_size=BATCH,
    )


def test_weighted_metrics(float64: None, compare: Compare) -> None:
    m = tf.keras.metrics
    weights = np.random.default_rng(1).integers(0, 4, ROWS).astype("float64")
    compare(
        lambda: dense(
            1,
            "sigmoid",
            loss="binary_crossentropy",
            metrics=["mae"],
            weighted_metrics=["mse", m.AUC(name="auc"), m.Recall(name="recall"), per_row],
        ),
        y=binary(),
        sample_weight=weights,
    )


# ------------------------------------------------------------------------- additional losses
class Penalty(L.Layer):
    """A layer with its own loss, a mean over the batch."""

    def __init__(self, rate: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rate = rate

    def call(self, inputs: Any) -> Any:
        self.add_loss(self.rate * tf.reduce_mean(tf.square(inputs)))
        return inputs

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "rate": self.rate}


def penalised() -> Any:
    tf.keras.utils.set_random_seed(4)
    model = Sequential(
        [
            L.Input((6,)),
            L.Dense(5, kernel_regularizer="l2", bias_regularizer=tf.keras.regularizers.L1(0.02)),
            Penalty(0.3),
            L.Dense(4, activity_regularizer=tf.keras.regularizers.L2(0.05)),
            L.Dense(1, kernel_regularizer=lambda w: 0.01 * tf.reduce_sum(tf.abs(w))),
        ]
    )
    model.compile(tf.keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


@pytest.mark.both_generations
def test_add_loss_and_regularizers(float64: None, compare: Compare) -> None:
    compare(penalised, y=binary(), validation_data=(features(HELD_OUT), binary(HELD_OUT)))


@pytest.mark.thorough
def test_add_loss_of_a_model(float64: None, compare: Compare) -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(4)
        inputs = L.Input((6,))
        hidden = L.Dense(5)(inputs)
        model = Model(inputs, L.Dense(1)(Penalty(0.1)(hidden)))
        if not IS_KERAS_3:
            model.add_loss(tf.reduce_mean(hidden))  # of a symbolic tensor, Keras 2 alone
        model.compile(tf.keras.optimizers.SGD(0.1), "mse")
        return model

    compare(make, y=binary())


# --------------------------------------------------------------------------------------- masks
def sequences(rows: int = ROWS) -> np.ndarray:
    """Returns word numbers, 0 after a row's end; the first rows are much shorter than the last."""
    words = np.random.default_rng(2).integers(1, 20, (rows, 7))
    lengths = 1 + (np.arange(rows) % 21) // 3
    return np.where(np.arange(7) < lengths[:, None], words, 0)


def tagger(**compiled: Any) -> Any:
    """Returns a model with a prediction per word; its loss and metrics are masked."""
    tf.keras.utils.set_random_seed(4)
    model = Sequential(
        [
            L.Input((7,), dtype="int32"),
            L.Embedding(20, 4, mask_zero=True),
            L.Dense(5, activation="tanh"),
            L.Dense(1),
        ]
    )
    arguments = {"loss": "mse", "metrics": ["mae"], "weighted_metrics": ["mse"], **compiled}
    model.compile(tf.keras.optimizers.SGD(0.01), **arguments)
    return model


@pytest.mark.parametrize("reduction", [None, "sum", "mean_with_sample_weight"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("batch_size", [20, 25])
@pytest.mark.both_generations
def test_masked_targets(
    float64: None, reduction: str | None, weighted: bool, batch_size: int
) -> None:
    if reduction == "mean_with_sample_weight" and not IS_KERAS_3:
        pytest.skip("Keras 2 has no such reduction")
    x = sequences()
    arguments: dict[str, Any] = {"x": x, "y": np.sin(x)[..., None], "batch_size": batch_size}
    if weighted:
        arguments["sample_weight"] = (
            np.random.default_rng(3).integers(0, 3, (ROWS, 7)).astype(float)
        )
    fit_both(
        lambda: tagger(
            loss=tf.keras.losses.MeanSquaredError(**({"reduction": reduction} if reduction else {}))
        ),
        **arguments,
        validation_data=(x[:33], np.sin(x[:33])[..., None]),
    )


@pytest.mark.thorough
@pytest.mark.both_generations
def test_masked_inputs(float64: None) -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(4)
        embedding = L.Embedding(20, 4, mask_zero=True)
        inputs = L.Input((7,), dtype="int32")
        words = embedding(inputs)
        both = L.Concatenate()([L.LSTM(5)(words), L.GlobalAveragePooling1D()(words)])
        model = Model(inputs, L.Dense(1)(both))
        model.compile(tf.keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        return model

    fit_both(make, x=sequences(), y=binary(), batch_size=20)


# ---------------------------------------------------------------------------------- optimizers
def schedule() -> Any:
    return tf.keras.optimizers.schedules.CosineDecay(0.1, 9)


class Halving(tf.keras.optimizers.schedules.LearningRateSchedule):
    """A user's schedule."""

    def __init__(self, start: float, every: int) -> None:
        self.start = start
        self.every = every

    def __call__(self, step: Any) -> Any:
        return self.start * 0.5 ** tf.cast(step // self.every, tf.float64)

    def get_config(self) -> dict[str, Any]:
        return {"start": self.start, "every": self.every}


class Warming(tf.keras.optimizers.schedules.LearningRateSchedule):
    """The schedule of TensorFlow's tutorial on transformers: no get_config(), and a tensor."""

    def __init__(self, width: int, steps: int = 4) -> None:
        super().__init__()
        self.width = tf.cast(width, tf.float32)
        self.steps = steps

    def __call__(self, step: Any) -> Any:
        step = tf.cast(step, tf.float32)
        falling, rising = tf.math.rsqrt(step + 1.0), step * self.steps**-1.5
        return tf.math.rsqrt(self.width) * tf.math.minimum(falling, rising)


class Boosted(tf.keras.optimizers.SGD):
    """A user's optimizer, without get_config()."""

    def __init__(self, *args: Any, boost: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.boost = boost
        self.damping = 1.0

    def update_step(self, gradient: Any, variable: Any, *rate: Any) -> Any:
        return super().update_step(gradient * self.boost * self.damping, variable, *rate)


def damped() -> Any:
    optimizer = Boosted(0.02, momentum=0.5, boost=3.0)
    optimizer.damping = 0.5
    return optimizer


class Fixed(tf.keras.optimizers.Optimizer):
    """Has neither get_config() nor the arguments of Keras's own optimizers."""

    def __init__(self, power: float, learning_rate: Any = 0.01) -> None:
        if IS_KERAS_3:
            super().__init__(learning_rate)
        else:
            super().__init__(name="Fixed")
            self._learning_rate = self._build_learning_rate(learning_rate)
        self.power = power

    def update_step(self, gradient: Any, variable: Any, *_: Any) -> Any:
        rate = tf.cast(self.learning_rate, tf.float64)
        step = rate * tf.sign(gradient) * tf.abs(gradient) ** self.power
        variable.assign(tf.convert_to_tensor(variable) - step)


def excluding(names: list[str]) -> Any:
    optimizer = tf.keras.optimizers.AdamW(0.01, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=names)
    return optimizer


opt = tf.keras.optimizers
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "nesterov": lambda: opt.SGD(0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda: opt.AdamW(0.01, weight_decay=0.1),
    "rmsprop_centered": lambda: opt.RMSprop(0.005, centered=True, momentum=0.5),
    "adagrad": lambda: opt.Adagrad(0.05),
    "lion": lambda: opt.Lion(0.002),
    "ftrl": lambda: opt.Ftrl(0.05),
    "adafactor": lambda: opt.Adafactor(0.01),
    "clipnorm": lambda: opt.Adam(0.01, clipnorm=0.01),
    "clipvalue": lambda: opt.SGD(0.1, momentum=0.9, clipvalue=0.003),
    "global_clipnorm": lambda: opt.SGD(0.1, global_clipnorm=0.02),
    "ema": lambda: opt.Adam(0.01, use_ema=True, ema_momentum=0.9),
    "ema_overwrite": lambda: opt.SGD(
        0.1, momentum=0.9, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3
    ),
    "schedule": lambda: opt.SGD(schedule(), momentum=0.9),
    "own_schedule": lambda: opt.Adam(Halving(0.02, 4)),
    "schedule_without_config": lambda: opt.Adam(Warming(128)),
    "own_optimizer": damped,
    "own_base_optimizer": lambda: Fixed(0.5, Warming(128)),
    "without_decay_by_name": lambda: excluding(["bias"]),
    "accumulating": lambda: opt.Adam(0.01, gradient_accumulation_steps=3),
    "accumulating_clipped": lambda: opt.SGD(0.1, gradient_accumulation_steps=2, clipnorm=0.01),
    "loss_scale": lambda: (
        opt.LossScaleOptimizer(opt.SGD(0.1), dynamic_growth_steps=3)
        if IS_KERAS_3
        else tf.keras.mixed_precision.LossScaleOptimizer(opt.SGD(0.1), dynamic_growth_steps=3)
    ),
}


@pytest.mark.parametrize("scaled", [False, True])
def test_variables_without_weight_decay(float64: None, scaled: bool) -> None:
    """An optimizer knows them by keys that differ between processes."""

    def make() -> Any:
        model = dense()
        optimizer = opt.AdamW(0.01, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_list=[model.layers[-1].kernel])
        scaling = opt if IS_KERAS_3 else tf.keras.mixed_precision
        model.compile(scaling.LossScaleOptimizer(optimizer) if scaled else optimizer, "mse")
        return model

    fit_both(make, x=features(), y=binary(), batch_size=BATCH)


# One case for each way to divide, clip, schedule or send an optimizer; the rest is `thorough`.
TELLING = {
    "accumulating_clipped",
    "adafactor",
    "adamw",
    "ema_overwrite",
    "global_clipnorm",
    "loss_scale",
    "own_base_optimizer",
    "own_optimizer",
    "schedule_without_config",
    "without_decay_by_name",
}


@pytest.mark.every_case
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in TELLING else pytest.mark.thorough)
        for name in OPTIMIZERS
    ],
)
@pytest.mark.both_generations
def test_optimizers(float64: None, name: str) -> None:
    if name.startswith("accumulating") and not IS_KERAS_3:
        pytest.skip("Keras 2 has no gradient accumulation")
    make = lambda: dense(optimizer=OPTIMIZERS[name](), metrics=["mae"])  # noqa: E731
    arguments: dict[str, Any] = {"x": features(), "y": binary(), "shuffle": False, "verbose": 0}
    found, expected = fit_both(make, **arguments, batch_size=BATCH)
    # Two processes, one, and two again: state and step count continue.
    for processes in (None, 2):
        ours = found.fit(**arguments, batch_size=30, num_processes=processes)
        theirs = expected.fit(**arguments, batch_size=30)
        assert_same_history(ours.history, theirs.history)
        assert_same_state(found, expected)
