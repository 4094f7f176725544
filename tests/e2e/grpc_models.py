"""Models for tests of gRPC: one of many types, and one of TensorFlow 1 that takes examples."""

from __future__ import annotations

import pathlib
from typing import Any

import tensorflow as tf

TYPES = (
    *(f"{kind}int{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)),
    *("float16", "bfloat16", "float32", "float64", "bool", "string"),
)
ODD = "complex64"  # of gRPC's TensorProto alone
ALONE = ("float32", "int8", "string", ODD)  # each a signature, too


def save_types(folder: pathlib.Path) -> None:
    """A model that returns its inputs, (n, 2): all types, or the one that a signature names."""
    specs = {name: tf.TensorSpec([None, 2], name, name) for name in (*TYPES, ODD)}
    module, signatures = tf.Module(), {"serving_default": TYPES, **{n: (n,) for n in ALONE}}

    def function(**inputs: Any) -> dict[str, Any]:
        return {f"{name}_out": tf.identity(value) for name, value in inputs.items()}

    functions = {
        signature: tf.function(function).get_concrete_function(**{n: specs[n] for n in names})
        for signature, names in signatures.items()
    }
    tf.saved_model.save(module, str(folder), functions)


def save_examples(folder: pathlib.Path) -> None:
    """A model of TensorFlow 1: x of an example becomes a class or a value."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        examples = v1.placeholder(tf.string, [None], "examples")
        found = v1.parse_example(examples, {"x": tf.io.FixedLenFeature([1], tf.float32)})
        value = tf.reshape(found["x"], [-1])
        scores = tf.concat([found["x"], 1 - found["x"]], 1)
        classes = tf.tile(tf.constant([["yes", "no"]]), [tf.shape(scores)[0], 1])
        make = v1.saved_model.signature_def_utils
        builder = v1.saved_model.Builder(str(folder))
        builder.add_meta_graph_and_variables(
            session,
            ["serve"],
            signature_def_map={
                "serving_default": make.regression_signature_def(examples, value * 2),
                "kinds": make.classification_signature_def(examples, classes, scores),
            },
        )
        builder.save()
