"""Every layer, loss and metric of Keras gives the numbers of one process in `fit`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras_parts as parts
import numpy as np
import parity
import pytest
import tensorflow as tf
from tensorflow.keras import losses, metrics

from nanotf.keras import Model

L = tf.keras.layers

pytestmark = pytest.mark.both_generations


@dataclasses.dataclass
class Size:
    """The rows of the data and of a batch; see `keras_parts.SIZES`."""

    rows: int
    batch: int


@pytest.fixture(params=parts.SIZES)
def size(request: pytest.FixtureRequest) -> Size:
    return Size(*parts.SIZES[request.param])


def test_every_part_is_listed() -> None:
    layers = {name for _, table in parts.LAYERS.values() for name in table}
    layers |= {*parts.AUGMENTATIONS, *parts.MERGING, *parts.OF_NUMBERS, *parts.OF_TEXTS}
    layers |= {*parts.OF_SIGNALS, *parts.NO_LAYERS}
    for module, base, known in (
        (L, L.Layer, layers),
        (losses, losses.Loss, {*parts.LOSSES, *parts.NO_LOSSES}),
        (metrics, metrics.Metric, {*parts.METRICS, *parts.NO_METRICS}),
    ):
        unknown = [names for names in parts.classes_in(module, base) if not names & known]
        assert not unknown, module.__name__


def branches(make_input: Callable[[], Any], table: Any, ends: Callable[[Any], Any]) -> Any:
    """Returns a model with an output for each layer of a table; a separate layer precedes each."""
    tf.keras.utils.set_random_seed(3)
    inputs = make_input()
    outputs = []
    for name, make in table.items():
        hidden = ends(inputs)
        outputs.append(L.Dense(2, name=f"of_{name}")(L.Flatten()(make()(hidden))))
    model = Model(inputs, outputs)
    model.compile(tf.keras.optimizers.SGD(0.05), "mse")
    return model


def assert_alike(
    make: Callable[[], Any],
    x: Any,
    y: Any,
    size: Size,
    *,
    whole: Sequence[str] = (),
    **options: Any,
) -> None:
    """Fits two models made by `make`, and compares the weights by their names.

    Args:
        make, x, y, size: the model, its data, and how they are batched.
        whole: classes of layers, besides `parts.WHOLE`, that may run whole.
        **options: of `fit`.
    """
    arguments = {"batch_size": size.batch, "epochs": 2, "shuffle": False, "verbose": 0}
    expected, found = make(), make()
    before = expected.get_weights()
    histories = []
    for model, more in ((expected, {}), (found, {"num_processes": 2})):
        tf.keras.utils.set_random_seed(4)
        histories.append(model.fit(x, y, **arguments, **options, **more).history)
    tolerance = parity.TOLERANCE[tf.keras.backend.floatx()]
    ours, theirs = found.get_weights(), expected.get_weights()
    wrong = [
        (getattr(v, "path", v.name), float(abs(one - other).max()))
        for v, one, other in zip(expected.weights, ours, theirs, strict=True)
        if not np.allclose(one, other, rtol=10 * tolerance, atol=tolerance)
    ]
    assert not wrong
    assert any(not np.array_equal(a, b) for a, b in zip(before, theirs, strict=True))
    parity.assert_same_history(histories[1], histories[0])
    assert undivided(found) <= parts.WHOLE | parts.WHOLE_LOSSES | set(whole)


def undivided(model: Any) -> set[str]:
    """Returns the classes of the layers and losses that the last `fit` ran whole."""
    layers = {layer.name: type(layer).__name__ for layer in (model, *model.layers)}
    whole = {part.name for part in model.history.nanotf.parts if not part.is_divided}
    of_losses = whole & parts.LOSSES.keys()
    return of_losses | {layers[name] for name in whole - of_losses if name in layers}


def values(size: Size, *shape: int) -> np.ndarray:
    return np.random.default_rng(5).normal(size=(size.rows, *shape))


def targets_of(table: Iterable[str], size: Size) -> list[np.ndarray]:
    return [values(size, 2) for _ in table]


def assert_layers_alike(shape: tuple[int, ...], table: Any, size: Size) -> None:
    """Compares a model with a branch for each layer of a table, each behind a layer that trains."""

    def trained(x: Any) -> Any:
        return L.Dense(shape[-1], activation="tanh")(x)

    assert_alike(
        lambda: branches(lambda: L.Input(shape), table, trained),
        values(size, *shape),
        targets_of(table, size),
        size,
    )


@pytest.mark.parametrize("kind", list(parts.LAYERS))
def test_layers(float64: None, kind: str, size: Size) -> None:
    shape, table = parts.LAYERS[kind]
    assert_layers_alike(shape, parts.installed(table), size)


@pytest.mark.parametrize("rows", [22, 24])
def test_a_look_up_table_in_a_model(float64: None, rows: int) -> None:
    """Keras 2 lists the table among the model's variables."""
    numbers = np.random.default_rng(5).integers(0, 4, (rows, 1))
    table = L.IntegerLookup(output_mode="multi_hot")
    table.adapt(numbers)

    def model() -> Any:
        tf.keras.utils.set_random_seed(3)
        inputs = L.Input((1,), dtype="int64")
        made = Model(inputs, L.Dense(1)(table(inputs)))
        made.compile(tf.keras.optimizers.SGD(0.05), "mse")
        return made

    assert_alike(model, numbers, numbers.astype("float64"), Size(rows, 8))


