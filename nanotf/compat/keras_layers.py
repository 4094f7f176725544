"""Layers of both Keras generations: what is in them, and their masks, losses and variables.

| name | generation, versions seen | why |
| --- | --- | --- |
| `Layer._metrics` | 2 and 3 | see `all_variables` |
| `Layer._flatten_layers` | 2 and 3 | all layers of a model, including layers inside layers |
| `Embedding._embeddings` | 3; 3.10-3.15 | see `look_up` |
| `DistributedVariable._get` | TensorFlow 2.14-2.21 | see `variable_here` |
| `_keras_call_info_injected`, an attribute of exceptions | 2 and 3 | Keras adds the arguments of a call to other exceptions, in a new exception |
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from nanotf.compat.generation import generation
from nanotf.compat.keras_common import flat_layers, tf_variable, tf_variables
from nanotf.compat.versions import require_tensorflow


def all_variables(layer: Any) -> list[Any]:
    """Returns the `tf.Variable`s of a layer and of the metrics in it and in layers inside it."""
    found = tf_variables(layer)
    for inner in flat_layers(layer):
        for metric in getattr(inner, "_metrics", ()):
            found += generation().variables_of_metric(metric)
    return list({id(variable): variable for variable in found}.values())


def layers_below(layer: Any) -> list[Any]:
    """Returns all layers inside a model or layer, in a fixed order."""
    return list(layer._flatten_layers(include_self=False))


def computes_in_bfloat16(obj: Any) -> bool:
    """Returns True if any layer of a model computes in bfloat16; False for other objects."""
    return any(getattr(x, "compute_dtype", None) == "bfloat16" for x in flat_layers(obj))


AS_IT_IS = "_keras_call_info_injected"  # attribute of exceptions that Keras leaves alone


DECLARED = "_nanotf_declared"  # attribute of a layer: WHOLE or BY_ROWS


WHOLE, BY_ROWS = "whole", "by_rows"


def variable_here(variable: Any) -> Any:
    """Returns the plain `tf.Variable` of this replica or of the running update.

    Unlike a distributed variable, it can be read row by row.
    """
    variable = tf_variable(variable)
    return variable._get() if hasattr(variable, "_get") else variable


def look_up(stock: Any) -> Any:
    """Makes a `call` for Keras 3's `Embedding` that reads only the rows, as Keras 2's does.

    Keras 3 first reads the whole table. Once anything has written single rows of it, TensorFlow
    copies it at each such read (resource variables copy on read from then on).

    Args:
        stock: function, `Embedding.call`.

    Returns:
        A function with the same results.
    """

    @functools.wraps(stock)
    def call(self: Any, inputs: Any) -> Any:
        tf = require_tensorflow()
        plain = not self.lora_enabled and self.quantization_mode is None  # others read more tables
        if not plain or not isinstance(inputs, tf.Tensor):
            return stock(self, inputs)
        if inputs.dtype not in (tf.int32, tf.int64):
            inputs = tf.cast(inputs, tf.int32)
        # An index below 0 counts from the end.
        inputs = tf.where(inputs < 0, inputs + tf.cast(self.input_dim, inputs.dtype), inputs)
        return tf.cast(tf.gather(variable_here(self._embeddings), inputs), self.compute_dtype)

    return call


def of_variable_dtype(stock: Any) -> Any:
    """Makes an `add_loss` for Keras 3's `Embedding` that casts its regularizer's losses.

    With mixed precision they are float16 or bfloat16, and Keras cannot add them to other losses.

    Args:
        stock: function, `Embedding.add_loss`.
    """

    @functools.wraps(stock)
    def add_loss(self: Any, loss: Any) -> Any:
        return stock(self, require_tensorflow().cast(loss, self.variable_dtype))

    return add_loss


def mask_of(value: Any) -> Any:
    """Returns the mask that Keras has put on a tensor, or None."""
    return getattr(value, "_keras_mask", None)


def set_mask(value: Any, mask: Any) -> None:
    """Puts a mask on a tensor, as Keras does."""
    value._keras_mask = mask


def lists_of_losses(layer: Any) -> list[list[Any]]:
    """Returns the lists in which a layer and the layers inside it keep `add_loss` values."""
    found = []
    for inner in flat_layers(layer):
        for name in ("_losses", "_eager_losses"):  # the second of Keras 2, for eager calls
            kept = getattr(inner, name, None)
            if isinstance(kept, list):
                found.append(kept)
    return found


@dataclasses.dataclass(frozen=True)
class Activation:
    """The operation behind a tensor of probabilities, where a loss finds logits.

    Args:
        kind: str, "Sigmoid" or "Softmax".
        is_noted: bool, whether Keras's activation has noted the logits in an attribute.
    """

    kind: str
    is_noted: bool

    def applied_to(self, logits: Any) -> Any:
        """Returns a tensor that losses treat like the one of which this was found."""
        tf = require_tensorflow()
        out = tf.sigmoid(logits) if self.kind == "Sigmoid" else tf.nn.softmax(logits)
        if self.is_noted:
            out._keras_logits = logits
        return out


def activation_behind(tensor: Any) -> Activation | None:
    """Returns the `Activation` in which Keras's losses find the logits of a tensor, if any.

    They use the attribute `_keras_logits`, else, in a graph, the input of the operation.
    """
    is_noted = hasattr(tensor, "_keras_logits")
    tf = require_tensorflow()
    # An eager tensor knows no operation.
    kind = (
        "" if not tf.is_tensor(tensor) or tf.is_symbolic_tensor(tensor) is False else tensor.op.type
    )
    if kind in ("Sigmoid", "Softmax"):
        return Activation(kind, is_noted)
    return Activation("Softmax", True) if is_noted else None


def context_of_calls() -> Any:
    """Returns what the calls around a layer's call pass on to it, such as `training`."""
    return generation().context_of_calls()


def makes_or_limits_weights(value: Any) -> bool:
    """Returns True for an initializer, a regularizer or a constraint: no part of a call."""
    keras = require_tensorflow().keras
    kinds = (keras.initializers.Initializer, keras.regularizers.Regularizer)
    return isinstance(value, (*kinds, keras.constraints.Constraint))


def converted_as_here(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that AutoGraph converts if Keras 2 converts it where it calls it."""
    found: Callable[..., Any] = generation().converted_as_here(function)
    return found
