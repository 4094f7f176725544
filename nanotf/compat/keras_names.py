"""Private names of both Keras generations, behind one interface.

| name | generation, versions seen | why |
| --- | --- | --- |
| `Model._compile_config` | 2 and 3 | the arguments of `compile`, as the user gave them |
| `Trainer._compile_metrics`, its `_user_metrics`, `_user_weighted_metrics` | 3; 3.10-3.15 | metrics kept from an earlier `compile` |
| `backend.tensorflow.trainer.potentially_ragged_concat`, `engine.training.` | 3 / 2 | how `predict` joins batches whose outputs differ in shape |
| `Layer._metrics` | 2 and 3 | see `all_variables` |
| `Layer._flatten_layers` | 2 and 3 | all layers of a model, including layers inside layers |
| `models.functional.Functional` / `engine.functional.Functional` | 3 / 2 | the class that `Model(inputs, outputs)` makes |
| `models.model.Model`, `models.sequential.Sequential` / `engine.training.Model`, `engine.sequential.Sequential` | 3 / 2 | Keras's own classes, even while the public names are nanotf's |
| `layers.core.embedding.Embedding` | 2 and 3 | as above |
| `Embedding._embeddings` | 3; 3.10-3.15 | see `look_up` |
| `DistributedVariable._get` | TensorFlow 2.14-2.21 | see `variable_here` |
| `_keras_call_info_injected`, an attribute of exceptions | 2 and 3 | Keras adds the arguments of a call to other exceptions, in a new exception |
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from nanotf.compat import eager_context
from nanotf.compat.chance import Chance
from nanotf.compat.generation import generation
from nanotf.compat.keras_common import OF_LOOPS
from nanotf.compat.keras_common import (
    flat_layers as flat_layers,
)
from nanotf.compat.keras_common import (
    has_own_step as has_own_step,
)
from nanotf.compat.keras_common import (
    holds_numbers as holds_numbers,
)
from nanotf.compat.keras_common import (
    is_keras_own as is_keras_own,
)
from nanotf.compat.keras_common import (
    source_module as source_module,
)
from nanotf.compat.keras_common import (
    tf_variable as tf_variable,
)
from nanotf.compat.keras_common import (
    tf_variables as tf_variables,
)
from nanotf.compat.versions import require_tensorflow


def model_class() -> Any:
    """Returns Keras's `Model`, even while `tf.keras.Model` is nanotf's."""
    return source_module(generation().MODEL).Model


def keras_method(model: Any, name: str) -> Any:
    """Returns Keras's own method of a model, bound, even if the user's class overrides it."""
    return types.MethodType(getattr(model_class(), name), model)


def is_overridden(cls: type, name: str) -> bool:
    """Returns True if a class, or one that it derives from, replaces a method of Keras's models.

    nanotf's own classes only add to the methods of `fit`, `evaluate` and `predict`.
    """
    ours = __name__.partition(".")[0]
    owners = (base for base in cls.__mro__ if name in vars(base))
    owner = next(base for base in owners if base.__module__.partition(".")[0] != ours)
    return not is_keras_own(owner)


def overrides(model: Any, name: str) -> bool:
    """Returns True if the user replaced a method of Keras's, in a class or in the model itself."""
    return name in vars(model) or is_overridden(type(model), name)


def sequential_class() -> Any:
    """Returns Keras's `Sequential`, even while `tf.keras.Sequential` is nanotf's."""
    return source_module(generation().SEQUENTIAL).Sequential


def embedding_class() -> Any:
    """Returns Keras's `Embedding`, even while `tf.keras.layers.Embedding` is nanotf's."""
    return source_module("layers.core.embedding").Embedding


def save_as(cls: type, original: type) -> None:
    """Makes saved models name a class like another, if that one is registered with Keras.

    Registering the class instead would make Keras load models as the new class from then on.
    """
    names = getattr(source_module("saving.object_registration"), generation().CUSTOM_NAMES)
    if original in names:
        names[cls] = names[original]


def functional_class() -> type:
    """Returns the class of models that `Model(inputs, outputs)` makes."""
    cls: type = source_module(generation().FUNCTIONAL).Functional
    return cls


def make_functional(cls: Any) -> None:
    """Makes a model class functional, as its first model made from inputs and outputs would.

    Keras would put its `Functional` into the bases of every class in between, including nanotf's
    `Model`. That would affect all later subclasses.
    """
    if issubclass(cls, functional_class()):
        return
    bases = []
    for base in cls.__bases__:
        if base is model_class():
            base = functional_class()
        elif "_nanotf_functional" in vars(base):
            base = base._nanotf_functional
        elif issubclass(base, model_class()):
            make_functional(base)
        bases.append(base)
    cls.__bases__ = tuple(bases)


