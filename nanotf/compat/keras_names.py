"""Private names of both Keras generations, behind one interface.

| name | generation, versions seen | why |
| --- | --- | --- |
| `Trainer._maybe_symbolic_build`, `_symbolic_build` | 3 | feeds a per-replica value to a reduction (same issue) |
| `Trainer._distribute_strategy` | 3; 3.10-3.15 | see `builds_optimizer_for_all` |
| `Model._compile_config` | 2 and 3 | the arguments of `compile`, as the user gave them |
| `Model.compiled_loss.build`, its `_user_losses`, `compiled_metrics.build`, `_conform_to_outputs` | 2; 2.15, tf_keras 2.15-2.21 | metrics exist before the first step |
| `Trainer._compile_metrics`, its `_user_metrics`, `_user_weighted_metrics` | 3; 3.10-3.15 | metrics of an earlier `compile` stay |
| `backend.tensorflow.trainer.potentially_ragged_concat`, `engine.training.` | 3 / 2 | how `predict` joins batches whose outputs differ in shape |
| `utils.tracking.TrackedList`, `TrackedDict`, `TrackedSet` | 3 | configurations hold some, and they cannot be pickled |
| `Trainer._flatten_metrics_in_order`, `engine.training.flatten_metrics_in_order` | 3 / 2 | the order in which `evaluate` returns metrics |
| `Model.compiled_metrics._output_names`, `_metrics`, `_weighted_metrics`, `Metric._name` | 2 | see `metric_names_as_compiled` |
| `Lambda._serialize_function_to_config` | 2; 2.15, tf_keras 2.15-2.21 | writes a function's byte code, without the globals that it refers to |
| `Metric._metrics` | 3; 3.10-3.15 | the metrics in a metric |
| `MeanMetricWrapper._fn_kwargs` | 2 and 3 | see `unconfigured` |
| `Model.jit_compile`, `Model._clear_losses` | 2 and 3 | see `compile_forward` |
| `IndexLookup.input_vocabulary`, `input_idf_weights`, `idf_weights`, `num_documents`, `Discretization.input_bin_boundaries`, `num_bins`, `Normalization.adapt_mean`, `adapt_variance`, `finalize_state` | 2 and 3 | what was adapted is not in the configuration |
| `Layer.build._is_default` | 2 and 3; 2.15, tf_keras 2.15-2.21, 3.10-3.15 | see `build_alone` |
| `Layer._flatten_layers` | 2 and 3 | all layers of a model, those inside of layers among them |
| `Layer._non_trainable_variables`, `_non_trainable_weights` | 3; 3.10-3.15 / 2 | what every replica updates by itself |
| `Layer._seed_generators` | 3; 3.10-3.15 | the seeds of random layers |
| `backend.common.global_state.get_global_attribute`, `set_global_attribute`, its `global_seed_generator` / `backend._SEED_GENERATOR` | 3; 3.10-3.15 / 2; 2.15, tf_keras 2.15-2.21 | see `kept_seeds` |
| `Model._is_compiled` / `Model.compiled` | 2 / 3 | whether `compile` was called |
| `Model._train_counter`, `_test_counter`, `_predict_counter` | 2 | step counts that the progress bar reads |
| `PolymorphicFunction._reduce_retracing` | TensorFlow 2.15-2.21 | an option of a step's `tf.function` |
| `Model._steps_per_execution` | 2 | steps of one execution |
| `models.functional.Functional` / `engine.functional.Functional` | 3 / 2 | the class that `Model(inputs, outputs)` makes |
| `saving.object_registration.GLOBAL_CUSTOM_NAMES` / `_GLOBAL_CUSTOM_NAMES` | 3 / 2 | see `save_as` |
| `mixed_precision.policy._global_policy` | 2; 2.15, tf_keras 2.15-2.21 | None as long as the policy follows `floatx` |
| `models.model.Model`, `models.sequential.Sequential` / `engine.training.Model`, `engine.sequential.Sequential` | 3 / 2 | Keras's own, also while the public names are nanotf's |
| `layers.core.embedding.Embedding` | 2 and 3 | same |
| `Embedding._embeddings` | 3; 3.10-3.15 | see `look_up` |
| `DistributedVariable._get` | TensorFlow 2.15-2.21 | see `variable_here` |
| `Layer._tracker`, its `locked`, `lock`, `unlock` | 3; 3.10-3.15 | see `unlocked` |
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from nanotf.compat.versions import is_keras_3, keras_module_name, require_tensorflow

_TRAINER_3 = "backend.tensorflow.trainer"
_TRAINER_2 = "engine.training"


def source_module(path: str) -> Any:
    """A module below the Keras package's `src`."""
    return importlib.import_module(f"{keras_module_name()}.src.{path}")