def test_branches_and_batches_of_one_row(float64: None) -> None:
    """A worker without rows makes the same operations, and so the same order of exchanges."""
    shape, table = parts.LAYERS["sequences"]
    chosen = {name: table[name] for name in ("Masking", "TimeDistributed")}
    assert_layers_alike(shape, chosen, Size(3, 1))


@pytest.mark.every_case
@pytest.mark.parametrize("shape", [(3,), (6, 4), (4, 4, 3)])
def test_statistics_where_a_worker_has_no_rows(float64: None, shape: tuple[int, ...]) -> None:
    """A last batch of one row, in which the other worker's padding row counts for nothing."""
    assert_layers_alike(shape, {"BatchNormalization": L.BatchNormalization}, Size(9, 4))


@pytest.mark.thorough
def test_layers_with_several_inputs(float64: None, size: Size) -> None:
    def merged(name: str) -> Callable[[], Any]:
        def layer(x: Any) -> Any:
            merge = L.Dot(axes=1) if name == "Dot" else getattr(L, name)()
            return merge([x, L.Dense(4)(x)])

        return lambda: layer

    table = {name: merged(name) for name in parts.MERGING}
    assert_alike(
        lambda: branches(lambda: L.Input((4,)), table, lambda x: L.Dense(4)(x)),
        values(size, 4),
        targets_of(table, size),
        size,
    )


def test_layers_of_integers(float64: None, size: Size) -> None:
    table = parts.installed(parts.OF_NUMBERS)
    numbers = np.random.default_rng(5).integers(0, 9, (size.rows, 5))
    assert_alike(
        lambda: branches(lambda: L.Input((5,), dtype="int64"), table, lambda x: x),
        numbers,
        targets_of(table, size),
        size,
    )


def test_layers_of_strings(float64: None, size: Size) -> None:
    table = parts.OF_TEXTS
    texts = tf.constant(np.random.default_rng(5).choice(["a", "b", "c"], (size.rows, 1)))
    assert_alike(
        lambda: branches(lambda: L.Input((1,), dtype="string"), table, lambda x: x),
        texts,
        targets_of(table, size),
        size,
    )


def test_layers_of_signals(size: Size) -> None:
    table = parts.installed(parts.OF_SIGNALS)
    if not table:
        pytest.skip("this Keras has none")
    assert_alike(
        lambda: branches(lambda: L.Input((32, 1)), table, lambda x: x),
        values(size, 32, 1).astype("float32"),
        targets_of(table, size),
        size,
    )


# `make test` runs a layer that draws per row, and a layer that mixes rows.
_SAMPLED = ("RandomFlip", "MixUp")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in _SAMPLED else pytest.mark.thorough)
        for name in parts.installed(parts.AUGMENTATIONS)
    ],
)
def test_augmentations(name: str, size: Size) -> None:
    images = np.random.default_rng(5).integers(0, 256, (size.rows, 8, 8, 3)).astype("float32")

    def make() -> Any:
        tf.keras.utils.set_random_seed(3)
        layer = parts.AUGMENTATIONS[name]()
        inputs = L.Input((8, 8, 3))
        pooled = L.GlobalAveragePooling2D()(layer(inputs))
        model = Model(inputs, L.Dense(2)(L.Rescaling(1 / 255)(pooled)))
        model.compile(tf.keras.optimizers.SGD(0.05), "mse")
        return model

    assert_alike(make, images, values(size, 2).astype("float32"), size)


# ------------------------------------------------------------------------- losses and metrics
def output_and_targets(kind: str, x: Any, name: str, size: Size) -> tuple[Any, np.ndarray]:
    """Returns an output for a loss or metric, and targets; see `keras_parts.LOSSES`."""
    random = np.random.default_rng(11)
    numbers = random.integers(0, 3, size.rows)
    if kind == "values":
        return L.Dense(3, "tanh", name=name)(x), random.normal(size=(size.rows, 3))
    if kind == "probabilities":
        target = random.integers(0, 2, (size.rows, 1)).astype("float64")
        return L.Dense(1, "sigmoid", name=name)(x), target
    if kind == "texts":
        target = random.integers(1, 5, (size.rows, 2))
        return L.Reshape((6, 5), name=name)(L.Dense(30)(x)), target
    scores = L.Dense(3, "softmax", name=name)(x)
    return scores, numbers if kind == "numbers of classes" else np.eye(3)[numbers]