def compilation(model: Any) -> Any:
    """Returns an object that each call of `compile` replaces, None if not compiled."""
    return getattr(model, "_compile_config", None)


def compile_arguments(model: Any) -> dict[str, Any]:
    """Returns the arguments of `model.compile` as the user gave them.

    Keras 3 keeps the metrics of an earlier `compile` if a later one names none.
    """
    arguments = dict(compilation(model).config)
    kept = getattr(model, "_compile_metrics", None)
    if kept is not None and not (arguments.get("metrics") or arguments.get("weighted_metrics")):
        arguments["metrics"] = kept._user_metrics
        arguments["weighted_metrics"] = kept._user_weighted_metrics
    return arguments


@functools.cache
def own_attributes() -> frozenset[str]:
    """Returns the names of attributes that Keras itself sets on layers and models."""
    found: frozenset[str] = eager_context.made_outside(_own_attributes)
    return found


def _own_attributes() -> frozenset[str]:
    tf = require_tensorflow()

    class Plain(model_class()):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return x

    model = Plain(name="nanotf")
    model.compile(tf.keras.optimizers.SGD(name="nanotf"), "mse", metrics=["mse"], run_eagerly=True)
    model.build((None, 1))
    for name in ("train", "test", "predict"):
        getattr(model, f"make_{name}_function")()
    given = tf.keras.Input((1,), name="nanotf")
    # Keras 3 before 3.13 refuses a model that computes nothing. A layer's call would be noted by a
    # proof that runs now.
    computed = tf.keras.ops.negative(given) if hasattr(tf.keras, "ops") else given
    functional = functional_class()(given, computed, name="nanotf")
    start = tf.keras.layers.InputLayer((1,), name="nanotf")
    sequential = sequential_class()([start], name="nanotf")
    bare = (tf.keras.layers.Layer(name="nanotf"), model, functional, sequential)
    return frozenset(OF_LOOPS).union(*map(vars, bare))


def users_attributes(layer: Any) -> dict[str, Any]:
    """Returns the attributes of a layer or model that are neither Keras's nor nanotf's."""
    theirs = own_attributes()
    return {n: v for n, v in vars(layer).items() if n not in theirs and n[:7] != "_nanotf"}


_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.ndarray, np.generic)


def plain_attributes(model: Any) -> tuple[dict[str, Any], ...]:
    """Returns the user's attributes that are numbers, texts or arrays, of each of its layers."""
    return tuple(
        {n: value for n, value in users_attributes(layer).items() if isinstance(value, _PLAIN)}
        for layer in flat_layers(model)
    )


def set_plain_attributes(model: Any, values: Sequence[dict[str, Any]]) -> None:
    """Sets what `plain_attributes` returned for a model of the same layers."""
    for layer, found in zip(flat_layers(model), values, strict=False):
        for name, value in found.items():
            setattr(layer, name, value)


def all_variables(layer: Any) -> list[Any]:
    """Returns the `tf.Variable`s of a layer and of the metrics in it and in layers inside it."""
    found = tf_variables(layer)
    for inner in flat_layers(layer):
        for metric in getattr(inner, "_metrics", ()):
            found += generation().variables_of_metric(metric)
    return list({id(variable): variable for variable in found}.values())


def layers_below(layer: Any) -> list[Any]:
    """Returns all layers inside a model or layer, in a fixed order."""
    return list(layer._flatten_layers(include_self=False))


def computes_in_bfloat16(obj: Any) -> bool:
    """Returns True if any layer of a model computes in bfloat16; False for other objects."""
    return any(getattr(x, "compute_dtype", None) == "bfloat16" for x in flat_layers(obj))


AS_IT_IS = "_keras_call_info_injected"  # attribute of exceptions that Keras leaves alone
DECLARED = "_nanotf_declared"  # attribute of a layer: WHOLE or BY_ROWS
WHOLE, BY_ROWS = "whole", "by_rows"


def callback_list_class() -> Any:
    """Returns Keras's own callback container, public in both generations."""
    cls: type = require_tensorflow().keras.callbacks.CallbackList
    return cls


def variable_here(variable: Any) -> Any:
    """Returns the plain `tf.Variable` of this replica or of the running update.

    Unlike a distributed variable, it can be read row by row.
    """
    variable = tf_variable(variable)
    return variable._get() if hasattr(variable, "_get") else variable