def model_class() -> Any:
    """Keras's `Model`, also where `tf.keras.Model` is nanotf's."""
    return source_module("models.model" if is_keras_3() else "engine.training").Model


def sequential_class() -> Any:
    """Keras's `Sequential`, also where `tf.keras.Sequential` is nanotf's."""
    return source_module("models.sequential" if is_keras_3() else "engine.sequential").Sequential


def embedding_class() -> Any:
    """Keras's `Embedding`, also where `tf.keras.layers.Embedding` is nanotf's."""
    return source_module("layers.core.embedding").Embedding


def save_as(cls: type, original: type) -> None:
    """Makes saved models name a class as they name another, if that one is registered with Keras.

    Registering it would make Keras load models of the new class from then on.
    """
    registration = source_module("saving.object_registration")
    prefix = "" if is_keras_3() else "_"
    names = getattr(registration, f"{prefix}GLOBAL_CUSTOM_NAMES")
    if original in names:
        names[cls] = names[original]


def global_policy() -> Any:
    """What `set_global_policy` takes to leave the global dtype policy as it is."""
    if is_keras_3():
        return require_tensorflow().keras.mixed_precision.global_policy()
    return source_module("mixed_precision.policy")._global_policy


def functional_class() -> type:
    """The class of a model made by `Model(inputs, outputs)`."""
    path = "models.functional" if is_keras_3() else "engine.functional"
    cls: type = source_module(path).Functional
    return cls


def untracked(value: Any) -> Any:
    """A list, dict or set in which Keras 3 tracks variables, as a plain one; None for others."""
    if not is_keras_3():
        return None
    tracking = source_module("utils.tracking")
    kinds = {tracking.TrackedList: list, tracking.TrackedDict: dict, tracking.TrackedSet: set}
    kind = kinds.get(type(value))
    return None if kind is None else kind(value)


def is_compiled(model: Any) -> bool:
    """Whether `model.compile` was called."""
    return bool(model.compiled if is_keras_3() else model._is_compiled)


def compile_arguments(model: Any) -> dict[str, Any]:
    """The arguments that `model.compile` was called with, as the user gave them.

    Keras 3 keeps the metrics of an earlier `compile` where a later one names none.
    """
    arguments = dict(model._compile_config.config)
    kept = getattr(model, "_compile_metrics", None)
    if kept is not None and not (arguments.get("metrics") or arguments.get("weighted_metrics")):
        arguments["metrics"] = kept._user_metrics
        arguments["weighted_metrics"] = kept._user_weighted_metrics
    return arguments


@contextlib.contextmanager
def functions_by_name() -> Iterator[None]:
    """Makes Keras 2's Lambda layers name their functions in their configuration."""
    if is_keras_3():
        yield
        return
    cls = require_tensorflow().keras.layers.Lambda
    stock = cls._serialize_function_to_config

    def serialize(self: Any, inputs: Any, allow_raw: bool = False) -> Any:
        if callable(inputs):
            return inputs.__name__, "function", inputs.__module__
        return stock(self, inputs, allow_raw)

    cls._serialize_function_to_config = serialize
    try:
        yield
    finally:
        cls._serialize_function_to_config = stock


def layers_below(layer: Any) -> list[Any]:
    """All layers inside of a model or layer, in a fixed order."""
    return list(layer._flatten_layers(include_self=False))


def is_keras_own(value: Any) -> bool:
    """Whether a function or class is Keras's own."""
    module = getattr(value, "__module__", None) or ""
    return module.split(".")[0] in (keras_module_name(), "keras", "tf_keras")


