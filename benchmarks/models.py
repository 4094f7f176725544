"""Models and their data. Runs in every contestant's process, including a peer's old interpreter."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any, Callable, Dict, Tuple  # noqa: UP035 - Python 3.8

Arrays = Tuple[Any, Any]  # noqa: UP006 - Python 3.8
SEED = 2024
OPTIMIZERS = ("adam", "sgd")


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of the benchmark.

    Args:
        title: str, for display.
        batch_size: int, rows of a global batch.
        build: function of the `keras` module that returns `(inputs, outputs)`; outputs are
            logits.
        shape: tuple of int, one sample's shape.
        classes: int.
        scale: float, samples are uniform in [0, scale).
        tokens: bool, whether samples are integers below `scale`.
        optimizer: str, one of `OPTIMIZERS`.
        precision: str, the name of Keras's dtype policy.
        steps_per_execution: int, for `compile`.
        sparse: bool, whether "adam" is nanotf's `SparseAdam`, or the peer's.
    """

    title: str
    batch_size: int
    build: Callable[[Any], Tuple[Any, Any]]  # noqa: UP006 - Python 3.8
    shape: Tuple[int, ...]  # noqa: UP006 - Python 3.8
    classes: int = 10
    scale: float = 1.0
    tokens: bool = False
    optimizer: str = "adam"
    precision: str = "float32"
    steps_per_execution: int = 1
    sparse: bool = False

    @property
    def row_bytes(self) -> int:
        """Returns the bytes of a sample and its label."""
        size = 4
        for dimension in self.shape:
            size *= dimension
        return size + 8

    def data(self, rows: int, rank: int = 0) -> Arrays:
        """Returns `rows` samples and labels, deterministic for given arguments."""
        import numpy as np

        random = np.random.default_rng((SEED, rank))
        x: Any
        if self.tokens:
            x = random.integers(0, int(self.scale), (rows, *self.shape), dtype=np.int32)
        else:
            x = random.random((rows, *self.shape), dtype=np.float32)
            x *= np.float32(self.scale)
        return x, random.integers(0, self.classes, rows)

    def compiled(self, keras: Any, model_class: Any) -> Any:
        """Returns the compiled model, an instance of `model_class`."""
        keras.utils.set_random_seed(SEED)
        inputs, outputs = self._built(keras)
        model = model_class(inputs=inputs, outputs=outputs)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            optimizer=self.made_optimizer(keras),
            loss=loss,
            metrics=["accuracy"],
            steps_per_execution=self.steps_per_execution,
        )
        return model

    def _built(self, keras: Any) -> Any:
        if self.precision == "float32":
            return self.build(keras)
        policies = keras.mixed_precision
        policies.set_global_policy(self.precision)
        try:
            return self.build(keras)
        finally:
            policies.set_global_policy("float32")

    def made_optimizer(self, keras: Any) -> Any:
        """Returns a new optimizer, of the kind that trains the model."""
        if self.optimizer == "sgd":
            return keras.optimizers.SGD()
        return _sparse_classes()[1]() if self.sparse else keras.optimizers.Adam()


def _sparse_classes() -> Tuple[Any, Any]:  # noqa: UP006 - Python 3.8
    """Returns `Embedding` and `SparseAdam`, nanotf's or the peer's."""
    try:
        return _classes("nanotf.keras.layers", "nanotf.optimizers")
    except (ImportError, SyntaxError):  # the peer's interpreter is too old for nanotf
        return _classes("bigdl.nano.tf.keras.layers", "bigdl.nano.tf.optimizers")


def _classes(layers: str, optimizers: str) -> Tuple[Any, Any]:  # noqa: UP006 - Python 3.8
    made = importlib.import_module(layers), importlib.import_module(optimizers)
    return made[0].Embedding, made[1].SparseAdam


def _mlp(keras: Any) -> Any:
    layers = keras.layers
    inputs = keras.Input((784,))
    x = layers.Dense(512, activation="relu")(inputs)
    x = layers.Dense(512, activation="relu")(x)
    return inputs, layers.Dense(10)(x)


def _cnn(keras: Any) -> Any:
    layers = keras.layers
    inputs = x = keras.Input((32, 32, 3))
    for filters in (32, 64):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Dense(128, activation="relu")(layers.Flatten()(x))
    return inputs, layers.Dense(10)(x)


