"""The `TABLE` of everything that a worker replaces in TensorFlow and Keras for its process's life.

Calls of layers are divided. The code around them runs as in one process.

During a call nanotf also replaces `tf.print` (`worker.output`). In the user's process
`patch_tensorflow` replaces Keras's classes until `unpatch_tensorflow`.
"""

from __future__ import annotations

import functools
from typing import Any

from nanotf.collectives import lazy
from nanotf.compat import autograph, keras_layers, one_replica, replacements
from nanotf.compat.replacements import KERAS_2, KERAS_3, Override
from nanotf.region import call_changes, draws, keras_rules, normalization, once, tapes


def install(strategy: Any) -> None:
    """Applies `TABLE` in a worker's process. A second call replaces the first one's overrides.

    Args:
        strategy: the `strategy.WorkerStrategy` of this worker.
    """
    replacements.install(TABLE, strategy)


def find() -> None:
    """Finds what `TABLE` replaces, in the process from which workers are forked."""
    replacements.find(TABLE)


# ---------------------------------------------------------------------- TensorFlow's variables
def _with_known_values(stock: Any, strategy: Any) -> Any:
    """Lets a single rank make variables that start with the same values on every rank."""

    @functools.wraps(stock)
    def call(*args: Any) -> Any:
        with strategy.values_known():
            return stock(*args)

    return call


_OF_BATCH = "statistics are those of the whole batch"
_ONE_NUMBER = "a function of rows gathers one number per row"
_LOGITS = "a loss looks for the logits behind a model's output"
_UNDER_THE_STRATEGY = "`strategy.run` only trains variables made in its scope"
_ONCE = "all workers run the program, but only one writes its files"