# Of one-dimensional outputs they return one number for the batch, as all of Keras's own do.
_MEANS_OVER_ROWS = frozenset({
    "binary_accuracy", "binary_crossentropy", "binary_focal_crossentropy", "huber", "log_cosh",
    "mean_absolute_error", "mean_absolute_percentage_error", "mean_squared_error",
    "mean_squared_logarithmic_error", "poisson",
})  # fmt: skip


def is_mean_over_rows(function: Any) -> bool:
    """Whether a loss or metric function of Keras's own is a mean over rows, whatever its inputs.

    The mean over all rows is then to be had of those of workers, without gathering the rows.
    """
    return is_keras_own(function) and getattr(function, "__name__", "") in _MEANS_OVER_ROWS


@contextlib.contextmanager
def unlocked(model: Any) -> Iterator[None]:
    """Lets a model that is built get metrics, as one can that is compiled before it is built."""
    tracker: Any = getattr(model, "_tracker", None)  # Keras 3's
    before = getattr(tracker, "locked", False)
    if before:
        tracker.unlock()
    try:
        yield
    finally:
        if before:
            tracker.lock()


def flat_layers(obj: Any) -> list[Any]:
    """A layer or model and all layers inside of it; another object alone."""
    return list(obj._flatten_layers()) if hasattr(obj, "_flatten_layers") else [obj]


def computes_in_bfloat16(obj: Any) -> bool:
    """Whether any layer of a model computes in bfloat16; False for another object."""
    return any(getattr(x, "compute_dtype", None) == "bfloat16" for x in flat_layers(obj))


@contextlib.contextmanager
def with_vocabularies(obj: Any) -> Iterator[None]:
    """Makes configurations hold the vocabulary, or the bins, that layers were adapted to."""
    changed: list[tuple[Any, str, Any]] = []

    def change(layer: Any, name: str, value: Any) -> None:
        changed.append((layer, name, getattr(layer, name)))
        setattr(layer, name, value)

    for layer in flat_layers(obj):
        if hasattr(layer, "input_vocabulary") and layer.input_vocabulary is None:
            vocabulary = layer.get_vocabulary(include_special_tokens=False)
            if len(vocabulary) > 0:
                change(layer, "input_vocabulary", list(vocabulary))
                if getattr(layer, "output_mode", None) == "tf_idf":
                    change(layer, "input_idf_weights", _idf_weights(layer, len(vocabulary)))
        if getattr(layer, "input_bin_boundaries", ()) is None and len(layer.bin_boundaries) > 0:
            change(layer, "input_bin_boundaries", [float(b) for b in layer.bin_boundaries])
            change(layer, "num_bins", None)
    try:
        yield
    finally:
        for layer, name, value in reversed(changed):
            setattr(layer, name, value)


def _idf_weights(layer: Any, words: int) -> list[float]:
    """The weights of a vocabulary's words, without those of what is not in it."""
    others = len(layer.get_vocabulary(include_special_tokens=True)) - words
    weights = layer.idf_weights.numpy()[others : others + words]
    return [float(weight) for weight in weights]


# Attributes that change what a layer does, and that its configuration in Keras 2 leaves out.
_UNCONFIGURED = {"BatchNormalization": ("synchronized", "fused")}


def adapted_state(layer: Any) -> dict[str, Any]:
    """What a layer computes with and does not write into its configuration.

    Returns:
        A dict of attribute to value, for `set_adapted_state`; a variable stands for its value.
    """
    found = {}
    for cls in type(layer).__mro__:
        for name in _UNCONFIGURED.get(cls.__name__, ()):
            value = getattr(layer, name, None)
            if value is not None:
                found[name] = value
    if hasattr(layer, "adapt_mean") and hasattr(layer, "finalize_state"):
        for name in ("adapt_mean", "adapt_variance"):
            found[name] = tf_variable(getattr(layer, name)).numpy()
    return found


def set_adapted_state(layer: Any, state: dict[str, Any]) -> None:
    """Undoes `adapted_state`, on a copy of the layer."""
    for name, value in state.items():
        if name.startswith("adapt_"):
            tf_variable(getattr(layer, name)).assign(value)
        else:
            setattr(layer, name, value)
    if "adapt_mean" in state:
        layer.finalize_state()


