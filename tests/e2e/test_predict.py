"""`predict(num_processes=2)` returns the arrays of `predict()`: rows in order, same structure."""

from __future__ import annotations

import collections
import gc
import os
import pathlib
import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import digits, small_cnn

from nanotf.compat.versions import is_keras_3
from nanotf.errors import WorkerError
from nanotf.keras import Model
from nanotf.shipping.data import outputs

L = tf.keras.layers
Pair = collections.namedtuple("Pair", ["double", "negative"])


def _assert_same(found: Any, expected: Any) -> None:
    """Asserts that two results have the same structure, types, dtypes and numbers."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for name in expected:
            _assert_same(found[name], expected[name])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            _assert_same(ours, theirs)
    elif isinstance(expected, tf.RaggedTensor):
        assert found.dtype == expected.dtype
        assert found.to_list() == expected.to_list()
    elif isinstance(expected, tf.SparseTensor):
        np.testing.assert_array_equal(found.indices, expected.indices)
        np.testing.assert_array_equal(found.values, expected.values)
        np.testing.assert_array_equal(found.dense_shape, expected.dense_shape)
    else:
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        if expected.dtype.kind in "fc":
            np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
        else:
            np.testing.assert_array_equal(found, expected)


def _predict_both(model: Any, *arguments: Any, **named: Any) -> Any:
    named = {"verbose": 0, **named}
    before = model.get_weights()
    expected = model.predict(*arguments, **named)
    found = model.predict(*arguments, **named, num_processes=2)
    _assert_same(found, expected)
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)
    return found


SIZES = [(200, 50), (201, 50), (3, 1), (70, None), (1, 32)]


@pytest.mark.both_generations
def test_arrays(float64: None) -> None:
    model = small_cnn()
    for rows, batch_size in SIZES:
        x, _ = digits(rows)
        found = _predict_both(model, x, batch_size)
        assert found.flags.owndata
        assert found.flags.writeable


@pytest.mark.both_generations
def test_numbers_of_rows_that_change(float64: None) -> None:
    x, y = digits(95)
    model, plain = small_cnn(), small_cnn()
    for rows in (1, 3, 95):
        pairs = tf.data.Dataset.from_tensor_slices((x[:rows], y[:rows]))
        batches = pairs.batch(rows, drop_remainder=True)
        _predict_both(model, x[:rows])
        _predict_both(model, batches)
        arrays: Any = {"x": x[:rows], "y": y[:rows], "batch_size": rows, "shuffle": False}
        for data, more in ((arrays, {}), ({"x": batches}, {"sharding": "data"})):
            plain.fit(**data, verbose=0)
            model.fit(**data, **more, verbose=0, num_processes=2)
        expected = plain.evaluate(x[:rows], y[:rows], rows, verbose=0)
        found = model.evaluate(x[:rows], y[:rows], rows, verbose=0, num_processes=2)
        np.testing.assert_allclose(found, expected, rtol=1e-10)
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.both_generations
def test_datasets_and_steps(float64: None) -> None:
    x, y = digits(201)
    model = small_cnn()
    pairs = tf.data.Dataset.from_tensor_slices((x, y)).batch(50)
    _predict_both(model, pairs)
    _predict_both(model, pairs.filter(lambda x, y: True))  # of unknown length
    _predict_both(model, pairs.map(lambda x, y: x))
    _predict_both(model, pairs.repeat(), steps=6)
    _predict_both(model, pairs.unbatch().batch(1).take(3))
    _predict_both(model, x, batch_size=50, steps=2)


def test_without_compile_and_between_fits(float64: None) -> None:
    x, y = digits(101)
    inputs = L.Input((8, 8, 1))
    model = Model(inputs, L.Dense(10)(L.Flatten()(inputs)))
    _predict_both(model, x)
    model.compile("adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    _predict_both(model, x)
    model.fit(x, y, verbose=0, num_processes=2)
    _predict_both(model, x)


class Anything(Model):
    """Returns outputs of many kinds, from `x` of shape (rows, width)."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.dense = L.Dense(3)

    def call(self, x: Any) -> Any:
        dense = self.dense(x)
        whole = tf.cast(x * 100, tf.int32)
        forms: dict[str, Any] = {
            "list": [dense, whole],
            "tuple": (dense, whole),
            "dict": {"z": dense, "a": whole},
            "named": Pair(dense * 2, -dense),
            "nested": {"one": [dense, (whole, whole > 50)], "two": {"b": dense, "a": dense}},
            "bool": whole > 50,
            "int64": tf.cast(whole, tf.int64),
            "uint8": tf.cast(whole, tf.uint8),
            "string": tf.strings.as_string(whole),
            "bfloat16": tf.cast(dense, tf.bfloat16),
            "float16": tf.cast(dense, tf.float16),
            "complex": tf.complex(dense, dense),
            "flat": dense[:, 0],
            "rows second": tf.stack([dense, -dense]),
            "of the batch": tf.reduce_max(dense, axis=0),
            "two rows each": tf.reshape(tf.stack([dense, -dense], axis=1), [-1, 3]),
        }
        return forms[self.form]

    def predict_step(self, data: Any) -> Any:
        x = data[0] if isinstance(data, tuple) else data
        if self.form == "ragged":
            return tf.RaggedTensor.from_tensor(x, lengths=tf.cast(x[:, 0] * 3, tf.int64))
        if self.form == "sparse":
            return tf.sparse.from_dense(tf.where(x > 0.5, x, 0))
        if self.form == "scalar":
            return tf.reduce_sum(x)
        return super().predict_step(data)


