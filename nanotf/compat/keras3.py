"""Keras 3. See `generation`.

Versions seen: 3.10-3.15.

| name | why |
| --- | --- |
| `Trainer._maybe_symbolic_build`, `_symbolic_build` | feeds a per-replica value to a reduction (keras-team/keras#20585); makes metrics before the first step |
| `Trainer._distribute_strategy` | see `builds_optimizer_first` |
| `Trainer._flatten_metrics_in_order` | the order in which `evaluate` returns metrics |
| `Optimizer._trainable_variables`, `_trainable_variables_indices` | the variables that an optimizer was built for |
| `Metric._metrics` | the metrics in a metric |
| `Layer._non_trainable_variables` | weights that every replica updates by itself |
| `Layer._seed_generators` | the seeds of random layers |
| `backend.common.global_state.get_global_attribute`, `set_global_attribute`, its `global_seed_generator` | see `capture_seeds` |
| `backend.common.global_state.GLOBAL_STATE_TRACKER` | see `session_parts` |
| `backend.common.global_state`'s `current_call_ctx`, its `entry_layer` | see `context_of_calls` |
| `backend.compute_output_spec` | see `call_on_specs` |
| `utils.tracking.DotNotTrackScope` | keeps layers from tracking what `compile` sets |
| `utils.tracking.Tracker`, its `config`, `stored_ids`; `Layer._losses`, `_loss_ids`; `ops.function.Function`, its `_nodes`, `_nodes_by_depth`, `make_node_key`; `Operation._inbound_nodes` | state keyed by identity or left by the last call, see `restore_identities` |
| `saving.object_registration.GLOBAL_CUSTOM_NAMES` | see `keras_models.save_as` |
| `TensorBoard._start_batch`, `_stop_batch` | tells if it profiles batches |
| `Model._initial_epoch` | where `BackupAndRestore` resumes |
| `trainers.epoch_iterator.EpochIterator`, its `_enumerate_iterator`, `_epoch_iterator`, `_get_iterator`, `_current_iterator`, `_interrupted_warning`, `catch_stop_iteration`, `reset` | the loop over the batches of an epoch |
| `trainers.data_adapters.array_data_adapter.ArrayDataAdapter`, its `_inputs`, `_num_samples`, `_size`, `_batch_size`, `_shuffle` | arrays after Keras's checks and class weights; see `orders` |
| `trainers.data_adapters.tf_dataset_adapter.TFDatasetAdapter` | datasets, iterated as they are |
| `trainers.data_adapters.data_adapter.DataAdapter.get_numpy_iterator`, `get_tf_dataset`, `num_batches`; `PyDatasetAdapter.enqueuer`; `data_adapter_utils.NUM_BATCHES_FOR_TENSOR_SPEC` | everything else |
| `trainers.data_adapters.array_slicing.convert_to_sliceable`, `train_validation_split` | arrays as NumPy arrays; `validation_split` |
| `Model._eval_epoch_iterator`, `backend.tensorflow.trainer.TFEpochIterator` | `fit` keeps the validation data in it; stays in a model after a `fit` that raised |
| `Layer._build_shapes_dict` | the shapes of a subclassed model's first call |
| `Model._assert_compile_called` | raises if `compile` was not called |
| `Model._should_eval` | checks `validation_freq`, and tells if an epoch is validated |
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from nanotf.compat import eager_context
from nanotf.compat.keras_common import (
    OF_LOOPS,
    attributes_set,
    holds_numbers,
    leaving_behind,
    source_module,
    tf_variable,
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

MODEL = "models.model"
SEQUENTIAL = "models.sequential"
FUNCTIONAL = "models.functional"
TRAINER = "backend.tensorflow.trainer"
CUSTOM_NAMES = "GLOBAL_CUSTOM_NAMES"
EMBEDDING_READS_WHOLE_TABLE = True
PASSES_ADD_A_HISTORY = False
PASSES_CAN_BE_STOPPED = True
PREDICTS_LISTS_OF_BATCHES = True
EACH_PASS_HAS_AN_ITERATOR = True
KNOWS_ROWS_OF_BATCHES = True


# -------------------------------------------------------------------------------- variables
def variable_classes() -> tuple[Any, ...]:
    return (require_tensorflow().keras.Variable,)


def seed_generator_classes() -> tuple[Any, ...]:
    return (require_tensorflow().keras.random.SeedGenerator,)


def trainable_variables(model: Any) -> list[Any]:
    return list(model.trainable_variables)


def model_variables(model: Any) -> list[Any]:
    return [tf_variable(v) for v in model.variables]


_GENERATOR = "global_seed_generator"


def seed_variables(model: Any) -> list[Any]:
    generators = [g for layer in model._flatten_layers() for g in layer._seed_generators]
    return [tf_variable(generator.state) for generator in generators]


def session_parts() -> Sequence[Any]:
    found = vars(source_module("backend.common.global_state").GLOBAL_STATE_TRACKER)
    return *found, *found.values()  # the names are interned


def capture_seeds() -> Any:
    # Random operations without a seed draw from this generator.
    generator = source_module("backend.common.global_state").get_global_attribute(_GENERATOR)
    # A trace may make another generator, but runs nothing that changes the state of this one.
    is_kept = generator is None or not require_tensorflow().executing_eagerly()
    return generator if is_kept else generator.state.numpy()


def drawn_seeds() -> Any:
    return capture_seeds()


def restore_seeds(taken: Any) -> None:
    tracker = source_module("backend.common.global_state")
    if taken is None or hasattr(taken, "state"):
        tracker.set_global_attribute(_GENERATOR, taken)
    else:
        source_module("random.seed_generator").global_seed_generator().state.assign(taken)


def seed(number: int) -> None:
    tracker = source_module("backend.common.global_state")
    tracker.set_global_attribute("global_random_seed", number)
    tracker.set_global_attribute(_GENERATOR, None)  # the next draw makes one, by Python's `random`


def variables_of_metric(metric: Any) -> list[Any]:
    # `metric.variables` omits plain `tf.Variable`s in attributes of the metric and metrics in it.
    found = [tf_variable(v) for v in metric.variables]
    found += [v for v in vars(metric).values() if holds_numbers(v)]
    metric_class = require_tensorflow().keras.metrics.Metric
    inside = [*metric._metrics, *getattr(metric, "metrics", [])]  # a container has `metrics`
    for part in inside:
        if isinstance(part, metric_class) and part is not metric:
            found += variables_of_metric(part)
    return list({id(v): v for v in found}.values())


# ----------------------------------------------------------------------------------- models
_LEFT_BEHIND = ("train_function", "test_function", "predict_function")
# A model must be the same in another process before and after the first call of a loop.
_NOT_SENT = (*OF_LOOPS, "_eval_epoch_iterator")


def for_another_process(obj: Any, attributes: dict[str, Any]) -> dict[str, Any]:
    found = leaving_behind(attributes, _LEFT_BEHIND)
    found = {name: value for name, value in found.items() if name not in _NOT_SENT}
    if isinstance(obj, _tracker_class()):
        del found["stored_ids"]  # see `restore_identities`
    elif isinstance(obj, source_module("ops.function").Function):
        found.pop("_nodes", None)  # likewise
    if hasattr(obj, "add_loss"):
        found |= {"_losses": [], "_loss_ids": set()}  # of the last call
    return found


def operation_config(obj: Any) -> dict[str, Any] | None:
    return None


def class_of_wrapper(variable: Any) -> Any:
    return type(variable)


def restore_identities(objects: Sequence[Any]) -> None:
    for obj in objects:
        if isinstance(obj, _tracker_class()):
            kept = obj.config.items()
            obj.stored_ids = {name: {id(v) for v in held} for name, (_, held) in kept}
    function = source_module("ops.function")
    for obj in objects:
        if isinstance(obj, function.Function) and "_nodes_by_depth" in vars(obj):
            nodes = [node for each in obj._nodes_by_depth.values() for node in each]
            places = [(n.operation, n.operation._inbound_nodes.index(n)) for n in nodes]
            # Not set as an attribute: Keras would track another set.
            vars(obj)["_nodes"] = {function.make_node_key(*place) for place in places}


def _tracker_class() -> Any:
    return source_module("utils.tracking").Tracker


def global_policy() -> Any:
    return require_tensorflow().keras.mixed_precision.global_policy()


def is_compiled(model: Any) -> bool:
    return bool(model.compiled)


def uncompiled(model: Any) -> contextlib.AbstractContextManager[None]:
    return attributes_set(model, ["optimizer"], compiled=False)


def builds_optimizer_first(model: Any) -> bool:
    return model._distribute_strategy is not None


@contextlib.contextmanager
def as_step_builds(model: Any) -> Iterator[None]:
    if builds_optimizer_first(model):
        yield
        return
    optimizer, nothing = model.optimizer, contextlib.nullcontext()
    in_graph = nothing if model.run_eagerly else eager_context.initializing()
    # Keras's `apply` builds in a scope of the optimizer's name; MultiOptimizer has an own `apply`.
    in_scope = type(optimizer).apply is require_tensorflow().keras.optimizers.Optimizer.apply
    name_scope = source_module("backend").name_scope
    with in_graph, name_scope(optimizer.name, caller=optimizer) if in_scope else nothing:
        yield


def call_on_specs(model: Any, specs: Any) -> None:
    tf = require_tensorflow()
    inputs = tf.nest.map_structure(
        lambda s: tf.keras.KerasTensor(tuple(s.shape), dtype=s.dtype.name), specs
    )
    source_module("backend").compute_output_spec(model, inputs)


def called_with(model: Any) -> Any:
    tf = require_tensorflow()

    def specs_of(value: Any) -> Any:  # a shape is a tuple or a list of numbers
        if isinstance(value, dict):
            return {key: specs_of(each) for key, each in value.items()}
        if all(each is None or isinstance(each, int) for each in value):
            return tf.TensorSpec(value, model.input_dtype)
        return type(value)(specs_of(each) for each in value)

    shapes = getattr(model, "_build_shapes_dict", None)
    return specs_of(next(iter(shapes.values()))) if shapes else None


def is_symbolic(leaves: Sequence[Any]) -> bool:
    if any(isinstance(leaf, require_tensorflow().keras.KerasTensor) for leaf in leaves):
        return True
    return bool(source_module("backend.common.symbolic_scope").in_symbolic_scope())


def context_of_calls() -> Any:
    here = source_module("backend.common.global_state").get_global_attribute("current_call_ctx")
    known = {} if here is None else vars(here)
    return tuple(sorted((name, repr(v)) for name, v in known.items() if name != "entry_layer"))


def around_step() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def converted_as_here(function: Any) -> Any:
    return function  # Keras 3 calls losses and metrics as they are


def steps_per_execution(model: Any) -> int:
    given = model.steps_per_execution
    return int(given.numpy() if hasattr(given, "numpy") else given)


def makes_one_step(model: Any) -> bool:
    return steps_per_execution(model) == 1


def steps_at_once(model: Any) -> int:
    return steps_per_execution(model)  # even past the end of the epoch


def pass_counter(model: Any, method: str) -> Any:
    return None


def step_counters(model: Any) -> list[Any]:
    return []


# ----------------------------------------------------------------------- losses and metrics
def build_compiled_metrics(model: Any, specs: Any) -> None:
    optimizer = model.optimizer
    unbuilt = optimizer is not None and not optimizer.built
    if unbuilt:  # keeps Keras from building the optimizer, too
        optimizer.built = True
    try:
        model._symbolic_build(data_batch=specs)
    finally:
        if unbuilt:
            optimizer.built = False


def step_builds_losses(model: Any) -> bool:
    return False  # `fit` builds them before, from the model's outputs


def unused_losses(model: Any) -> set[str]:
    return set()


def metrics_in_order(model: Any, logs: dict[str, Any]) -> Any:
    return model._flatten_metrics_in_order(logs)


# ------------------------------------------------------------------------------- optimizers
def state_beside(optimizer: Any) -> list[Any]:
    return []


def note_first_trace(optimizer: Any) -> None:
    pass


def places_by_key(optimizer: Any) -> dict[Any, int]:
    places: dict[Any, int] = optimizer._trainable_variables_indices
    return places


def make_variable(value: Any, name: str) -> Any:
    return require_tensorflow().keras.Variable(value, name=name)


def apply_through(optimizer: Any, twin: Any, apply: Callable[[Any, Any, Any], None]) -> None:
    stock = twin.apply

    def apply_all(grads: Any, trainable_variables: Any = None) -> Any:
        apply(stock, list(grads), list(trainable_variables))
        return optimizer.iterations

    optimizer.apply = apply_all


def updating(cls: Any, change: Callable[..., Any]) -> dict[str, Any]:
    stock = cls.apply

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        given = self._trainable_variables if trainable_variables is None else trainable_variables
        own = None if trainable_variables is None else list(trainable_variables)
        return change(self, lambda changed: stock(self, changed, own), list(grads), list(given))

    return {"apply": apply}


# -------------------------------------------------------------------------------- callbacks
def auto_verbose() -> int:
    return 1


def tensorboard_acts_at_batches(callback: Any) -> bool:
    profiles = (callback._start_batch, callback._stop_batch) != (0, 0)
    return bool(profiles or callback.update_freq != "epoch" or callback.write_steps_per_second)


def place_to_resume(model: Any, initial_epoch: int, steps: int | None) -> tuple[int, int]:
    return int(model._initial_epoch or initial_epoch), 0


def begin_at(model: Any, epoch: int, step: int) -> None:
    """Changes nothing: Keras 3 resumes at the start of an epoch."""


# ------------------------------------------------------------------------------------- data
def check_compiled(model: Any, method: str) -> None:
    model._assert_compile_called(method)


def check_validation(model: Any, validation_data: Any, validation_freq: Any) -> None:
    model._should_eval(0, validation_freq)


def untraced_hidden(model: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def keep_validation_data(model: Any, given: dict[str, Any], steps: int | None) -> None:
    if getattr(model, "_eval_epoch_iterator", None) is None:
        model._eval_epoch_iterator = source_module("backend.tensorflow.trainer").TFEpochIterator(
            **given,
            distribute_strategy=model.distribute_strategy,
            steps_per_execution=model.steps_per_execution,
            steps_per_epoch=steps,
            shuffle=False,
        )


def batches_looked_at() -> int:
    number: int = source_module(
        "trainers.data_adapters.data_adapter_utils"
    ).NUM_BATCHES_FOR_TENSOR_SPEC
    return number


def iterators_per_epoch(cardinality: int) -> int:
    # At the end of an epoch of known length it makes another iterator, which it never reads.
    return 2 if cardinality > 0 else 1


def warn_that_data_ran_out(batches: int) -> None:
    source_module("trainers.epoch_iterator").EpochIterator._interrupted_warning(None)


def split_for_validation(data: tuple[Any, ...], fraction: float) -> tuple[Any, Any]:
    split = source_module("trainers.data_adapters.array_slicing").train_validation_split
    train, validation = split(data, validation_split=fraction)
    return train, validation


def open_data(model: Any, arguments: DataArguments) -> Arrays | Epochs:
    a = arguments
    adapters = source_module("trainers.data_adapters")
    range(a.initial_epoch, a.epochs)  # raises what Keras's loops raise, as does the next line
    loop = _loop_class()(
        x=a.x,
        y=a.y,
        sample_weight=a.sample_weight,
        batch_size=a.batch_size,
        steps_per_epoch=a.steps,
        shuffle=a.shuffle,
        class_weight=a.class_weight,
        steps_per_execution=model.steps_per_execution,
    )
    range(a.steps or 0)
    adapter = loop.data_adapter
    if not isinstance(adapter, adapters.ArrayDataAdapter):
        return _Keras3Epochs(loop)
    tf = require_tensorflow()
    for leaf in tf.nest.flatten(adapter._inputs, expand_composites=False):
        refuse_what_is_not_dense(leaf)
    if not is_size(adapter._batch_size):
        next(iter(adapter.get_tf_dataset()))  # raises TensorFlow's error
    if adapter._shuffle == "batch":  # within batches, which orders of rows cannot express
        return _Keras3Epochs(loop)
    sliceables = source_module("trainers.data_adapters.array_slicing").convert_to_sliceable(
        adapter._inputs, target_backend="numpy"
    )
    structure = tf.nest.map_structure(
        lambda s: None if s is None else np.asarray(s.convert_to_numpy(s.array)), sliceables
    )
    return Arrays(
        structure,
        adapter._batch_size,
        adapter._size,
        adapter._num_samples,
        bool(adapter._shuffle),
    )


def orders(rows: int, size: int, epochs: int, repeats: bool) -> Iterator[Any]:
    adapters = source_module("trainers.data_adapters")
    adapter = adapters.ArrayDataAdapter(np.arange(rows), batch_size=size, shuffle=True)
    dataset = adapter.get_tf_dataset()
    if repeats:
        return iter(dataset.repeat(epochs))
    return itertools.chain.from_iterable(itertools.repeat(dataset, epochs))


def _loop_class() -> Any:
    """Returns a subclass of Keras's `EpochIterator` that iterates over its adapter's own data.

    It reads generators and `PyDataset`s without a `tf.data.Dataset`. So their exceptions keep
    their class, and nothing is read before it is needed.
    """
    base = source_module("trainers.epoch_iterator").EpochIterator

    class EpochLoop(base):  # type: ignore[misc, valid-type]
        dataset: Any = None

        def _get_iterator(self) -> Any:
            if self.dataset is not None:
                return self.dataset
            return self.data_adapter.get_numpy_iterator()

        def __next__(self) -> Any:  # as in the TensorFlow backend's class
            return next(self._epoch_iterator)

    return EpochLoop


class _Keras3Epochs(Epochs):
    def __init__(self, loop: Any) -> None:
        self._loop = loop
        adapter, adapters = loop.data_adapter, source_module("trainers.data_adapters")
        batches = adapter.num_batches
        dataset = adapter.get_tf_dataset()
        is_dataset = isinstance(adapter, adapters.TFDatasetAdapter)
        is_of_arrays = isinstance(adapter, adapters.ArrayDataAdapter)
        if is_dataset or is_of_arrays:
            loop.dataset = dataset
        super().__init__(
            dataset.element_spec,
            UNKNOWN_CARDINALITY if batches is None else batches,
            loop.num_batches,
            dataset if is_dataset else None,
            is_of_arrays,
        )

    def _epochs(self) -> Iterator[Iterator[tuple[Any, Any]]]:
        if self._passed is None:  # otherwise a `PyDataset` already knows that it begins
            self._loop.reset()
        for _ in range(self._passed or 0):
            self._pass_by()
        while True:
            yield self._epoch()

    def evaluations(self) -> Iterator[Iterator[tuple[Any, Any]]]:
        while True:
            self._loop.reset()
            yield self._epoch()

    def _epoch(self) -> Iterator[tuple[Any, Any]]:
        with self._loop.catch_stop_iteration():
            for *_, iterator in self._loop:  # (step, iterator) up to 3.10, three from 3.11 on
                for _ in range(self._loop.steps_per_execution):
                    yield iterator, self._next(iterator)

    def _pass_by(self) -> None:
        loop = self._loop
        if loop.steps_per_epoch is None:
            # Each epoch has its own iterator; only the number of iterators matters.
            for _ in range(iterators_per_epoch(self.cardinality)):
                iter(loop._get_iterator())
            return
        with loop.catch_stop_iteration():
            for *_, iterator in loop:
                for _ in range(loop.steps_per_execution):
                    self._next(iterator)

    def keeps(self, iterator: Any) -> bool:
        loop = self._loop
        return loop.steps_per_epoch is not None and loop._current_iterator is iterator

    def _enqueuer(self) -> Any:
        return getattr(self._loop.data_adapter, "enqueuer", None)