def build_config(layer: Any) -> Any:
    """What `build_from_config` needs to build another layer like this one.

    In Keras 2.15 a layer of which `build()` was called, and not the layer itself, does not know
    the shape any more. What inputs it asks for tells it.
    """
    config = layer.get_build_config()
    spec = getattr(layer, "input_spec", None)
    if config or not isinstance(spec, require_tensorflow().keras.layers.InputSpec):
        return config
    shape = [None] * (spec.ndim or spec.min_ndim or 0) if spec.shape is None else [*spec.shape]
    for axis, size in (spec.axes or {}).items():
        shape[axis] = size
    return {"input_shape": tuple(shape)} if shape else config


def build_alone(layer: Any, config: dict[str, Any]) -> None:
    """Builds a layer as `build_config` says another was built, but not the layers inside of it.

    Args:
        layer: a layer or model that is not built.
        config: dict, which is not empty.
    """
    # Keras's would call the layer; that of a Sequential of Keras 2 is one of its own.
    if not hasattr(layer.build, "_is_default") or isinstance(layer, sequential_class()):
        layer.build_from_config(config)
    layer.built = True  # which the user's `build` may not say


def unconfigured(metric: Any) -> dict[str, Any]:
    """Attributes that change what a metric of Keras's does, and that its configuration leaves out.

    It does the `axis` of Keras 3's `CosineSimilarity`.
    """
    options = getattr(metric, "_fn_kwargs", None) or {}
    return {"_fn_kwargs": dict(options)} if "axis" in options else {}


def callback_list_class() -> type:
    """Keras's own container of callbacks, public in both generations."""
    cls: type = require_tensorflow().keras.callbacks.CallbackList
    return cls


def tf_variable(variable: Any) -> Any:
    """The `tf.Variable` behind a variable of either generation."""
    tf = require_tensorflow()
    return variable if isinstance(variable, tf.Variable) else variable.value


def variable_here(variable: Any) -> Any:
    """The plain `tf.Variable` of this replica, or of the update that is being made.

    Unlike a distributed one it can be read row by row.
    """
    variable = tf_variable(variable)
    return variable._get() if hasattr(variable, "_get") else variable


def look_up(stock: Any) -> Any:
    """Makes a `call` for Keras 3's `Embedding` that reads rows, as Keras 2's does.

    Keras 3 reads the whole table first. TensorFlow makes a copy of it then, at each step, if
    anything has ever written single rows of it (resource variables copy on read from then on).

    Args:
        stock: function, `Embedding.call`.

    Returns:
        A function with the same results.
    """

    @functools.wraps(stock)
    def call(self: Any, inputs: Any) -> Any:
        tf = require_tensorflow()
        plain = not self.lora_enabled and self.quantization_mode is None
        if not plain or not isinstance(inputs, tf.Tensor):
            return stock(self, inputs)
        if inputs.dtype not in (tf.int32, tf.int64):
            inputs = tf.cast(inputs, tf.int32)
        # An index below 0 counts from the end.
        inputs = tf.where(inputs < 0, inputs + tf.cast(self.input_dim, inputs.dtype), inputs)
        return tf.cast(tf.gather(variable_here(self._embeddings), inputs), self.compute_dtype)

    return call


def of_variable_dtype(stock: Any) -> Any:
    """Makes an `add_loss` for Keras 3's `Embedding` that takes its regularizer's losses.

    With mixed precision they are in float16 or bfloat16, and Keras cannot add them up with others.

    Args:
        stock: function, `Embedding.add_loss`.
    """

    @functools.wraps(stock)
    def add_loss(self: Any, loss: Any) -> Any:
        return stock(self, require_tensorflow().cast(loss, self.variable_dtype))

    return add_loss