def look_up(stock: Any) -> Any:
    """Makes a `call` for Keras 3's `Embedding` that reads only the rows, as Keras 2's does.

    Keras 3 first reads the whole table. Once anything has written single rows of it, TensorFlow
    copies it at each such read (resource variables copy on read from then on).

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
    """Makes an `add_loss` for Keras 3's `Embedding` that casts its regularizer's losses.

    With mixed precision they are float16 or bfloat16, and Keras cannot add them to other losses.

    Args:
        stock: function, `Embedding.add_loss`.
    """

    @functools.wraps(stock)
    def add_loss(self: Any, loss: Any) -> Any:
        return stock(self, require_tensorflow().cast(loss, self.variable_dtype))

    return add_loss


def has_call(model: Any) -> bool:
    """Returns True if a model has a `call`. A GAN with only a `train_step` has none."""
    keras_model = require_tensorflow().keras.Model
    return type(model).call is not keras_model.call


def scope_of(model: Any) -> Any:
    """Returns the scope of a model's strategy, to make variables like the model's own.

    A model keeps the `tf.distribute.Strategy` that it was made under. Wherever `fit` is called,
    both generations build what the first step needs in the scope of that strategy.
    """
    return model.distribute_strategy.scope()


def trace_step(model: Any, name: str, specs: Any, strategy: Any = None) -> Any:
    """Traces a step, which makes all variables that it uses, without running it.

    Args:
        model: a compiled model.
        name: str, "train_step", "test_step" or "predict_step".
        specs: nested structure of `tf.TensorSpec`, the step's argument.
        strategy: the `tf.distribute.Strategy` that the model trains under, or None.

    Returns:
        The `tf.Graph` of the step.
    """

    tf = require_tensorflow()

    def step(data: Any) -> Any:
        return (strategy or tf.distribute.get_strategy()).run(getattr(model, name), (data,))

    return tf.function(step).get_concrete_function(specs).graph


def build_metrics(model: Any, specs: Any, trace: Callable[[], None] | None = None) -> None:
    """Creates the variables of metrics, which `evaluate` would at its first step.

    Args:
        model: a built and compiled model.
        specs: nested structure of `tf.TensorSpec`, of one batch as `evaluate` sees it.
        trace: function that traces the user's own step, or None if the step is Keras's. It is
            called if the data do not show the model's inputs in that step. Tracing makes the
            metrics that the step uses.
    """
    if not has_call(model):
        return  # its own step builds everything
    with kept_random_states(model):  # one process would make them while it trains
        try:
            generation().build_compiled_metrics(model, specs)
        except Exception:
            if trace is None:
                raise
            trace()


def build_metrics_for(model: Any, step: str, specs: Any) -> None:
    """Creates the variables of metrics that the first step in a single process would create.

    Args:
        model: a built and compiled model.
        step: str, "train_step" or "test_step".
        specs: nested structure of `tf.TensorSpec`, the step's argument.
    """
    if not has_own_step(model, step):
        build_metrics(model, specs)
        return
    trace = functools.partial(trace_step, model, step, specs)
    # A step that runs eagerly may read values, which a trace lacks.
    is_traced = has_call(model) and not model.run_eagerly
    if is_traced and generation().step_builds_losses(model):
        with kept_random_states(model):
            trace()
    build_metrics(model, specs, trace)  # those that the step does not use


def builds_optimizer_for_all(model: Any) -> bool:
    """Returns True if `fit` builds the model's optimizer for all trainable variables.

    Keras's own step does. A user's own step builds it for the variables that the step trains,
    except that Keras 3 builds it earlier, for all, if the model was made under a strategy.
    """
    return not has_own_step(model) or generation().builds_optimizer_first(model)


def without_unused_losses(model: Any, results: dict[str, Any]) -> dict[str, Any]:
    """Returns metric results without those of `Generation.unused_losses`."""
    unused = generation().unused_losses(model)
    return {name: value for name, value in results.items() if name not in unused}


def makes_steps_one_by_one(model: Any) -> bool:
    """Returns True if no user code runs between Keras's loop and a step in a graph."""
    own = overrides(model, "make_train_function")
    return not (own or model.run_eagerly) and bool(generation().makes_one_step(model))


def step_on_batch(model: Any) -> Callable[[Any], Any]:
    """Returns Keras's training step as a function of one batch, not yet in a graph.

    For a model that runs eagerly, `make_train_function` makes a function of any Python iterator.
    """
    model.run_eagerly = True
    try:
        model_class().make_train_function(model, force=True)
    finally:
        model.run_eagerly = False
    step, model.train_function = model.train_function, None
    return lambda batch: step(iter([batch]))


