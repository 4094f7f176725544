"""The legacy generation of Keras: `tf_keras`, and the Keras of TensorFlow 2.14 and 2.15. See `generation`.

Versions seen: 2.14, 2.15, tf_keras 2.15-2.21.

| name | why |
| --- | --- |
| `Model._is_compiled` | tells if `compile` was called; see `uncompiled` |
| `Model._train_counter`, `_test_counter`, `_predict_counter` | step counters, which the progress bar reads |
| `Model.train_tf_function`, its `_concrete_variable_creation_fn` | see `untraced_hidden` |
| `Model._steps_per_execution` | steps of one execution |
| `Model.compiled_loss.build`, its `_user_losses`, `compiled_metrics.build`, `_conform_to_outputs` | builds metrics before the first step |
| `Node.flat_input_ids`, `flat_output_ids`, `_keras_inputs_ids_and_indices`, `Functional._tensor_usage_count`, `_compute_tensor_usage_count`, `Layer._obj_reference_counts_dict`, `Metric._call_result`, `Layer._losses` | state keyed by identity or left by the last call, see `restore_identities` |
| `autocast_variable.AutoCastVariable`, its `_variable`, `create_autocast_variable` | see `class_of_wrapper` |
| `Optimizer._learning_rate`, legacy `_hyper`; `LossScaleOptimizer._loss_scale`, its `_current_loss_scale`, `_counter` | state outside `variables` |
| `Optimizer._index_dict` | the variables that an optimizer was built for |
| `engine.training.flatten_metrics_in_order` | the order in which `evaluate` returns metrics |
| `Layer._non_trainable_weights` | weights that every replica updates by itself |
| `backend._SEED_GENERATOR` | see `capture_seeds` |
| `backend._GRAPH`, `PER_GRAPH_OBJECT_NAME_UIDS`, `OBSERVED_NAMES` | see `session_parts` |
| `mixed_precision.policy._global_policy` | None while the policy follows `floatx` |
| `saving.object_registration._GLOBAL_CUSTOM_NAMES` | see `keras_models.save_as` |
| `TensorBoard._implements_train_batch_hooks` | tells if it does anything at batch hooks |
| `Model._maybe_load_initial_counters_from_ckpt`, `_training_state` | where `BackupAndRestore` resumes |
| `engine.data_adapter.DataHandler`, its `_adapter`, `_dataset`, `_insufficient_data` | the loop over epochs and batches |
| `engine.data_adapter.select_data_adapter` and the adapters' `_handle_multiprocessing`, `_standardize_batch`, `_enqueuer` | the kind of input; its batches before they reach TensorFlow |
| `engine.data_adapter.train_validation_split`, `_check_data_cardinality`, `_make_class_weight_map_fn`, `pack_x_y_sample_weight`, `_is_pandas_series` | arrays |
| `engine.data_adapter.TensorLikeDataAdapter`, `ListsOfScalarsDataAdapter` | arrays; see `orders` |
| `engine.training_utils.handle_partial_sample_weights` | arrays |
| `Model._assert_weights_created`, `Sequential._assert_weights_created` | parts that no step has called yet have no variables |
| `Layer._called` | differs after the first call |
| `Model._assert_compile_was_called` | raises if `compile` was not called |
| `Model._should_eval` | checks `validation_freq`, and tells if an epoch is validated |
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from nanotf.compat import autograph, random_states
from nanotf.compat.keras_common import (
    attributes_set,
    flat_layers,
    has_own_step,
    holds_numbers,
    leaving_behind,
    source_module,
)
from nanotf.compat.keras_epochs import (
    UNKNOWN_CARDINALITY,
    Arrays,
    DataArguments,
    Epochs,
    is_size,
    refuse_what_is_not_dense,
)
from nanotf.compat.versions import require_tensorflow

MODEL = "engine.training"
SEQUENTIAL = "engine.sequential"
FUNCTIONAL = "engine.functional"
TRAINER = "engine.training"
CUSTOM_NAMES = "_GLOBAL_CUSTOM_NAMES"
EMBEDDING_READS_WHOLE_TABLE = False
PASSES_ADD_A_HISTORY = True
PASSES_CAN_BE_STOPPED = False
PREDICTS_LISTS_OF_BATCHES = False
EACH_PASS_HAS_AN_ITERATOR = False
KNOWS_ROWS_OF_BATCHES = False


# -------------------------------------------------------------------------------- variables
def variable_classes() -> tuple[Any, ...]:
    return ()


def seed_generator_classes() -> tuple[Any, ...]:
    return ()


@contextlib.contextmanager
def _unbuilt_parts_have_none() -> Iterator[None]:
    """Lets models that are not built be asked for variables, as layers can."""
    classes = [source_module(MODEL).Model, source_module(SEQUENTIAL).Sequential]
    stock = [vars(cls)["_assert_weights_created"] for cls in classes]
    for cls in classes:
        cls._assert_weights_created = lambda self: None
    try:
        yield
    finally:
        for cls, method in zip(classes, stock, strict=True):
            cls._assert_weights_created = method


def trainable_variables(model: Any) -> list[Any]:
    with _unbuilt_parts_have_none():
        return list(model.trainable_variables)


def model_variables(model: Any) -> list[Any]:
    # `model.variables` also has lookup tables, and shapeless variables of layers not adapted yet.
    with _unbuilt_parts_have_none():
        variables = list(model.variables)
    # An adapted layer counts documents; a layer that was given its vocabulary does not.
    counts = {id(getattr(layer, "num_documents", None)) for layer in flat_layers(model)}
    variables = [v for v in variables if holds_numbers(v) and id(v) not in counts]
    # The progress bar reads the counters if the number of steps is not known in advance.
    return variables + step_counters(model) + seed_variables(model)


def seed_variables(model: Any) -> list[Any]:
    # Image augmentation layers have generators. Other layers draw from TensorFlow's own seeds.
    holders = [getattr(layer, "_random_generator", None) for layer in flat_layers(model)]
    generators = [getattr(holder, "_generator", None) for holder in holders]
    return [generator.state for generator in generators if generator is not None]


def drawn_seeds() -> Any:
    return None  # random operations without a seed draw from graphs' own


def session_parts() -> Sequence[Any]:
    backend = source_module("backend")
    graph = getattr(backend._GRAPH, "graph", None)
    operations = 0 if graph is None else len(graph.get_operations())
    uids = backend.PER_GRAPH_OBJECT_NAME_UIDS
    return graph, operations, len(uids), len(backend.OBSERVED_NAMES)


def capture_seeds() -> Any:
    # Initial weights draw from it if `set_random_seed` was called, otherwise from Python's.
    generator = getattr(source_module("backend")._SEED_GENERATOR, "generator", None)
    return None if generator is None else generator.getstate()


def restore_seeds(taken: Any) -> None:
    holder = source_module("backend")._SEED_GENERATOR
    holder.generator = None
    if taken is not None:
        holder.generator = random.Random()
        holder.generator.setstate(taken)


def seed(number: int) -> None:
    source_module("backend")._SEED_GENERATOR.generator = random_states.LateRandom(number)


def variables_of_metric(metric: Any) -> list[Any]:
    return list(metric.variables)


# ----------------------------------------------------------------------------------- models
_FUNCTIONS = ("train_function", "train_tf_function", "test_function", "predict_function")
_LEFT_BEHIND = (*_FUNCTIONS, "history", "_cluster_coordinator")


# `restore_identities` makes them.
_BY_IDENTITY = ("flat_input_ids", "flat_output_ids", "_keras_inputs_ids_and_indices")


def for_another_process(obj: Any, attributes: dict[str, Any]) -> dict[str, Any]:
    found = leaving_behind(attributes, _LEFT_BEHIND)
    if "_called" in found:  # only Keras's register_call_context_args asks for it
        found["_called"] = False
    # Reference counts by identity, and a metric's last result.
    for name in ("_obj_reference_counts_dict", "_call_result", *_BY_IDENTITY):
        found.pop(name, None)
    if operation_config(obj) is not None:  # its `__init__` makes both
        found = {name: v for name, v in found.items() if name not in ("call", "function")}
    if "_tensor_usage_count" in found:
        found["_tensor_usage_count"] = {}
    return found | ({"_losses": []} if hasattr(obj, "add_loss") else {})  # of the last call


def operation_config(obj: Any) -> dict[str, Any] | None:
    is_operation = type(obj).__module__ == source_module("layers.core.tf_op_layer").__name__
    config: dict[str, Any] | None = obj.get_config() if is_operation else None
    return config


def class_of_wrapper(variable: Any) -> Any:
    casting = source_module("mixed_precision.autocast_variable").AutoCastVariable
    return casting if isinstance(variable, casting) else type(variable)


def restore_identities(objects: Sequence[Any]) -> None:
    tf = require_tensorflow()
    autocast = source_module("mixed_precision.autocast_variable")
    for obj in objects:
        if isinstance(obj, autocast.AutoCastVariable):
            obj.__class__ = type(autocast.create_autocast_variable(obj._variable))
    node, tensor = (source_module(f"engine.{n}") for n in ("node", "keras_tensor"))
    for obj in objects:
        if isinstance(obj, node.Node):
            obj.flat_input_ids = [str(id(t)) for t in obj._keras_inputs]
            obj.flat_output_ids = [str(id(t)) for t in tf.nest.flatten(obj.outputs)]
            obj._keras_inputs_ids_and_indices = [
                (str(id(leaf)), place)
                for place, leaf in enumerate(obj._flat_arguments)
                if isinstance(leaf, tensor.KerasTensor)
            ]
    for obj in objects:
        if hasattr(obj, "_tensor_usage_count"):
            obj._compute_tensor_usage_count()


def global_policy() -> Any:
    return source_module("mixed_precision.policy")._global_policy


def is_compiled(model: Any) -> bool:
    return bool(model._is_compiled)


def uncompiled(model: Any) -> contextlib.AbstractContextManager[None]:
    return attributes_set(model, _is_compiled=False, optimizer=None)


def builds_optimizer_first(model: Any) -> bool:
    return False


def as_step_builds(model: Any) -> Any:
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return require_tensorflow().name_scope(optimizer.name)  # names slots as `apply_gradients` does


def call_on_specs(model: Any, specs: Any) -> None:
    tf = require_tensorflow()
    inputs = tf.nest.map_structure(
        lambda s: tf.keras.Input(shape=s.shape[1:], dtype=s.dtype), specs
    )
    model(inputs)


def called_with(model: Any) -> Any:
    found = model.save_spec()
    return found[0][0] if found and found[0] else None


def is_symbolic(leaves: Sequence[Any]) -> bool:
    symbolic = source_module("engine.keras_tensor").KerasTensor
    if any(isinstance(leaf, symbolic) for leaf in leaves):
        return True
    return bool(source_module("engine.base_layer_utils").is_in_keras_graph())


def context_of_calls() -> Any:
    here = source_module("engine.base_layer_utils").call_context()
    return here.training, source_module("backend").learning_phase() if here.training is None else 0


def around_step() -> contextlib.AbstractContextManager[None]:
    return autograph.converting()


def converted_as_here(function: Any) -> Any:
    tf = require_tensorflow()
    if tf.executing_eagerly():
        return function
    convert: Any = tf.__internal__.autograph
    return convert.tf_convert(function, convert.control_status_ctx())


def steps_per_execution(model: Any) -> int:
    given = model._steps_per_execution
    return int(given.numpy() if hasattr(given, "numpy") else given)


def makes_one_step(model: Any) -> bool:
    # Keras 2.14 does not tune the number of steps.
    tuned = getattr(model, "autotune_steps_per_execution", False)
    return steps_per_execution(model) == 1 and not tuned


def steps_at_once(model: Any) -> int:
    return 1  # it knows where the epoch ends


def pass_counter(model: Any, method: str) -> Any:
    return {"evaluate": model._test_counter, "predict": model._predict_counter}[method]


def step_counters(model: Any) -> list[Any]:
    return [model._train_counter, model._test_counter]


# ----------------------------------------------------------------------- losses and metrics
def build_compiled_metrics(model: Any, specs: Any) -> None:
    if model.compiled_loss.built:
        return
    tf = require_tensorflow()
    x, y = (*specs, None)[:2] if isinstance(specs, tuple) else (specs, None)
    outputs = getattr(model, "outputs", None)
    if outputs is None:
        trace = tf.function(model).get_concrete_function(x)
        outputs = trace.structured_outputs
    else:
        outputs = tf.nest.pack_sequence_as(model.output, outputs)
    outputs = tf.nest.map_structure(lambda o: tf.TensorSpec(o.shape, o.dtype), outputs)
    if model.compiled_loss._user_losses is not None or not has_own_step(model):
        model.compiled_loss.build(outputs)
    if y is not None and not model.compiled_metrics.built:
        targets = model.compiled_metrics._conform_to_outputs(outputs, y)
        model.compiled_metrics.build(outputs, targets)
        if not all(metric.built for metric in model.compiled_metrics.metrics):
            # Some metrics, such as F1Score, make their variables at the first update.
            run = tf.distribute.get_strategy().run
            update = model.compiled_metrics.update_state
            tf.function(lambda *args: run(update, args)).get_concrete_function(y, outputs)


def step_builds_losses(model: Any) -> bool:
    container = model.compiled_loss
    return not container.built and container._user_losses is not None


def unused_losses(model: Any) -> set[str]:
    # nanotf makes the loss metrics before the first step, since that step may use them.
    container = getattr(model, "compiled_loss", None)
    if container is None or not has_own_step(model):
        return set()
    of_losses = {id(metric) for metric in container.metrics}
    # The user's own `metrics` may omit them and have others with the same names.
    metrics = [metric for metric in model.metrics if id(metric) in of_losses]
    called = getattr(container, "_nanotf_called", None)
    if called is None:  # in the parent, whose metrics have the workers' counts
        called = any(float(metric.count) > 0 for metric in metrics)
    return set() if called else {metric.name for metric in metrics}


def metrics_in_order(model: Any, logs: dict[str, Any]) -> Any:
    return source_module(TRAINER).flatten_metrics_in_order(logs, model.metrics_names)


# ------------------------------------------------------------------------------- optimizers
def state_beside(optimizer: Any) -> list[Any]:
    hypers = getattr(optimizer, "_hyper", {})  # of tf.keras.optimizers.legacy
    scale = getattr(optimizer, "_loss_scale", None)  # of a LossScaleOptimizer
    found = [
        getattr(optimizer, "_learning_rate", None),
        *(value for _, value in sorted(hypers.items())),
        getattr(scale, "_current_loss_scale", None),
        getattr(scale, "_counter", None),
    ]
    return [value for value in found if hasattr(value, "assign")]


def note_first_trace(optimizer: Any) -> None:
    if getattr(optimizer, "_u_product_counter", None) == 1:  # Nadam's, as `build` leaves it
        optimizer._u_product_counter += len(optimizer._index_dict)


def places_by_key(optimizer: Any) -> dict[Any, int]:
    places: dict[Any, int] = optimizer._index_dict
    return places


def make_variable(value: Any, name: str) -> Any:
    return require_tensorflow().Variable(value, name=name)


def apply_through(optimizer: Any, twin: Any, apply: Callable[[Any, Any, Any], None]) -> None:
    stock = twin.apply_gradients

    def update(grads: Any, variables: Any) -> None:
        pairs = zip(grads, variables, strict=True)
        # They are sums over workers already.
        stock(list(pairs), skip_gradients_aggregation=True)

    def apply_gradients(grads_and_vars: Any, *_: Any, **__: Any) -> Any:
        grads, variables = zip(*grads_and_vars, strict=True)
        apply(update, list(grads), list(variables))
        return optimizer.iterations

    optimizer.apply_gradients = apply_gradients


def updating(cls: Any, change: Callable[..., Any]) -> dict[str, Any]:
    stock = cls.apply_gradients

    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        grads, variables = map(list, zip(*grads_and_vars, strict=True))

        def apply(changed: Sequence[Any]) -> Any:
            return stock(self, list(zip(changed, variables, strict=True)), *args, **kwargs)

        return change(self, apply, grads, variables)

    return {"apply_gradients": apply_gradients}


# -------------------------------------------------------------------------------- callbacks
def auto_verbose() -> int:
    return 1 if require_tensorflow().keras.utils.is_interactive_logging_enabled() else 2


def tensorboard_acts_at_batches(callback: Any) -> bool:
    return bool(callback._implements_train_batch_hooks())


def place_to_resume(model: Any, initial_epoch: int, steps: int | None) -> tuple[int, int]:
    epoch, step = model._maybe_load_initial_counters_from_ckpt(steps, initial_epoch)
    return int(epoch), int(step)


class _Counters:
    """Replaces the training state of `BackupAndRestore` in a worker."""

    def __init__(self, epoch: int, step: int) -> None:
        self._place = (epoch, step)

    def maybe_load_initial_counters_from_ckpt(self, *_: Any, **__: Any) -> tuple[int, int]:
        return self._place


def begin_at(model: Any, epoch: int, step: int) -> None:
    model._training_state = _Counters(epoch, step) if step else None


# ------------------------------------------------------------------------------------- data
def check_compiled(model: Any, method: str) -> None:
    model._assert_compile_was_called()


def check_validation(model: Any, validation_data: Any, validation_freq: Any) -> None:
    if validation_data:  # by its truth, as in `fit`
        model._should_eval(0, validation_freq)


@contextlib.contextmanager
def untraced_hidden(model: Any) -> Iterator[None]:
    function = model.train_tf_function
    if hasattr(function, "_concrete_variable_creation_fn"):
        yield
        return
    model.train_tf_function = None
    try:
        yield
    finally:
        model.train_tf_function = function


def keep_validation_data(model: Any, given: dict[str, Any], steps: int | None) -> None:
    """Changes nothing: Keras 2's `evaluate` opens them where `fit` has not."""