def model_variables(model: Any) -> list[Any]:
    """The variables that training changes in a model, in a fixed order.

    Returns:
        A list of `tf.Variable`: weights, the seeds of random layers, in Keras 2 the counters
        of steps. Metrics are not among them.
    """
    if is_keras_3():
        return [tf_variable(v) for v in model.variables]
    # Lookup tables are listed there, too, and variables without a shape, of layers to adapt.
    tf = require_tensorflow()
    variables = [v for v in model.variables if isinstance(v, tf.Variable)]
    # An adapted layer counts documents, and one that is given its vocabulary does not.
    counts = {id(getattr(layer, "num_documents", None)) for layer in flat_layers(model)}
    variables = [v for v in variables if v.shape.is_fully_defined() and id(v) not in counts]
    # The progress bar reads them where the number of steps is not known in advance.
    variables += [model._train_counter, model._test_counter]
    return variables


def moving_variables(model: Any) -> list[Any]:
    """The moving statistics of a model of Keras 3, among `model_variables`.

    Each worker updates its own. In Keras 2 they say so (`VariableSynchronization.ON_READ`).
    """
    if not is_keras_3():
        return []
    # By how they were made: freezing a layer does not move its weights to this list.
    made = [v for layer in model._flatten_layers() for v in layer._non_trainable_variables]
    on_read = require_tensorflow().VariableSynchronization.ON_READ  # where TensorFlow knows it
    variables = [tf_variable(variable) for variable in made if variable.dtype != "string"]
    return [variable for variable in variables if variable.synchronization != on_read]


def weights_assigned(model: Any) -> list[Any]:
    """The non-trainable weights that a user's `call` or step may assign, among `model_variables`.

    Not those that TensorFlow knows to differ between replicas (`VariableSynchronization.ON_READ`).
    """
    on_read = require_tensorflow().VariableSynchronization.ON_READ
    found = []
    for layer in flat_layers(model):
        if any(_is_users(type(layer), name) for name in ("call", "train_step")):
            own = layer._non_trainable_variables if is_keras_3() else layer._non_trainable_weights
            found += [tf_variable(v) for v in own]
    return [v for v in found if holds_numbers(v) and v.synchronization != on_read]


def _is_users(cls: type, method: str) -> bool:
    """Whether the user wrote a method of a layer, or nobody did."""
    owners = [base for base in cls.__mro__ if method in vars(base)]
    owners = [c for c in owners if not c.__module__.startswith("nanotf.")]  # a replica's own step
    return bool(owners) and not is_keras_own(owners[0])


def synchronized_variables(model: Any) -> list[Any]:
    """The moving statistics of layers that compute them from the rows of all workers."""
    layers = [v for v in flat_layers(model) if getattr(v, "synchronized", False)]
    return [tf_variable(v) for layer in layers for v in layer.non_trainable_variables]


def seed_variables(model: Any) -> list[Any]:
    """The seeds of a model's random layers, among `model_variables`.

    Keras 2 has none there: its random operations draw from seeds that are TensorFlow's own.
    """
    if not is_keras_3():
        return []
    generators = [g for layer in model._flatten_layers() for g in layer._seed_generators]
    return [tf_variable(generator.state) for generator in generators]


@contextlib.contextmanager
def kept_seeds() -> Iterator[None]:
    """After this context Keras's own generator of seeds stands where it stood before.

    In Keras 3 random operations without a seed draw from it; in Keras 2 initial weights do, if
    `set_random_seed` was called, and otherwise from Python's.
    """
    if is_keras_3():
        tracker = source_module("backend.common.global_state")
        generator = tracker.get_global_attribute("global_seed_generator")
        seeds = None if generator is None else generator.state.numpy()
        try:
            yield
        finally:
            tracker.set_global_attribute("global_seed_generator", generator)
            if generator is not None:
                generator.state.assign(seeds)
        return
    holder = source_module("backend")._SEED_GENERATOR
    generator = getattr(holder, "generator", None)
    state = None if generator is None else generator.getstate()
    try:
        yield
    finally:
        holder.generator = generator
        if generator is not None:
            generator.setstate(state)


def has_call(model: Any) -> bool:
    """Whether a model can be called; one that only has a `train_step`, as a GAN, cannot."""
    keras_model = require_tensorflow().keras.Model
    return type(model).call is not keras_model.call


