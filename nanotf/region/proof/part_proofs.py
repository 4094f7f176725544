"""Calls of Keras's own layers within a call that is traced: proved once for all that are alike.

A model of 150 layers has some 50 different ones, and each is traced again with every graph. The
trace of the model then has placeholders for a layer's outputs. Since the layer's proof holds for
any rows that it gets, and for any gradient that arrives at its outputs, that of the model needs
only what is between layers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from nanotf.compat import keras_common, keras_layers, keras_models, variable_handles
from nanotf.region import variables
from nanotf.region.proof import verdicts
from nanotf.region.proof.states import Coupled
from nanotf.region.proof.traces import Argument, ProvedCall, Tracing

_MOST_NESTED = 6  # levels of attributes that `_likeness` looks at; deeper ones are unknown


@dataclasses.dataclass(frozen=True)
class _Outputs:
    """The outputs of layers that are alike, and divided."""

    structure: Any  # the structure that they are leaves of
    leaves: tuple[Argument, ...]
    # See `verdicts.Verdict`, which is not kept itself: it has variables, which must not stay in
    # memory longer than their layer.
    draws: tuple[bool, ...]
    statistics: tuple[bool, ...]
    operations: float


_known: dict[Any, _Outputs | None] = {}  # None for layers that are traced where they are


def call(tracing: Tracing, layer: Any, stock: Any, args: Any, kwargs: Any) -> Any:
    """Calls a layer in a trace, or makes placeholders for its outputs.

    Args:
        tracing: `Tracing` of the call around it.
        stock: the stock `__call__`.
        args, kwargs: its arguments.
    """
    leaves = tf.nest.flatten((args, kwargs))
    called, found = tracing.decided(
        lambda: (layer, _found(tracing, layer, stock, leaves, (args, kwargs)))
    )
    if called is not layer:
        raise Coupled("it calls other layers each time")
    if found is None:
        return stock(layer, *args, **kwargs)
    described, outputs = found
    used = list(map(keras_common.tf_variable, layer.trainable_variables))
    variable_handles.note_use(used)
    made = [output.made(tracing) for output in outputs.leaves]
    pairs = [(t, each) for t, each in zip(leaves, described, strict=True) if tf.is_tensor(t)]
    by_rows = [variable_handles.handle_of(variables.plain(v)) for v in used]
    placeholders = [placeholder for placeholder, _ in made]
    tracing.parts.append(ProvedCall(pairs, placeholders, by_rows, outputs.operations))
    tracing.draws += outputs.draws
    tracing.statistics += outputs.statistics
    return tf.nest.pack_sequence_as(outputs.structure, [tensor for _, tensor in made])


def _found(
    tracing: Tracing, layer: Any, stock: Any, leaves: list[Any], like: Any
) -> tuple[list[Any], _Outputs] | None:
    """Returns the described arguments and the outputs of a layer that is proved by itself."""
    described = [_described(tracing, leaf) for leaf in leaves]
    alike = _likeness(layer) if layer.built and None not in described else None
    if alike is None or not any(isinstance(each, Argument) for each in described):
        return None
    structure = str(tf.nest.map_structure(lambda _: 0, like))
    key = alike, keras_layers.context_of_calls(), structure, tuple(described)
    if key not in _known:
        _known[key] = _proved(layer, stock, described, like)
    outputs = _known[key]
    return None if outputs is None else (described, outputs)


def _described(tracing: Tracing, leaf: Any) -> Any:
    """Returns the `Argument` of a tensor, plain values as they are, None for anything else."""
    if isinstance(leaf, (bool, int, float, str)):
        return leaf
    if leaf is None:
        return "None"  # None itself says that nothing is known of a leaf
    if not isinstance(leaf, tf.Tensor) or hasattr(leaf, "assign"):
        return None
    return Argument.of(leaf, tracing.rows)


def _proved(layer: Any, stock: Any, described: list[Any], like: Any) -> _Outputs | None:
    outputs: list[Any] = []

    def noted(layer: Any, *args: Any, **kwargs: Any) -> Any:
        out = stock(layer, *args, **kwargs)
        outputs.append(out)
        return out

    subject = verdicts.layer_subject(layer, noted)
    given = [None if each == "None" else each for each in described]
    verdict = verdicts.prove(subject, given, like)
    others = verdict.losses or verdict.assigned or verdict.reads_behind or verdict.positions
    is_simple = not (verdict.whole or others)
    # A placeholder can replace rows alone, one for each row of the batch.
    if not is_simple or set(verdict.factors or ()) != {1}:
        return None
    flat = tf.nest.flatten(outputs[0])
    rows = flat[0].shape[0]
    found = [Argument.of(tensor, rows) for tensor in flat]
    if any(each is None for each in found):
        return None
    structure = tf.nest.map_structure(lambda _: 0, outputs[0])
    leaves = tuple(each for each in found if each is not None)
    operations = verdict.operations or 0.0
    return _Outputs(structure, leaves, verdict.draws, verdict.statistics, operations)


def _likeness(value: Any, depth: int = 0) -> Any:
    """Describes a layer of Keras's own so that equal descriptions compute alike; None if unknown."""
    if isinstance(value, (bool, int, float, str, bytes, type(None), tf.DType)):
        return type(value).__name__, value
    if isinstance(value, (list, tuple)):
        return _all(type(value).__name__, [_likeness(each, depth + 1) for each in value])
    if isinstance(value, dict):
        items = [_likeness(each, depth + 1) for pair in value.items() for each in pair]
        return _all("dict", items)
    if depth > _MOST_NESTED:
        return None
    if keras_layers.makes_or_limits_weights(value):
        return "weights"
    variable = keras_common.tf_variable(value) if hasattr(value, "assign") else None
    if isinstance(variable, tf.Variable):
        return "variable", str(variable.shape), variable.dtype, bool(variable.trainable)
    if isinstance(value, tf.TensorShape):
        return "shape", str(value)
    if callable(value) and hasattr(value, "__qualname__"):
        is_own = keras_common.is_keras_own(value) and "<locals>" not in value.__qualname__
        return (value.__module__, value.__qualname__) if is_own else None
    if not keras_common.is_keras_own(type(value)):
        return None
    if isinstance(value, tf.keras.layers.Layer):
        # Above, a regularizer counts as one of weights; that of outputs adds losses to a call.
        if getattr(value, "activity_regularizer", None) is not None or isinstance(
            value, keras_models.model_class()
        ):
            return None
        attributes = keras_models.users_attributes(value)
        general = [str(value.compute_dtype), value.trainable, value.supports_masking]
        attributes = {**attributes, "_general": general}
    else:
        attributes = vars(value) if hasattr(value, "__dict__") else {}
    name = str(getattr(value, "name", "") or "")
    parts: list[Any] = [type(value).__module__, type(value).__qualname__]
    for key, each in attributes.items():
        if isinstance(each, str) and name and name in each:
            continue  # layers that are alike still have names of their own
        parts += [key, _likeness(each, depth + 1)]
    return _all("object", parts)


def _all(kind: str, parts: list[Any]) -> Any:
    return None if any(part is None for part in parts) else (kind, *parts)