def step_function(model: Any, step: str) -> Any:
    """Returns the function that Keras runs for each batch, made now if there is none yet.

    Args:
        model: a Keras model.
        step: str, "train", "test" or "predict".
    """
    getattr(model, f"make_{step}_function")()
    return getattr(model, f"{step}_function")


def is_validated(model: Any, epoch: int | None, validation_freq: Any) -> bool:
    """Returns True if `fit` evaluates the model after an epoch, counted from 0."""
    return bool(model._should_eval(epoch, validation_freq))


def validate(model: Any, data: Any, batch_size: Any, steps: Any, callbacks: Any) -> Any:
    """Calls a model's own `evaluate` as Keras's `fit` calls it at the end of an epoch.

    Args:
        model: a Keras model.
        data: tuple of x, y and sample weights, of `validation_data`.
        batch_size: int or None.
        steps: int or None, `validation_steps`.
        callbacks: a `CallbackList`.

    Returns:
        What `evaluate` returns, a dict of str to float.
    """
    x, y, sample_weight = data
    given = {"x": x, "y": y, "sample_weight": sample_weight, "batch_size": batch_size}
    generation().keep_validation_data(model, given, steps)
    return model.evaluate(
        **given, steps=steps, callbacks=callbacks, return_dict=True, _use_cached_eval_dataset=True
    )


def forget_validation_data(model: Any) -> None:
    """Drops the `validation_data` that a `fit` kept when it ended by an exception.

    The next `fit` would validate on them (Keras 2, and Keras 3 before 3.15).
    """
    for name in ("_eval_epoch_iterator", "_eval_data_handler"):
        if hasattr(model, name):
            delattr(model, name)


def run_limits() -> tuple[int | None, int | None]:
    """Returns Keras 3's limits on epochs and on steps per epoch; None is no limit.

    Newer versions set both publicly: `keras.config.set_max_epochs`, `set_max_steps_per_epoch`.
    """
    config: Any = getattr(require_tensorflow().keras, "config", None)
    if not hasattr(config, "max_epochs"):
        return None, None
    return config.max_epochs(), config.max_steps_per_epoch()


def set_run_limits(epochs: int | None, steps: int | None) -> None:
    """Sets what `run_limits` returns, if this version has it."""
    config: Any = getattr(require_tensorflow().keras, "config", None)
    if hasattr(config, "max_epochs"):
        config.set_max_epochs(epochs)
        config.set_max_steps_per_epoch(steps)


def metric_variables(model: Any) -> list[Any]:
    """Returns the variables of a model's built metrics, in a fixed order."""
    return [v for metric in model.metrics for v in generation().variables_of_metric(metric)]


def metric_state(model: Any) -> list[Any]:
    """Returns the variables that a batch hook's logs are computed from, in a fixed order.

    Returns:
        A list of `tf.Variable`: the metrics' variables and the step counters, which Keras 2's
        TensorBoard writes next to them.
    """
    return metric_variables(model) + generation().step_counters(model)