def scope_of(model: Any) -> Any:
    """A context in which variables are made as the model's own, of its strategy.

    A model keeps the `tf.distribute.Strategy` that it was made under; both generations build what
    its first step needs in that one's scope, wherever `fit` is called.
    """
    return model.distribute_strategy.scope()


def trace_step(model: Any, name: str, specs: Any, strategy: Any = None) -> None:
    """Traces a step, which makes all variables that it uses, and runs nothing.

    Args:
        model: a compiled model.
        name: str, "train_step", "test_step" or "predict_step".
        specs: nested structure of `tf.TensorSpec`, what the step takes.
        strategy: the `tf.distribute.Strategy` that the model trains under, or None.
    """

    tf = require_tensorflow()

    def step(data: Any) -> Any:
        return (strategy or tf.distribute.get_strategy()).run(getattr(model, name), (data,))

    tf.function(step).get_concrete_function(specs)


def build_metrics(model: Any, specs: Any, trace: Callable[[], None] | None = None) -> None:
    """Creates the variables of metrics, which `evaluate` would at its first step.

    Args:
        model: a built and compiled model.
        specs: nested structure of `tf.TensorSpec`, of one batch as `evaluate` sees it.
        trace: function that traces the step of the user's own, or None if it is Keras's. It is
            called where the data do not tell what the step calls the model on; what metrics the
            step uses, it makes.
    """
    if not has_call(model):
        return  # all is built by its own step
    try:
        _build_compiled_metrics(model, specs)
    except Exception:
        if trace is None:
            raise
        trace()


def _build_compiled_metrics(model: Any, specs: Any) -> None:
    tf = require_tensorflow()
    if is_keras_3():
        optimizer = model.optimizer
        unbuilt = optimizer is not None and not optimizer.built
        if unbuilt:  # keeps Keras from building it, too
            optimizer.built = True
        try:
            model._symbolic_build(data_batch=specs)
        finally:
            if unbuilt:
                optimizer.built = False
    elif not model.compiled_loss.built:
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
                # F1Score and its like make their variables at the first update.
                run = tf.distribute.get_strategy().run
                update = model.compiled_metrics.update_state
                tf.function(lambda *args: run(update, args)).get_concrete_function(y, outputs)


def has_own_step(model: Any, name: str = "train_step") -> bool:
    """Whether the user wrote the model's `train_step`, or another step.

    With no loss in `compile`, it need not use Keras's container of losses. That would bring a
    metric of its own, "loss", to stand in the place of what such a step returns.
    """
    own = getattr(model, "_nanotf_own_steps", None)
    if own is not None:  # a replica, whose class has a train_step anyway
        return name in own
    return not is_keras_own(getattr(type(model), name))


def builds_optimizer_for_all(model: Any) -> bool:
    """Whether `fit` builds the model's optimizer for all trainable variables.

    So does Keras's own step. In a step of the user's own the optimizer is built for those that
    this trains; but Keras 3 does it before, if the model was made under a strategy.
    """
    return not has_own_step(model) or (is_keras_3() and model._distribute_strategy is not None)


def unused_losses(model: Any) -> set[str]:
    """The metrics of `compile`'s losses that no step has used, by name (Keras 2).

    In one process they would not be there, and what the user's own step returns under their names
    would stand. nanotf makes them before the first step, since that may use them.
    """
    container = getattr(model, "compiled_loss", None)
    if is_keras_3() or container is None or not has_own_step(model):
        return set()
    of_losses = {id(metric) for metric in container.metrics}
    # The user's own `metrics` may leave them out, and have others of the same names.
    metrics = [metric for metric in model.metrics if id(metric) in of_losses]
    called = getattr(container, "_nanotf_called", None)
    if called is None:  # in the parent, which has what the workers' have counted
        called = any(float(metric.count) > 0 for metric in metrics)
    return set() if called else {metric.name for metric in metrics}


def without_unused_losses(model: Any, results: dict[str, Any]) -> dict[str, Any]:
    """The results of a model's metrics, but for those of `unused_losses`."""
    unused = unused_losses(model)
    return {name: value for name, value in results.items() if name not in unused}