FORMS = [
    "list", "tuple", "dict", "named", "nested", "bool", "int64", "uint8", "string", "bfloat16",
    "float16", "complex", "flat", "two rows each", "rows second", "of the batch",
]  # fmt: skip


def _rows(rows: int, width: int = 4) -> np.ndarray:
    return np.random.default_rng(rows).random((rows, width))


def _anything(form: str) -> Any:
    tf.keras.utils.set_random_seed(1)
    model = Anything(form)
    model.dense.build((None, 4))
    return model


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.both_generations
def test_structures_and_dtypes(float64: None, form: str) -> None:
    _predict_both(_anything(form), _rows(20 if form == "rows second" else 21), 5)


class AnythingBuilt(Anything):
    """Returns the outputs of `Anything` that Keras cannot build a model from."""

    def call(self, x: Any) -> Any:
        return self.dense(x)


@pytest.mark.parametrize("form", ["ragged", "sparse"])
@pytest.mark.both_generations
def test_ragged_and_sparse(float64: None, form: str) -> None:
    tf.keras.utils.set_random_seed(1)
    model = AnythingBuilt(form)
    model(_rows(1))
    _predict_both(model, _rows(21), 5)


@pytest.mark.both_generations
def test_batches_of_different_widths(float64: None) -> None:
    """With padded_batch, Keras returns a ragged tensor."""
    inputs = L.Input((None, 2))
    model = Model(inputs, L.Dense(3)(inputs))
    widths = [4, 2, 3]

    def batches() -> Any:
        for width in widths:
            yield np.random.default_rng(width).random((5, width, 2))

    data = tf.data.Dataset.from_generator(
        batches, output_signature=tf.TensorSpec([None, None, 2], tf.float64)
    )
    expected = model.predict(data, verbose=0)
    found = model.predict(data, verbose=0, num_processes=2)
    assert isinstance(expected, tf.RaggedTensor)
    assert found.shape.as_list() == expected.shape.as_list()
    for ours, theirs in zip(found.to_list(), expected.to_list(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10)


def test_output_without_rows_is_refused() -> None:
    tf.keras.utils.set_random_seed(1)
    with pytest.raises(WorkerError, match="each must have one"):
        AnythingBuilt("scalar").predict(_rows(21).astype("float32"), 5, num_processes=2)


def test_compiled_with_several_steps_per_execution(float64: None) -> None:
    x, _ = digits(201)
    model = small_cnn()
    model.compile("sgd", "mse", steps_per_execution=3)
    _predict_both(model, x, 20)


def test_run_eagerly(float64: None) -> None:
    x, _ = digits(31)
    model = small_cnn()
    model.compile("sgd", "mse", run_eagerly=True)
    _predict_both(model, x, 10)


@pytest.mark.thorough
def test_many_pieces(monkeypatch: pytest.MonkeyPatch, float64: None) -> None:
    """Outputs larger than a block arrive in several blocks."""
    taken: list[int] = []
    stock = outputs.OutputReader.take

    def take(self: Any, rank: int, *rest: Any) -> None:
        taken.append(rank)
        stock(self, rank, *rest)

    monkeypatch.setattr(outputs.OutputReader, "take", take)
    tf.keras.utils.set_random_seed(1)
    inputs = L.Input((4,))
    model = Model(inputs, L.Dense(1024)(inputs))
    rows = 4 * outputs.PIECE_NBYTES // (8 * 1024)
    _predict_both(model, _rows(rows), 512)
    assert taken.count(0) == taken.count(1) > 1


class _Recorder(tf.keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.outputs: list[np.ndarray] = []

    def on_predict_begin(self, logs: Any = None) -> None:
        self.calls.append(("begin", None, os.getpid()))

    def on_predict_end(self, logs: Any = None) -> None:
        self.calls.append(("end", None, os.getpid()))

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("batch begin", batch, os.getpid()))

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("batch end", batch, sorted(logs)))
        self.outputs.append(np.asarray(logs["outputs"]))


