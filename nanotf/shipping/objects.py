"""The roots of a `@nano` call: what it refers to that has an identity.

A root is a model, a layer, an optimizer, a metric, a loss, a variable, a checkpoint, a writer of
summaries, or something that yields data. Both sides ask the same questions of their own roots, and
must get answers in the same order: which variables a root has, what is part of it, what its
optimizers are built with.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any

from nanotf.compat import keras_compiled, keras_names, keras_optimizers
from nanotf.compat.generation import generation
from nanotf.compat.versions import require_tensorflow


def is_data(value: Any) -> bool:
    """Whether something yields the batches of a loop, and is read in the parent."""
    tf = require_tensorflow()
    return isinstance(value, (tf.data.Dataset, tf.data.Iterator, types.GeneratorType))


def is_root(value: Any) -> bool:
    """Whether something has an identity that must be kept."""
    return isinstance(value, _root_classes()) or is_data(value)


@functools.cache
def _root_classes() -> tuple[type, ...]:
    tf = require_tensorflow()
    keras = tf.keras
    return (
        keras.layers.Layer,
        keras.metrics.Metric,
        keras.losses.Loss,
        tf.Variable,
        tf.train.Checkpoint,
        tf.summary.SummaryWriter,
        *keras_optimizers.optimizer_classes(),
        *generation().variable_classes(),
        *generation().seed_generator_classes(),
    )


def _is_variable(value: Any) -> bool:
    tf = require_tensorflow()
    return isinstance(value, (tf.Variable, *generation().variable_classes()))


def parts_of(root: Any) -> dict[tuple[str, int], Any]:
    """What is part of a root, by its place: alike on both sides."""
    tf = require_tensorflow()
    kinds: dict[str, Sequence[Any]] = {}
    if isinstance(root, tf.keras.layers.Layer):
        kinds["layers"] = keras_names.layers_below(root)
        if isinstance(root, tf.keras.Model):
            kinds["optimizers"] = keras_optimizers.with_inner(keras_optimizers.optimizers_of(root))
            kinds["compiled"] = keras_compiled.given_metrics(root)
            kinds["metrics"] = keras_names.flat_metrics(root)
    elif isinstance(root, keras_optimizers.optimizer_classes()):
        kinds["optimizers"] = keras_optimizers.with_inner([root])[1:]
    variables = own_variables(root)
    kinds["variables"] = variables
    kinds["values"] = [keras_names.tf_variable(v) for v in variables]
    return {
        (kind, place): part
        for kind, found in kinds.items()
        for place, part in enumerate(found)
        if part is not root
    }


def own_variables(root: Any) -> list[Any]:
    """A root's variables as its own `variables` lists them, in the order of both sides."""
    tf = require_tensorflow()
    if _is_variable(root) or is_data(root):
        return []
    if isinstance(root, tf.train.Checkpoint):
        return [root.save_counter]
    if isinstance(root, generation().seed_generator_classes()):
        return [root.state]
    try:
        found = getattr(root, "variables", [])
    except ValueError:  # Keras 2, of a model that is not built
        return []
    return [v for v in (found() if callable(found) else found) if hasattr(v, "assign")]


def variables_of(root: Any) -> list[Any]:
    """All variables whose values travel with a root.

    Returns:
        A list of `tf.Variable` in a fixed order.
    """
    tf = require_tensorflow()
    if isinstance(root, tf.keras.Model):
        try:
            return keras_optimizers.training_variables(root) + keras_names.metric_variables(root)
        except ValueError:  # Keras 2, of a model that is not built
            return []
    if isinstance(root, keras_optimizers.optimizer_classes()):
        return keras_optimizers.optimizer_variables(root)
    if _is_variable(root):
        return [keras_names.tf_variable(root)]
    if isinstance(root, tf.keras.metrics.Metric):
        own = generation().variables_of_metric(root)
    else:
        own = [keras_names.tf_variable(v) for v in own_variables(root)]
    return [v for v in own if v.shape.is_fully_defined()]


Place = tuple[int, tuple[str, int] | None]  # a root, or a part of one
VariablePlace = tuple[int, int]  # a root, and a place in its variables


def optimizers_in(roots: Sequence[Any]) -> dict[Place, Any]:
    """All optimizers among roots and their parts, each once."""
    found: dict[int, tuple[Place, Any]] = {}
    for index, root in enumerate(roots):
        if isinstance(root, keras_optimizers.optimizer_classes()):
            found.setdefault(id(root), ((index, None), root))
        elif isinstance(root, require_tensorflow().keras.Model):
            for place, part in parts_of(root).items():
                if place[0] == "optimizers":
                    found.setdefault(id(part), ((index, place), part))
    inner = {id(getattr(o, "inner_optimizer", None)) for _, o in found.values()}
    return {place: o for place, o in found.values() if id(o) not in inner}


def built_optimizers(roots: Sequence[Any]) -> dict[Place, tuple[VariablePlace, ...] | None]:
    """What the built optimizers were built with.

    Returns:
        A dict of an optimizer's place to the places of variables; None for an optimizer that
        was built with others than the roots have.
    """
    places: dict[int, VariablePlace] = {}
    for index, root in enumerate(roots):
        for place, variable in enumerate(variables_of(root)):
            places.setdefault(id(variable), (index, place))
    candidates = distinct_variables(roots)
    result: dict[Place, tuple[VariablePlace, ...] | None] = {}
    for at, optimizer in optimizers_in(roots).items():
        found = [places.get(id(v)) for v in keras_optimizers.built_with(optimizer, candidates)]
        if found:
            known = tuple(place for place in found if place is not None)
            result[at] = known if len(known) == len(found) else None
    return result


def build_optimizers(
    roots: Sequence[Any], built: Mapping[Place, tuple[VariablePlace, ...] | None]
) -> None:
    """Builds the optimizers that are not built yet as `built_optimizers` says."""
    done = built_optimizers(roots)
    optimizers = optimizers_in(roots)
    for at, places in built.items():
        if at not in done and places is not None:
            variables = [variables_of(roots[index])[place] for index, place in places]
            generation().build_for(optimizers[at], as_owned(roots, variables))


def excluded_from_decay(roots: Sequence[Any]) -> dict[Place, tuple[int, ...]]:
    """The variables that optimizers exclude from weight decay, among `distinct_variables`."""
    variables = distinct_variables(roots)
    inner = {at: keras_optimizers.with_inner([o])[-1] for at, o in optimizers_in(roots).items()}
    found = {at: keras_optimizers.excluded_places(o, variables) for at, o in inner.items()}
    return {at: places for at, places in found.items() if places}


def exclude_from_decay(roots: Sequence[Any], excluded: Mapping[Place, tuple[int, ...]]) -> None:
    """Makes the optimizers exclude variables as `excluded_from_decay` says."""
    variables, optimizers = distinct_variables(roots), optimizers_in(roots)
    for at, places in excluded.items():
        inner = keras_optimizers.with_inner([optimizers[at]])[-1]
        keras_optimizers.exclude_places(inner, variables, places)


def as_owned(roots: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """The variables of the installed Keras that hold these `tf.Variable`s."""
    owners: dict[int, Any] = {}
    for root in roots:
        own = [root] if _is_variable(root) else own_variables(root)
        owners.update({id(keras_names.tf_variable(v)): v for v in own})
    return [owners.get(id(variable), variable) for variable in variables]


def distinct_variables(roots: Sequence[Any]) -> list[Any]:
    """The variables of all roots, each once, in a fixed order."""
    found = {id(v): v for root in roots for v in variables_of(root)}
    return list(found.values())