def _cnn180(keras: Any) -> Any:
    layers = keras.layers
    inputs = keras.Input((180, 180, 3))
    x = layers.Rescaling(1.0 / 255)(inputs)
    for filters in (16, 32, 64):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Dense(128, activation="relu")(layers.Flatten()(x))
    return inputs, layers.Dense(5)(x)


def _lstm(keras: Any) -> Any:
    inputs = keras.Input((50, 32))
    return inputs, keras.layers.Dense(10)(keras.layers.LSTM(128)(inputs))


def _lstm100(keras: Any) -> Any:
    inputs = keras.Input((100, 16))
    return inputs, keras.layers.Dense(10)(keras.layers.LSTM(64)(inputs))


def _mobilenetv2(keras: Any) -> Any:
    made = keras.applications.MobileNetV2(
        input_shape=(96, 96, 3), weights=None, classes=10, classifier_activation=None
    )
    return made.input, made.output


def _resnet50(keras: Any) -> Any:
    made = keras.applications.ResNet50(
        input_shape=(64, 64, 3), weights=None, classes=10, classifier_activation=None
    )
    return made.input, made.output


def _text(keras: Any, embedding: Any = None) -> Any:
    layers = keras.layers
    inputs = keras.Input((200,), dtype="int32")
    x = (embedding or layers.Embedding)(20_000, 128)(inputs)
    x = layers.Conv1D(128, 5, activation="relu")(x)
    x = layers.GlobalMaxPooling1D()(x)
    x = layers.Dense(128, activation="relu")(x)
    return inputs, layers.Dense(2)(x)


def _text_sparse(keras: Any) -> Any:
    return _text(keras, _sparse_classes()[0])


def _transformer(keras: Any) -> Any:
    layers = keras.layers
    inputs = keras.Input((64, 32))
    x = layers.Dense(128)(inputs)
    for _ in range(2):
        attended = layers.MultiHeadAttention(num_heads=4, key_dim=32)(x, x)
        x = layers.LayerNormalization(epsilon=1e-6)(layers.Add()([x, attended]))
        hidden = layers.Dense(128)(layers.Dense(256, activation="relu")(x))
        x = layers.LayerNormalization(epsilon=1e-6)(layers.Add()([x, hidden]))
    return inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x))


MODELS: Dict[str, Model] = {  # noqa: UP006 - Python 3.8
    "mlp": Model("MLP 784-512-512-10", 64, _mlp, (784,)),
    "mlp128": Model("MLP, batch 128, SGD", 128, _mlp, (784,), optimizer="sgd"),
    "cnn": Model("CNN 32x32", 64, _cnn, (32, 32, 3)),
    "cnn180": Model("CNN 180x180", 32, _cnn180, (180, 180, 3), classes=5, scale=255.0),
    "lstm": Model("LSTM 50x32", 64, _lstm, (50, 32)),
    "lstm100": Model("LSTM 100x16, SGD", 64, _lstm100, (100, 16), optimizer="sgd"),
    "mobilenetv2": Model("MobileNetV2 96x96", 32, _mobilenetv2, (96, 96, 3)),
    "resnet50": Model("ResNet-50 64x64", 32, _resnet50, (64, 64, 3)),
    "text": Model("text 20000x128", 64, _text, (200,), classes=2, scale=20_000, tokens=True),
    "text_sgd": Model(
        "text, SGD",
        64,
        _text,
        (200,),
        classes=2,
        scale=20_000,
        tokens=True,
        optimizer="sgd",
    ),
    "text_sparse": Model(
        "text, SparseAdam",
        64,
        _text_sparse,
        (200,),
        classes=2,
        scale=20_000,
        tokens=True,
        sparse=True,
    ),
    "transformer": Model("transformer 64x128", 64, _transformer, (64, 32)),
}


def chosen(name: str, optimizer: str, batch_size: int) -> Model:
    """Returns the named model; "" and 0 select its own optimizer and batch size."""
    model = MODELS[name]
    return dataclasses.replace(
        model,
        optimizer=optimizer or model.optimizer,
        batch_size=batch_size or model.batch_size,
    )


def share(batch_size: int, rank: int, size: int) -> int:
    """Returns the rows of a batch for one rank of `size` ranks."""
    return batch_size // size + (rank < batch_size % size)
