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

from nanotf.collectives import lazy
from nanotf.compat import autograph, keras_names, overrides
from nanotf.compat.overrides import KERAS_2, KERAS_3, Override
from nanotf.region import (
    calls,
    draws,
    gradients,
    keras_rules,
    losses,
    metrics,
    normalization,
    once,
    optimizers,
    tapes,
)
from nanotf.region.share import Share, Worker


def install(share: Share, strategy: Any) -> None:
    """Replaces what `TABLE` names, in a worker's process. A second call replaces the first's.

    Args:
        share: `Share`.
        strategy: `strategy.WorkerStrategy`.
    """
    overrides.install(TABLE, Worker(share, strategy))


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
def _with_known_values(stock: Any, worker: Worker) -> Any:
    """Lets one rank alone call what makes variables, which begin alike on every rank."""

    @functools.wraps(stock)
    def call(*args: Any) -> Any:
        with worker.strategy.values_known():
            return stock(*args)

    return call


_LOSS_UTILS = "keras.src.utils.losses_utils"
_VARIABLE = "tensorflow.python.distribute.values:DistributedVariable"
_UNEQUAL_SHARES = "Keras divides a loss by the number of workers, whose rows need not be as many"
_SUMS_AFTERWARDS = "Keras sums gradients over workers, unweighed, and after clipping them"
_OF_BATCH = "statistics are those of the whole batch"
_ONE_NUMBER = "of a function of rows one number a row is gathered"
_UNDER_THE_STRATEGY = "what `strategy.run` trains is made in its scope"
_ONCE = "all workers run the program, and one of them writes its files"
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
    Override("tensorflow:keras.losses.Loss._get_reduction", "under a strategy Keras 2 refuses a mean in the user's own step, for which there is a share", losses.get_reduction, KERAS_2),
    Override("tensorflow:keras.layers.Layer.activity_regularizer", "Keras divides it by the batch from 3.14 on", losses.activity_regularizer, ((3,), (3, 14)), adds=True),
    Override("keras.src.backend.tensorflow.nn:_compute_moments_sync", "a row that stands in for none does not count", losses.compute_moments_sync, KERAS_3),
    Override("keras.src.layers.normalization.batch_normalization:BatchNormalizationBase._sync_calculate_mean_and_var", "a row that stands in for none does not count", losses.compute_moments_sync_in_2, KERAS_2),
    # Metrics.
    Override("tensorflow:keras.metrics.Mean.update_state", "a scalar counts as much as the share", metrics.update_mean),
    Override("keras.src.utils.metrics_utils:update_state_wrapper", "layers that update a metric are rebuilt outside of any replica", metrics.leave_alone_while_building, KERAS_2),
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
    Override("keras.src.saving.saving_lib:get_attr_skipset", "makes variables, which are broadcast, and one rank may save alone", _with_known_values, KERAS_3),
    # TensorFlow.
    Override("tensorflow:train.Checkpoint._maybe_create_save_counter", "makes a variable, which is broadcast, and one rank may save alone", _with_known_values),
    Override(f"{_VARIABLE}.__float__", _OF_NUMBER, lambda stock, worker: lambda self: float(self.numpy()), adds=True),
    Override(f"{_VARIABLE}.__int__", _OF_NUMBER, lambda stock, worker: lambda self: int(self.numpy()), adds=True),
    Override(f"{_VARIABLE}.__complex__", _OF_NUMBER, lambda stock, worker: lambda self: complex(self.numpy()), adds=True),
    Override(f"{_VARIABLE}.__array__", _OF_NUMBER, lambda stock, worker: lambda self, dtype=None, copy=None: np.asarray(self.numpy(), dtype), adds=True),
    Override("tensorflow.python.autograph.core.config:CONVERSION_RULES", "see `autograph.leave_tf_keras_alone`", lambda stock, worker: autograph.leave_tf_keras_alone(stock), KERAS_2),
    Override("tensorflow.python.autograph.pyct.loader:load_source", "see `autograph.keep_no_files`", lambda stock, worker: autograph.keep_no_files(stock)),
    # Regions: what is divided, and what its code reads, draws and returns.
    Override("tensorflow:keras.layers.Layer.__call__", "the outermost call is divided", calls.calling_layers),
    Override("tensorflow.python.eager.polymorphic_function.polymorphic_function:Function.__call__", "a graph traced elsewhere knows nothing of the region", calls.calling_functions),
    Override("tensorflow.python.data.ops.structured_function:StructuredFunctionWrapper.__init__", "each worker runs its pipelines alone", calls.tracing_pipelines),
    Override("tensorflow.python.autograph.operators.control_flow:for_stmt", "AutoGraph makes a loop over a dataset a pipeline, which a worker runs alone", calls.looping),
    *(
        Override(f"tensorflow:keras.Model.{name}", "a worker has no workers; a model under the strategy would have its batches divided twice", calls.refusing)
        for name in ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
    ),
    Override("tensorflow.python.framework.func_graph:FuncGraph._create_op_internal", "a tensor that reaches a region behind its call has a gradient, too", calls.making_operations),
    *(
        Override(f"tensorflow.python.ops.custom_gradient:{name}", "a gradient function may run a region's code again", calls.recomputing)
        for name in ("_graph_mode_decorator", "_eager_mode_decorator")
    ),
    *(
        Override(target, "random numbers are those of the whole batch", draws.drawing)
        for kind in ("normal", "uniform", "truncated_normal")
        for target in (
            f"tensorflow:random.{kind}",
            f"tensorflow:random.stateless_{kind}",
            f"tensorflow.python.ops.random_ops:{kind if kind[0] == 't' else 'random_' + kind}",
            f"tensorflow.python.ops.stateless_random_ops:stateless_{kind if kind[0] == 't' else 'random_' + kind}",
        )
    ),
    Override("tensorflow:GradientTape.gradient", "a joined tensor's gradient is that of its rows, joined", tapes.differentiating),
    Override("tensorflow:GradientTape.watch", "who watches a joined tensor watches its rows", tapes.watching),
    *(
        Override(f"tensorflow:GradientTape.{name}", "exchanges cannot be vectorized", tapes.without_vectorizing)
        for name in ("jacobian", "batch_jacobian")
    ),
    Override("tensorflow:nn.moments", _OF_BATCH, normalization.moments),
    Override("tensorflow:nn.weighted_moments", _OF_BATCH, normalization.weighted_moments),
    Override("tensorflow:compat.v1.nn.fused_batch_norm", _OF_BATCH, normalization.fused_batch_norm, KERAS_2),
    Override("keras.src.layers.normalization.batch_normalization:BatchNormalization._moments", _OF_BATCH, normalization.masked_moments, KERAS_3),
    Override("keras.src.losses.losses:LossFunctionWrapper.call", _ONE_NUMBER, keras_rules.calling, KERAS_3),
    Override("keras.src.losses:LossFunctionWrapper.call", _ONE_NUMBER, keras_rules.calling, KERAS_2),
    Override("keras.src.metrics.reduction_metrics:MeanMetricWrapper.update_state", _ONE_NUMBER, keras_rules.updating, KERAS_3),
    Override("keras.src.metrics.base_metric:MeanMetricWrapper.update_state", _ONE_NUMBER, keras_rules.updating, KERAS_2),
    *(
        Override(f"tensorflow:keras.optimizers.{name}.apply", _UNDER_THE_STRATEGY, calls.applying, KERAS_3)
        for name in ("Optimizer", "LossScaleOptimizer")
    ),
    *(
        Override(f"tensorflow:keras.optimizers.{name}.apply_gradients", _UNDER_THE_STRATEGY, calls.applying_pairs, KERAS_2)
        for name in ("Optimizer", "legacy.Optimizer")
    ),
    # Files.
    Override("tensorflow:train.Checkpoint._write", _ONCE, once.writing("file_prefix")),
    Override("tensorflow:saved_model.save", _ONCE, once.writing("export_dir")),
    *(
        Override(f"tensorflow:keras.{name}", _ONCE, once.writing("filepath"))
        for name in ("Model.save", "Model.save_weights", "Model.export", "models.save_model")
    ),
    *(
        Override(f"tensorflow.python.checkpoint.checkpoint_management:{name}", _ONCE, once.leaving_files_alone)
        for name in ("update_checkpoint_state_internal", "_delete_file_if_exists")
    ),
    Override("tensorflow:summary.create_file_writer", _ONCE, once.making_writers),
    # Exchanges that are made if they are read.
    Override("tensorflow.python.framework.auto_control_deps:AutomaticControlDependencies.__exit__", "what nobody reads is not gathered", lazy.completing),
    Override("tensorflow.python.framework.auto_control_deps:op_is_stateful", "what is gathered has its place among other exchanges", lazy.ordering),
)  # fmt: skip
