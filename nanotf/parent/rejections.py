"""Raises Keras's own errors for data that do not suit the model.

Keras finds such errors when it traces its step. Tracing takes as long in the parent as in a worker,
so the parent traces only if the data look wrong, before workers start. Then the user gets the same
exception as in a single process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from nanotf.compat import (
    dataset_graphs,
    keras_build,
    keras_common,
    keras_compiling,
    keras_metrics,
    keras_optimizers,
)
from nanotf.compat.generation import generation
from nanotf.compat.generators import from_generator
from nanotf.compat.versions import require_tensorflow
from nanotf.console import logger
from nanotf.errors import ModelError
from nanotf.shipping.data import inputs

# Prefixes of the names of a model's functions, by the method that calls them.
STEPS = {"fit": "train", "evaluate": "test", "predict": "predict"}


def refuse_data(model: Any, specs: Any, method: str) -> None:
    """Raises what Keras's own step raises for data that look wrong for a model.

    Args:
        model: a model, compiled unless it is for "predict".
        specs: nested structure of `tf.TensorSpec` or None, of one batch.
        method: "fit", "evaluate" or "predict".
    """
    if _look_wrong(model, specs, method):
        trace_step(model, specs, method)


def _look_wrong(model: Any, specs: Any, method: str) -> bool:
    """Returns True if targets or a loss are missing, or inputs do not have the model's shapes.

    They may still be right: the model may have its own step.
    """
    tf = require_tensorflow()
    if isinstance(specs, tuple) and len(specs) > 3:
        return True  # Keras's steps take x, y and sample weights
    if keras_common.has_own_step(model, f"{STEPS[method]}_step"):
        return False  # its own step may not need them
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


def refuse_weights(model: Any, specs: Any, method: str) -> None:
    """Raises what Keras raises for sample weights whose shape does not fit its losses.

    Several weights per row are right if a loss has as many values per row. Only a step can tell.
    If Keras does not know the rows, the step's batch has a number of rows that no other dimension
    has, since a worker's part may have as many rows as weights per row.

    Args:
        model, specs, method: as in `refuse_data`. The model is built, and the specs have the rows
            that Keras knows.
    """
    tf = require_tensorflow()
    shapes = [spec.shape for spec in tf.nest.flatten(specs) if spec is not None]
    if not _weights_look_wrong(model, specs, method):
        return
    if all(shape.rank and shape[1:].is_fully_defined() for shape in shapes):
        rows = 1 + max(d for shape in shapes for d in [1, *shape[1:].as_list()])
        trace_step(model, specs, method, [(s[0] or rows, *s[1:]) for s in shapes])


def _weights_look_wrong(model: Any, specs: Any, method: str) -> bool:
    tf = require_tensorflow()
    if keras_common.has_own_step(model, f"{STEPS[method]}_step"):
        return False
    _, y, weights = tf.keras.utils.unpack_x_y_sample_weight(specs)
    outputs = tf.nest.flatten(getattr(model, "outputs", None) or ())
    # Keras's losses reduce the last axis: a weight is for what is left, or for a row.
    usual = [tf.TensorShape(one.shape)[1:-1] for one in outputs]
    if not usual:
        usual = [
            spec.shape[1:end]
            for spec in tf.nest.flatten(y)
            if spec is not None and spec.shape.rank
            for end in range(1, spec.shape.rank + 1)
        ]
    for spec in tf.nest.flatten(weights):
        if spec is None or not spec.shape.rank:
            continue
        own = spec.shape[1:]
        own = own[:-1] if own.rank and own[-1] == 1 else own  # Keras drops such an axis, too
        if own.rank and not any(own.is_compatible_with(shape) for shape in usual):
            return True
    return False


def _has_no_loss(model: Any) -> bool:
    return keras_compiling.compile_arguments(model).get("loss") is None


def trace_step(
    model: Any, specs: Any, method: str = "fit", shapes: Sequence[tuple[int, ...]] | None = None
) -> None:
    """Traces the step of a method; raises any error of the trace.

    Args:
        model, specs, method: as in `refuse_data`.
        shapes: those of a batch's arrays, flattened: the step also runs, on zeros of these shapes.
            None only traces it.
    """
    tf = require_tensorflow()
    name = f"{STEPS[method]}_function"
    step = getattr(model, f"make_{name}")() or getattr(model, name)  # Keras 3 returns None
    if method == "predict" and generation().PREDICTS_LISTS_OF_BATCHES:
        if shapes is not None:
            step([next(iter(_batches(specs, shapes)))])
        elif not model.run_eagerly:
            step.get_concrete_function([specs])
        return
    iterator = iter(_batches(specs, shapes))
    # Even without a batch, the step does its batch-independent work, such as counting steps and
    # applying the gradients of regularizers.
    kept = []
    if method == "fit":
        if model.built and generation().trainable_variables(model):
            with keras_compiling.scope_of(model):
                keras_optimizers.build_optimizers(model, specs)
        counters = [optimizer.iterations for optimizer in keras_optimizers.optimizers_of(model)]
        variables = counters
        if not keras_build.needs_call(model):
            variables = [*keras_optimizers.training_variables(model), *counters]
        kept = [(v, v.numpy()) for v in variables]
    if shapes is not None:  # a step that runs also counts metrics and draws random numbers
        changed = [*keras_metrics.metric_variables(model), *generation().seed_variables(model)]
        kept += [(v, v.numpy()) for v in changed]
    try:
        step(iterator)
    except (StopIteration, tf.errors.OutOfRangeError):
        return  # the step was traced, and found no batch
    finally:
        for variable, value in kept:
            variable.assign(value)


def _batches(specs: Any, shapes: Sequence[tuple[int, ...]] | None) -> Any:
    """Returns a dataset of one batch, or of none, as Keras would make it from arrays."""
    tf = require_tensorflow()
    given = tuple(spec for spec in tf.nest.flatten(specs) if spec is not None)

    def flat_batches() -> Iterator[Any]:
        if shapes is not None:
            yield tuple(
                tf.zeros(shape, spec.dtype) for shape, spec in zip(shapes, given, strict=True)
            )

    @tf.autograph.experimental.do_not_convert
    def batch(*flat: Any) -> Any:
        arrays = iter(flat)
        return inputs.without_lists(
            tf.nest.map_structure(lambda spec: None if spec is None else next(arrays), specs)
        )

    return from_generator(flat_batches, given).map(batch)


def warn_of_lengths(model: Any, specs: Any) -> None:
    """Warns of data for which XLA compiles the same step again and again."""
    shapes = [leaf.shape for leaf in require_tensorflow().nest.flatten(specs)]
    varying = [shape for shape in shapes if shape.rank and None in shape[1:].as_list()]
    if varying:
        logger.warning(
            "XLA compiles a step anew for each shape of its batches, and those of the model %r, "
            "compiled with jit_compile=True, have dimensions that vary: %s. Pad all to one "
            "length, for instance by a tokenizer's padding='max_length' or by padded_shapes of "
            "`padded_batch`.",
            model.name,
            varying[0],
        )


def refuse_optimizer(model: Any, specs: Any) -> None:
    """Rejects an optimizer whose slots do not match the trainable variables.

    Keras raises, or continues as if nothing had changed, depending on its earlier traces.
    """
    optimizer = model.optimizer
    own_step = not keras_common.is_keras_own(type(model).train_step)
    trained = generation().trainable_variables(model)
    if own_step or keras_optimizers.is_built_for(optimizer, trained):
        return
    trace_step(model, specs)
    raise ModelError(
        "An optimizer must have been built for the trainable variables. Received: "
        f"model {model.name!r} with {len(trained)} trainable variables, and "
        f"an optimizer {type(optimizer).__name__} of others. Call compile(), with a new "
        "optimizer, after a change of `trainable` or of the layers."
    )


def check_first_batch(dataset: Any) -> None:
    """Raises `UndividedError` if a dataset's first batch has unlike rows, before it is read.

    The batch is that of a copy, so that the dataset stays as it is. A dataset that runs Python, or
    keeps a state outside its graph, is not read.
    """
    tf = require_tensorflow()
    specs = tf.nest.flatten(dataset.element_spec)
    if not all(isinstance(spec, tf.TensorSpec) and spec.shape.rank for spec in specs):
        return
    rows = {spec.shape[0] for spec in specs}
    if len(specs) < 2 or (len(rows) == 1 and None not in rows):
        return
    copy = dataset_graphs.copy_without_effects(dataset)
    for batch in () if copy is None else copy.take(1):
        inputs.check_rows(tf.nest.flatten(batch))
