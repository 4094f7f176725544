"""Hugging Face's TensorFlow models with workers: the numbers of one process.

They need Keras 2 (`TF_USE_LEGACY_KERAS=1`) and transformers below 5. Nothing is downloaded: the
models are tiny and start with random weights.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_history

import nanotf
from nanotf.compat.versions import is_keras_3

pytestmark = [
    pytest.mark.both_generations,
    pytest.mark.skipif(
        # Where both are installed, transformers takes tf_keras rather than the Keras of TF 2.15.
        is_keras_3() or os.environ.get("TF_USE_LEGACY_KERAS") != "1",
        reason="transformers' models need TF_USE_LEGACY_KERAS=1",
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
    ),
]

ROWS, LENGTH, WORDS = 22, 6, 40  # the last of the batches of 8 has 6 rows
Make = Callable[[float], Any]


@pytest.fixture(scope="module")
def hf() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("USE_TORCH", "0")
        import transformers

        transformers.logging.set_verbosity_error()
        yield transformers


def _bert(hf: Any, dropout: float = 0.0) -> Any:
    return hf.TFBertForSequenceClassification(
        hf.BertConfig(
            vocab_size=WORDS,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )


def _gpt2(hf: Any, dropout: float = 0.0) -> Any:
    sizes = {"n_positions": LENGTH, "n_embd": 8, "n_layer": 1, "n_head": 2}
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return hf.TFGPT2LMHeadModel(hf.GPT2Config(vocab_size=WORDS, **sizes, **drops))


def _t5(hf: Any, dropout: float = 0.0) -> Any:
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return hf.TFT5ForConditionalGeneration(
        hf.T5Config(vocab_size=WORDS, dropout_rate=dropout, decoder_start_token_id=0, **sizes)
    )


def _vit(hf: Any, dropout: float = 0.0) -> Any:
    return hf.TFViTForImageClassification(
        hf.ViTConfig(
            image_size=8,
            patch_size=4,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            num_labels=3,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )


def _data(make: Any) -> tuple[dict[str, Any], Any]:
    """Returns inputs and labels; rows of text differ in their number of labels."""
    random = np.random.default_rng(0)
    if make is _vit:
        return {"pixel_values": random.normal(size=(ROWS, 3, 8, 8))}, random.integers(0, 3, ROWS)
    words = random.integers(2, WORDS, (ROWS, LENGTH))
    mask = (np.arange(LENGTH) < 2 + np.arange(ROWS)[:, None] % 5).astype("int64")
    labels = random.integers(0, 2, ROWS) if make is _bert else np.where(mask, words, -100)
    return {"input_ids": words, "attention_mask": mask}, labels


def _both(hf: Any, make: Any, run: Callable[[Any, dict[str, int]], Any], dropout: float) -> Any:
    """Runs a function on two equal models, with one process and with two; weights must agree."""
    results, models = [], []
    for workers in ({}, {"num_processes": 2}):
        tf.keras.utils.set_random_seed(1)
        model = make(hf, dropout)
        models.append(nanotf.accelerate(model) if workers else model)
        results.append(run(models[-1], workers))
    for ours, theirs in zip(models[1].weights, models[0].weights, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-9, atol=1e-10)
    return results


def _train_and_use(
    make: Any, in_dict: bool = True
) -> Callable[[Any, dict[str, int]], tuple[Any, Any, Any]]:
    def run(model: Any, workers: dict[str, int]) -> tuple[Any, Any, Any]:
        x, y = _data(make)
        model.compile(tf.keras.optimizers.SGD(0.1))  # no loss: the model's own
        data = ({**x, "labels": y},) if in_dict else (dict(x), y)
        history = model.fit(*data, batch_size=8, epochs=2, shuffle=False, verbose=0, **workers)
        score = model.evaluate(*data, batch_size=8, verbose=0, **workers)
        inputs = {**x, "decoder_input_ids": x["input_ids"]} if make is _t5 else dict(x)
        outputs = model.predict(inputs, batch_size=11, verbose=0, **workers)
        return history.history, score, outputs

    return run


def _assert_same_results(results: Any) -> None:
    (history, score, outputs), (found_history, found_score, found_outputs) = results
    assert_same_history(found_history, history)
    np.testing.assert_allclose(found_score, score, rtol=1e-10)
    assert type(found_outputs) is type(outputs)
    assert list(found_outputs) == list(outputs)
    pairs = zip(tf.nest.flatten(found_outputs), tf.nest.flatten(outputs), strict=True)
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=1e-8, atol=1e-8)


def test_bert(float64: None, hf: Any) -> None:
    """Its own loss and steps, labels in the dict, dropout."""
    _assert_same_results(_both(hf, _bert, _train_and_use(_bert), 0.1))


@pytest.mark.thorough
def test_gpt2(float64: None, hf: Any) -> None:
    """Its loss leaves out labels of -100, and its states have their rows along the second axis."""
    _assert_same_results(_both(hf, _gpt2, _train_and_use(_gpt2), 0.0))


@pytest.mark.thorough
@pytest.mark.parametrize("in_dict", [True, False])
@pytest.mark.parametrize("make", [_bert, _gpt2, _t5, _vit])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_models(float64: None, hf: Any, make: Any, in_dict: bool, dropout: float) -> None:
    _assert_same_results(_both(hf, make, _train_and_use(make, in_dict), dropout))


@pytest.mark.thorough
def test_weight_decay(hf: Any, tmp_path: pathlib.Path) -> None:
    """`create_optimizer` decays no biases; `save_pretrained` saves what the workers trained."""

    def optimizer() -> Any:
        return hf.create_optimizer(1e-2, 6, 2, weight_decay_rate=0.5)[0]

    x, y = _data(_bert)
    ends = []
    for workers in ({}, {"num_processes": 2}):
        tf.keras.utils.set_random_seed(1)
        model = nanotf.accelerate(_bert(hf))
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss, metrics=["accuracy"])
        history = model.fit(
            dict(x), y, batch_size=8, epochs=2, shuffle=False, verbose=0, **workers
        ).history
        bias = next(v for v in model.weights if v.name.endswith("pooler/dense/bias:0"))
        ends.append((history, bias.numpy(), model))
    assert_same_history(ends[1][0], ends[0][0])
    np.testing.assert_allclose(ends[1][1], ends[0][1], rtol=1e-3, atol=1e-5)
    model = ends[1][2]
    model.save_pretrained(tmp_path)
    loaded = type(_bert(hf)).from_pretrained(tmp_path)
    for ours, theirs in zip(loaded.weights, model.weights, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


@pytest.mark.thorough
def test_custom_loop(float64: None, hf: Any) -> None:
    def run(model: Any, workers: dict[str, int]) -> list[float]:
        x, y = _data(_bert)
        data = tf.data.Dataset.from_tensor_slices({**x, "labels": y}).batch(8)
        optimizer = tf.keras.optimizers.SGD(0.1)

        @tf.function
        def step(batch: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(batch, training=True).loss)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        def train(data: Any) -> list[float]:
            return [float(step(batch)) for batch in data]

        return (nanotf.nano(**workers)(train) if workers else train)(data)

    expected, found = _both(hf, _bert, run, 0.1)
    np.testing.assert_allclose(found, expected, rtol=1e-10)


@pytest.mark.thorough
def test_prepare_tf_dataset(float64: None, hf: Any) -> None:
    datasets = pytest.importorskip("datasets")

    def run(model: Any, workers: dict[str, int]) -> Any:
        x, y = _data(_bert)
        rows = datasets.Dataset.from_dict({**{k: v.tolist() for k, v in x.items()}, "labels": y})
        data = model.prepare_tf_dataset(rows, batch_size=8, shuffle=False)
        model.compile(tf.keras.optimizers.SGD(0.1))
        return model.fit(data, epochs=2, verbose=0, **workers).history

    expected, found = _both(hf, _bert, run, 0.0)
    assert_same_history(found, expected)
