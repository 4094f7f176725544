"""A model on its way to the workers, with what its code holds beside it.

A loss that is annealed by a variable, a step that reads one of the script's, a loss that compares
with another model: such variables, layers and models are captured. They travel as what makes them
in the worker, once each, and their values, as the model's own, in the state block (`state`).
The same goes for variables in attributes that Keras does not know of.

Four pickles of one stream, which share what they refer to:

    what builds the model
    what was set on it later
    what compiles it: it may refer to layers and variables of the model, and finds the worker's
    which of the captured variables have values to send
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import sys
import types
from typing import Any

from nanotf.compat import keras_names, keras_optimizers
from nanotf.compat.generation import generation
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import ModelError
from nanotf.shipping import attributes, classes, models, objects, pickling, programs, user_modules

# The parts that a model has not, before it is compiled.
_UNCOMPILED = ("compiled", "metrics", "optimizers")


def _is_root(value: Any) -> bool:
    keras = require_tensorflow().keras
    if isinstance(value, keras.metrics.Metric):  # layers, in Keras 2
        return False
    if isinstance(value, keras.layers.Layer) or attributes.is_variable(value):
        return True
    return isinstance(value, generation().seed_generator_classes())


@dataclasses.dataclass(frozen=True)
class _CapturedModel:
    """A model that is called, and not trained, by another's code."""

    recipe: models.ModelRecipe

    def make(self) -> Any:
        return models.rebuild(self.recipe)


@dataclasses.dataclass(frozen=True)
class _CapturedLayer:
    """Same, of a layer."""

    parts: tuple[Any, ...]
    built: models.BuiltState

    def make(self) -> Any:
        layer = pickling.rebuild_from_config(*self.parts)
        self.built.put(layer)
        return layer


class _Pickler(pickling.Pickler):
    """Writes captured objects as numbers, and what makes them at their first place.

    Args:
        file: `io.BytesIO`.
        model: the model.

    Attributes:
        roots: list of the captured objects.
        weights: set of int, the ids of the model's own variables: while what makes them is
            written, they are not captured, but copied.
        parts: dict of int to tuple, the places of the model's parts by id, once it is made.
        modules: `user_modules.ModulesByValue`.
    """

    def __init__(self, file: io.BytesIO, model: Any) -> None:
        super().__init__(file)
        self.roots: list[Any] = []
        self.parts: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        self.modules = user_modules.ModulesByValue()
        self._seen: set[str] = set()
        optimizers = models.all_optimizers(model)
        inside = [*classes.with_layers(model), *optimizers]
        for optimizer in optimizers:  # built by their own ways
            inside += keras_optimizers.optimizer_variables(optimizer)
        self._inside = {id(part): part for part in inside}
        self.weights = {id(v) for v in objects.own_variables(model)}
        self.weights |= {id(v) for v in generation().model_variables(model)}

    def persistent_id(self, obj: Any) -> Any:
        known = self._numbers.get(id(obj))
        if known is not None:
            return "root", known, None
        if id(obj) in self.parts:
            return "part", self.parts[id(obj)], None
        if id(obj) in self._inside or id(obj) in self.weights or not _is_root(obj):
            return None
        number = self._numbers[id(obj)] = len(self.roots)
        self.roots.append(obj)
        return "root", number, self._maker(obj)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType)):
            self._take_module(obj)
        return super().reducer_override(obj)

    def _take_module(self, obj: Any) -> None:
        """Makes a module whose globals are variables travel by value."""
        module = sys.modules.get(obj.__module__ or "")
        if module is None or module.__name__ in self._seen or not classes.is_foreign(obj):
            return
        self._seen.add(module.__name__)
        if any(map(attributes.is_variable, _globals(module))):
            self.modules.take(module)

    def _maker(self, obj: Any) -> Any:
        keras = require_tensorflow().keras
        if isinstance(obj, keras.Model):
            recipe = dataclasses.replace(models.recipe_of(obj), compiled=None, excluded=())
            return _CapturedModel(models.checked(obj, recipe))
        if isinstance(obj, keras.layers.Layer):
            return _CapturedLayer(self.from_config(obj), models.BuiltState.of(obj))
        return programs.recipe_of_root(obj)