def batches_looked_at() -> int:
    return 1


def iterators_per_epoch(cardinality: int) -> int:
    return 1


def warn_that_data_ran_out(batches: int) -> None:
    require_tensorflow().get_logger().warning(
        "Your input ran out of data; interrupting training. Make sure that your dataset or "
        "generator can generate at least `steps_per_epoch * epochs` batches (in this case, "
        f"{batches} batches). You may need to use the repeat() function when building your "
        "dataset."
    )


def split_for_validation(data: tuple[Any, ...], fraction: float) -> tuple[Any, Any]:
    split = source_module("engine.data_adapter").train_validation_split
    train, validation = split(data, validation_split=fraction)
    return train, validation


def open_data(model: Any, arguments: DataArguments) -> Arrays | Epochs:
    a = arguments
    keras = source_module("engine.data_adapter")
    kind = keras.select_data_adapter(a.x, a.y)
    if kind is keras.CompositeTensorDataAdapter:
        for leaf in require_tensorflow().nest.flatten((a.x, a.y)):
            refuse_what_is_not_dense(leaf)
    if issubclass(kind, (keras.TensorLikeDataAdapter, keras.ListsOfScalarsDataAdapter)):
        # Keras then shuffles within batches, which orders of rows cannot express.
        if isinstance(a.shuffle, str) and a.shuffle.lower() == "batch":
            return _Keras2Epochs(
                keras, _handler(keras, model, a, a.x, a.y, a.sample_weight), a.x, a
            )
        return _arrays(keras, kind, model, a)
    x = a.x
    if kind is keras.GeneratorDataAdapter:
        x = _Remembering(x)
    handler = _handler(keras, model, a, x, a.y, a.sample_weight)
    return _Keras2Epochs(keras, handler, x, a)


