"""Rows of several requests share a batch if the graph proves that they are apart, and only then."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from nanotf.inference import exported, row_proof
from nanotf.inference.signature import DEFAULT

L = tf.keras.layers
pytestmark = pytest.mark.both_generations


def sequential(shape: tuple[int | None, ...], *layers: Any) -> Any:
    return tf.keras.Sequential([tf.keras.Input(shape), *layers])


def encoder(length: int | None) -> Any:
    ids = tf.keras.Input((length,), dtype="int32")
    x = L.Embedding(50, 16)(ids)
    x = L.LayerNormalization()(x + L.MultiHeadAttention(2, 8)(x, x))
    x = L.LayerNormalization()(x + L.Dense(16)(L.Dense(32, "gelu")(x)))
    return tf.keras.Model(ids, L.Dense(2, "softmax")(L.GlobalAveragePooling1D()(x)))


def masked() -> Any:
    ids = tf.keras.Input((None,), dtype="int32")
    return tf.keras.Model(ids, L.Dense(1)(L.LSTM(8)(L.Embedding(50, 8, mask_zero=True)(ids))))


def of_two_texts() -> Any:
    """Returns a model whose second input must be as long as the first, which no shape says."""
    ids, weights = tf.keras.Input((None,), dtype="int32"), tf.keras.Input((None,))
    x = L.Multiply()([L.Embedding(50, 8)(ids), L.Reshape((-1, 1))(weights)])
    return tf.keras.Model([ids, weights], L.Dense(1)(L.GRU(8)(x)))


APART: dict[str, Callable[[], Any]] = {
    "dense": lambda: sequential((8,), L.Dense(4, "relu"), L.Dropout(0.5), L.Dense(2, "softmax")),
    "images": lambda: sequential(
        (16, 16, 3), L.Conv2D(4, 3), L.BatchNormalization(), L.MaxPool2D(), L.Flatten(), L.Dense(2)
    ),
    "images of any size": lambda: sequential(
        (None, None, 3), L.Conv2D(4, 3, 2), L.DepthwiseConv2D(3), L.GlobalAveragePooling2D()
    ),
    "recurrent": lambda: sequential(
        (None, 8), L.LSTM(8, return_sequences=True), L.Bidirectional(L.GRU(8)), L.Dense(3)
    ),
    "recurrent of fixed length": lambda: sequential((10, 8), L.LSTM(8), L.Dense(3)),
    "recurrent with a mask": masked,
    "encoder": lambda: encoder(None),
    "encoder of fixed length": lambda: encoder(12),
    "two texts": of_two_texts,
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", APART)
def test_models_of_kerass_layers(name: str, tmp_path: pathlib.Path) -> None:
    """Rows of a model of Keras's layers are apart, in loops and for any lengths, too."""
    folder = exported.export(APART[name](), tmp_path / "saved").folder
    assert row_proof.reason_to_keep_together(signature_of(folder)) == ""


def signature_of(folder: pathlib.Path) -> Any:
    loaded = tf.saved_model.load(str(folder))
    function = loaded.signatures[DEFAULT]
    function.kept = loaded  # it would free the variables
    return function


class Module(tf.Module):
    """A module that serves a function."""

    def __init__(self, function: Callable[..., Any], *specs: tf.TensorSpec) -> None:
        super().__init__()
        self.calls = tf.Variable(0.0)
        self.table = tf.Variable(tf.random.uniform([3000, 3]))
        self.serve = tf.function(lambda *x: function(self, *x), input_signature=specs)


TABLE = tf.TensorSpec([None, 3], tf.float32, "x")
SEQUENCES = tf.TensorSpec([None, None, 4], tf.float32, "x")


def by_served(function: Callable[..., Any], folder: pathlib.Path, *specs: tf.TensorSpec) -> str:
    """Returns the reason for a function that was saved and loaded."""
    tf.saved_model.save(Module(function, *specs), str(folder))
    return row_proof.reason_to_keep_together(signature_of(folder))


def number_of(x: Any) -> Any:
    return tf.shape(x)[0]


