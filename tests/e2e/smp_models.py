"""Run by `test_smp_models.py` with `nanotf run --smp`: models, trained as one process trains them.

Each rank trains its part of each model, and compares it with a plain program that gets whole
batches, and the random numbers that the step has drawn: exact in float64, or refused before the
first step.

    smp_models.py FOLDER CONFIGURATION...      partitions,microbatches,pipeline
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf import smp
from nanotf.compat.keras_common import tf_variable
from nanotf.errors import CollectiveError, ModelError, NanoError, UnavailableError

STEPS, ROWS, WIDTH = 3, 8, 4
L = tf.keras.layers
tf.keras.backend.set_floatx("float64")
Drawn = Sequence[Any]  # what a step draws, or a plain program gets instead


def dense(units: int, **options: Any) -> Any:
    return L.Dense(units, dtype="float64", **options)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and a step."""

    make: Callable[[Any], Any]  # takes the base class, returns the model
    # Each takes the model, x, y and what is drawn, or None to draw it; returns the loss and what is
    # drawn. The tape records it. With several, each step updates the attribute of its name.
    loss: Callable[[Any, Any, Any, Drawn | None], tuple[Any, Drawn]] | dict[str, Any]
    refused: str = ""  # with several partitions: a part of the error's text
    optimizer: Callable[[], Any] = lambda: tf.keras.optimizers.SGD(0.1, 0.9)
    by_parts: bool = False  # the plain program computes microbatches, too
    auto: bool = False  # auto_partition
    tolerance: float = 1e-9

    @property
    def losses(self) -> dict[str, Any]:
        return self.loss if isinstance(self.loss, dict) else {"": self.loss}