def _handler(keras: Any, model: Any, a: DataArguments, x: Any, y: Any, weights: Any) -> Any:
    at_once = getattr(model, "_steps_per_execution", None)
    return keras.DataHandler(
        x=x,
        y=y,
        sample_weight=weights,
        batch_size=a.batch_size,
        steps_per_epoch=a.steps,
        epochs=a.epochs,
        initial_epoch=a.initial_epoch,
        shuffle=a.shuffle,
        class_weight=a.class_weight,
        max_queue_size=a.max_queue_size,
        workers=a.workers,
        use_multiprocessing=a.use_multiprocessing,
        model=model,
        # A variable of its own: the handler sets it.
        steps_per_execution=require_tensorflow().Variable(
            1 if at_once is None else int(at_once.numpy()), dtype="int64"
        ),
    )


def _arrays(keras: Any, kind: Any, model: Any, a: DataArguments) -> Arrays:
    """Lets Keras check the first row of each array, then converts all rows as Keras would.

    Keras's own adapter copies whole arrays into tensors.
    """
    tf = require_tensorflow()
    data: tuple[Any, ...] = (a.x, a.y, a.sample_weight)
    if kind is keras.ListsOfScalarsDataAdapter:
        data = tuple(None if value is None else np.asarray(value) for value in data)
    looked_at = data
    if a.batch_size is None or is_size(a.batch_size):  # otherwise TensorFlow's error names the rows
        looked_at = tuple(
            tf.nest.map_structure(lambda v: v[:1] if getattr(v, "shape", ()) else v, value)
            for value in data
        )
    _handler(keras, model, a, *looked_at)
    # Keras packs a tuple of inputs into another, but not a list.
    x, y, weights = tf.__internal__.nest.list_to_tuple(
        tf.nest.map_structure(lambda v: _as_tensor_would_be(keras, v), data)
    )
    weights, _, _ = source_module("engine.training_utils").handle_partial_sample_weights(
        y, weights, None, check_all_flat=True
    )
    inputs = keras.pack_x_y_sample_weight(x, y, weights)
    keras._check_data_cardinality(inputs)
    if a.class_weight:
        weigh = keras._make_class_weight_map_fn(a.class_weight)
        _, _, weights = weigh((), tf.convert_to_tensor(y), weights)
        inputs = keras.pack_x_y_sample_weight(x, y, weights.numpy())
    rows = int(next(v for v in tf.nest.flatten(inputs) if v is not None).shape[0])
    batch_size = a.batch_size or (math.ceil(rows / a.steps) if a.steps else 32)
    # `should_recreate_iterator` of the adapters
    one_iterator = kind is not keras.ListsOfScalarsDataAdapter
    size = math.ceil(rows / batch_size)
    return Arrays(inputs, batch_size, size, rows, bool(a.shuffle), one_iterator)


