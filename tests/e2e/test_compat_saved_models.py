"""The private names by which nanotf reads and freezes SavedModels are where it looks."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from nanotf.compat import saved_models, versions
from nanotf.compat.generation import generation

L = tf.keras.layers


def _saved(folder: pathlib.Path) -> Any:
    module = tf.Module()
    module.factor = tf.Variable(3.0)

    @tf.function(input_signature=[tf.TensorSpec((None, 2), tf.int32, name="x")])
    def serve(x: Any) -> Any:
        return {"y": tf.cast(x, tf.float32) * module.factor}

    tf.saved_model.save(module, str(folder), signatures={"serving_default": serve})
    return module, serve


def test_signatures_are_read_without_the_model(tmp_path: pathlib.Path) -> None:
    _saved(tmp_path)
    (definition,) = saved_models.signature_definitions(tmp_path).values()
    assert definition.method_name == "tensorflow/serving/predict"
    assert definition.inputs["x"].dtype == tf.int32.as_datatype_enum
    assert [axis.size for axis in definition.inputs["x"].tensor_shape.dim] == [-1, 2]
    assert list(definition.outputs) == ["y"]


def test_frozen(tmp_path: pathlib.Path) -> None:
    _module, serve = _saved(tmp_path)  # which has the variable
    frozen = saved_models.frozen(serve.get_concrete_function())
    assert [tensor.name for tensor in frozen.inputs] == ["x:0"]
    assert not frozen.variables
    (found,) = tf.nest.flatten(frozen(tf.constant([[1, 2]])))
    np.testing.assert_array_equal(found, [[3.0, 6.0]])


@pytest.mark.both_generations
def test_the_first_call_of_a_subclassed_model() -> None:
    class Sum(tf.keras.Model):
        def call(self, inputs: Any) -> Any:
            return inputs["a"] + inputs["b"][0]

    model = Sum()
    if versions.is_keras_3():
        assert generation().called_with(model) is None
    model({"a": tf.zeros((2, 3)), "b": [tf.zeros((2, 3))]})
    found = generation().called_with(model)
    assert {tuple(spec.shape[1:]) for spec in tf.nest.flatten(found)} == {(3,)}
    assert {spec.dtype for spec in tf.nest.flatten(found)} == {tf.float32}
    assert list(found) == ["a", "b"]
