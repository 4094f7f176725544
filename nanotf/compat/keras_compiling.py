"""A compiled model of both Keras generations: its arguments of `compile`, and its step functions.

| name | generation, versions seen | why |
| --- | --- | --- |
| `Model._compile_config` | 2 and 3 | the arguments of `compile`, as the user gave them |
| `Trainer._compile_metrics`, its `_user_metrics`, `_user_weighted_metrics` | 3; 3.10-3.15 | metrics kept from an earlier `compile` |
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from nanotf.compat.chance import Chance
from nanotf.compat.generation import generation
from nanotf.compat.keras_common import has_own_step
from nanotf.compat.keras_models import model_class, overrides
from nanotf.compat.keras_runs import counting_generators
from nanotf.compat.versions import require_tensorflow


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
        model_class().make_train_function(model, force=True)  # even if the model has one
    finally:
        model.run_eagerly = False  # as before, see `makes_steps_one_by_one`
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


def counts_traces(model: Any) -> bool:
    """Returns True if random numbers depend on how often Keras has traced the model before."""
    return bool(counting_generators(model))


@contextlib.contextmanager
def before_last_trace(model: Any, name: str, specs: Any) -> Iterator[None]:
    """Sets back what `counts_traces` is about, in this context, by one trace.

    Args:
        model, name, specs: of `trace_step`.
    """
    generators = counting_generators(model)
    now = [generator._seed for generator in generators]
    trace_step(model, name, specs)  # shows how many seeds a trace takes
    for generator, seed in zip(generators, now, strict=True):
        generator._seed = 2 * seed - generator._seed  # back by as many seeds as one trace takes
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
    seeds = [(generator, generator._seed) for generator in counting_generators(owner)]
    try:
        yield
    finally:
        chance.restore()
        for generator, seed in seeds:
            generator._seed = seed
