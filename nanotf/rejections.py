"""What Keras's own step says to data that do not suit the model.

Keras finds out when it traces its step. In the parent that would take as long as in a worker,
so it is done where something looks wrong, before workers start, and where a worker has failed,
so that the user gets the exception that a single process raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nanotf.compat import keras_names, keras_optimizers, keras_share
from nanotf.compat.versions import require_tensorflow
from nanotf.shipping import inputs


def looks_wrong(model: Any, specs: Any) -> bool:
    """Whether targets or a loss are missing, or inputs do not have the model's shapes.

    Nothing of that must be wrong: the model may have a `train_step` of its own.

    Args:
        model: a compiled model.
        specs: nested structure of `tf.TensorSpec` or None, of one batch.
    """
    tf = require_tensorflow()
    if isinstance(specs, tuple) and len(specs) > 3:
        return True
    if not keras_share.is_keras_own(type(model).train_step):
        return False  # its own step may do without
    x, y, _ = tf.keras.utils.unpack_x_y_sample_weight(specs)
    if y is None or keras_names.compile_arguments(model).get("loss") is None:
        return True
    given, wanted = tf.nest.flatten(x), getattr(model, "inputs", None)
    if not wanted or None in given:
        return None in given
    return len(given) != len(wanted) or not all(
        spec.shape.is_compatible_with(tf.TensorShape(one.shape))
        for spec, one in zip(given, wanted, strict=True)
    )


def trace_step(model: Any, specs: Any) -> None:
    """Traces the step of `fit`, without a batch, and raises what that raises.

    Args:
        model: a compiled model.
        specs: nested structure of `tf.TensorSpec` or None, of one batch.
    """
    tf = require_tensorflow()
    iterator = iter(_no_batches(specs))
    step = model.make_train_function() or model.train_function  # Keras 3 returns None
    # What does not depend on a batch happens nevertheless, such as the counting of steps and the
    # gradients of regularizers.
    if model.built and model.trainable_variables:
        keras_optimizers.build_optimizer(model)
    counters = [optimizer.iterations for optimizer in keras_optimizers.optimizers_of(model)]
    kept = [(v, v.numpy()) for v in [*keras_optimizers.training_variables(model), *counters]]
    try:
        step(iterator)
    except (StopIteration, tf.errors.OutOfRangeError):
        return  # it was traced, and found no batch
    finally:
        for variable, value in kept:
            variable.assign(value)


def _no_batches(specs: Any) -> Any:
    """An empty dataset of batches as Keras would make them of arrays."""
    tf = require_tensorflow()
    given = tuple(spec for spec in tf.nest.flatten(specs) if spec is not None)

    def nothing() -> Iterator[Any]:
        yield from ()

    @tf.autograph.experimental.do_not_convert
    def batch(*flat: Any) -> Any:
        arrays = iter(flat)
        return inputs.without_lists(
            tf.nest.map_structure(lambda spec: None if spec is None else next(arrays), specs)
        )

    return tf.data.Dataset.from_generator(nothing, output_signature=given).map(batch)


def rejection(model: Any, specs: Any, error: BaseException) -> BaseException | None:
    """What a single process raises instead of what a worker did, where that can be told.

    Args:
        model, specs: as in `trace_step`.
        error: what a worker raised.

    Returns:
        An exception of the same type, or None where the parent cannot tell.
    """
    try:
        trace_step(model, specs)
    except Exception as found:
        return found if type(found) is type(error) else None
    return None