FUNCTIONS_APART: dict[str, tuple[Any, Callable[..., Any]]] = {
    "sum along a row": (TABLE, lambda _, x: tf.cumsum(x, 1) / tf.reduce_sum(x, 1, keepdims=True)),
    "best of a row": (TABLE, lambda _, x: tf.math.top_k(x, 2).values),
    "branch": (TABLE, lambda _, x: tf.cond(tf.shape(x)[1] > 2, lambda: x + 1.0, lambda: x)),
    "loop": (
        TABLE,
        lambda _, x: tf.while_loop(lambda i, y: i < 5, lambda i, y: (i + 1, -y), (0, x))[1],
    ),
    "slices": (
        SEQUENCES,
        lambda _, x: x[..., 1:3] + x[: number_of(x), :, :2] + tf.slice(x, [0, 0, 1], [-1, -1, 2]),
    ),
    "slice of the shape": (
        SEQUENCES,
        lambda _, x: tf.slice(x, [0, 0, 2], [number_of(x), tf.shape(x)[1], 2])
        + x[:, :, tf.newaxis, 1:3][:, :, 0],
    ),
    "squeezed axis": (TABLE, lambda _, x: tf.squeeze(x[:, None], 1)),
    "zeros by the number of rows": (
        TABLE, lambda _, x: tf.concat([x, tf.zeros([number_of(x), 2])], 1)
    ),
    "a token for each row": (
        SEQUENCES,
        lambda _, x: tf.concat([tf.broadcast_to(tf.ones((1, 1, 4)), [number_of(x), 1, 4]), x], 1),
    ),
    "heads": (
        SEQUENCES,
        lambda _, x: tf.transpose(
            tf.reshape(x, [number_of(x), tf.shape(x)[1], 2, 2]), [0, 2, 1, 3]
        ),
    ),
}  # fmt: skip


@pytest.mark.every_case
@pytest.mark.parametrize("name", FUNCTIONS_APART)
def test_functions_of_rows(name: str, tmp_path: pathlib.Path) -> None:
    """Functions of each row by itself are told from others, whatever code made them."""
    spec, function = FUNCTIONS_APART[name]
    assert by_served(function, tmp_path, spec) == ""


def counted(module: Any, x: Any) -> Any:
    module.calls.assign_add(1.0)
    return x + 1.0


def printed(_: Any, x: Any) -> Any:
    tf.print(tf.shape(x))
    return x * 2.0


def total_of(x: Any) -> Any:
    return tf.reduce_sum(tf.cast(x, tf.int32))


def listed(module: Any) -> Any:
    return tf.TensorArray(tf.float32, 3000, element_shape=[3]).unstack(module.table)