def orders(rows: int, size: int, epochs: int, repeats: bool) -> Iterator[Any]:
    keras = source_module("engine.data_adapter")
    each = epochs if repeats else 1
    adapter = keras.TensorLikeDataAdapter(
        np.arange(rows), batch_size=size, epochs=each, shuffle=True
    )
    dataset = adapter.get_dataset()
    return itertools.chain.from_iterable(itertools.repeat(dataset, 1 if repeats else epochs))


def _as_tensor_would_be(keras: Any, value: Any) -> Any:
    """Converts an array as `_process_tensorlike` does, without making a tensor."""
    if value is None:
        return None
    if keras._is_pandas_series(value):
        value = np.expand_dims(value.to_numpy(), axis=-1)
    if isinstance(value, np.ndarray):
        floating = issubclass(value.dtype.type, np.floating)
        floatx = require_tensorflow().keras.backend.floatx()
        return value.astype(floatx, copy=False) if floating else value
    return value.numpy() if hasattr(value, "numpy") else np.asarray(value)


class _Remembering:
    """An iterator that remembers its first element, since Keras 2 peeks at it."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self.first: list[Any] = []

    def __iter__(self) -> _Remembering:
        return self

    def __next__(self) -> Any:
        element = next(self._iterator)
        if not self.first:
            self.first.append(element)
        return element

    def from_the_first(self) -> Iterator[Any]:
        """Returns all elements, including the element that Keras has seen."""
        return itertools.chain(self.first, self._iterator)


class _Raw:
    """The elements of a generator or `Sequence`, as Keras 2 hands them to TensorFlow."""

    def __init__(self, start: Callable[[], Any], finish: Callable[[Any], Any]) -> None:
        self._start = start
        self._finish = finish

    def __iter__(self) -> Iterator[Any]:
        # As in a tf.data.Dataset, nothing starts before the first batch is requested.
        for batch in self._start():
            yield self._finish(batch)


class _Keras2Epochs(Epochs):
    def __init__(self, keras: Any, handler: Any, x: Any, a: DataArguments) -> None:
        self._handler = handler
        adapter = handler._adapter
        spec = handler._dataset.element_spec
        cardinality, dataset = UNKNOWN_CARDINALITY, None
        if isinstance(adapter, keras.DatasetAdapter):
            dataset = handler._dataset
            cardinality = int(handler._dataset.cardinality())
        elif isinstance(adapter, keras.KerasSequenceAdapter):
            # A worker's Keras makes a new iterator each epoch if the two numbers are equal.
            cardinality = adapter.get_size() if a.steps is None else a.steps
        if isinstance(adapter, keras.GeneratorDataAdapter):  # includes a Sequence's adapter
            elements = x.from_the_first() if isinstance(x, _Remembering) else x
            start = adapter._handle_multiprocessing(
                elements, a.workers, a.use_multiprocessing, a.max_queue_size
            )
            handler._dataset = _Raw(start, _finishing(keras, adapter, a.class_weight))
        arrays = (keras.TensorLikeDataAdapter, keras.ListsOfScalarsDataAdapter)
        is_of_arrays = isinstance(adapter, arrays)
        super().__init__(spec, cardinality, handler.inferred_steps, dataset, is_of_arrays)

    def _epochs(self) -> Iterator[Iterator[tuple[Any, Any]]]:
        for number, (_, iterator) in enumerate(self._handler.enumerate_epochs()):
            if number >= (self._passed or 0):
                yield self._epoch(iterator)
            elif self.keeps(iterator) or self._handler.inferred_steps is None:
                for _ in self._epoch(iterator):
                    pass

    def evaluations(self) -> Iterator[Iterator[tuple[Any, Any]]]:
        while True:
            yield itertools.chain.from_iterable(self._epochs())

    def _epoch(self, iterator: Any) -> Iterator[tuple[Any, Any]]:
        handler = self._handler
        with handler.catch_stop_iteration():
            for _ in handler.steps():
                for _ in range(handler.step_increment + 1):
                    yield iterator, self._next(iterator)

    def keeps(self, iterator: Any) -> bool:
        kept = not self._handler._adapter.should_recreate_iterator()
        return kept and self._exhausted is not iterator

    def _enqueuer(self) -> Any:
        return getattr(self._handler._adapter, "_enqueuer", None)


def _finishing(keras: Any, adapter: Any, class_weight: Any) -> Callable[[Any], Any]:
    """Returns the function that Keras 2 applies to a batch of a generator or `Sequence`."""
    if not class_weight:
        finish: Callable[[Any], Any] = adapter._standardize_batch
        return finish
    tf = require_tensorflow()
    weigh = keras._make_class_weight_map_fn(class_weight)

    def weighed(batch: Any) -> Any:
        standard = adapter._standardize_batch(batch)
        x, *rest = standard if isinstance(standard, tuple) else (standard,)
        return weigh(x, *tf.nest.map_structure(tf.convert_to_tensor, rest))

    return weighed