def test_callbacks_run_here_in_keras_order(float64: None) -> None:
    x, _ = digits(121)
    model = small_cnn()
    recorders = _Recorder(), _Recorder()
    for recorder, processes in zip(recorders, (None, 2), strict=True):
        model.predict(x, 50, verbose=0, callbacks=[recorder], num_processes=processes)
        assert recorder.model is model
    assert recorders[1].calls == recorders[0].calls
    for ours, theirs in zip(recorders[1].outputs, recorders[0].outputs, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10)


@pytest.mark.skipif(not is_keras_3(), reason="Keras 3 alone has stop_predicting")
def test_callback_that_ends_the_prediction() -> None:
    class Stop(tf.keras.callbacks.Callback):
        def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_predicting = batch == 1

    x, _ = digits(200)
    found = small_cnn().predict(x, 50, verbose=0, callbacks=[Stop()], num_processes=2)
    assert len(found) == 100


@pytest.mark.parametrize("verbose", [0, 1, 2, "auto"])
def test_progress_is_printed_once(capfd: pytest.CaptureFixture[str], verbose: Any) -> None:
    x, _ = digits(200)
    model = small_cnn()
    shown = []
    for processes in (None, 2):
        capfd.readouterr()
        model.predict(x, 50, verbose=verbose, num_processes=processes)
        out = re.sub(r"\x1b\[[0-9;]*m|\x08", "", capfd.readouterr().out)
        shown.append((re.findall(r"4/4", out)[-1:], out.count("\n")))
    assert shown[1] == shown[0]
    assert bool(shown[1][0]) == (verbose != 0)


class FailsInWorkers(Model):
    def predict_step(self, data: Any) -> Any:
        if "NANOTF_RANK" in os.environ:
            raise ArithmeticError("of the user's")
        return super().predict_step(data)


def test_a_users_step_that_raises() -> None:
    x, _ = digits(20)
    inputs = L.Input((8, 8, 1))
    with pytest.raises(WorkerError, match="of the user's") as caught:
        FailsInWorkers(inputs, L.Flatten()(inputs)).predict(x, verbose=0, num_processes=2)
    assert caught.value.rank in (0, 1)
    assert small_cnn().predict(x, verbose=0, num_processes=2).shape == (20, 10)


OPEN_FILES = pathlib.Path("/proc/self/fd")


class CountsDescriptors(tf.keras.callbacks.Callback):
    """Requests every batch; counts this process's open files."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        assert logs["outputs"].shape == (2, 10)
        self.counts.append(len(list(OPEN_FILES.iterdir())))


@pytest.mark.skipif(not OPEN_FILES.is_dir(), reason="/proc is Linux's")
@pytest.mark.parametrize("kept", [outputs.KEPT_NBYTES, 0], ids=["small", "large"])
@pytest.mark.thorough
def test_no_file_stays_open_for_a_batch(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "KEPT_NBYTES", kept)
    monkeypatch.setattr(outputs, "KEPT_BLOCKS", 4)
    x, _ = digits(60)
    counts = CountsDescriptors()
    gc.collect()  # closes files of earlier tests before this one counts
    found = small_cnn().predict(x, 2, verbose=0, num_processes=2, callbacks=[counts])
    np.testing.assert_allclose(found, small_cnn().predict(x, 2, verbose=0), rtol=1e-4)
    assert len(counts.counts) == 30
    assert max(counts.counts) - min(counts.counts) < 10


@pytest.mark.usefixtures("float64")
@pytest.mark.both_generations
def test_list_of_inputs() -> None:
    """Keras makes a tuple of it, also where a layer takes several tensors."""
    x, y = np.random.default_rng(0).normal(size=(2, 12, 3))
    a, b = L.Input((3,)), L.Input((3,))
    model = Model([a, b], L.Dense(2)(L.Concatenate()([a, b])))
    for given in ([x, y], (x, y)):
        _predict_both(model, given, batch_size=4)


@pytest.mark.usefixtures("float64")
@pytest.mark.both_generations
def test_vocabulary_in_the_model() -> None:
    """Keras 2 lists a lookup table among a layer's variables."""
    text = L.TextVectorization(max_tokens=9, output_sequence_length=3)
    text.adapt(["a b c d", "b c e"])
    words = tf.keras.Input((1,), dtype=tf.string)
    model = Model(words, L.Dense(1)(L.Flatten()(L.Embedding(9, 2)(text(words)))))
    x = np.array([["a b"], ["c e d"], ["b b"], ["zz a"]] * 3)
    data = tf.data.Dataset.from_tensor_slices((x, np.arange(12.0)[:, None])).batch(5)
    model.compile("sgd", "mse")
    _predict_both(model, data.map(lambda x, y: x))
    expected = model.evaluate(data, verbose=0)
    np.testing.assert_allclose(model.evaluate(data, verbose=0, num_processes=2), expected, 1e-5)
    model.fit(data, verbose=0, num_processes=2)
