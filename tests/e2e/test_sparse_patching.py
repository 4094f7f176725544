"""`patch_tensorflow(sparse=True)` replaces `Adam` and `Embedding`, and restores them."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import L, fit_both
from sparse_models import KerasAdam, KerasEmbedding, data, model_of

import nanotf
from nanotf.compat import versions
from nanotf.keras import models as nano_models
from nanotf.keras.layers import Embedding
from nanotf.keras.optimizers import SparseAdam

IS_KERAS_3 = versions.is_keras_3()


@pytest.fixture
def patched() -> Iterator[None]:
    nanotf.patch_tensorflow(sparse=True)
    yield
    nanotf.unpatch_tensorflow()


@pytest.mark.usefixtures("patched")
def test_patched_names() -> None:
    from tensorflow.keras.layers import Embedding as Named

    assert tf.keras.layers.Embedding is Named is Embedding
    assert issubclass(tf.keras.optimizers.Adam, SparseAdam)
    plain = KerasEmbedding.__new__(KerasEmbedding)
    assert isinstance(plain, tf.keras.layers.Embedding)
    assert not isinstance(L.Dense(1), tf.keras.layers.Embedding)
    assert isinstance(KerasAdam(), SparseAdam)
    assert isinstance(KerasEmbedding(3, 2), Embedding)
    assert not isinstance(tf.keras.optimizers.AdamW(), SparseAdam)
    both = tf.keras.layers.Embedding(3, 2, embeddings_regularizer="l2", activity_regularizer="l1")
    assert both.embeddings_regularizer is not None
    if IS_KERAS_3:
        assert tf.keras.optimizers.Adam(gradient_accumulation_steps=2)


def test_patched_names_can_be_left_out_and_are_restored() -> None:
    before = (vars(KerasAdam)["__init__"], vars(KerasEmbedding)["__init__"])
    nanotf.patch_tensorflow(sparse=True)
    nanotf.patch_tensorflow()
    try:
        assert tf.keras.Model is nanotf.keras.Model
        assert tf.keras.optimizers.Adam is KerasAdam and type(KerasAdam()) is KerasAdam
        assert tf.keras.layers.Embedding is KerasEmbedding
        nanotf.patch_tensorflow(sparse=True)
        assert tf.keras.layers.Embedding is Embedding
    finally:
        nanotf.unpatch_tensorflow()
    assert tf.keras.optimizers.Adam is KerasAdam and tf.keras.layers.Embedding is KerasEmbedding
    assert (vars(KerasAdam)["__init__"], vars(KerasEmbedding)["__init__"]) == before
    assert type(KerasAdam()) is KerasAdam and type(KerasEmbedding(3, 2)) is KerasEmbedding
    assert not nano_models.in_place_of


@pytest.mark.thorough
@pytest.mark.usefixtures("float64", "patched")
@pytest.mark.both_generations
def test_patched_models_train_and_are_saved_as_keras_own(tmp_path: pathlib.Path) -> None:
    x, y = data()

    def make() -> Any:
        return model_of("adam", tf.keras.layers.Embedding, embeddings_regularizer="l2")

    model, _ = fit_both(make, x=x, y=y, batch_size=16)
    assert isinstance(model.optimizer, SparseAdam)
    again = tf.keras.models.clone_model(model)
    again.compile(tf.keras.optimizers.Adam(0.001), "mse")
    model.save(tmp_path / "model.keras")
    assert "nanotf" not in model.to_json()
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, SparseAdam)
    nanotf.unpatch_tensorflow()
    plain = tf.keras.models.load_model(tmp_path / "model.keras")
    assert type(plain.optimizer) is KerasAdam and type(plain.layers[0]) is KerasEmbedding
    for ours, theirs in zip(loaded.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert int(plain.optimizer.iterations.numpy()) == int(model.optimizer.iterations.numpy())


@pytest.mark.thorough
def test_dense_models_are_the_same_when_patched(float64: None) -> None:
    x, y = np.random.default_rng(0).normal(size=(2, 48, 5))

    def trained() -> list[np.ndarray]:
        tf.keras.utils.set_random_seed(5)
        model = tf.keras.Sequential([L.Input((5,)), L.Dense(7, activation="tanh"), L.Dense(5)])
        model.compile("adam", "mse")
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
        return list(model.get_weights())

    expected = trained()
    nanotf.patch_tensorflow(sparse=True)
    try:
        found = trained()
    finally:
        nanotf.unpatch_tensorflow()
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