@pytest.mark.parametrize("weighted", [False, True])
def test_losses(float64: None, weighted: bool, size: Size) -> None:
    table = parts.installed(parts.LOSSES, losses)
    table.pop("CTC", None)  # TensorFlow computes it in float32
    targets: list[np.ndarray] = []

    def make() -> Any:
        tf.keras.utils.set_random_seed(3)
        inputs = L.Input((4,))
        made = [output_and_targets(kind, inputs, n, size) for n, (kind, _) in table.items()]
        targets[:] = [target for _, target in made]
        model = Model(inputs, [output for output, _ in made])
        each = [getattr(losses, name)(**options) for name, (_, options) in table.items()]
        model.compile(tf.keras.optimizers.SGD(1e-3), each)
        return model

    make()
    weights = [np.random.default_rng(7).uniform(size=size.rows) for _ in table]
    assert_alike(make, values(size, 4), targets, size, sample_weight=weights if weighted else None)


@pytest.mark.skipif(not hasattr(losses, "CTC"), reason="Keras 3's")
def test_ctc(size: Size) -> None:
    targets = output_and_targets("texts", L.Input((4,)), "text", size)[1]

    def make() -> Any:
        tf.keras.utils.set_random_seed(3)
        inputs = L.Input((4,))
        model = Model(inputs, output_and_targets("texts", inputs, "text", size)[0])
        model.compile(tf.keras.optimizers.SGD(1e-3), losses.CTC())
        return model

    assert_alike(make, values(size, 4).astype("float32"), targets, size)


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(losses, "CTC"), reason="Keras 2 has none for float64")
@pytest.mark.parametrize("weighted", [False, True])
def test_metrics(float64: None, weighted: bool, size: Size) -> None:
    table = parts.installed(parts.METRICS, metrics)
    kinds = list(dict.fromkeys(kind for kind, _ in table.values()))
    targets: list[np.ndarray] = []

    def make() -> Any:
        tf.keras.utils.set_random_seed(3)
        inputs = L.Input((4,))
        made = [output_and_targets(kind, inputs, f"of{n}", size) for n, kind in enumerate(kinds)]
        targets[:] = [target for _, target in made]
        model = Model(inputs, [output for output, _ in made])
        by_output = [
            [
                getattr(metrics, n)(name=n, **options)
                for n, (k, options) in table.items()
                if k == kind
            ]
            for kind in kinds
        ]
        option = {"weighted_metrics" if weighted else "metrics": by_output}
        loss = ["sparse_categorical_crossentropy" if "numbers" in k else "mse" for k in kinds]
        model.compile(tf.keras.optimizers.SGD(1e-3), loss, **option)
        return model

    make()
    weights = [np.random.default_rng(7).uniform(size=size.rows) for _ in kinds]
    assert_alike(make, values(size, 4), targets, size, sample_weight=weights if weighted else None)


# ------------------------------------------------------------------- TensorFlow's random numbers
class Drawing(L.Layer):  # type: ignore[misc]
    """Adds random numbers to its rows, and may shuffle them.

    Args:
        function: str, of `DRAWS`.
    """

    def __init__(self, function: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.function = function
        self.generator = tf.random.Generator.from_seed(5)

    def call(self, x: Any) -> Any:
        return DRAWS[self.function](self, x)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "function": self.function}


# Without `Generator.binomial`: in a graph it sometimes loses changes of the generator's state, even
# in one process (TensorFlow 2.21).
DRAWS: dict[str, Callable[[Any, Any], Any]] = {
    "normal": lambda _, x: x + tf.random.normal(tf.shape(x), seed=3, dtype=x.dtype),
    "stateless_uniform": lambda _, x: x * tf.random.stateless_uniform(tf.shape(x), [3, 4]),
    "truncated_normal": lambda _, x: x + tf.random.truncated_normal(tf.shape(x), seed=3),
    "gamma": lambda _, x: x + tf.random.gamma(tf.shape(x), 2.0, seed=3),
    "poisson": lambda _, x: x + tf.random.stateless_poisson(tf.shape(x), [3, 4], 2.0, tf.float32),
    "categorical": lambda _, x: x + tf.cast(tf.random.categorical(x, 2, seed=3), tf.float32),
    "shuffle": lambda _, x: x + tf.random.shuffle(x, seed=3),
    "generator": lambda layer, x: x + layer.generator.normal(tf.shape(x)),
}  # fmt: skip
# `shuffle` mixes the rows, and a generator counts the values that it has drawn; the others draw
# their rows by operations without a rule.
WHOLE_DRAWS = {"gamma", "poisson", "categorical", "shuffle", "generator"}


@pytest.mark.parametrize("function", list(DRAWS))
def test_random_numbers(function: str, size: Size) -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(3)
        inputs = L.Input((2,))
        hidden = Drawing(function)(L.Dense(2)(inputs))
        model = Model(inputs, L.Dense(2)(hidden))
        model.compile(tf.keras.optimizers.SGD(0.05), "mse")
        return model

    x, y = values(size, 2).astype("float32"), values(size, 2).astype("float32")
    assert_alike(make, x, y, size, whole=["Drawing"] if function in WHOLE_DRAWS else ())
