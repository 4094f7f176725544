"""What Keras's own step says to data that do not suit the model.

Keras finds out when it traces its step. In the parent that would take as long as in a worker,
so it is done where something looks wrong, before workers start, and where a worker has failed,
so that the user gets the exception that a single process raises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from nanotf.compat import keras_names, keras_optimizers
from nanotf.compat.versions import is_keras_3, require_tensorflow
from nanotf.errors import NanoError
from nanotf.shipping import inputs

# The parts of the names of a model's functions, by the method that calls them.
_STEPS = {"fit": "train", "evaluate": "test", "predict": "predict"}


@contextlib.contextmanager
def in_words_of_keras(model: Any, specs: Any, method: str) -> Iterator[None]:
    """Raises what Keras's own step says, before or in place of what is raised inside.

    What was raised inside is its cause: it may be the reason of what the step says.

    Args:
        model: a model, compiled unless it is for "predict".
        specs: nested structure of `tf.TensorSpec` or None, of one batch.
        method: str, "fit", "evaluate" or "predict".
    """
    if looks_wrong(model, specs, method):
        trace_step(model, specs, method)
    try:
        yield
    except NanoError:
        raise
    except Exception as error:
        try:
            trace_step(model, specs, method)
        except Exception as found:
            raise found from error
        raise


def looks_wrong(model: Any, specs: Any, method: str = "fit") -> bool:
    """Whether targets or a loss are missing, or inputs do not have the model's shapes.

    Nothing of that must be wrong: the model may have a step of its own.

    Args:
        model, specs, method: as in `in_words_of_keras`.
    """
    tf = require_tensorflow()
    if isinstance(specs, tuple) and len(specs) > 3:
        return True
    if not keras_names.is_keras_own(getattr(type(model), f"{_STEPS[method]}_step")):
        return False  # its own step may do without
    x, y, _ = tf.keras.utils.unpack_x_y_sample_weight(specs)
    trains = method == "fit"
    if method != "predict" and (y is None or (trains and _has_no_loss(model))):
        return True
    given, wanted = tf.nest.flatten(x), getattr(model, "inputs", None)
    if not wanted or None in given:
        return None in given
    return len(given) != len(wanted) or not all(
        spec.shape.is_compatible_with(tf.TensorShape(one.shape))
        for spec, one in zip(given, wanted, strict=True)
    )


def _has_no_loss(model: Any) -> bool:
    return keras_names.compile_arguments(model).get("loss") is None


def trace_step(model: Any, specs: Any, method: str = "fit") -> None:
    """Traces the step of a method, without a batch, and raises what that raises.

    Args:
        model, specs, method: as in `in_words_of_keras`.
    """
    tf = require_tensorflow()
    name = f"{_STEPS[method]}_function"
    step = getattr(model, f"make_{name}")() or getattr(model, name)  # Keras 3 returns None
    if method == "predict" and is_keras_3():  # its function takes batches
        if not model.run_eagerly:
            step.get_concrete_function([specs])
        return
    iterator = iter(_no_batches(specs))
    # What does not depend on a batch happens nevertheless, such as the counting of steps and the
    # gradients of regularizers.
    kept = []
    if method == "fit":
        if model.built and model.trainable_variables:
            with keras_names.scope_of(model):
                keras_optimizers.build_optimizers(model, specs)
        counters = [optimizer.iterations for optimizer in keras_optimizers.optimizers_of(model)]
        variables = [*keras_optimizers.training_variables(model), *counters]
        kept = [(v, v.numpy()) for v in variables]
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


def rejection(
    model: Any, specs: Any, error: BaseException, method: str = "fit"
) -> BaseException | None:
    """What a single process raises instead of what a worker did, where that can be told.

    Args:
        model, specs, method: as in `in_words_of_keras`.
        error: what a worker raised.

    Returns:
        An exception of the same type, or None where the parent cannot tell.
    """
    try:
        trace_step(model, specs, method)
    except Exception as found:
        return found if type(found) is type(error) else None
    return None
