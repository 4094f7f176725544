"""Functional and Sequential models of Keras in microbatches and partitions, with `fit`.

Keras's own loops call `KerasModel.train_step` and `test_step`. All ranks run the same loop on the
same batches:

train_step   1. a step of smp: gradients, and predictions of the whole batch, from microbatches
             2. the optimizer updates the variables of this process
             3. Keras's `test_step` computes losses and metrics from the predictions
test_step    1. a step of smp without gradients
             2. as 3

So a step ends as one process's does: with the same logs on all ranks, and the same weights.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.compat import eager_context, keras_optimizers
from nanotf.compat.generation import generation
from nanotf.compat.keras_common import tf_variable
from nanotf.compat.step_errors import python_operation
from nanotf.errors import JobError, ModelError, UnavailableError
from nanotf.sagemaker.smp import (
    communication,
    exchange,
    keras_checks,
    partitioned,
    replicas,
    runtime,
)
from nanotf.sagemaker.smp.bodies import BodyCall
from nanotf.sagemaker.smp.shares import Shares
from nanotf.sagemaker.smp.step_model import SAVE_PATH, StepModel, file_call, rows_spec
from nanotf.sagemaker.smp.step_output import StepOutput
from nanotf.sagemaker.smp.steps import PartitionedStep

_ROUNDINGS = 16  # of numbers whose sum may be much smaller than each
_ROWS = 32  # of the batch with which a model is cut; Keras's default
# Keras's loop runs in this context.
_in_loop: contextvars.ContextVar[bool] = contextvars.ContextVar("nanotf_smp_loop", default=False)
# The model's results that Keras's `test_step` gets when it calls the model: a tuple of one.
_results: contextvars.ContextVar[Any] = contextvars.ContextVar("nanotf_smp_results", default=None)


class KerasModel(StepModel):
    """A Keras model in microbatches and partitions; `DistributedModel.from_keras` makes it.

    Args:
        model: a functional or Sequential model that passes `keras_checks.check`.
    """

    def __init__(self, model: Any) -> None:
        # Like functional models, it leaves casts to layers.
        super().__init__(name=model.name, autocast=False)
        self.original = model
        if hasattr(model, "output_names"):  # of Keras 3's classes, Functional alone
            self.output_names = list(model.output_names)  # for losses by name
        self._nanotf_spec = _specs(model, "input")
        self._make_steps()
        if runtime.mp_size() > 1:
            self._cut()

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Calls the model."""
        return self.original(inputs, training=training)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = _results.get()
        if found is not None:
            return found[0]
        if runtime.calling.get() is not None:
            return super().__call__(*args, **kwargs)
        if _in_loop.get() and not tf.executing_eagerly():
            # Keras wants to know shapes. What it traces here never runs.
            return tf.keras.Model.__call__(self, *args, **kwargs)
        raise JobError(
            "A model of smp.DistributedModel.from_keras is called by fit, evaluate and predict, "
            f"and in functions decorated by smp.step. Received: a call of {self.name!r} elsewhere."
            " Use predict(x), or predict_on_batch(x)."
        )

    def _cut(self) -> None:
        """Cuts the model before an optimizer makes slots for its variables."""

        def cut(inputs: Any) -> None:
            whole = super(StepModel, self).__call__  # Keras's own, which does not ask for a step
            call = BodyCall(self, whole, (inputs,), {"training": True})
            partitioned.begun(self).cut(call)

        # `auto_partition` runs the layers, for which it needs to know their shapes.
        rows = tf.nest.map_structure(_some_rows, self._nanotf_spec)
        with runtime.allowed():
            tf.function(cut, autograph=False).get_concrete_function(rows)
        runtime.called.setdefault(self)
        replicas.equalize([self])

    # ------------------------------------------------------------------------------- steps
    def train_step(self, data: Any) -> Any:
        """Trains on a batch; returns the logs."""
        x, y, sample_weight = tf.keras.utils.unpack_x_y_sample_weight(data)
        self._build_losses(y, sample_weight)
        # Losses of microbatches may count in metrics here; `test_step` counts the batch once.
        with self._keeping_metrics():
            parts = self._get_gradients(x, y, sample_weight)
            gradients, loss, results = parts
            y_pred = _whole(results, x)
            _check_mean(
                loss,
                self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight),
                _largest(y, y_pred),
            )
        averaged = [None if part is None else part.accumulate() for part in gradients]
        if runtime.mp_size() > 1:
            _check_gradients(averaged)
        with tf.init_scope():  # before the update, which has the variables in another order
            keras_optimizers.build_optimizer(self)
        pairs = [*zip(averaged, self.trainable_variables, strict=True)]
        # The last layers' gradients come first, and each can be freed after its update.
        with keras_optimizers.updating_in_order(self.optimizer):
            self.optimizer.apply_gradients(reversed(pairs))
        if runtime.mp_size() > 1:
            _check_state(self.optimizer, bool(pairs))
        with runtime.setting(_results, (y_pred,)):
            return super().test_step(data)

    def test_step(self, data: Any) -> Any:
        """Evaluates a batch; returns the logs."""
        with runtime.setting(_results, (self._predicted(data),)):
            return super().test_step(data)

    def predict_step(self, data: Any) -> Any:
        """Returns the results for a batch."""
        return self._predicted(data)

    def _predicted(self, data: Any) -> Any:
        x, _, _ = tf.keras.utils.unpack_x_y_sample_weight(data)
        return _whole(self._get_results(x), x)

    def _train_microbatch(self, x: Any, y: Any, sample_weight: Any, share: Any) -> Any:
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight)
            loss *= tf.cast(share, loss.dtype)
            scaled = keras_optimizers.scaled(self.optimizer, loss)
        # A tape knows these, and not Keras 3's variables.
        weights = [tf_variable(weight) for weight in self.trainable_variables]
        return tape.gradient(scaled, weights), loss, y_pred

    def _predict_microbatch(self, x: Any, share: Any) -> Any:
        del share  # of a mean
        return self(x, training=False)

    def _build_losses(self, y: Any, sample_weight: Any) -> None:
        """Makes the metrics of losses, which some versions of Keras make in their first use."""
        results = _specs(self.original, "output")
        batch = tf.nest.map_structure(rows_spec, (y, results, sample_weight))

        def compute(y: Any, y_pred: Any, sample_weight: Any) -> Any:
            return self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)

        with tf.init_scope():
            tf.function(compute, autograph=False).get_concrete_function(*batch)

    @contextlib.contextmanager
    def _keeping_metrics(self) -> Iterator[None]:
        """Takes back what happens to metrics in this context, such as to those of losses."""
        variables = [tf_variable(v) for metric in self.metrics for v in metric.variables]
        before = [variable.read_value() for variable in variables]
        yield
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)

    def _make_steps(self) -> None:
        arguments, plain = ("x", "y", "sample_weight"), {"autograph": False}
        self._get_gradients = PartitionedStep(self._train_microbatch, Shares(*arguments), plain)
        self._get_results = PartitionedStep(self._predict_microbatch, Shares("x"), plain)

    # ------------------------------------------------------------------------------- loops
    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles as `tf.keras.Model.compile`, without `jit_compile` and `steps_per_execution`."""
        given = keras_checks.compile_arguments(args, kwargs)
        # Keras 3 may choose XLA by itself, which cannot compile functions of Python.
        given["jit_compile"] = False
        super().compile(**given)
        self._make_steps()  # those made before have the losses of the compile call before
        keras_checks.check_optimizer(self.optimizer, runtime.mp_size())

    def fit(self, *args: Any, num_processes: int | None = None, **kwargs: Any) -> Any:
        """Trains as `tf.keras.Model.fit`. All ranks call it with the same data.

        Args:
            *args, **kwargs: as for `tf.keras.Model.fit`. Only rank 0 shows progress.
            num_processes: int or None, the number of ranks that run.

        Returns:
            The `History`, equal on all ranks.

        Raises:
            JobError: Another number of ranks runs.
        """
        if num_processes not in (None, runtime.size()):
            raise JobError(
                "The command that starts a script of nanotf.smp says how many processes run it. "
                f"Received: num_processes={num_processes!r} with {runtime.size()} running. Start "
                f"the script with\n    {runtime.command(num_processes)}"
            )
        with self._same_seed():
            return self._loop("fit", args, kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates as `tf.keras.Model.evaluate`. All ranks call it with the same data."""
        return self._loop("evaluate", args, kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predicts as `tf.keras.Model.predict`. All ranks call it with the same data."""
        return self._loop("predict", args, kwargs)

    def _loop(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = keras_checks.named(method, args, kwargs)
        if runtime.rank() > 0:
            given["verbose"] = 0
        with runtime.setting(_in_loop, True):
            return getattr(super(), method)(**given)

    @contextlib.contextmanager
    def _same_seed(self) -> Iterator[None]:
        """Makes all ranks shuffle alike, in this context. A seed that the script has set stays."""
        with contextlib.ExitStack() as stack:
            if runtime.size() > 1:
                unset = eager_context.seeds() is None
                drawn = int.from_bytes(os.urandom(4), "little")
                seeds = communication.allgather((unset, drawn))
                if all(each for each, _ in seeds):
                    stack.enter_context(eager_context.seeded_for_now(seeds[0][1]))
            yield

    # ------------------------------------------------------------------------------- files
    def load_weights(self, *args: Any, **kwargs: Any) -> None:
        """Loads weights of the original's `save_weights`, with one partition."""
        self._check_whole("load_weights()", "load them into the model that from_keras takes")
        self.original.load_weights(*args, **kwargs)

    def save_model(self, save_path: str | os.PathLike[str] = SAVE_PATH) -> None:
        """Saves as `DistributedModel.save_model`. Plain Keras loads the files, too."""
        self._write(*file_call(save_path))

    def _write(self, method: str, args: Any, kwargs: Any) -> None:
        """Writes the original, whole; with one partition, too, rank 0 alone.

        No rank has the whole optimizer, and an earlier `compile` of the original's is not this one.
        """
        with self._saving() as writes:
            if writes:
                with generation().uncompiled(self.original):
                    getattr(self.original, method)(*args, **kwargs)


def _specs(model: Any, end: str) -> Any:
    """Returns the `tf.TensorSpec`s of a model's inputs or outputs, for any number of rows.

    Args:
        end: "input" or "output".
    """
    is_list = isinstance(model, tf.keras.Sequential)
    symbols = getattr(model, f"{end}s")[0] if is_list else getattr(model, end)
    return tf.nest.map_structure(rows_spec, symbols)


def _some_rows(spec: Any) -> Any:
    return tf.TensorSpec([_ROWS, *spec.shape[1:]], spec.dtype) if spec.shape.rank else spec


def _whole(results: Any, x: Any) -> Any:
    """Returns the results of a batch from those of microbatches, of all copies of the model."""
    rows = tf.shape(tf.nest.flatten(x)[0])[0]

    def joined(output: Any) -> Any:
        merged = output.merge()
        if runtime.has_replicas():
            like = tf.TensorSpec([None, *merged.shape[1:]], merged.dtype)
            (merged,) = python_operation(_of_all_copies, [merged], [like])
        return merged[:rows]  # a batch of few rows has some of them twice

    return tf.nest.map_structure(joined, results)


def _of_all_copies(rows: Any) -> Any:
    # By rank, which is by copy: in the order in which `Shares` has divided the batch.
    return np.concatenate([parts[0] for parts in replicas.gather_over_replicas([rows])])


_traces = itertools.count()  # all partitions trace the same steps in the same order


def _check_gradients(gradients: Sequence[Any]) -> None:
    """Raises `ModelError` if the loss depends on no trainable variable of any partition.

    Called while tracing. An optimizer knows its own partition alone, which may have no gradients.
    """
    has_some = any(gradient is not None for gradient in gradients)
    own = len(gradients[:1]) + has_some  # 0 without trainable variables, of which Keras warns
    if max(exchange.known_everywhere(f"smp: gradients {next(_traces)}", own)) == 1:
        raise ModelError(
            "A loss must depend on a trainable variable. Received: a loss that gives no gradients "
            "for any variable. Make a layer trainable, or leave tf.stop_gradient out."
        )


def _check_state(optimizer: Any, trains: bool) -> None:
    """Makes an operation that fails in the first steps if partitions have unlike optimizers.

    One process has one step count, or what else is a number and no slot, for all variables.

    Args:
        trains: whether this partition has trainable variables.
    """
    beside = keras_optimizers.variables_beside_slots(optimizer) if trains else []
    numbers = [
        v for v in beside if v.shape.rank == 0 and (v.dtype.is_floating or v.dtype.is_integer)
    ]

    def compare(*values: Any) -> None:
        found = exchange.gather_now("smp: optimizer", np.array(values))
        parts = [part for part in found if part.size]
        each = zip(numbers, *parts, strict=False)  # without trainable variables, there are none
        unlike = [v.name for v, *of in each if len(set(map(str, of))) > 1]  # NaN is equal to NaN
        if unlike:
            raise UnavailableError(
                "What an optimizer keeps must be one slot per variable, or the same in all "
                f"partitions, each of which updates its own variables. Received: {unlike} of "
                f"{type(optimizer).__name__}, which differ. Pass the same callbacks in all ranks, "
                "or use another optimizer, or partitions=1."
            )

    exchange.check(compare, [tf.cast(v.read_value(), tf.float64) for v in numbers])


def _largest(*values: Any) -> Any:
    """Returns the largest number among floating tensors, without its sign; 0 if there are none."""
    found = [tf.zeros([], tf.float64)]
    for value in tf.nest.flatten(values):
        if isinstance(value, tf.Tensor) and value.dtype.is_floating:
            of_value = tf.reduce_max(tf.abs(value), keepdims=False)
            found.append(tf.cast(of_value, tf.float64))
    return tf.reduce_max(tf.stack(found))


def _check_mean(loss: StepOutput, of_batch: Any, of_rows: Any) -> None:
    """Makes an operation that fails for a loss that is no mean over rows.

    Only some batches may show it, such as those with targets that the loss ignores.

    Args:
        loss: of microbatches, each scaled by its share of the batch.
        of_rows: a magnitude of what the loss adds up.
    """
    # Some losses, such as CTC, are computed with 32 bits whatever the dtype is.
    exact = max(exchange.precision(of_batch.dtype), exchange.precision(tf.float32))
    largest = 0.0  # of all steps so far

    def compare(mean: Any, whole: Any, rows: Any, *parts: Any) -> Any:
        nonlocal largest
        if not np.all(np.isfinite([mean, whole, rows])):  # it diverges; callbacks may end it
            return np.int64(0)
        # A mean of means rounds otherwise, and more so where positive and negative numbers cancel.
        scale = np.max(np.abs([mean, whole, *parts]))
        largest = max(largest, scale) if np.isfinite(scale) else largest
        tolerance = exact**0.5 * scale + exact * (largest + _ROUNDINGS * rows)
        if abs(mean - whole) > tolerance:
            raise ModelError(
                "A loss must be a mean over rows, so that microbatches give the batch's "
                f"gradients. Received: a loss of {whole} for a batch, and a mean over its "
                f'microbatches of {mean}. Use the reduction "sum_over_batch_size".'
            )
        return np.int64(0)

    numbers = (loss.accumulate(), of_batch, of_rows, *loss.outputs)
    losses = [tf.cast(v, tf.float64) for v in numbers]
    python_operation(compare, losses, [tf.TensorSpec([], tf.int64)], "check_mean")