def dump(model: Any, recipe: models.ModelRecipe) -> tuple[bytes, list[Any]]:
    """Pickles a model's recipe, with what its code has captured.

    Args:
        model: a built model.
        recipe: its recipe.

    Returns:
        A tuple of bytes, for `Loaded`, and the captured `tf.Variable`s that have values to send.

    Raises:
        ShippingError, ModelError: Something in it cannot be sent.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, model)
    try:
        captured = _dump(pickler, model, recipe)
    finally:
        pickler.modules.release()
    return file.getvalue(), captured


def _dump(pickler: _Pickler, model: Any, recipe: models.ModelRecipe) -> list[Any]:
    early = dataclasses.replace(recipe, changed=(), compiled=None)
    pickling.dump(pickler, early)
    pickler.weights = set()  # one that was set later, of which Keras makes a weight, is captured
    pickling.dump(pickler, recipe.changed)
    found = [(p, v) for p, v in objects.parts_of(model).items() if p[0] not in _UNCOMPILED]
    pickler.parts = {id(model): None, **{id(part): place for place, part in found}}
    pickling.dump(pickler, recipe.compiled)
    own = {id(variable) for variable in generation().model_variables(model)}
    places: list[tuple[int, int]] = []
    variables: dict[int, Any] = {}
    for number, root in enumerate(pickler.roots):
        for place, variable in enumerate(_variables_of(root)):
            if id(variable) not in own and id(variable) not in variables:
                variables[id(variable)] = variable
                places.append((number, place))
    held = []
    for place in recipe.held:
        variable = keras_names.tf_variable(attributes.at(model, place))
        if id(variable) not in own and id(variable) not in variables:
            variables[id(variable)] = variable
            held.append(place)
    pickling.dump(pickler, (places, held))
    return list(variables.values())


def _globals(module: types.ModuleType) -> list[Any]:
    return list(vars(module).values())


def _variables_of(root: Any) -> list[Any]:
    if isinstance(root, require_tensorflow().keras.Model):
        return generation().model_variables(root)
    return objects.variables_of(root)


class Loaded:
    """What `dump` has written, in a worker.

    Args:
        data: bytes.

    Attributes:
        recipe: `models.ModelRecipe`, without what `compile` needs.
    """

    def __init__(self, data: bytes) -> None:
        self._unpickler = _Unpickler(io.BytesIO(data))
        self.recipe: models.ModelRecipe = self._unpickler.load()

    def compile(self, model: Any) -> None:
        """Compiles the model that was built of `recipe`, as the original is."""
        self._unpickler.model = model
        changed = self._unpickler.load()
        models.set_attributes(model, changed)
        compiled = self._unpickler.load()
        self.recipe = dataclasses.replace(self.recipe, changed=changed, compiled=compiled)
        self._places, self._held = self._unpickler.load()
        models.compile_as(model, self.recipe)

    def captured(self, model: Any) -> list[Any]:
        """The captured variables, in the order of the parent.

        Args:
            model: the model that was compiled.

        Returns:
            A list of `tf.Variable`.

        Raises:
            ModelError: A captured layer is not what it is in the parent's process.
        """
        roots = self._unpickler.roots
        try:
            found = [_variables_of(roots[number])[place] for number, place in self._places]
        except IndexError as error:
            kinds = sorted({type(roots[number]).__name__ for number, _ in self._places})
            raise ModelError(
                "What a loss or a step holds beside the model must have, in a worker, the "
                f"variables of the original. Received: one of {kinds}, which has fewer there. Make "
                "it a model whose layers have an Input, or a layer with a complete get_config()."
            ) from error
        found += [keras_names.tf_variable(attributes.at(model, place)) for place in self._held]
        return found


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.roots: dict[int, Any] = {}
        self.model: Any = None

    def persistent_load(self, pid: Any) -> Any:
        kind, key, maker = pid
        if kind == "part":
            return self.model if key is None else objects.parts_of(self.model)[key]
        if key not in self.roots:
            self.roots[key] = maker.make()
        return self.roots[key]
