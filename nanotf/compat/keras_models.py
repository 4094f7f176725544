"""Keras's classes of models, and the attributes that users and Keras set on models.

| name | generation, versions seen | why |
| --- | --- | --- |
| `models.functional.Functional` / `engine.functional.Functional` | 3 / 2 | the class that `Model(inputs, outputs)` makes |
| `models.model.Model`, `models.sequential.Sequential` / `engine.training.Model`, `engine.sequential.Sequential` | 3 / 2 | Keras's own classes, even while the public names are nanotf's |
| `layers.core.embedding.Embedding` | 2 and 3 | as above |
"""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import Any

import numpy as np

from nanotf.compat import eager_context
from nanotf.compat.generation import generation
from nanotf.compat.keras_common import OF_LOOPS, flat_layers, is_keras_own, source_module
from nanotf.compat.versions import require_tensorflow


def model_class() -> Any:
    """Returns Keras's `Model`, even while `tf.keras.Model` is nanotf's."""
    return source_module(generation().MODEL).Model


def keras_method(model: Any, name: str) -> Any:
    """Returns Keras's own method of a model, bound, even if the user's class overrides it."""
    return types.MethodType(getattr(model_class(), name), model)


def is_overridden(cls: type, name: str) -> bool:
    """Returns True if a class, or one that it derives from, replaces a method of Keras's models.

    nanotf's own classes only add to the methods of `fit`, `evaluate` and `predict`.
    """
    ours = __name__.partition(".")[0]
    owners = (base for base in cls.__mro__ if name in vars(base))
    owner = next(base for base in owners if base.__module__.partition(".")[0] != ours)
    return not is_keras_own(owner)


def overrides(model: Any, name: str) -> bool:
    """Returns True if the user replaced a method of Keras's, in a class or in the model itself."""
    return name in vars(model) or is_overridden(type(model), name)


def sequential_class() -> Any:
    """Returns Keras's `Sequential`, even while `tf.keras.Sequential` is nanotf's."""
    return source_module(generation().SEQUENTIAL).Sequential


def embedding_class() -> Any:
    """Returns Keras's `Embedding`, even while `tf.keras.layers.Embedding` is nanotf's."""
    return source_module("layers.core.embedding").Embedding


def save_as(cls: type, original: type) -> None:
    """Makes saved models name a class like another, if that one is registered with Keras.

    Registering the class instead would make Keras load models as the new class from then on.
    """
    names = getattr(source_module("saving.object_registration"), generation().CUSTOM_NAMES)
    if original in names:
        names[cls] = names[original]


def functional_class() -> type:
    """Returns the class of models that `Model(inputs, outputs)` makes."""
    cls: type = source_module(generation().FUNCTIONAL).Functional
    return cls


def make_functional(cls: Any) -> None:
    """Makes a model class functional, as its first model made from inputs and outputs would.

    Keras would put its `Functional` into the bases of every class in between, including nanotf's
    `Model`. That would affect all later subclasses.
    """
    if issubclass(cls, functional_class()):
        return
    bases = []
    for base in cls.__bases__:
        if base is model_class():
            base = functional_class()
        elif "_nanotf_functional" in vars(base):
            base = base._nanotf_functional
        elif issubclass(base, model_class()):
            make_functional(base)
        bases.append(base)
    cls.__bases__ = tuple(bases)


@functools.cache
def own_attributes() -> frozenset[str]:
    """Returns the names of attributes that Keras itself sets on layers and models."""
    found: frozenset[str] = eager_context.made_outside(_own_attributes)
    return found


def _own_attributes() -> frozenset[str]:
    tf = require_tensorflow()

    class Plain(model_class()):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return x

    # All have names: those that Keras chooses are numbered, and the user's would change.
    model = Plain(name="nanotf")
    model.compile(tf.keras.optimizers.SGD(name="nanotf"), "mse", metrics=["mse"], run_eagerly=True)
    model.build((None, 1))
    for name in ("train", "test", "predict"):
        getattr(model, f"make_{name}_function")()
    given = tf.keras.Input((1,), name="nanotf")
    # Keras 3 before 3.13 refuses a model that computes nothing. A layer's call would be noted by a
    # proof that runs now.
    computed = tf.keras.ops.negative(given) if hasattr(tf.keras, "ops") else given
    functional = functional_class()(given, computed, name="nanotf")
    start = tf.keras.layers.InputLayer((1,), name="nanotf")
    sequential = sequential_class()([start], name="nanotf")
    bare = (tf.keras.layers.Layer(name="nanotf"), model, functional, sequential)
    return frozenset(OF_LOOPS).union(*map(vars, bare))


def users_attributes(layer: Any) -> dict[str, Any]:
    """Returns the attributes of a layer or model that are neither Keras's nor nanotf's."""
    theirs = own_attributes()
    return {n: v for n, v in vars(layer).items() if n not in theirs and n[:7] != "_nanotf"}


_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.ndarray, np.generic)


def plain_attributes(model: Any) -> tuple[dict[str, Any], ...]:
    """Returns the user's attributes that are numbers, texts or arrays, of each of its layers."""
    return tuple(
        {n: value for n, value in users_attributes(layer).items() if isinstance(value, _PLAIN)}
        for layer in flat_layers(model)
    )


def set_plain_attributes(model: Any, values: Sequence[dict[str, Any]]) -> None:
    """Sets what `plain_attributes` returned for a model of the same layers."""
    for layer, found in zip(flat_layers(model), values, strict=False):
        for name, value in found.items():
            setattr(layer, name, value)


def callback_list_class() -> Any:
    """Returns Keras's own callback container, public in both generations."""
    cls: type = require_tensorflow().keras.callbacks.CallbackList
    return cls


def has_call(model: Any) -> bool:
    """Returns True if a model has a `call`. A GAN with only a `train_step` has none."""
    keras_model = require_tensorflow().keras.Model
    return type(model).call is not keras_model.call
