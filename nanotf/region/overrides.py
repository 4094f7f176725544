"""`TABLE` lists all that a worker replaces in TensorFlow and Keras for the life of its process.

It makes Keras train on the rows of one worker as it would on the whole batch.

For the time of a call nanotf also replaces `tf.print` (`worker.output`), Keras 2's
`Lambda._serialize_function_to_config` (`Generation.functions_by_name`), `get_config` of
classes that a model is made of (`shipping.constructors`, `shipping.pickling`). In the user's process
`patch_tensorflow` replaces Keras's classes until `unpatch_tensorflow`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.compat import autograph, keras_names, overrides
from nanotf.compat.overrides import KERAS_2, KERAS_3, Override
from nanotf.errors import InvalidArgumentError, NanoError
from nanotf.region import datasets, gradients, losses, metrics, optimizers
from nanotf.region.share import Share, Worker


def install(share: Share, strategy: Any) -> None:
    """Replaces what `TABLE` names, in a worker's process. A second call replaces the first's.

    Args:
        share: `Share`.
        strategy: `strategy.WorkerStrategy`.
    """
    overrides.install(TABLE, Worker(share, strategy))


# -------------------------------------------------------------------------------- Keras's loops
_TRAIN = (
    "Write the step as a function under @nano_multiprocessing, or call "
    "nanotf.keras.Model.fit(num_processes=N) outside of @nano"
)
_CALL = (
    "Call the model, model(x, training=False), in a function under @nano_multiprocessing, or call "
    "{}() outside of @nano"
)
_LOOPS = {
    "fit": _TRAIN,
    "train_on_batch": _TRAIN,
    "evaluate": _CALL,
    "predict": _CALL,
    "test_on_batch": _CALL,
    "predict_on_batch": _CALL,
}


def _refuse_in_loop(stock: Any, worker: Worker) -> Any:
    """Makes one of Keras's own loops raise `NanoError` inside of `@nano` functions."""
    name = stock.__name__

    @functools.wraps(stock)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not worker.share.in_loop:
            return stock(self, *args, **kwargs)
        if "num_processes" in kwargs:  # which the models of workers, Keras's, do not know
            raise NanoError(
                "A worker cannot start workers of its own. Received: a call of "
                f"{name}(num_processes={kwargs['num_processes']!r}) inside of a @nano "
                "function. Call it outside."
            )
        raise NanoError(
            "Inside of a @nano function Keras's own loops do not run: they do not know "
            f"batches that workers share. Received: a call of {name}(). "
            f"{_LOOPS[name].format(name)}."
        )

    return method


def _refuse_clear_session(stock: Any, worker: Worker) -> Any:
    @functools.wraps(stock)
    def clear_session(*args: Any, **kwargs: Any) -> Any:
        if worker.share.in_loop:
            raise NanoError(
                "Inside of a @nano function Keras's state stays: the workers' strategy is part of "
                "it. Received: a call of clear_session(). Call it outside of @nano, or leave it "
                "out."
            )
        return stock(*args, **kwargs)

    return clear_session


def _keep_local(*reductions: str) -> Callable[[Any, Worker], Any]:
    """Makes what a step returns this worker's value, where Keras would make these reductions."""

    def replacement(stock: Any, worker: Worker) -> Any:
        def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
            if reduction not in reductions:
                return stock(values, strategy, reduction)
            return tf.nest.map_structure(
                lambda v: strategy.experimental_local_results(v)[0], values
            )

        return reduce_per_replica

    return replacement


# ---------------------------------------------------------------------- TensorFlow's variables
def _explaining_place(stock: Any, worker: Worker) -> Any:
    """Makes what works in a step alone say, in a `@nano` function, where it has to stand."""

    @functools.wraps(stock)
    def explained(self: Any) -> Any:
        try:
            return stock(self)
        except ValueError as error:  # it has no other
            if not worker.share.in_loop:
                raise
            raise InvalidArgumentError(
                "Inside of a @nano function gradients are computed and applied in steps that "
                "the workers share. Received: code outside of one, of which TensorFlow says: "
                f"{error} Put @nano_multiprocessing on the function that it stands in, or "
                "call that with get_strategy().run()."
            ) from error

    return explained