TABLE: tuple[Override, ...] = (
    # Models.
    Override("keras.src.layers.core.embedding:Embedding.call", "see `keras_layers.look_up`", lambda stock, strategy: keras_layers.look_up(stock), KERAS_3),
    Override("keras.src.layers.core.embedding:Embedding.add_loss", "see `keras_layers.of_variable_dtype`", lambda stock, strategy: keras_layers.of_variable_dtype(stock), KERAS_3),
    Override("keras.src.saving.saving_lib:get_attr_skipset", "makes variables, which would be broadcast, while one rank may save alone", _with_known_values, KERAS_3),
    # TensorFlow.
    Override("tensorflow:train.Checkpoint._maybe_create_save_counter", "makes a variable, which would be broadcast, while one rank may save alone", _with_known_values),
    Override("tensorflow.python.autograph.core.config:CONVERSION_RULES", "see `autograph.leave_alone`", lambda stock, strategy: autograph.leave_alone(stock), KERAS_2),
    Override("tensorflow.python.autograph.pyct.loader:load_source", "see `autograph.keep_no_files`", lambda stock, strategy: autograph.keep_no_files(stock)),
    *(
        Override(f"tensorflow:distribute.{name}.__new__", "the workers divide the work; a strategy of the program's own has one replica", one_replica.making)
        for name in one_replica.STRATEGIES
    ),
    # Regions: the divided calls, and the values that their code reads, draws and returns.
    Override("tensorflow:keras.layers.Layer.__call__", "the outermost call is divided", call_changes.calling_layers),
    Override("tensorflow.python.eager.polymorphic_function.polymorphic_function:Function.__call__", "a graph traced elsewhere is unaware of the region", call_changes.calling_functions),
    Override("tensorflow.python.data.ops.structured_function:StructuredFunctionWrapper.__init__", "each worker runs its pipelines alone", call_changes.tracing_pipelines),
    Override("tensorflow.python.autograph.operators.control_flow:for_stmt", "AutoGraph turns a loop over a dataset into a pipeline, which each worker runs alone", call_changes.looping),
    *(
        Override(f"tensorflow:keras.Model.{name}", "a worker has no workers of its own; a model under the strategy would divide its batches twice", call_changes.refusing)
        for name in ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
    ),
    Override("tensorflow.python.framework.func_graph:FuncGraph._create_op_internal", "a tensor that reaches a region bypassing its arguments needs a gradient, too", call_changes.making_operations),
    *(
        Override(f"tensorflow.python.ops.custom_gradient:{name}", "a gradient function may rerun a region's code", call_changes.recomputing)
        for name in ("_graph_mode_decorator", "_eager_mode_decorator")
    ),
    *(
        Override(target, "random numbers are those of the whole batch", draws.drawing)
        for kind in ("normal", "uniform", "truncated_normal")
        for target in (f"tensorflow:random.{kind}", f"tensorflow:random.stateless_{kind}")
    ),
    *(
        Override(f"tensorflow:random.Generator.{kind}", "random numbers are those of the whole batch", draws.drawing)
        for kind in ("normal", "uniform", "truncated_normal", "uniform_full_int")
    ),
    Override("tensorflow.python.ops.random_ops_util:get_key_counter_alg", "a worker draws from where its rows begin", draws.keying),
    Override("tensorflow:GradientTape.gradient", "the gradient of a joined tensor is that of its rows, joined", tapes.differentiating),
    Override("tensorflow:GradientTape.watch", "watching a joined tensor also watches its rows", tapes.watching),
    *(
        Override(f"tensorflow:GradientTape.{name}", "exchanges cannot be vectorized", tapes.taking_jacobians)
        for name in ("jacobian", "batch_jacobian")
    ),
    Override("tensorflow.python.ops.parallel_for.control_flow_ops:pfor", "exchanges cannot be vectorized", tapes.vectorizing),
    Override("tensorflow:nn.moments", _OF_BATCH, normalization.moments),
    Override("tensorflow:nn.weighted_moments", _OF_BATCH, normalization.weighted_moments),
    Override("tensorflow:compat.v1.nn.fused_batch_norm", _OF_BATCH, normalization.fused_batch_norm, KERAS_2),
    Override("keras.src.layers.normalization.batch_normalization:BatchNormalization._moments", _OF_BATCH, normalization.masked_moments, KERAS_3),
    Override("keras.src.backend.tensorflow.nn:_compute_moments_sync", _OF_BATCH, normalization.synchronized_moments, KERAS_3),
    Override("keras.src.layers.normalization.batch_normalization:BatchNormalizationBase._sync_calculate_mean_and_var", _OF_BATCH, normalization.synchronized_in_2, KERAS_2),
    Override("keras.src.engine.compile_utils:LossesContainer.__call__", "see `Generation.unused_losses`", keras_rules.noting_call, KERAS_2),
    Override("keras.src.engine.compile_utils:LossesContainer._nanotf_called", "see `Generation.unused_losses`", lambda stock, strategy: False, KERAS_2, adds=True),
    Override("tensorflow:keras.losses.Loss.__call__", _ONE_NUMBER, keras_rules.calling),
    Override("keras.src.backend.tensorflow.nn:_get_logits", _LOGITS, keras_rules.finding_logits, KERAS_3),
    Override("keras.src.backend:_get_logits", _LOGITS, keras_rules.finding_logits, KERAS_2),
    Override("keras.src.metrics.reduction_metrics:MeanMetricWrapper.update_state", _ONE_NUMBER, keras_rules.updating, KERAS_3),
    Override("keras.src.metrics.base_metric:MeanMetricWrapper.update_state", _ONE_NUMBER, keras_rules.updating, KERAS_2),
    *(
        Override(f"tensorflow:keras.optimizers.{name}.apply", _UNDER_THE_STRATEGY, call_changes.applying, KERAS_3)
        for name in ("Optimizer", "LossScaleOptimizer")
    ),
    *(
        Override(f"tensorflow:keras.optimizers.{name}.apply_gradients", _UNDER_THE_STRATEGY, call_changes.applying_pairs, KERAS_2)
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
    # Exchanges that are made only if something reads them.
    Override("tensorflow.python.framework.auto_control_deps:AutomaticControlDependencies.__exit__", "a result that nothing reads is not gathered", lazy.completing),
    Override("tensorflow.python.framework.auto_control_deps:op_is_stateful", "a gathered result needs its place among other exchanges", lazy.ordering),
)  # fmt: skip
