"""`Embedding` is Keras's own, with a penalty of the rows looked up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import fit_both
from sparse_models import WIDTH, KerasEmbedding, data, model_of

from nanotf.compat import keras_common, versions
from nanotf.errors import InvalidArgumentError
from nanotf.keras.layers import Embedding
from nanotf.keras.optimizers import SparseAdam

IS_KERAS_3 = versions.is_keras_3()


def _loss_and_gradient(layer: Any, tokens: Any) -> tuple[float, Any]:
    with tf.GradientTape() as tape:
        layer(tokens)
        loss = tf.add_n(layer.losses)
    return float(loss), tape.gradient(loss, keras_common.tf_variable(layer.embeddings))


def test_the_penalty_is_of_the_rows_looked_up(float64: None) -> None:
    tokens = np.array([[1, 2, 2], [2, 7, 0]])
    layer = Embedding(9, 3, embeddings_regularizer=tf.keras.regularizers.L2(0.5))
    loss, gradient = _loss_and_gradient(layer, tokens)
    table = np.array(layer.get_weights()[0])
    samples = 2 if not IS_KERAS_3 or versions.keras_version() >= (3, 14) else 1
    assert loss == pytest.approx(0.5 * (table[tokens] ** 2).sum() / samples, rel=1e-12)
    assert isinstance(gradient, tf.IndexedSlices)
    assert sorted(gradient.indices.numpy()) == [0, 1, 2, 2, 2, 7]
    theirs = KerasEmbedding(9, 3, embeddings_regularizer=tf.keras.regularizers.L2(0.5))
    theirs.build((None, 3))
    theirs.set_weights([table])
    loss, gradient = _loss_and_gradient(theirs, tokens)
    assert loss == pytest.approx(0.5 * (table**2).sum(), rel=1e-12)
    assert not isinstance(gradient, tf.IndexedSlices)


@pytest.mark.both_generations
def test_arguments_are_keras_own() -> None:
    layer = Embedding(
        9,
        3,
        "ones",
        embeddings_regularizer="l2",
        embeddings_constraint="non_neg",
        mask_zero=True,
        name="words",
        weights=[np.full((9, 3), 2.0)],
    )
    assert np.all(layer(np.array([[1, 0]])) == 2)
    assert np.array_equal(layer.compute_mask(tf.constant([[1, 0]])), [[True, False]])
    config = layer.get_config()
    assert config["embeddings_regularizer"] is None
    assert config["name"] == "words" and config["mask_zero"]
    twin = KerasEmbedding.from_config(config)
    assert twin.get_config() == Embedding.from_config(config).get_config() == config
    with pytest.raises(TypeError, match="output_dim"):
        Embedding(9)
    with pytest.raises(ValueError, match="positive"):
        Embedding(0, 3)
    with pytest.raises(InvalidArgumentError, match="sum of both"):
        Embedding(9, 3, embeddings_regularizer="l2", activity_regularizer="l1")


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 looks rows up as they are")
@pytest.mark.both_generations
def test_lookups_are_keras_own() -> None:
    layer, theirs = Embedding(9, 3), KerasEmbedding(9, 3)
    theirs.build()
    ragged = tf.ragged.constant([[1], [2, 3]])
    for tokens in (np.array([[-1, 0, 8]]), np.array([[1.0, 2.5]]), ragged):
        found = layer(tokens)
        theirs.set_weights(layer.get_weights())
        expected = theirs(tokens)
        assert type(found) is type(expected)
        if tokens is ragged:
            found, expected = found.to_tensor(), expected.to_tensor()
        assert np.array_equal(found, expected)
    layer.enable_lora(2)
    assert layer(np.array([[3]])).shape == (1, 1, 3)


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 has no quantization")
@pytest.mark.thorough
def test_quantized_as_in_keras() -> None:
    layer, theirs = Embedding(9, 4), KerasEmbedding(9, 4)
    for each in (layer, theirs):
        each.build()
    theirs.set_weights(layer.get_weights())
    for each in (layer, theirs):
        each.quantize("int8")
    tokens = np.array([[1, 3]])
    assert np.array_equal(*(tf.convert_to_tensor(each(tokens)) for each in (layer, theirs)))


class Words(Embedding):
    """A user's layer, which workers rebuild from this class."""

    def __init__(self, words: int, width: int = WIDTH, **kwargs: Any) -> None:
        super().__init__(words, width, embeddings_regularizer="l2", **kwargs)

    def get_config(self) -> dict[str, Any]:
        return {"words": self.input_dim, "width": self.output_dim, "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls(**config)


@pytest.mark.parametrize("layer", [Embedding, Words])
@pytest.mark.parametrize("mask_zero", [False, True])
@pytest.mark.both_generations
def test_the_penalty_with_two_processes(float64: None, layer: Any, mask_zero: bool) -> None:
    if layer is Words and mask_zero:
        pytest.skip("its configuration omits it")
    options = {"mask_zero": mask_zero}
    if layer is Embedding:
        options["embeddings_regularizer"] = "l2"
    x, y = data()
    fit_both(lambda: model_of(SparseAdam(0.01), layer, **options), x=x, y=y, batch_size=16)