IMAGES = tf.TensorSpec([None, 4, 4, 3], tf.float32, "x")
NO_ROW = "'output_0' has no row"
TOGETHER: dict[str, tuple[Any, Callable[..., Any], str]] = {
    "softmax over rows": (TABLE, lambda _, x: tf.nn.softmax(x, 0), "Softmax"),
    "mean of the batch": (TABLE, lambda _, x: x - tf.reduce_mean(x, 0), "Sub"),
    "sorted rows": (TABLE, lambda _, x: tf.sort(x, 0), "TopKV2"),
    "turned rows": (TABLE, lambda _, x: x[::-1], "StridedSlice"),
    "moved rows": (TABLE, lambda _, x: tf.roll(x, 1, 0), "Roll"),
    "first row": (TABLE, lambda _, x: tf.gather(x, [0]), "GatherV2"),
    "attention between rows": (
        TABLE, lambda _, x: tf.nn.softmax(tf.matmul(x, x, transpose_b=True)) @ x, "MatMul"
    ),
    "einsum over other rows": (TABLE, lambda _, x: tf.einsum("ni,mi->n", x, x), "Einsum"),
    "einsum by sums of rows": (TABLE, lambda _, x: tf.einsum("ni,mj->nj", x, x), "Einsum"),
    "einsum of sequences": (
        SEQUENCES, lambda _, x: x * tf.einsum("b...i,c...i->b...", x, x)[..., None], "Einsum"
    ),
    "quantized by the range": (
        TABLE,
        lambda _, x: tf.quantization.quantize_and_dequantize_v2(x, 0.0, 1.0, range_given=False),
        "QuantizeAndDequantize",
    ),
    "padded by the mean": (
        TABLE,
        lambda m, x: x * tf.pad(m.table[0, :1], [[1, 1]], constant_values=tf.reduce_mean(x)),
        "PadV2",
    ),
    "diagonal of the means": (
        TABLE, lambda m, x: x @ tf.linalg.set_diag(m.table[:3, :3], tf.reduce_mean(x, 0)), "MatMul"
    ),
    "diagonals in the mean": (
        TABLE, lambda _, x: tf.linalg.diag(x, padding_value=tf.reduce_mean(x)), "MatrixDiagV3"
    ),
    "contrast by the mean": (
        IMAGES, lambda _, x: tf.image.adjust_contrast(x, tf.reduce_mean(x)), "AdjustContrast"
    ),
    "hue by the mean": (IMAGES, lambda _, x: tf.image.adjust_hue(x, tf.reduce_mean(x)), "Adjust"),
    "moved by a sum": (TABLE, lambda _, x: tf.roll(x, total_of(x), 1), "Roll"),
    "slice at a sum": (
        TABLE, lambda m, x: x * tf.slice(m.table, [total_of(x), 0], [1, 3]), "Slice"
    ),
    "filled by a sum": (
        TABLE, lambda _, x: x * tf.cast(tf.size(tf.ones([total_of(x)])), tf.float32), "Fill"
    ),
    "element of a list by a sum": (
        TABLE, lambda m, x: x * listed(m).read(total_of(x)), "TensorListGetItem"
    ),
    "element of a list by the number": (
        TABLE, lambda m, x: x * listed(m).read(number_of(x)), "TensorListGetItem"
    ),
    "best by a sum": (
        TABLE,
        lambda _, x: x * tf.reduce_sum(tf.math.top_k([1.0, 2.0, 3.0], total_of(x)).values),
        "TopKV2",
    ),
    "one more than rows": (
        TABLE, lambda _, x: x * tf.reduce_sum(tf.ones([number_of(x) + 1])), "Fill"
    ),
    "weight of the number": (TABLE, lambda m, x: x * m.table[number_of(x)], "StridedSlice"),
    "weights up to the number": (
        TABLE, lambda m, x: x + tf.reduce_sum(m.table[:3][: number_of(x)], 0), "StridedSlice"
    ),
    "numbers up to the number": (
        TABLE, lambda _, x: tf.reduce_sum(x[:, : number_of(x)], 1), "StridedSlice"
    ),
    "at most 5000 rows": (TABLE, lambda _, x: x[:5000], "StridedSlice"),
    "more than one row": (
        TABLE, lambda _, x: tf.where(tf.cast(number_of(x) - 1, tf.bool), x, -x), "Cast"
    ),
    "rounded quotient": (
        TABLE,
        lambda _, x: x + tf.cast(tf.cast(100 / number_of(x), tf.int32), tf.float32),
        "Cast",
    ),
    "squeezed": (tf.TensorSpec([None, 1], tf.float32, "x"), lambda _, x: tf.squeeze(x), "Squeeze"),
    "number of rows": (TABLE, lambda _, x: x * tf.cast(number_of(x), tf.float32), "output_0"),
    "many rows": (TABLE, lambda _, x: tf.where(number_of(x) > 100, x, -x), "Greater"),
    "at most 64 rows": (
        TABLE, lambda _, x: x * tf.cast(tf.minimum(number_of(x), 64), tf.float32), "Minimum"
    ),
    "range in large steps": (
        TABLE,
        lambda _, x: x * tf.cast(tf.size(tf.range(0, number_of(x), 5000)), tf.float32),
        "Range",
    ),
    "hyperbolic tangent of the number": (
        TABLE, lambda _, x: x * tf.tanh(tf.cast(number_of(x), tf.float32)), "Tanh"
    ),
    "thousands of rows": (
        TABLE, lambda _, x: x + tf.cast(number_of(x) // 5000, tf.float32), "FloorDiv"
    ),
    "compared with the number": (
        TABLE, lambda _, x: tf.where(tf.cast(x, tf.int32) < number_of(x) + 1, x, 0.0), "Less"
    ),
    "place in the batch": (
        TABLE, lambda _, x: x + tf.cast(tf.range(number_of(x))[:, None], tf.float32), "AddV2"
    ),
    "rows in groups": (
        tf.TensorSpec([None, 4], tf.float32, "x"),
        lambda _, x: tf.reshape(tf.nn.softmax(tf.reshape(x, [-1, 8])), [-1, 4]),
        "evenly",
    ),
    "loop for each row": (TABLE, lambda _, x: tf.map_fn(lambda row: row * 2.0, x), "TensorList"),
    "loop until all rows": (
        TABLE,
        lambda _, x: tf.while_loop(lambda y: tf.reduce_max(y) < 5.0, lambda y: (y + 1.0,), (x,))[0],
        "While",
    ),
    "statistics of the batch": (
        tf.TensorSpec([None, 4, 4, 3], tf.float32, "x"),
        lambda _, x: tf.compat.v1.nn.fused_batch_norm(x, [1.0] * 3, [0.0] * 3, is_training=True)[0],
        "FusedBatchNorm",
    ),
    "random numbers": (TABLE, lambda _, x: x + tf.random.uniform(tf.shape(x)), "RandomUniform"),
    "code of Python": (
        TABLE, lambda _, x: tf.ensure_shape(tf.numpy_function(np.sort, [x], tf.float32), (None, 3)),
        "PyFunc",
    ),
    "counted calls": (TABLE, counted, "AssignAddVariableOp"),
    "text": (TABLE, printed, "PrintV2"),
    "no rows": (TABLE, lambda _, x: tf.constant([1.0, 2.0]), NO_ROW),
    "sum of rows": (TABLE, lambda _, x: tf.reduce_sum(x, 0), NO_ROW),
    "rows at another place": (TABLE, lambda _, x: tf.transpose(x), NO_ROW),
    "two for each row": (TABLE, lambda _, x: tf.reshape(x[:, :2], [-1, 1]), NO_ROW),
    "fixed number of rows": (tf.TensorSpec([4, 3], name="x"), lambda _, x: x * 2.0, "'x' has the"),
    "a number": (tf.TensorSpec([], name="x"), lambda _, x: x * 2.0, "'x' has the shape ()"),
    "any rank": (tf.TensorSpec(None, name="x"), lambda _, x: x * 2.0, "'x' may have any number"),
}  # fmt: skip


@pytest.mark.every_case
@pytest.mark.parametrize("name", TOGETHER)
def test_rows_that_meet(name: str, tmp_path: pathlib.Path) -> None:
    """The operation that mixes or counts rows, or leaves something behind, is the reason."""
    spec, function, named = TOGETHER[name]
    assert named in by_served(function, tmp_path, spec)


def test_lengths_that_differ(tmp_path: pathlib.Path) -> None:
    """Rows that stay apart only where two inputs are equally long are computed by themselves."""
    specs = [tf.TensorSpec([None, None], tf.float32, name) for name in ("a", "b")]

    def groups(_: Any, a: Any, b: Any) -> Any:
        return tf.reshape(tf.nn.softmax(tf.reshape(a, [-1, tf.shape(b)[1]])), tf.shape(a))

    assert by_served(groups, tmp_path, *specs) != ""


def test_a_state_for_each_request(tmp_path: pathlib.Path) -> None:
    """A signature with a scalar beside its rows gets each request by itself."""
    specs = [TABLE, tf.TensorSpec([], tf.float32, "temperature")]
    reason = by_served(lambda _, x, t: x / t, tmp_path, *specs)
    assert reason == "its input 'temperature' has the shape (), without rows"
