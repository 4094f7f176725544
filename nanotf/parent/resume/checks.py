"""Refuses arguments of `fit(resume=...)` with which a new process could not continue exactly."""

from __future__ import annotations

from typing import Any

from nanotf.compat import dataset_graphs as compat_pipelines
from nanotf.compat import graphs, keras_common, keras_compiling
from nanotf.compat.generation import generation
from nanotf.compat.versions import require_tensorflow
from nanotf.console import logger
from nanotf.errors import InvalidArgumentError
from nanotf.parent.fit_arguments import FitArguments
from nanotf.parent.reading.fit_data import FitData
from nanotf.shipping.data import inputs, pipelines

REMEDY = (
    "Use tf.random.stateless_* with a seed from a variable, or a tf.random.Generator of the model. "
    "With Keras 2, dropout has such a generator if the program calls "
    "tf.keras.backend.experimental.enable_tf_random_generator() before it makes the layer."
)


def check(model: Any, arguments: FitArguments, data: FitData) -> None:
    """Raises `InvalidArgumentError` for such arguments.

    Args:
        model: a compiled model.
        data: what `FitData` made of the arguments.
    """
    _check_callbacks(arguments.callbacks)
    _check_eager(model)
    _check_executions(model, data.steps)
    if found := unreadable(model, data):
        raise InvalidArgumentError(
            "With `resume`, random numbers must have a state that a checkpoint can hold. Received: "
            f"{found}, whose state TensorFlow keeps to itself. {REMEDY}"
        )
    if isinstance(data.train, inputs.ArrayInput):
        _check_steps(model, arguments.steps_per_epoch, data.train.steps)
    else:
        _check_read_again(arguments.x, arguments.steps_per_epoch)
    if data.read is not None and data.read.is_of_arrays and not data.order_seed.is_users:
        raise InvalidArgumentError(
            "With `resume`, a seed must decide how Keras shuffles batches. Received: "
            "shuffle='batch' and no seed. Call tf.keras.utils.set_random_seed(), or pass "
            "shuffle=True."
        )


def unreadable(model: Any, data: FitData) -> str | None:
    """Returns which operation of a model's steps has random numbers of unreadable state, or None.

    Traces the steps, which is the only way to know them.

    Args:
        model: a built and compiled model.
        data: those of a call of `fit`, with or without validation.
    """
    steps = {"train_step": data.specs, "test_step": data.validation_specs}
    for name, specs in steps.items():
        if specs is None:
            continue
        with keras_compiling.scope_of(model), keras_compiling.kept_random_states(model):
            graph = keras_compiling.trace_step(model, name, specs)
        for operation in graphs.drawing(graph.as_graph_def()):
            return f"{operation.op} in {type(model).__name__}.{name}, as {operation.name!r}"
    return None


def warn_of_other_numbers(model: Any, data: FitData) -> None:
    """Warns if new workers draw other random numbers than the old ones would have.

    Args:
        model, data: as in `unreadable`.
    """
    if model.run_eagerly:
        return  # nobody can tell
    if found := unreadable(model, data):
        logger.warning(
            "From here on random numbers differ from those of an undisturbed run: the model "
            "has %s, whose state TensorFlow keeps to itself. %s",
            found,
            REMEDY,
        )


def _check_eager(model: Any) -> None:
    if model.run_eagerly:
        raise InvalidArgumentError(
            "With `resume`, steps must be graphs: the random numbers of Python code that workers "
            "run are not in a checkpoint. Received: run_eagerly=True. Leave it out."
        )


def _check_executions(model: Any, steps: int | None) -> None:
    """Refuses executions that Keras 3 would run past the end of an epoch."""
    at_once = generation().steps_at_once(model)
    if at_once > 1 and (steps is None or steps % at_once):
        raise InvalidArgumentError(
            "With `resume`, steps_per_execution must divide the steps of an epoch. Received: "
            f"steps_per_execution={at_once}, and {steps or 'an unknown number of'} steps in an "
            "epoch. Call compile() with a divisor, or leave it out."
        )


def _check_callbacks(callbacks: Any) -> None:
    tf = require_tensorflow()
    listed = getattr(callbacks, "callbacks", callbacks)  # of a `CallbackList`
    for callback in tf.nest.flatten(listed):
        if isinstance(callback, tf.keras.callbacks.BackupAndRestore):
            raise InvalidArgumentError(
                "`resume` and BackupAndRestore both decide where training continues. Received: "
                f"{type(callback).__name__} among the callbacks. Leave it out."
            )


def _check_steps(model: Any, steps: int | None, size: int) -> None:
    """Refuses epochs that end in the middle of a pass that Keras 3 then gives up."""
    if steps is None or not generation().EACH_PASS_HAS_AN_ITERATOR:
        return
    if not 0 < steps <= size or size % steps or steps % generation().steps_at_once(model):
        raise InvalidArgumentError(
            "With `resume`, steps_per_epoch must divide the steps of a pass over the arrays. "
            f"Received: steps_per_epoch={steps}, and {size} steps in a pass. Leave it out, or pass "
            "a divisor."
        )


def _check_read_again(x: Any, steps: int | None) -> None:
    tf = require_tensorflow()
    if isinstance(x, tf.data.Dataset):
        if steps is not None and int(x.cardinality()) != tf.data.INFINITE_CARDINALITY:
            raise InvalidArgumentError(
                "With `resume`, a dataset must be endless to be used with steps_per_epoch. "
                f"Received: steps_per_epoch={steps}. Leave it out, or call repeat()."
            )
        reason = _unseeded(x)
        if reason is not None:
            raise InvalidArgumentError(
                "With `resume`, a dataset must yield the same batches in a new process. Received: "
                f"{reason}."
            )
        return
    if not hasattr(x, "__getitem__"):
        raise InvalidArgumentError(
            "With `resume`, data must be readable from their beginning again. Received: x of class "
            f"{type(x).__name__}, which can be read only once. Pass arrays, a tf.data.Dataset or a "
            "PyDataset."
        )
    if steps is not None:
        raise InvalidArgumentError(
            f"With `resume`, a {type(x).__name__} has an epoch of its own length. Received: "
            f"steps_per_epoch={steps}. Leave it out."
        )
    for hook in ("on_epoch_end", "on_epoch_begin"):
        method = getattr(type(x), hook, None)
        if method is not None and not keras_common.is_keras_own(method):
            raise InvalidArgumentError(
                "With `resume`, data must not change between epochs in ways that only this process "
                f"knows. Received: {type(x).__name__}.{hook}(). Pass a tf.data.Dataset, or let "
                "Keras shuffle the batches (shuffle=True)."
            )


def _unseeded(dataset: Any) -> str | None:
    """Returns why a dataset's batches would differ in another process, with the remedy, or None.

    None also if TensorFlow cannot write the dataset's graph, so that nobody can tell.
    """
    try:
        definition = compat_pipelines.definition_of(dataset)
    except require_tensorflow().errors.OpError:
        return None
    for node in graphs.drawing(definition):
        if node.attr["seed"].i or node.attr["seed2"].i:  # both 0: TensorFlow draws a seed
            continue
        return f"a {node.op} without a seed; give it one, or call set_random_seed()"
    return next(pipelines.differences(definition), None)