def _add_once(stock: Any, worker: Worker) -> Any:
    """Lets sums over workers, those of Keras 2's metrics, be added to outside of replicas.

    All workers add the same there, which counts once: the first one's.
    """

    @functools.wraps(stock)
    def add(self: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        outside = tf.distribute.in_cross_replica_context()
        if not outside or self.aggregation != tf.VariableAggregation.SUM:
            return stock(self, value, *args, **kwargs)
        local = tf.distribute.get_strategy().experimental_local_results(self)[0]
        part = value if worker.strategy.rank == 0 else tf.zeros_like(value)
        return getattr(local, stock.__name__)(part, *args, **kwargs)

    return add


def _with_known_values(stock: Any, worker: Worker) -> Any:
    """Lets one rank alone call what makes variables, which begin alike on every rank."""

    @functools.wraps(stock)
    def call(*args: Any) -> Any:
        with worker.strategy.values_known():
            return stock(*args)

    return call


def _read_through(stock: Any, worker: Worker) -> Any:
    """Makes iterators of datasets pass their elements through `Share.read`."""

    def _next_internal(self: Any) -> Any:
        element, read = stock(self), worker.share.read
        return element if read is None else read(element)

    return _next_internal


_LOSS_UTILS = "keras.src.utils.losses_utils"
_VARIABLE = "tensorflow.python.distribute.values:DistributedVariable"
_UNEQUAL_SHARES = "Keras divides a loss by the number of workers, whose rows need not be as many"
_SUMS_AFTERWARDS = "Keras sums gradients over workers, unweighed, and after clipping them"
_OF_NUMBER = "a distributed variable cannot be read as a number, as a plain one can"

TABLE: tuple[Override, ...] = (
    # Losses.
    Override("keras.src.losses.loss:scale_loss_for_distribution", _UNEQUAL_SHARES, losses.scale_loss, KERAS_3),
    Override("keras.src.losses.loss:unscale_loss_for_distribution", _UNEQUAL_SHARES, losses.scale_loss, KERAS_3),
    Override(f"{_LOSS_UTILS}:scale_loss_for_distribution", _UNEQUAL_SHARES, losses.scale_loss, KERAS_2),
    Override("tensorflow:nn.compute_average_loss", _UNEQUAL_SHARES, losses.average_loss),
    Override("tensorflow:nn.scale_regularization_loss", _UNEQUAL_SHARES, losses.scale_regularization),
    Override("keras.src.losses.loss:apply_mask", "masked means count the entries of all workers", losses.apply_mask_in_3, KERAS_3),
    Override(f"{_LOSS_UTILS}:apply_valid_mask", "masked means count the entries of all workers", losses.apply_mask_in_2, KERAS_2),
    Override("keras.src.losses.loss:reduce_values", "a sum over rows becomes a mean", losses.reduce_in_3, KERAS_3),
    Override(f"{_LOSS_UTILS}:reduce_weighted_loss", "a sum over rows becomes a mean", losses.reduce_in_2, KERAS_2),
    Override("keras.src.losses.losses:LossFunctionWrapper.call", "a scalar loss needs the rows of all workers", losses.call_function, KERAS_3),
    Override("keras.src.losses:LossFunctionWrapper.call", "a scalar loss needs the rows of all workers", losses.call_function, KERAS_2),
    Override("keras.src.trainers.compile_utils:CompileLoss.__call__", "tells the losses of `compile` from those that the user's code calls", losses.compute_losses_of_compile, KERAS_3),
    Override("keras.src.engine.compile_utils:LossesContainer.__call__", "tells the losses of `compile` from those that the user's code calls", losses.compute_losses_of_compile, KERAS_2),
    Override("keras.src.engine.compile_utils:LossesContainer._nanotf_called", "see `Generation.unused_losses`", lambda stock, worker: False, KERAS_2, adds=True),
    Override("tensorflow:keras.losses.Loss._get_reduction", "under a strategy Keras 2 refuses a mean in the user's own step, for which there is a share", lambda stock, worker: _explaining_place(losses.get_reduction(stock, worker), worker), KERAS_2),
    Override("tensorflow:keras.layers.Layer.activity_regularizer", "Keras divides it by the batch from 3.14 on", losses.activity_regularizer, ((3,), (3, 14)), adds=True),
    Override("keras.src.backend.tensorflow.nn:_compute_moments_sync", "a row that stands in for none does not count", losses.compute_moments_sync, KERAS_3),
    Override("keras.src.layers.normalization.batch_normalization:BatchNormalizationBase._sync_calculate_mean_and_var", "a row that stands in for none does not count", losses.compute_moments_sync_in_2, KERAS_2),
    # Metrics.
    Override("tensorflow:keras.metrics.Mean.update_state", "a scalar counts as much as the share", metrics.update_mean),
    Override("keras.src.utils.metrics_utils:update_state_wrapper", "layers that update a metric are rebuilt outside of any replica", metrics.leave_alone_while_building, KERAS_2),
    Override("keras.src.distribute.distributed_training_utils:call_replica_local_fn", "a metric called outside of steps is updated there, once", metrics.call_here, KERAS_2),
    # Gradients and optimizers.
    Override("tensorflow:GradientTape.gradient", "gradients in the user's steps are those of the global batch", gradients.follow_share),
    Override("tensorflow:keras.optimizers.Optimizer._all_reduce_sum_gradients", _SUMS_AFTERWARDS, optimizers.stay_summed, KERAS_3),
    *(
        Override(f"tensorflow:keras.optimizers.{name}.apply", _SUMS_AFTERWARDS, optimizers.follow_share_in_3, KERAS_3)
        for name in ("Optimizer", "LossScaleOptimizer")
    ),
    *(
        Override(f"{name}.apply_gradients", "Keras sums gradients over workers unweighed", optimizers.follow_share_in_2, KERAS_2)
        for name in (
            "tensorflow:keras.optimizers.Optimizer",
            "tensorflow:keras.optimizers.legacy.Optimizer",
            "keras.src.mixed_precision.loss_scale_optimizer:LossScaleOptimizer",
            "keras.src.mixed_precision.loss_scale_optimizer:LossScaleOptimizerV3",
        )
    ),
    # Models.
    Override("keras.src.backend.tensorflow.trainer:reduce_per_replica", "reduces scalars over axis 0 (keras-team/keras#20585), and sends all outputs of `predict` to all workers", _keep_local("concat", "auto", "mean", "first"), KERAS_3),
    Override("keras.src.engine.training:reduce_per_replica", "sends all outputs of `predict` to all workers", _keep_local("concat"), KERAS_2),
    Override("keras.src.layers.core.embedding:Embedding.call", "see `keras_names.look_up`", lambda stock, worker: keras_names.look_up(stock), KERAS_3),
    Override("keras.src.layers.core.embedding:Embedding.add_loss", "see `keras_names.of_variable_dtype`", lambda stock, worker: keras_names.of_variable_dtype(stock), KERAS_3),
    *(
        Override(f"tensorflow:keras.Model.{name}", "Keras's loops would share out batches that workers share already", _refuse_in_loop)
        for name in _LOOPS
    ),
    Override("keras.src.backend.common.global_state:clear_session", "clears TensorFlow's stack of scopes, on which the strategy is", _refuse_clear_session, KERAS_3),
    Override("keras.src.backend:clear_session", "clears TensorFlow's stack of scopes, on which the strategy is", _refuse_clear_session, KERAS_2),
    Override("keras.src.saving.saving_lib:get_attr_skipset", "makes variables, which are broadcast, and one rank may save alone", _with_known_values, KERAS_3),
    # TensorFlow.
    Override("tensorflow:train.Checkpoint._maybe_create_save_counter", "makes a variable, which is broadcast, and one rank may save alone", _with_known_values),
    Override("tensorflow.python.data.ops.iterator_ops:OwnedIterator._next_internal", "a step weighs the batches that it reads", _read_through),
    Override("tensorflow:data.Dataset.sample_from_datasets", "all workers pick the same", datasets.sample_alike),
    Override(f"{_VARIABLE}.__float__", _OF_NUMBER, lambda stock, worker: lambda self: float(self.numpy()), adds=True),
    Override(f"{_VARIABLE}.__int__", _OF_NUMBER, lambda stock, worker: lambda self: int(self.numpy()), adds=True),
    Override(f"{_VARIABLE}.__complex__", _OF_NUMBER, lambda stock, worker: lambda self: complex(self.numpy()), adds=True),
    Override(f"{_VARIABLE}.__array__", _OF_NUMBER, lambda stock, worker: lambda self, dtype=None, copy=None: np.asarray(self.numpy(), dtype), adds=True),
    Override(f"{_VARIABLE}.handle", "its error does not say what to do in a `@nano` function", lambda stock, worker: property(_explaining_place(stock.fget, worker))),
    *(
        Override(f"tensorflow.python.distribute.values:SyncOnReadVariable.{name}", "Keras 2 adds to metrics outside of steps", _add_once)
        for name in ("assign_add", "assign_sub")
    ),
    Override("tensorflow.python.autograph.core.config:CONVERSION_RULES", "see `autograph.leave_tf_keras_alone`", lambda stock, worker: autograph.leave_tf_keras_alone(stock), KERAS_2),
    Override("tensorflow.python.autograph.pyct.loader:load_source", "see `autograph.keep_no_files`", lambda stock, worker: autograph.keep_no_files(stock)),
)  # fmt: skip