def all_logs(model: Any, logs: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns the logs of a batch hook, from a model that holds the metrics of all workers.

    Follows Keras's rule for the logs of an epoch: metric results replace what a step returns if
    it has their names. Otherwise the step's result is kept.

    Args:
        model: the user's model.
        logs: dict or None, from rank 0.
    """
    if not logs:
        return logs
    results = without_unused_losses(model, model.get_metrics_result())
    if set(results) != set(logs):
        return logs
    return {name: _number(results[name]) for name in logs}


def _number(value: Any) -> Any:
    """Converts a scalar tensor to a number, as Keras does for callbacks."""
    value = value.numpy() if hasattr(value, "numpy") else value
    return value.item() if getattr(value, "shape", None) == () else value


def join_batches(batches: list[Any]) -> Any:
    """Joins the outputs of batches as `predict` does: ragged where their shapes differ.

    Args:
        batches: list of tensors, dense, ragged or sparse, with one row for each sample.

    Returns:
        A `numpy.ndarray`, or a ragged or sparse tensor.
    """
    joined = source_module(generation().TRAINER).potentially_ragged_concat(batches)
    return joined.numpy() if isinstance(joined, require_tensorflow().Tensor) else joined


def step_count(model: Any, method: str) -> int | None:
    """Returns the number of batches of the last `evaluate` or `predict`, if Keras counts them.

    Args:
        model: a Keras model.
        method: "evaluate" or "predict".
    """
    counter = generation().pass_counter(model, method)
    return None if counter is None else int(counter.numpy())


def counters_of_steps(model: Any) -> list[Any]:
    """Returns the variables in which Keras counts a model's batches and its optimizer's steps."""
    # With accumulated gradients the number is computed from another, and is no variable.
    steps = getattr(getattr(model, "optimizer", None), "iterations", None)
    counted = [tf_variable(steps)] if hasattr(steps, "assign") else []
    return generation().step_counters(model) + counted


def set_step_count(model: Any, method: str, steps: int | None) -> None:
    """Sets what `step_count` returns; None changes nothing."""
    if steps is not None:
        generation().pass_counter(model, method).assign(steps)


def _counting_generators(owner: Any) -> list[Any]:
    """Returns the generators of Keras 2's layers that have a seed: each trace takes the next."""
    found = [getattr(layer, "_random_generator", None) for layer in flat_layers(owner)]
    return [each for each in found if getattr(each, "_seed", None) is not None]


def counts_traces(model: Any) -> bool:
    """Returns True if random numbers depend on how often Keras has traced the model before."""
    return bool(_counting_generators(model))


@contextlib.contextmanager
def before_last_trace(model: Any, name: str, specs: Any) -> Iterator[None]:
    """Sets back what `counts_traces` is about, in this context, by one trace.

    Args:
        model, name, specs: of `trace_step`.
    """
    generators = _counting_generators(model)
    now = [generator._seed for generator in generators]
    trace_step(model, name, specs)  # shows how many seeds a trace takes
    for generator, seed in zip(generators, now, strict=True):
        generator._seed = 2 * seed - generator._seed
    try:
        yield
    finally:
        for generator, seed in zip(generators, now, strict=True):
            generator._seed = seed


@contextlib.contextmanager
def kept_random_states(owner: Any = None) -> Iterator[None]:
    """Keeps random numbers drawn in this context from changing later ones.

    Args:
        owner: a layer or model whose own generators are kept, too; None keeps only the process's.
    """
    chance = Chance.capture()
    seeds = [(generator, generator._seed) for generator in _counting_generators(owner)]
    try:
        yield
    finally:
        chance.restore()
        for generator, seed in seeds:
            generator._seed = seed


def mask_of(value: Any) -> Any:
    """Returns the mask that Keras has put on a tensor, or None."""
    return getattr(value, "_keras_mask", None)


def set_mask(value: Any, mask: Any) -> None:
    """Puts a mask on a tensor, as Keras does."""
    value._keras_mask = mask


def lists_of_losses(layer: Any) -> list[list[Any]]:
    """Returns the lists in which a layer and the layers inside it keep `add_loss` values."""
    found = []
    for inner in flat_layers(layer):
        for name in ("_losses", "_eager_losses"):
            kept = getattr(inner, name, None)
            if isinstance(kept, list):
                found.append(kept)
    return found


@dataclasses.dataclass(frozen=True)
class Activation:
    """The operation behind a tensor of probabilities, where a loss finds logits.

    Args:
        kind: str, "Sigmoid" or "Softmax".
        is_noted: bool, whether Keras's activation has noted the logits in an attribute.
    """

    kind: str
    is_noted: bool

    def applied_to(self, logits: Any) -> Any:
        """Returns a tensor that losses treat like the one of which this was found."""
        tf = require_tensorflow()
        out = tf.sigmoid(logits) if self.kind == "Sigmoid" else tf.nn.softmax(logits)
        if self.is_noted:
            out._keras_logits = logits
        return out


def activation_behind(tensor: Any) -> Activation | None:
    """Returns the `Activation` in which Keras's losses find the logits of a tensor, if any.

    They use the attribute `_keras_logits`, else, in a graph, the input of the operation.
    """
    is_noted = hasattr(tensor, "_keras_logits")
    tf = require_tensorflow()
    kind = (
        "" if not tf.is_tensor(tensor) or tf.is_symbolic_tensor(tensor) is False else tensor.op.type
    )
    if kind in ("Sigmoid", "Softmax"):
        return Activation(kind, is_noted)
    return Activation("Softmax", True) if is_noted else None


def context_of_calls() -> Any:
    """Returns what the calls around a layer's call pass on to it, such as `training`."""
    return generation().context_of_calls()


def makes_or_limits_weights(value: Any) -> bool:
    """Returns True for an initializer, a regularizer or a constraint: no part of a call."""
    keras = require_tensorflow().keras
    kinds = (keras.initializers.Initializer, keras.regularizers.Regularizer)
    return isinstance(value, (*kinds, keras.constraints.Constraint))


def converted_as_here(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that AutoGraph converts if Keras 2 converts it where it calls it."""
    found: Callable[..., Any] = generation().converted_as_here(function)
    return found
