"""Checks for `smp.DistributedModel.from_keras`: of models, and of arguments of Keras's methods."""

from __future__ import annotations

import inspect
from typing import Any

import tensorflow as tf

from nanotf.compat import keras_layers, keras_optimizers
from nanotf.compat.keras_common import has_own_step
from nanotf.errors import InvalidArgumentTypeError, ModelError, UnavailableError
from nanotf.sagemaker.smp.step_model import StepModel

# `KerasModel` has its own, so those of the model would not be called.
_OWN = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")


def check(model: Any, partitions: int) -> None:
    """Checks a model for `smp.DistributedModel.from_keras`; see there for what it raises.

    Args:
        model: the object that the user has passed; it may be anything.
    """
    if not isinstance(model, tf.keras.Model):
        raise InvalidArgumentTypeError(
            f"from_keras takes a model of Keras. Received: {model!r} of type {type(model)}."
        )
    if isinstance(model, StepModel):
        raise ModelError(
            "from_keras takes a functional or Sequential model of tf.keras. Received: "
            f"{model.name!r}, which is a smp.DistributedModel."
        )
    if not model.built or not getattr(model, "inputs", None):
        raise ModelError(
            "from_keras takes a functional model, or a Sequential one that knows the shape of its "
            f"inputs. Received: {model.name!r}, a {type(model).__name__} without. Begin a "
            "Sequential model with tf.keras.Input; derive another class from smp.DistributedModel."
        )
    own = [name for name in _OWN if has_own_step(model, name)]
    if own:
        raise UnavailableError(
            f"from_keras uses Keras's own steps. Received: {type(model).__name__}, which defines "
            f"{', '.join(own)}. Write a function with @smp.step instead."
        )
    if any(keras_layers.mask_of(output) is not None for output in tf.nest.flatten(model.outputs)):
        raise UnavailableError(
            "A loss over masked outputs is no mean over rows, so microbatches would change it. "
            f"Received: {model.name!r}, whose outputs have a mask. Pass sample_weight instead of "
            "mask_zero=True or a Masking layer, or write a function with @smp.step."
        )
    if partitions > 1 and model.losses:
        raise UnavailableError(
            "A model in several partitions has no losses of its own: each process knows those of "
            f"its own part alone. Received: {model.name!r} with {len(model.losses)} losses of "
            "regularizers or add_loss. Use the optimizer's weight_decay, or partitions=1."
        )


def compile_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `compile` by name, without `jit_compile`.

    Raises:
        UnavailableError: One of them is not supported.
    """
    given = named("compile", args, kwargs)
    for name, plain in (("jit_compile", (None, False, "auto")), ("steps_per_execution", (1,))):
        if given.get(name, plain[0]) not in plain:
            raise UnavailableError(
                f"A model of from_keras has no {name}. Received: {name}={given[name]!r}. Leave "
                "it out."
            )
    given.pop("jit_compile", None)
    return given


def check_optimizer(optimizer: Any, partitions: int) -> None:
    """Raises `UnavailableError` for an optimizer that needs what a partition does not have."""
    # None scales the loss: steps do not, and a partition sees overflows of its own part only.
    if isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer):
        raise UnavailableError(
            "A model of from_keras does not scale its loss. Received: a LossScaleOptimizer. "
            'Use the policy "mixed_bfloat16", which needs none.'
        )
    norm = getattr(optimizer, "global_clipnorm", None)
    if norm is not None and partitions > 1:
        raise UnavailableError(
            "Each partition knows the gradients of its own variables. Received: "
            f"global_clipnorm={norm!r}. Use clipnorm, clipvalue, or partitions=1."
        )
    if partitions > 1 and keras_optimizers.depends_on_number(optimizer):
        raise UnavailableError(
            "Each partition updates its own variables alone, so updates must not depend on how "
            f"many there are. Received: {type(optimizer).__name__} of Keras 2. Use Adam, Keras 3, "
            "or partitions=1."
        )


def named(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns all arguments of a method of `tf.keras.Model` by name."""
    signature = inspect.signature(getattr(tf.keras.Model, method))
    given = dict(signature.bind_partial(None, *args, **kwargs).arguments)  # None: `self`
    given.pop("self", None)
    further = given.pop("kwargs", {})  # of Keras 2's `compile`
    return {**given, **further}