@contextlib.contextmanager
def metric_names_as_compiled(model: Any) -> Iterator[None]:
    """Gives metrics, in this context, the names that they had when `compile` got them.

    Keras 2 puts the output's name before the name of the user's metric object when it builds
    the metrics of a model with several outputs, and a worker's copy would get it twice.
    """
    renamed: list[tuple[Any, str]] = []
    built = not is_keras_3() and is_compiled(model) and model.compiled_metrics.built
    if built and len(model.compiled_metrics._output_names) > 1:
        container = model.compiled_metrics
        lists = zip(
            container._output_names, container._metrics, container._weighted_metrics, strict=True
        )
        for output, *metrics in lists:
            prefix = f"{output}_"
            for metric in require_tensorflow().nest.flatten(metrics):
                if metric is not None and metric._name.startswith(prefix):
                    renamed.append((metric, metric._name))
                    metric._name = metric._name[len(prefix) :]
    try:
        yield
    finally:
        for metric, name in renamed:
            metric._name = name


def reduces_retracing(function: Any) -> bool:
    """The argument `reduce_retracing` of a `tf.function`."""
    return bool(getattr(function, "_reduce_retracing", False))


def forget_validation_data(model: Any) -> None:
    """Drops what a `fit` that was left by an exception keeps of its `validation_data`.

    The next would be validated on them (Keras 2, and Keras 3 before 3.15).
    """
    for name in ("_eval_epoch_iterator", "_eval_data_handler"):
        if hasattr(model, name):
            delattr(model, name)


def run_limits() -> tuple[int | None, int | None]:
    """The most epochs and the most steps of an epoch that Keras 3 may run; None is no limit.

    Newer versions have both, in public: `keras.config.set_max_epochs`, `set_max_steps_per_epoch`.
    """
    config: Any = getattr(require_tensorflow().keras, "config", None)
    if not hasattr(config, "max_epochs"):
        return None, None
    return config.max_epochs(), config.max_steps_per_epoch()


def set_run_limits(epochs: int | None, steps: int | None) -> None:
    """Sets what `run_limits` returns, where this version has it."""
    config: Any = getattr(require_tensorflow().keras, "config", None)
    if hasattr(config, "max_epochs"):
        config.set_max_epochs(epochs)
        config.set_max_steps_per_epoch(steps)


def runs_several_steps(model: Any) -> bool:
    """Whether one execution of Keras 3's step function is several steps."""
    return is_keras_3() and bool(model.steps_per_execution > 1)


def steps_per_execution(model: Any) -> int:
    """How many steps one execution of a compiled model's step function is."""
    given = model.steps_per_execution if is_keras_3() else model._steps_per_execution
    return int(given.numpy() if hasattr(given, "numpy") else given)


def compile_forward(model: Any) -> None:
    """Compiles a replica's forward and backward with XLA, in place of its whole step.

    XLA knows no communication between processes. A model whose outputs carry masks, or which
    adds losses in its layers' calls, is not compiled: both would be lost. Nor are calls outside of
    steps, by which Keras builds metrics.

    Args:
        model: a model, in a worker. Without `jit_compile=True` nothing happens.
    """
    if not model.jit_compile:
        return
    tf = require_tensorflow()
    model.jit_compile = False
    stock = model.call
    lost: list[bool] = []

    @tf.function(jit_compile=True, autograph=False)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        outputs = stock(*args, **kwargs)
        graph = tf.compat.v1.get_default_graph()
        lost[:] = [
            any(getattr(o, "_keras_mask", None) is not None for o in tf.nest.flatten(outputs))
            or any(getattr(loss, "graph", None) is graph for loss in model.losses)
        ]
        return outputs

    def call(*args: Any, **kwargs: Any) -> Any:
        if True not in lost and not tf.distribute.in_cross_replica_context():
            outputs = compiled(*args, **kwargs)
            if True not in lost:
                return outputs
            model._clear_losses()
        return stock(*args, **kwargs)

    object.__setattr__(model, "call", call)


def flat_metrics(model: Any) -> list[Any]:
    """A model's metrics, in Keras 3 those inside of its container of compiled metrics, too."""
    return [m for metric in model.metrics for m in (getattr(metric, "metrics", None) or [metric])]


