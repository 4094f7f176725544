"""Layers whose rows are apart, and layers whose rows depend on each other, in the style of users'.

Each entry of `APART` and `COUPLED` is a function that makes a layer for rows of `WIDTH` numbers, or
of the shape in `SHAPES`. A layer that draws or assigns returns as many rows as it gets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

L = tf.keras.layers
WIDTH = 8
SEQUENCE, IMAGE, IDS = (6, 8), (8, 8, 3), (5,)


class Own(L.Layer):  # type: ignore[misc]
    """A layer with a function as its call.

    Args:
        function: callable, of the layer and its input.
        shape: tuple of int, of its weight `w`; default the number of the input's channels.
        **state: shapes of variables that are not trained, by their names.
    """

    def __init__(self, function: Any, shape: Any = None, **state: tuple[int, ...]) -> None:
        super().__init__()
        self.function, self.of_weight, self.of_state = function, shape, state

    def build(self, shape: Any) -> None:
        self.w = self.add_weight(shape=self.of_weight or (shape[-1],), name="w")
        for name, of_variable in self.of_state.items():
            made = self.add_weight(
                shape=of_variable, initializer="zeros", trainable=False, name=name
            )
            setattr(self, name, made)
        self.built = True

    def call(self, x: Any) -> Any:
        return self.function(self, x)


def _gradient(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @tf.custom_gradient
    def changed(x: Any) -> Any:
        return tf.identity(x), change

    return changed


def _with_loss(loss: Callable[[Any, Any], Any]) -> Own:
    def call(layer: Any, x: Any) -> Any:
        layer.add_loss(loss(layer, x))
        return x * layer.w

    return Own(call)


def _capacity(layer: Any, x: Any) -> Any:
    """A mixture of experts: each takes the first 8 rows of a batch that choose it."""
    chosen = tf.one_hot(tf.argmax(tf.matmul(x, layer.w), -1), 4, dtype=x.dtype)
    place = tf.reduce_sum(tf.cumsum(chosen, 0) * chosen, -1)
    return x * tf.cast(place <= 8, x.dtype)[:, None]


def _ratio(layer: Any, x: Any) -> Any:
    known = tf.cast(x > 0, x.dtype)
    return tf.reduce_sum(known * layer.w) / tf.reduce_sum(known)


def _turns(layer: Any, x: Any) -> Any:
    return tf.while_loop(
        lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h * layer.w + x)), (0, x)
    )[1]


def _fixed_point(layer: Any, x: Any) -> Any:
    def turn(h: Any, d: Any) -> Any:
        new = tf.tanh(0.5 * h * layer.w + x)
        return new, tf.reduce_max(tf.abs(new - h))

    one = tf.constant(1.0, x.dtype)
    return tf.while_loop(lambda h, d: d > 1e-3, turn, (x, one))[0]


def _warm(layer: Any, x: Any) -> Any:
    is_warm = tf.reduce_sum(layer.w) > 5.0
    return tf.cond(is_warm, lambda: x - tf.reduce_mean(x, 0), lambda: x) * layer.w


def _average(step: float) -> Own:
    def call(layer: Any, x: Any) -> Any:
        layer.mean.assign(layer.mean + step * (tf.reduce_mean(x, 0) - layer.mean))
        return x * layer.w - tf.stop_gradient(layer.w)

    return Own(call, mean=(WIDTH,))


def _rare(layer: Any, x: Any) -> Any:
    layer.count.assign_add(tf.reduce_sum(tf.cast(x[:, 0] > 1.5, x.dtype)))
    return x * layer.w


APART: dict[str, Callable[[], Any]] = {
    "dense": lambda: L.Dense(5, "gelu"),
    "convolution": lambda: L.Conv2D(4, 3, activation="relu"),
    "depthwise": lambda: L.DepthwiseConv2D(3),
    "layer normalization": L.LayerNormalization,
    "batch normalization": L.BatchNormalization,
    "batch normalization of images": L.BatchNormalization,
    "lstm": lambda: L.LSTM(4),
    "gru": lambda: L.GRU(4, return_sequences=True),
    "bidirectional": lambda: L.Bidirectional(L.LSTM(4)),
    "group normalization": lambda: L.GroupNormalization(2),
    "time distributed": lambda: L.TimeDistributed(L.Dense(3)),
    "embedding": lambda: L.Embedding(10, 4),
    "dropout": lambda: L.Dropout(0.5),
    "scaled gradient": lambda: Own(lambda s, x: _gradient(lambda d: d * 0.5)(x) * s.w),
    "reshapes": lambda: Own(
        lambda s, x: tf.reshape(tf.reshape(x, (-1, 4)) * 2.0, (-1, *SEQUENCE)) * s.w
    ),
    "time first": lambda: Own(
        lambda s, x: tf.transpose(
            tf.reshape(tf.reshape(tf.transpose(x, (1, 0, 2)), (-1, 8)) * s.w, (6, -1, 8)), (1, 0, 2)
        )
    ),
    "mean loss": lambda: _with_loss(lambda s, x: tf.reduce_mean((x * s.w) ** 2)),
    "small sum loss": lambda: _with_loss(lambda s, x: 1e-6 * tf.reduce_sum((x * s.w) ** 2)),
    "loss by hand": lambda: _with_loss(
        lambda s, x: tf.reduce_sum((x * s.w) ** 2) / tf.cast(tf.shape(x)[0], x.dtype)
    ),
    "loss per row": lambda: _with_loss(lambda s, x: tf.reduce_sum((x * s.w) ** 2, -1)),
    "loss of weights": lambda: _with_loss(lambda s, x: tf.reduce_sum(s.w**2)),
    "noise": lambda: Own(lambda s, x: x * s.w + tf.random.normal(tf.shape(x), dtype=x.dtype)),
    "einsum": lambda: Own(lambda s, x: tf.einsum("bti,ij->btj", x, s.w), (8, 3)),
    "einsum of rows": lambda: Own(
        lambda s, x: tf.einsum("...i,...i->...", x, x * s.w)[:, None] * x
    ),
    "sum by einsum": lambda: _with_loss(lambda s, x: tf.einsum("ni,ni->", x, x * s.w)),
    "quantized": lambda: Own(
        lambda s, x: tf.quantization.quantize_and_dequantize_v2(x * s.w, 0, 1, range_given=True)
    ),
    "turns": lambda: Own(_turns),
    "slices": lambda: Own(lambda s, x: tf.concat([x[:, 2:], x[..., :2]], -1) * s.w),
    "moving average": lambda: _average(1e-4),
    "counter": lambda: Own(_rare, count=()),
}
COUPLED: dict[str, Callable[[], Any]] = {
    "softmax of rows": lambda: L.Softmax(axis=0),
    "norm of rows": lambda: L.UnitNormalization(axis=0),
    "capacity": lambda: Own(_capacity, (WIDTH, 4)),
    "mining": lambda: _with_loss(
        lambda s, x: tf.reduce_mean(tf.math.top_k(tf.reduce_mean((x - s.w) ** 2, -1), 2).values)
    ),
    "ratio loss": lambda: _with_loss(_ratio),
    "clipped gradient": lambda: Own(
        lambda s, x: _gradient(lambda d: tf.clip_by_norm(d, 0.05))(x) * s.w
    ),
    "fixed point": lambda: Own(_fixed_point),
    "similarity": lambda: Own(lambda s, x: tf.matmul(tf.matmul(x * s.w, x, transpose_b=True), x)),
    "einsum over other rows": lambda: Own(
        lambda s, x: tf.einsum("ni,mi->n", x, x * s.w)[:, None] * x
    ),
    "einsum of two sums": lambda: _with_loss(lambda s, x: tf.einsum("ni,mi->", x, x * s.w)),
    "quantized by the range": lambda: Own(
        lambda s, x: tf.quantization.quantize_and_dequantize_v2(x * s.w, 0, 1, range_given=False)
    ),
    "padded by the mean": lambda: Own(
        lambda s, x: x * tf.pad(s.w[1:-1], [[1, 1]], constant_values=tf.reduce_mean(x))
    ),
    "diagonal of the means": lambda: Own(
        lambda s, x: x @ tf.linalg.set_diag(s.w, tf.reduce_mean(x, 0)), (WIDTH, WIDTH)
    ),
    "weight of the number of rows": lambda: Own(lambda s, x: x * s.w[tf.shape(x)[0]], (3000, 1)),
    "weights up to the number of rows": lambda: Own(
        lambda s, x: x * tf.reduce_sum(s.w[: tf.shape(x)[0]]), (WIDTH,)
    ),
    "channels up to the number of rows": lambda: Own(lambda s, x: (x * s.w)[:, : tf.shape(x)[0]]),
    "one more than rows": lambda: Own(
        lambda s, x: x * s.w * tf.reduce_sum(tf.ones([tf.shape(x)[0] + 1], x.dtype))
    ),
    "batch attention": lambda: Own(
        lambda s, x: tf.matmul(tf.nn.softmax(tf.matmul(x * s.w, x, transpose_b=True)), x)
    ),
    "centred": lambda: Own(lambda s, x: (x - tf.reduce_mean(x, 0)) * s.w),
    "warm-up": lambda: Own(_warm),
    "neighbor": lambda: Own(lambda s, x: tf.roll(x, 1, 0) * s.w),
    "reversed": lambda: Own(lambda s, x: x[::-1] * s.w),
    "numbered": lambda: Own(
        lambda s, x: x * s.w * tf.cast(tf.range(tf.shape(x)[0]), x.dtype)[:, None]
    ),
    "branch on few rows": lambda: Own(
        lambda s, x: x * s.w if (x.shape[0] or 9) < 8 else 2.0 * x * s.w
    ),
    "normalized by the number of rows": lambda: Own(
        lambda s, x: x * s.w / tf.sqrt(tf.cast(tf.shape(x)[0], x.dtype))
    ),
}
# The last of `COUPLED`, so that a sample has it.
COUPLED["number for few rows"] = lambda: Own(
    lambda s, x: x * s.w * (3.0 if (x.shape[0] or 9) < 8 else 2.0)
)
SHAPES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("convolution", "depthwise", "batch normalization of images"), IMAGE),
    **dict.fromkeys(
        (
            *("layer normalization", "lstm", "gru", "bidirectional", "group normalization"),
            *("time distributed", "reshapes", "time first", "einsum"),
        ),
        SEQUENCE,
    ),
    "embedding": IDS,
}


def shape_of(name: str) -> tuple[int, ...]:
    return SHAPES.get(name, (WIDTH,))


def dtype_of(name: str) -> str:
    return "int32" if name == "embedding" else str(tf.keras.backend.floatx())


def _print_verdicts() -> None:
    """Prints the verdict on each layer, as workers come to it."""
    from nanotf.region import overrides
    from nanotf.region.proof import traces, verdicts

    stock = L.Layer.__call__
    overrides.install(None)
    for name, make in {**APART, **COUPLED}.items():
        layer = make()
        stock(layer, tf.zeros((2, *shape_of(name)), dtype_of(name)))
        argument = traces.Argument(shape_of(name), tf.as_dtype(dtype_of(name)), True)
        options = {"training": True} if "batch norm" in name or name == "dropout" else {}
        leaves = [argument, *options.values()]
        verdict = verdicts.prove(
            verdicts.layer_subject(layer, stock), leaves, ((argument,), options), (4,)
        )
        print(f"{name}: {verdict.whole or 'apart'}")


if __name__ == "__main__":
    _print_verdicts()