# ------------------------------------------------------------------------------------ models
def two_layers(base: Any, middle: Any = None, frozen: Sequence[int] = ()) -> Any:
    class TwoLayers(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(dtype="float64")
            self.first, self.last = dense(8, activation="tanh"), dense(WIDTH)
            self.middle = middle() if middle is not None else None
            for number in frozen:
                (self.first, self.last)[number].trainable = False

        def call(self, x: Any, training: bool | None = None) -> Any:
            with smp.partition(0):
                x = self.first(x)
                if self.middle is not None:
                    x = self.middle(x, training=training)
            with smp.partition(1):
                return self.last(x)

    return TwoLayers()


def dropping(base: Any, drop: Any) -> Any:
    """A model that returns what it drops, and can be given it."""

    class Dropping(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(dtype="float64")
            self.first, self.last = dense(8, activation="tanh"), dense(WIDTH)
            self.drops = [drop(), drop()]

        def call(self, x: Any, given: Any = None, training: bool | None = None) -> Any:
            with smp.partition(0):
                x = self.first(x)
                one = self.drops[0](tf.ones_like(x)) if given is None else given[0]
                x = x * one
            with smp.partition(1):
                x = self.last(x)
                two = self.drops[1](tf.ones_like(x)) if given is None else given[1]
                return x * two, one, two

    return Dropping()


class Operations(L.Layer):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(dtype="float64")

    def call(self, x: Any) -> Any:
        return tf.nn.dropout(x, 0.5) * tf.random.uniform(tf.shape(x), dtype=x.dtype)


class KerasDropout(L.Layer):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(dtype="float64")
        self.drop = L.Dropout(0.5, dtype="float64")

    def call(self, x: Any) -> Any:
        return self.drop(x, training=True)


def vae(base: Any) -> Any:
    class Vae(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(dtype="float64")
            self.mean, self.log, self.decoder = dense(2), dense(2), dense(WIDTH)

        def call(self, x: Any, given: Any = None, training: bool | None = None) -> Any:
            with smp.partition(0):
                mean, log = self.mean(x), self.log(x)
                drawn = tf.random.normal(tf.shape(mean), dtype=x.dtype) if given is None else given
                code = mean + tf.exp(log / 2) * drawn
            with smp.partition(1):
                return self.decoder(code), mean, log, drawn

    return Vae()


def tied(base: Any) -> Any:
    class Tied(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(dtype="float64")
            self.table = self.add_weight(
                shape=(10, WIDTH), initializer="glorot_uniform", name="table", dtype="float64"
            )
            self.inner = dense(WIDTH, activation="tanh")

        def call(self, x: Any, training: bool | None = None) -> Any:
            with smp.partition(0):
                table = tf.convert_to_tensor(self.table)
                x = tf.gather(table, tf.cast(tf.abs(x[:, 0]) * 3, tf.int32) % 10) + x
            with smp.partition(1):
                return tf.matmul(self.inner(x), tf.convert_to_tensor(self.table), transpose_b=True)

    return Tied()


def several(base: Any) -> Any:
    class Several(base):  # type: ignore[misc]
        """A shared layer, a model in it, inputs and outputs in dicts."""

        def __init__(self) -> None:
            super().__init__(dtype="float64")
            self.shared = dense(WIDTH, activation="tanh")
            inner = tf.keras.Sequential([dense(6, activation="relu"), dense(WIDTH)])
            self.inner, self.out = inner, dense(2)

        def call(self, x: Any, training: bool | None = None) -> Any:
            with smp.partition(0):
                a, b = self.shared(x["a"]), self.shared(x["b"])
            with smp.partition(1):
                return {"sum": self.inner(a) + b, "out": [self.out(b)]}

    return Several()


def writing(base: Any) -> Any:
    class Writing(base):  # type: ignore[misc]
        """A variable that two partitions write."""

        def __init__(self) -> None:
            super().__init__(dtype="float64")
            self.first, self.last = dense(WIDTH), dense(WIDTH)
            self.count = tf.Variable(0.0, trainable=False)

        def call(self, x: Any, training: bool | None = None) -> Any:
            for number, layer in enumerate((self.first, self.last)):
                with smp.partition(number):
                    x = layer(x)
                    self.count.assign(1.0)  # as often as there are microbatches
            return x

    return Writing()


class Text(L.Layer):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(dtype="float64")

    def call(self, x: Any, training: bool | None = None) -> Any:
        with smp.partition(0):
            text = tf.strings.as_string(x)
        with smp.partition(1):
            return x + tf.stop_gradient(tf.strings.to_number(text, x.dtype))


def gan(base: Any) -> Any:
    class Gan(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(dtype="float64")
            self.maker = tf.keras.Sequential([dense(6, activation="tanh"), dense(WIDTH)])
            self.judge = tf.keras.Sequential([dense(6, activation="tanh"), dense(1)])

        def call(self, x: Any, training: bool | None = None) -> Any:
            with smp.partition(0):
                made = self.maker(x["noise"])
            with smp.partition(1):
                return self.judge(x["real"]), self.judge(made)

    return Gan()


def normalized() -> Any:
    return L.BatchNormalization(dtype="float64")


# Deep layers see two values of a channel; by Keras's 0.001, normalization enlarges roundings there:
# one process, with and without a graph, has other digits, from 1e-10 in the first step's gradients
# to 1 in the third's.
EPSILON = 0.1


def application(base: Any, name: str, **options: Any) -> Any:
    """A model of `tf.keras.applications` for small images and few classes."""

    class Application(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(dtype="float64")
            make = getattr(tf.keras.applications, name)
            self.inner = make(
                input_shape=(32, 32, 3),
                weights=None,
                classes=WIDTH,
                classifier_activation=None,
                **options,
            )
            for layer in self.inner.layers:
                if isinstance(layer, L.BatchNormalization):
                    layer.epsilon = EPSILON

        def call(self, x: Any, training: bool | None = None) -> Any:
            images = tf.repeat(tf.reshape(x, [-1, 2, 2, 1]), 3, axis=3)
            return self.inner(tf.repeat(tf.repeat(images, 16, 1), 16, 2), training=training)

    return Application()


def bfloat16(base: Any) -> Any:
    class Mixed(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(dtype="mixed_bfloat16")
            self.first = L.Dense(8, activation="tanh", dtype="mixed_bfloat16")
            self.last = L.Dense(WIDTH, dtype="mixed_bfloat16")

        def call(self, x: Any, training: bool | None = None) -> Any:
            with smp.partition(0):
                x = self.first(x)
            with smp.partition(1):
                return tf.cast(self.last(x), tf.float64)

    return Mixed()


def recurrent(base: Any) -> Any:
    class Recurrent(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(dtype="float64")
            self.one = L.GRU(5, return_sequences=True, dtype="float64")
            self.two, self.out = L.LSTM(4, dtype="float64"), dense(WIDTH)
            self.inner = dense(5, activation="tanh")
            # Keras 3's trial run of the call would trace the function before.
            self.inner.build((None, WIDTH, 5))

        @tf.function
        def repeated(self, x: Any) -> Any:
            for _ in tf.range(2):
                x = self.inner(x)
                x.set_shape([None, WIDTH, 5])
            return x

        def call(self, x: Any, training: bool | None = None) -> Any:
            with smp.partition(0):
                x = self.one(x[:, :, None])
                x = self.repeated(x)
            with smp.partition(1):
                return self.out(self.two(x))

    return Recurrent()


def regularized(base: Any) -> Any:
    class Regularized(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(dtype="float64")
            self.first, self.last = dense(4, kernel_regularizer="l2"), dense(WIDTH)

        def call(self, x: Any, training: bool | None = None) -> Any:
            with smp.partition(0):
                x = self.first(x)
            with smp.partition(1):
                return self.last(x)

    return Regularized()


def reaching(base: Any) -> Any:
    elsewhere = tf.Variable(tf.ones([WIDTH], tf.float64), name="elsewhere")

    class Reaching(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(dtype="float64")
            self.first, self.last = dense(WIDTH), dense(WIDTH)

        def call(self, x: Any, training: bool | None = None) -> Any:
            with smp.partition(0):
                x = self.first(x) * elsewhere
            with smp.partition(1):
                return self.last(x)

    return Reaching()


# ------------------------------------------------------------------------------------- steps
def square(a: Any, b: Any) -> Any:
    return tf.reduce_mean((a - b) ** 2)


def plain_loss(model: Any, x: Any, y: Any, given: Drawn | None) -> tuple[Any, Drawn]:
    return square(model(x, training=True), y), []


def diffusion(model: Any, x: Any, y: Any, given: Drawn | None) -> tuple[Any, Drawn]:
    if given is None:
        given = [
            tf.random.uniform([tf.shape(x)[0], 1], dtype=x.dtype),
            tf.random.normal(tf.shape(x), dtype=x.dtype),
        ]
    time, noise = given
    return square(model(time * x + (1 - time) * noise, training=True), noise), given


def around(model: Any, x: Any, y: Any, given: Drawn | None) -> tuple[Any, Drawn]:
    """Draws before and after the model."""
    before = tf.random.normal(tf.shape(x), dtype=x.dtype) if given is None else given[0]
    found = model(x + before, training=True)
    after = tf.random.normal(tf.shape(y), seed=5, dtype=x.dtype) if given is None else given[1]
    last = tf.random.uniform(tf.shape(y), dtype=x.dtype) if given is None else given[2]
    return square(found, y + after * last), [before, after, last]


@tf.function
def noise_like(x: Any) -> Any:
    return tf.random.normal(tf.shape(x), dtype=x.dtype)


def nested(model: Any, x: Any, y: Any, given: Drawn | None) -> tuple[Any, Drawn]:
    """Draws in a `tf.function`, twice."""
    if given is None:
        given = [noise_like(x), noise_like(x)]
    return square(model(x + given[0], training=True), y + given[1]), given


def mixup(model: Any, x: Any, y: Any, given: Drawn | None) -> tuple[Any, Drawn]:
    if given is None:
        order = tf.random.shuffle(tf.range(tf.shape(x)[0]))
        share = tf.random.gamma([], 2.0, dtype=x.dtype) / 10
        given = [share * v + (1 - share) * tf.gather(v, order) for v in (x, y)]
    return square(model(given[0], training=True), given[1]), given


def dropped(model: Any, x: Any, y: Any, given: Drawn | None) -> tuple[Any, Drawn]:
    found, *drawn = model(x, given=given, training=True)
    return square(found, y), drawn


def evidence(model: Any, x: Any, y: Any, given: Drawn | None) -> tuple[Any, Drawn]:
    found, mean, log, drawn = model(x, given=None if given is None else given[0], training=True)
    prior = tf.reduce_mean(tf.exp(log) + mean**2 - 1 - log)
    return square(found, y) + prior, [drawn]


def tied_loss(model: Any, x: Any, y: Any, given: Drawn | None) -> tuple[Any, Drawn]:
    return tf.reduce_mean(model(x, training=True) ** 2 * y[:, :1]), []


def several_loss(model: Any, x: Any, y: Any, given: Drawn | None) -> tuple[Any, Drawn]:
    found = model({"a": x, "b": y}, training=True)
    return square(found["sum"], y) + square(found["out"][0], x[:, :2]), []


def regularized_loss(model: Any, x: Any, y: Any, given: Drawn | None) -> tuple[Any, Drawn]:
    return square(model(x, training=True), y) + tf.add_n(model.losses), []


def judging(model: Any, x: Any, given: Drawn | None) -> tuple[Any, Any, Drawn]:
    noise = tf.random.normal(tf.shape(x), dtype=x.dtype) if given is None else given[0]
    return *model({"real": x, "noise": noise}, training=True), [noise]


def of_judge(model: Any, x: Any, y: Any, given: Drawn | None) -> tuple[Any, Drawn]:
    real, made, drawn = judging(model, x, given)
    return tf.reduce_mean(tf.nn.softplus(-real)) + tf.reduce_mean(tf.nn.softplus(made)), drawn


def of_maker(model: Any, x: Any, y: Any, given: Drawn | None) -> tuple[Any, Drawn]:
    _, made, drawn = judging(model, x, given)
    return tf.reduce_mean(tf.nn.softplus(-made)), drawn


def penalty(model: Any, x: Any, y: Any, given: Drawn | None) -> tuple[Any, Drawn]:
    loss = square(model(x, training=True), y)
    return loss + tf.add_n([tf.nn.l2_loss(w) for w in model.trainable_variables]), []


def averaging() -> Any:
    """An optimizer that replaces the weights by their moving averages in every second step."""
    return tf.keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)


CASES = {
    "dense": Case(two_layers, plain_loss),
    "diffusion": Case(two_layers, diffusion),
    "draws around": Case(two_layers, around),
    "draws in a function": Case(two_layers, nested),
    "mixup": Case(two_layers, mixup),
    "vae": Case(vae, evidence),
    "operations drop": Case(lambda base: dropping(base, Operations), dropped),
    "layers drop": Case(lambda base: dropping(base, KerasDropout), dropped),
    "frozen base": Case(lambda base: two_layers(base, frozen=[0]), plain_loss),
    "frozen head": Case(lambda base: two_layers(base, frozen=[1]), plain_loss),
    "tied": Case(tied, tied_loss),
    "writing": Case(writing, plain_loss, "must be used in one partition", by_parts=True),
    "text": Case(lambda base: two_layers(base, Text), plain_loss, "Only tensors of numbers"),
    "penalty": Case(two_layers, penalty, "in the model's call alone"),
    "gan": Case(gan, {"judge": of_judge, "maker": of_maker}),
    "moving averages": Case(two_layers, plain_loss, optimizer=averaging),
    "batch normalization": Case(
        lambda base: two_layers(base, normalized), plain_loss, by_parts=True
    ),
    "mixed_bfloat16": Case(bfloat16, plain_loss, tolerance=0.05),
    "several": Case(several, several_loss),
    "recurrent": Case(recurrent, plain_loss),
    "regularized": Case(regularized, regularized_loss, "no losses of its own"),
    "reaching": Case(reaching, plain_loss, "owns the variables"),
}


def slow() -> Any:
    """An optimizer with which deep networks do not diverge: that would enlarge each rounding."""
    return tf.keras.optimizers.SGD(1e-4, 0.9)


# Large, so only with the pipeline "simple".
APPLICATIONS = {
    name: Case(make, plain_loss, optimizer=slow, by_parts=True, auto=True)
    for name, make in {
        "MobileNetV2": lambda base: application(base, "MobileNetV2", alpha=0.35),
        "ResNet-50": lambda base: application(base, "ResNet50"),
    }.items()
}
MANUAL = {"auto_partition": False, "default_partition": 0}


# ----------------------------------------------------------------------------------- training
def batches() -> list[tuple[Any, Any]]:
    """Whole batches, of all copies."""
    rng = np.random.default_rng(0)
    shape = (STEPS, 2, ROWS * smp.dp_size(), WIDTH)
    return [(tf.constant(x), tf.constant(y)) for x, y in rng.normal(size=shape)]


def made(case: Case, base: Any) -> Any:
    tf.keras.utils.set_random_seed(1)
    return case.make(base)


def update(optimizer: Any, part: str, model: Any, gradients: Sequence[Any]) -> None:
    """Applies gradients to the trainable variables of a model, or to those of a part of it."""
    wanted = {id(tf_variable(w)) for w in getattr(model, part).weights} if part else set()
    optimizer.apply_gradients(
        (gradient, weight)
        for gradient, weight in zip(gradients, model.trainable_variables, strict=True)
        if not part or id(tf_variable(weight)) in wanted
    )


def train(case: Case) -> tuple[Any, list[Any], list[float], list[Drawn]]:
    """Returns the model, the optimizers, and the loss and what is drawn in each step."""
    model = made(case, smp.DistributedModel)
    tf.keras.utils.set_random_seed(3)

    def stepping(loss_of: Any) -> Any:
        @smp.step
        def step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss, drawn = loss_of(model, x, y, None)
            return tape.gradient(loss, model.trainable_variables), loss, drawn

        return step

    steps = [(part, stepping(loss), case.optimizer()) for part, loss in case.losses.items()]
    losses, draws = [], []
    rows = slice(ROWS * smp.dp_rank(), ROWS * (smp.dp_rank() + 1))
    for (x, y), (part, step, optimizer) in itertools.product(batches(), steps):
        gradients, loss, drawn = step(x[rows], y[rows])
        update(optimizer, part, model, [gradient.accumulate() for gradient in gradients])
        losses.append(float(loss.accumulate()))
        own = [each.merge().numpy() for each in drawn]
        check_numbers([np.array(each.outputs) for each in drawn])
        copies = smp.allgather(own, smp.CommGroup.DP_GROUP)
        for one, other in itertools.pairwise(copies):
            assert all(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))
        draws.append([np.concatenate(parts) for parts in zip(*copies, strict=True)])
    return model, [optimizer for _, _, optimizer in steps], losses, draws


def check_numbers(parts: Sequence[Any]) -> None:
    """Microbatches draw different numbers."""
    for microbatches in parts:
        for number, one in enumerate(microbatches):
            for other in microbatches[:number]:
                assert not np.array_equal(one, other)


def train_plain(case: Case, draws: list[Drawn]) -> tuple[Any, list[float]]:
    model = made(case, tf.keras.Model)
    steps = [(part, loss, case.optimizer()) for part, loss in case.losses.items()]
    tf.keras.utils.set_random_seed(3)  # Keras 2 draws first weights in the first call
    losses, left = [], iter(draws)
    for (x, y), (part, loss_of, optimizer) in itertools.product(batches(), steps):
        given = next(left)

        def gradients_of(x: Any, y: Any, given: Any = given, loss_of: Any = loss_of) -> Any:
            with tf.GradientTape() as tape:
                loss, _ = loss_of(model, x, y, given or None)
            return tape.gradient(loss, model.trainable_variables), float(loss)

        if case.by_parts:
            gradients, loss = in_parts(model, gradients_of, x, y)
        else:
            gradients, loss = gradients_of(x, y)
        update(optimizer, part, model, gradients)
        losses.append(loss)
    assert next(left, None) is None
    return model, losses


def in_parts(model: Any, gradients_of: Any, x: Any, y: Any) -> tuple[list[Any], float]:
    """Computes microbatches one after the other, and each copy from the same states."""
    if not model.built or not model.weights:
        model(x[:1])
    states = [tf_variable(w) for w in model.non_trainable_weights]
    before, ends, found = [s.numpy() for s in states], [], []
    for batch in zip(tf.split(x, smp.dp_size()), tf.split(y, smp.dp_size()), strict=True):
        for state, value in zip(states, before, strict=True):
            state.assign(value)
        parts = [tf.split(each, smp.num_microbatches()) for each in batch]
        found += [gradients_of(*part) for part in zip(*parts, strict=True)]
        ends.append([s.numpy() for s in states])
    for state, values in zip(states, zip(*ends, strict=True), strict=True):
        state.assign(np.mean(values, axis=0))
    means = [tf.add_n(each) / len(found) for each in zip(*(g for g, _ in found), strict=True)]
    return means, float(np.mean([loss for _, loss in found]))


def compare(name: str, case: Case) -> None:
    if case.refused and smp.mp_size() > 1:
        try:
            train(case)
        except NanoError as error:
            assert case.refused in str(error), (name, error)
            return
        raise AssertionError(name)
    model, _, losses, draws = train(case)
    if smp.mp_size() > 1:
        assert len(set(smp.allgather(str(draws)))) == 1, name
    expected, plain = train_plain(case, draws)
    np.testing.assert_allclose(losses, plain, rtol=case.tolerance, err_msg=name)
    held = [tf_variable(w).numpy() for w in model.weights]
    everywhere = smp.allgather(held, smp.CommGroup.DP_GROUP)
    for copy in everywhere[1:]:
        for one, other in zip(copy, everywhere[0], strict=True):
            np.testing.assert_array_equal(one, other, err_msg=name)
    found = smp.allgather(held, smp.CommGroup.MP_GROUP)
    values = [value for part in found for value in part]
    exact = {"rtol": case.tolerance, "atol": case.tolerance}
    for weight in expected.weights:  # in one of the partitions
        close = [v.shape == weight.shape and np.allclose(v, weight, **exact) for v in values]
        assert any(close), (name, weight.name)


# ------------------------------------------------------------------------------- refused, whole
def refused(kind: type[Exception], text: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)


def check_whole(folder: pathlib.Path) -> None:
    """A rank's files and numbers of a model in partitions are whole, or refused."""
    case = CASES["dense"]
    model, (optimizer,), _, _ = train(case)
    plain, _ = train_plain(case, [[]] * STEPS)
    assert model.count_params() == plain.count_params() > sum(np.size(w) for w in model.weights)
    lines: list[str] = []
    model.summary(print_fn=lambda line, **_: lines.append(line))
    assert str(plain.count_params()) in "".join(lines)
    refused(ModelError, "get_weights() of", model.get_weights)
    refused(ModelError, "set_weights() of", lambda: model.set_weights([]))
    refused(ModelError, "load_weights() of", lambda: model.load_weights("any.weights.h5"))
    refused(UnavailableError, "Leave it out", model.profile)
    for part in ({"model": model}, {"optimizer": optimizer}):
        checkpoint = tf.train.Checkpoint(**part)
        path = str(folder / "part")
        refused(ModelError, "smp.CheckpointManager", lambda c=checkpoint, p=path: c.save(p))
    model.save_weights(str(folder / "all.weights.h5"))
    elsewhere = [w for layer in (model.first, model.last) for w in layer.weights]
    held = {id(w) for w in model.weights}
    for weight in (w for w in elsewhere if id(w) not in held):
        refused(ModelError, "a read of", lambda weight=weight: tf_variable(weight).numpy())
        read = tf.function(lambda weight=weight: tf.reduce_sum(weight))
        refused(ValueError, "a read of", read)  # TensorFlow may wrap it
    if smp.rank() == 0:
        plain.load_weights(str(folder / "all.weights.h5"))
    copies = smp.allgather([tf_variable(w).numpy() for w in model.weights])
    if smp.rank() == 0:
        for weight, right in zip(plain.weights, [*copies[0], *copies[1]], strict=True):
            np.testing.assert_array_equal(weight, right)


def check_rebuilt() -> None:
    """A step is traced anew when layers are frozen."""
    model, optimizer = made(CASES["dense"], smp.DistributedModel), tf.keras.optimizers.SGD(0.1)

    @smp.step
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = square(model(x, training=True), y)
        return tape.gradient(loss, model.trainable_variables)

    x, y = batches()[0]
    for frozen in (False, True, False):
        model.first.trainable = not frozen
        before = [tf_variable(w).numpy() for w in model.first.weights] if smp.mp_rank() == 0 else []
        gradients = step(x, y)
        averaged = [gradient.accumulate() for gradient in gradients]
        optimizer.apply_gradients(zip(averaged, model.trainable_variables, strict=True))
        for old, new in zip(before, model.first.weights, strict=False):
            assert np.array_equal(old, new) == frozen


def check_moves() -> None:
    """A kind of call that would move a variable is refused: its value is in one process."""

    class Moving(smp.DistributedModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(dtype="float64")
            self.parts = [dense(WIDTH) for _ in range(3)]

        def call(self, x: Any, training: bool | None = None) -> Any:
            # A variable's uses are in one partition: the last call's first two parts are, too.
            order = (0, 1, 2) if training else (1, 0, 1, 2)
            for place, number in enumerate(order):
                with smp.partition(int(place > 0)):
                    x = self.parts[number](x)
            return x

    x = batches()[0][0]
    for options in (MANUAL, {}):
        smp.init({"partitions": 2, "microbatches": 2, **options})
        model = Moving()
        smp.step(lambda x, m=model: m(x, training=True))(x)
        call = smp.step(lambda x, m=model: m(x, training=False))
        refused(ModelError, "and now in", lambda call=call: call(x))


def check_arrays() -> None:
    """An array that is not split is a tensor in the step, called eagerly or in a `tf.function`."""
    model, table = made(CASES["dense"], smp.DistributedModel), np.arange(3.0)

    @smp.step(non_split_inputs=["table", "row"])
    def step(x: Any, table: Any, row: Any) -> Any:
        assert tf.is_tensor(row)
        return tf.reduce_mean(model(x)) * 0.0 + table[tf.cast(row, tf.int32)]

    x = batches()[0][0]

    def whole(x: Any) -> Any:
        return step(x, table, np.int64(2)).reduce_mean()

    assert float(whole(x)) == float(tf.function(whole)(x)) == 2.0


def check_errors() -> None:
    """Errors keep their class in a `tf.function` around the step."""
    model = made(CASES["dense"], smp.DistributedModel)
    numbers = np.random.default_rng(smp.rank())

    @smp.step
    def step(x: Any) -> Any:
        noise = tf.numpy_function(lambda: numbers.normal(size=x.shape), [], tf.float64)
        noise.set_shape(x.shape)
        with tf.GradientTape() as tape:
            loss = square(model(x + noise, training=True), noise)
        return tape.gradient(loss, model.trainable_variables)

    @smp.step
    def twice(x: Any) -> Any:
        return model(model(x))

    x = batches()[0][0]
    uneven, call = tf.RaggedTensor.from_tensor(x), smp.step(lambda x: model(x))
    refused(UnavailableError, "takes dense tensors", lambda: call(uneven))

    def inside(function: Any) -> Any:
        @tf.function
        def around(x: Any) -> Any:
            return tf.nest.map_structure(lambda output: output.accumulate(), function(x))

        return around

    for around in (lambda function: function, inside):
        failing, calling_twice = around(step), around(twice)
        refused(CollectiveError, "the model's inputs of microbatch 0", lambda f=failing: f(x))
        refused(UnavailableError, "calls one model once", lambda f=calling_twice: f(x))
    compiled = smp.step(lambda x: model(x), jit_compile=True)
    refused(UnavailableError, "XLA cannot compile", lambda: compiled(x))


def main() -> None:
    for text in sys.argv[2:]:
        partitions, microbatches, pipeline = text.split(",")
        config = {"partitions": int(partitions), "microbatches": int(microbatches)}
        for name, case in {**CASES, **(APPLICATIONS if pipeline == "simple" else {})}.items():
            manual = {} if case.auto or partitions == "1" else MANUAL
            smp.init({**config, "pipeline": pipeline, **manual})
            try:
                compare(name, case)
            except Exception as error:
                raise AssertionError(f"{name} with {text}: {error}") from error
        print(f"rank {smp.rank()}: {text}", flush=True)
    smp.init({"partitions": 2, "microbatches": 2, **MANUAL})
    check_whole(pathlib.Path(sys.argv[1]))
    check_rebuilt()
    check_arrays()
    check_errors()
    check_moves()
    print(f"rank {smp.rank()}: done", flush=True)


main()