def metric_variables(model: Any) -> list[Any]:
    """The variables of a model's metrics, in a fixed order, for those that are built."""
    return [v for metric in model.metrics for v in variables_of_metric(metric)]


def holds_numbers(value: Any) -> bool:
    """Whether something is a `tf.Variable` of numbers, and of a known shape."""
    tf = require_tensorflow()
    is_variable = isinstance(value, tf.Variable) and value.shape.is_fully_defined()
    return is_variable and value.dtype not in (tf.string, tf.resource, tf.variant)


def variables_of_metric(metric: Any) -> list[Any]:
    """A metric's variables, in a fixed order.

    In Keras 3 also those in its attributes, and in those of the metrics in it, that are
    TensorFlow's own, which Keras does not know of.

    Returns:
        A list of `tf.Variable`.
    """
    found = [tf_variable(v) for v in metric.variables]
    if is_keras_3():
        tf = require_tensorflow()
        found += [v for v in vars(metric).values() if holds_numbers(v)]
        metric_class = tf.keras.metrics.Metric
        inside = [*metric._metrics, *getattr(metric, "metrics", [])]  # a container has the latter
        for part in inside:
            if isinstance(part, metric_class) and part is not metric:
                found += variables_of_metric(part)
    return list({id(v): v for v in found}.values())


def metric_state(model: Any) -> list[Any]:
    """What a batch hook's logs are computed from, in a fixed order.

    Returns:
        A list of `tf.Variable`: the metrics', and in Keras 2 the counters of steps, which
        TensorBoard puts next to them.
    """
    counters = [] if is_keras_3() else [model._train_counter, model._test_counter]
    return metric_variables(model) + counters


def all_logs(model: Any, logs: dict[str, Any] | None) -> dict[str, Any] | None:
    """The logs of a batch hook, from a model that holds the metrics of all workers.

    Keras's own rule for the logs of an epoch: what a step returns is replaced by the results of
    the metrics if it has their names, and otherwise left alone.

    Args:
        model: the user's model.
        logs: dict or None, what rank 0 reports.
    """
    if not logs:
        return logs
    results = without_unused_losses(model, model.get_metrics_result())
    if set(results) != set(logs):
        return logs
    return {name: _number(results[name]) for name in logs}


def _number(value: Any) -> Any:
    """A scalar tensor as Keras gives it to callbacks: as a number."""
    value = value.numpy() if hasattr(value, "numpy") else value
    return value.item() if getattr(value, "shape", None) == () else value


def metrics_in_order(model: Any, logs: dict[str, Any]) -> Any:
    """What `evaluate` returns for `logs`: a list, or the only value.

    Args:
        model: a model whose metrics are built.
        logs: dict of str to float, by the metrics' names.
    """
    if is_keras_3():
        return model._flatten_metrics_in_order(logs)
    return source_module(_TRAINER_2).flatten_metrics_in_order(logs, model.metrics_names)


def join_batches(batches: list[Any]) -> Any:
    """Joins the outputs of batches as `predict` does: ragged where their shapes differ.

    Args:
        batches: list of tensors, dense, ragged or sparse, with one row for each sample.

    Returns:
        A `numpy.ndarray`, or a ragged or sparse tensor.
    """
    trainer = source_module(_TRAINER_3 if is_keras_3() else _TRAINER_2)
    joined = trainer.potentially_ragged_concat(batches)
    return joined.numpy() if isinstance(joined, require_tensorflow().Tensor) else joined


def step_count(model: Any, method: str) -> int | None:
    """The batches of the last `evaluate` or `predict`, where Keras counts them (Keras 2).

    Args:
        model: a Keras model.
        method: "evaluate" or "predict".
    """
    if is_keras_3():
        return None
    return int(_step_counter(model, method).numpy())


def set_step_count(model: Any, method: str, steps: int | None) -> None:
    """Sets what `step_count` returns; None changes nothing."""
    if steps is not None:
        _step_counter(model, method).assign(steps)


def _step_counter(model: Any, method: str) -> Any:
    return {"evaluate": model._test_counter, "predict": model._predict_counter}[method]
