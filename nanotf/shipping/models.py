"""How a model is rebuilt in a worker.

Weights and optimizer slots do not travel here but through the state block (`state`), so that
the same recipe, byte for byte, describes a model before and after training. A worker that has
built it once keeps the model and its traced functions.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from nanotf.compat import keras_compiled, keras_names, keras_optimizers
from nanotf.compat.generation import generation
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import ModelError
from nanotf.shipping import classes, constructors

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments


@dataclasses.dataclass(frozen=True)
class ModelRecipe:
    """What rebuilds a model.

    Args:
        cls: type, the model's class.
        config: dict or None, what `cls.from_config` takes; None if `arguments` are used.
        arguments: tuple of positional and keyword arguments of `cls`, or None.
        attributes: dict of str to object or None, what the user's `__init__` has set, where there
            is neither of them.
        graph: dict or None, the configuration of a functional model whose inputs and outputs
            stand in `arguments` as `_Tensor`.
        custom_objects: dict of str to object, the classes and functions that the configuration
            names and Keras does not know.
        build_configs: tuple of dict or None, of the model and every layer below it, in order, the
            input shapes that it was built with.
        weights: int, how many weights the model has.
        trainable: tuple of bool, of every layer below the model, in order.
        trainable_variables: tuple of bool, of every weight of the model, in order: Keras 3 lets
            users freeze single ones.
        adapted: tuple of dict of str to object, what each of these layers keeps elsewhere than
            in its configuration; see `keras_names.adapted_state`.
        compiled: `Compiled`, or None.
        dtype_policy: the global Keras dtype policy, by name.
    """

    cls: type
    config: dict[str, Any] | None
    arguments: _Arguments | None
    attributes: dict[str, Any] | None
    graph: dict[str, Any] | None
    custom_objects: dict[str, Any]
    build_configs: tuple[dict[str, Any] | None, ...]
    weights: int
    trainable: tuple[bool, ...]
    trainable_variables: tuple[bool, ...]
    adapted: tuple[dict[str, Any], ...]
    compiled: Compiled | None
    dtype_policy: str


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """An input or output of a functional model, by its place among all of them."""

    place: int


# Layers of Keras's own that Keras 2 cannot make from their configuration (2.15, tf_keras 2.21).
_UNKNOWN_TO_KERAS_2 = ("SpectralNormalization",)


def _collect(value: Any, found: dict[str, Any], seen: dict[int, int], depth: int = 0) -> None:
    """Adds the foreign classes and functions that `value` refers to.

    A function that has no name, or the name of another, gets one of its own.
    """
    if depth > 6 or seen.get(id(value), 7) <= depth:
        return
    seen[id(value)] = depth  # what was reached by a long way is looked at again by a short one
    if isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            _collect(item, found, seen, depth + 1)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found, seen, depth + 1)
    elif inspect.isfunction(value) or isinstance(value, type):
        if _is_unknown_to_keras(value):
            name = value.__name__
            if any(value is other for other in found.values()):
                return
            if inspect.isfunction(value) and (
                name == "<lambda>" or found.get(name, value) is not value
            ):
                name = f"nanotf_function_{len(found)}"
            found[name] = value
    elif hasattr(type(value), "get_config"):  # a metric's variable itself would sum over workers
        _collect(classes.original_class(type(value)), found, seen, depth + 1)
        is_model = isinstance(value, keras_names.model_class())
        for name, item in list(vars(value).items()):
            if is_model and name in _names_of_compile():
                continue  # what it is compiled with travels as it is
            # Keras 3 wraps `build` and the like in functions that hold the layer.
            if not (inspect.isfunction(item) and hasattr(type(value), name)):
                _collect(item, found, seen, depth + 2)


def _is_unknown_to_keras(value: Any) -> bool:
    """Whether Keras in another process would not find a class or function by its name."""
    if classes.is_foreign(value):
        return bool(value.__module__ != "builtins")
    is_function = inspect.isfunction(value) and "<locals>" not in value.__qualname__
    return is_function and not keras_names.is_keras_own(value)  # TensorFlow's, as of a Lambda


def custom_objects_of(obj: Any) -> dict[str, Any]:
    """The classes and functions, by name, that rebuilding `obj` needs and Keras lacks."""
    tf = require_tensorflow()
    found: dict[str, Any] = {}
    seen: dict[int, int] = {}
    for name, value in tf.keras.utils.get_custom_objects().items():
        if name.startswith("nanotf>"):  # registered in workers, too
            continue
        found[name] = value
        found[name.split(">")[-1]] = value
    for layer in keras_names.flat_layers(obj):
        _collect(layer, found, seen)
        if not classes.is_foreign(type(layer)) and type(layer).__name__ in _UNKNOWN_TO_KERAS_2:
            found[type(layer).__name__] = type(layer)
    return found


@contextlib.contextmanager
def configured_by_name(obj: Any, custom_objects: dict[str, Any]) -> Iterator[None]:
    """Makes `get_config()` of an object name functions as `custom_objects` does.

    Keras writes the byte code of a lambda instead, without the globals that it refers to.
    """
    before = {}
    layers = [
        layer
        for layer in keras_names.flat_layers(obj)
        if isinstance(layer, require_tensorflow().keras.layers.Layer)
        and classes.is_foreign(type(layer))
        and not classes.has_own_get_config(type(layer))
        and not isinstance(layer, keras_names.model_class())
    ]
    for name, value in custom_objects.items():
        if inspect.isfunction(value) and name.startswith("nanotf_function_"):
            before[name] = value.__name__
            value.__name__ = name
    try:
        with (
            generation().functions_by_name(),
            keras_names.with_vocabularies(obj),
            constructors.by_value(layers, custom_objects),
        ):
            yield
    finally:
        for name, own_name in before.items():
            custom_objects[name].__name__ = own_name


def recipe_of(model: Any) -> ModelRecipe:
    """Describes how to rebuild a model.

    Args:
        model: a built Keras model.

    Raises:
        ModelError: The model is of a class that cannot be rebuilt; names it and the remedy.
    """
    tf = require_tensorflow()
    cls = classes.original_class(type(model))
    custom_objects = custom_objects_of(model)
    functional = keras_names.functional_class()
    arguments = getattr(model, "_nanotf_arguments", None)
    config = graph = attributes = None
    if arguments is None or not classes.is_foreign(cls) or classes.has_own_get_config(cls):
        arguments = None
        try:
            with configured_by_name(model, custom_objects):
                config = model.get_config()
        except Exception as error:
            if classes.has_own_get_config(cls) or isinstance(
                model, (functional, tf.keras.Sequential)
            ):
                raise _cannot_rebuild(cls, f"get_config() raised {error!r}") from error
            config, attributes = None, _own_attributes(model)
        if config is not None and _lacks_arguments(cls, config):
            config, attributes = None, _own_attributes(model)
    elif isinstance(model, functional):
        with configured_by_name(model, custom_objects):
            graph, arguments = _with_graph(model, arguments)
    policy = tf.keras.mixed_precision.global_policy()
    complete = not needs_call(model)  # Keras 2 may raise where it has no variables yet
    return ModelRecipe(
        cls=cls,
        config=config,
        arguments=arguments,
        attributes=attributes,
        graph=graph,
        custom_objects=custom_objects,
        build_configs=build_configs(model),
        weights=len(model.weights) if complete else 0,
        trainable=_trainable_flags(model),
        trainable_variables=_trainable_variables(model),
        adapted=tuple(
            keras_names.adapted_state(layer) for layer in (*keras_names.layers_below(model), model)
        ),
        compiled=Compiled.of(model),
        dtype_policy=policy.name,
    )


def _lacks_arguments(cls: type, config: dict[str, Any]) -> bool:
    """Whether Keras has left out the arguments of `__init__`, which it could not write down."""
    if not generation().CONFIGS_MAY_LACK_ARGUMENTS:
        return False
    if not classes.is_foreign(cls) or classes.has_own_get_config(cls):
        return False
    parameters = list(inspect.signature(cls.__init__).parameters)[1:]  # type: ignore[misc]
    own = [name for name in parameters if name not in ("args", "kwargs", "name", "dtype")]
    return bool(own) and not any(name in config for name in own)


@functools.cache
def _names_of_compile() -> frozenset[str]:
    """The attributes that hold what Keras's `compile` was given."""
    model = keras_names.sequential_class()()
    before = dict(vars(model))
    model.compile("sgd", "mse", metrics=["mse"], weighted_metrics=["mse"])
    return frozenset(
        name
        for name, value in vars(model).items()
        if name not in before or before[name] is not value
    )


@functools.cache
def names_of_keras() -> frozenset[str]:
    """The attributes that Keras itself gives every layer, and models in a program's course."""
    tf = require_tensorflow()

    class Plain(keras_names.model_class()):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return x

    model, zeros = Plain(name="nanotf"), tf.zeros([1, 1])
    optimizer = tf.keras.optimizers.SGD(name="nanotf")
    model.compile(optimizer, "mse", metrics=["mse"], run_eagerly=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has no weights to train
        model.fit(zeros, zeros, shuffle=False, verbose=0, validation_data=(zeros, zeros))
    model.predict(zeros, verbose=0)
    given = tf.keras.Input((1,), name="nanotf")
    functional = keras_names.functional_class()(given, given, name="nanotf")
    start = tf.keras.layers.InputLayer((1,), name="nanotf")
    sequential = keras_names.sequential_class()([start], name="nanotf")
    bare = (tf.keras.layers.Layer(name="nanotf"), model, functional, sequential)
    return frozenset().union(*map(vars, bare))


def _own_attributes(model: Any) -> dict[str, Any]:
    """What the user's class has set on a model: its layers above all, and what it was made with."""
    names = [name for name in vars(model) if name not in names_of_keras()]
    found = {name: getattr(model, name) for name in names if not name.startswith("_nanotf")}
    inside: dict[int, _Inside] = {}  # by id, of layers in other attributes, those that hold them
    for name, value in found.items():
        if isinstance(value, require_tensorflow().keras.layers.Layer):
            below = enumerate(keras_names.layers_below(value))
            inside.update({id(layer): _Inside(name, place) for place, layer in below})
    return {name: inside.get(id(value), value) for name, value in found.items()}


@dataclasses.dataclass(frozen=True)
class _Inside:
    """An attribute that is a layer inside of another attribute, as a cell is of its RNN.

    Args:
        name: str, that attribute.
        place: int, among the layers below it.
    """

    name: str
    place: int


def all_optimizers(model: Any) -> list[Any]:
    """The optimizers of a model, and those that they wrap."""
    return keras_optimizers.with_inner(keras_optimizers.optimizers_of(model))


def excluded_from_decay(model: Any) -> tuple[tuple[int, ...], ...]:
    """Of every optimizer of a model, the places among its variables of those without decay."""
    optimizers = all_optimizers(model)
    if not any(keras_optimizers.excludes_variables(optimizer) for optimizer in optimizers):
        return ()  # a model that is not built has no variables to ask for
    variables = generation().model_variables(model)
    return tuple(keras_optimizers.excluded_places(o, variables) for o in optimizers)


def exclude_from_decay(model: Any, excluded: tuple[tuple[int, ...], ...]) -> None:
    """Excludes variables of a rebuilt model, now built, from weight decay as in the original.

    An optimizer knows them by keys that are not the same in another process.
    """
    if excluded:
        variables = generation().model_variables(model)
        optimizers = all_optimizers(model)
        for optimizer, places in zip(optimizers, excluded, strict=False):
            keras_optimizers.exclude_places(optimizer, variables, places)


def _with_graph(model: Any, arguments: Any) -> tuple[Any, Any]:
    """Takes the graph out of arguments like `(inputs, outputs)`, whose tensors cannot travel."""
    tf = require_tensorflow()
    ends = [*model.inputs, *model.outputs]

    def place(leaf: Any) -> Any:
        return next((_Tensor(i) for i, end in enumerate(ends) if end is leaf), leaf)

    plain = keras_names.functional_class()(model.inputs, model.outputs, name="nanotf_graph")
    return plain.get_config(), tf.nest.map_structure(place, arguments)


def _trainable_flags(model: Any) -> tuple[bool, ...]:
    return tuple(bool(layer.trainable) for layer in keras_names.layers_below(model))


def _trainable_variables(model: Any) -> tuple[bool, ...]:
    frozen_apart = generation().FREEZES_SINGLE_VARIABLES
    return tuple(bool(v.trainable) for v in model.weights) if frozen_apart else ()


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What compiles a model as another was compiled.

    Args:
        arguments: dict, what Keras's `compile` was called with, without the optimizer.
        own_arguments: tuple of positional and keyword arguments, or None, what the `compile` of
            the model's own class was called with.
        optimizer: the live optimizer, or None: it travels with its current settings.
    """

    arguments: dict[str, Any]
    own_arguments: _Arguments | None
    optimizer: Any

    @classmethod
    def of(cls, model: Any) -> Compiled | None:
        """That of a model; None if it is not compiled.

        Raises:
            ModelError: The model's class has a `compile` whose arguments nobody knows.
        """
        if not generation().is_compiled(model):
            return None
        arguments = keras_names.compile_arguments(model) | generation().COMPILE_IN_WORKERS
        arguments.pop("optimizer", None)
        return cls(arguments, _own_compile_arguments(model), getattr(model, "optimizer", None))

    def put(self, model: Any) -> None:
        """Compiles a model."""
        if self.own_arguments is None:
            model.compile(optimizer=self.optimizer, **self.arguments)
            return
        args, kwargs = self.own_arguments
        with keras_names.unlocked(model):
            model.compile(*args, **kwargs)


def _own_compile_arguments(model: Any) -> _Arguments | None:
    cls = classes.original_class(type(model))
    if not classes.is_foreign(cls.compile):  # type: ignore[attr-defined]
        return None
    recorded: _Arguments | None = getattr(model, "_nanotf_compile_arguments", None)
    if recorded is not None:
        return recorded
    # It was compiled before it was accelerated: `compile` may have kept what it was given.
    parameters = inspect.signature(model.compile).parameters.values()
    named = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    missing = [name for name in named if not hasattr(model, name)]
    if missing:
        raise ModelError(
            "Workers must know the arguments of a model's own compile(). Received: class "
            f"{cls.__qualname__}, whose compile() was called before nanotf.accelerate() and did "
            f"not keep {missing}. Call compile() again, or derive the class from "
            "nanotf.keras.Model."
        )
    return (), {name: getattr(model, name) for name in named}


def _cannot_rebuild(cls: type, received: str) -> ModelError:
    return ModelError(
        f"Workers rebuild a model from its class and configuration, and class "
        f"{cls.__qualname__} does not allow it. Received: {received}. Add a get_config() that "
        "returns the arguments of __init__ as a dict (and from_config() if they are not plain "
        "values), or derive the class from nanotf.keras.Model, which remembers them."
    )


def rebuild(recipe: ModelRecipe) -> Any:
    """Makes the model that a recipe describes, with fresh weights.

    Args:
        recipe: `ModelRecipe`.

    Returns:
        A built model, compiled if the original was.

    Raises:
        ModelError: The class does not follow its own configuration.
    """
    model = build(recipe)
    compile_as(model, recipe)
    return model


def build(recipe: ModelRecipe) -> Any:
    """As `rebuild`, and leaves what `compile_as` does."""
    tf = require_tensorflow()
    if tf.keras.mixed_precision.global_policy().name != recipe.dtype_policy:
        tf.keras.mixed_precision.set_global_policy(recipe.dtype_policy)
    with makers(recipe.custom_objects):
        try:
            if recipe.arguments is not None:
                args, kwargs = classes.copied(
                    recipe.arguments
                )  # a class may empty what it is given
                if recipe.graph is not None:
                    args, kwargs = _on_graph(recipe.graph, (args, kwargs))
                model = recipe.cls(*args, **kwargs)
            elif recipe.attributes is not None:
                model = _with_attributes(recipe.cls, recipe.attributes)
            else:
                config = copy.deepcopy(recipe.config)  # Keras empties what it is given
                model = maker_of(recipe.cls, recipe.custom_objects).from_config(config)
            build_layers(model, recipe.build_configs)
            config = recipe.build_configs[0]
            if config and (not _is_built(model) or len(model.weights) < recipe.weights):
                _build_as(model, config)  # a call makes some
        except Exception as error:
            raise _cannot_rebuild(recipe.cls, f"rebuilding it raised {error!r}") from error
    layers = [*keras_names.layers_below(model), model]
    _set_layers(layers, recipe.trainable, recipe.adapted)
    return model


def _set_layers(layers: list[Any], trainable: tuple[bool, ...], adapted: tuple[Any, ...]) -> None:
    """Sets what layers' configurations do not have."""
    for layer, flag in zip(layers, trainable, strict=False):
        if bool(layer.trainable) != flag:
            layer.trainable = flag
    for layer, state in zip(layers, adapted, strict=False):
        keras_names.set_adapted_state(layer, state)


def compile_as(model: Any, recipe: ModelRecipe) -> None:
    """Compiles a model that was built of a recipe."""
    if recipe.trainable_variables:
        for variable, flag in zip(model.weights, recipe.trainable_variables, strict=False):
            if bool(variable.trainable) != flag:
                variable.trainable = flag
    if recipe.compiled is not None:
        recipe.compiled.put(model)


def is_graph(model: Any) -> bool:
    """Whether a model is inputs and outputs and nothing more, so that `with_layers` can make it."""
    if not isinstance(model, keras_names.functional_class()):
        return False
    plain = classes.original_class(type(model)) is keras_names.functional_class()
    return plain and not generation().is_compiled(model)


def with_layers(model: Any, layers: Mapping[str, Any]) -> Any:
    """A functional model with other layers, by name, in the places of its own."""
    clone = require_tensorflow().keras.models.clone_model
    return clone(model, clone_function=lambda layer: layers.get(layer.name, layer))


def _with_attributes(cls: Any, attributes: dict[str, Any]) -> Any:
    """A model as the user's `__init__` has left it; Keras tracks layers as they are set."""
    model = cls.__new__(cls)
    keras_names.model_class().__init__(model)

    def found(value: Any) -> Any:
        if not isinstance(value, _Inside):
            return value
        return keras_names.layers_below(found(attributes[value.name]))[value.place]

    for name, value in attributes.items():
        setattr(model, name, found(value))
    return model


def _on_graph(graph: dict[str, Any], arguments: Any) -> Any:
    functional = keras_names.functional_class().from_config(copy.deepcopy(graph))  # type: ignore[attr-defined]
    ends = [*functional.inputs, *functional.outputs]
    return require_tensorflow().nest.map_structure(
        lambda leaf: ends[leaf.place] if isinstance(leaf, _Tensor) else leaf, arguments
    )


class _Maker:
    """Stands for a layer's class in `custom_objects`, and makes layers of it, none refused.

    Keras's configuration has `trainable`, `dtype` and `name`; a layer of a script that is never
    saved has no need to take them in its `__init__`.

    Args:
        cls: type, a user's class of layers.
        custom_objects: dict, where the configuration finds `Arguments`.
    """

    def __init__(self, cls: Any, custom_objects: dict[str, Any]) -> None:
        self._cls, self._custom_objects = cls, custom_objects
        self.__name__ = cls.__name__

    def from_config(self, config: dict[str, Any]) -> Any:
        """Makes a layer, as the class's own `from_config` does."""
        if constructors.KEY in config:
            return self._custom_objects[config[constructors.KEY]].make(self._cls)
        parameters = inspect.signature(self._cls.__init__).parameters
        own = any("from_config" in vars(c) for c in self._cls.__mro__ if classes.is_foreign(c))
        if own or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return self._cls.from_config(config)
        made = self._cls.from_config({k: v for k, v in config.items() if k in parameters})
        made.trainable = config.get("trainable", True)
        return made


def maker_of(cls: Any, custom_objects: dict[str, Any]) -> Any:
    """What makes an object of a configuration: its class, or what stands for it."""
    layer = require_tensorflow().keras.layers.Layer
    is_users = isinstance(cls, type) and issubclass(cls, layer) and classes.is_foreign(cls)
    return _Maker(cls, custom_objects) if is_users else cls


def makers(custom_objects: dict[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """In this context Keras finds `custom_objects`, each user's class of layers as its maker."""
    scope = {name: maker_of(value, custom_objects) for name, value in custom_objects.items()}
    made: contextlib.AbstractContextManager[Any] = (
        require_tensorflow().keras.utils.custom_object_scope(scope)
    )
    return made


@dataclasses.dataclass(frozen=True)
class BuiltState:
    """What the first calls of a layer or model make of it, next to what rebuilds it as new.

    Args:
        build_configs: tuple of dict or None, see `build_configs`.
        trainable: tuple of bool, of the layer and every layer below it.
        adapted: tuple of dict, likewise; see `keras_names.adapted_state`.
        compiled: dict, what a model's compiled losses and metrics are; see `keras_compiled`.
    """

    build_configs: tuple[dict[str, Any] | None, ...]
    trainable: tuple[bool, ...]
    adapted: tuple[dict[str, Any], ...]
    compiled: keras_compiled.Built

    @classmethod
    def of(cls, layer: Any) -> BuiltState:
        """That of a layer or a model; of a model, `ModelRecipe` has the rest."""
        if isinstance(layer, require_tensorflow().keras.Model):
            return cls((), (), (), keras_compiled.built_state(layer))
        layers = classes.with_layers(layer)
        return cls(
            build_configs(layer),
            tuple(bool(each.trainable) for each in layers),
            tuple(keras_names.adapted_state(each) for each in layers),
            {},
        )

    def put(self, layer: Any) -> None:
        """Brings a layer or model that is as new there."""
        build_layers(layer, self.build_configs)
        _set_layers(classes.with_layers(layer), self.trainable, self.adapted)
        if self.compiled:
            keras_compiled.set_built_state(layer, self.compiled)


def _is_built(model: Any) -> bool:
    return bool(model.built) and all(layer.built for layer in keras_names.layers_below(model))


def build_configs(layer: Any) -> tuple[dict[str, Any] | None, ...]:
    """The input shapes that a layer or model, and those below it, were built with."""
    return tuple(
        classes.plain(keras_names.build_config(each)) if each.built else None
        for each in classes.with_layers(layer)
    )


def build_layers(model: Any, configs: tuple[dict[str, Any] | None, ...]) -> None:
    """Builds a layer or model, and the layers below it, each as that of another was built.

    So it matters neither what calls them nor of which types the inputs are: a configuration has
    shapes alone.
    """
    layers = classes.with_layers(model)
    for place, config in enumerate(configs):
        if place < len(layers) and config and not layers[place].built:
            keras_names.build_alone(layers[place], config)
            layers = classes.with_layers(model)  # those that it has made come after it


def _build_as(model: Any, config: dict[str, Any]) -> None:
    """Builds a model as another was built, by that one's `get_build_config()`."""
    shapes = config.get("input_shape")
    if shapes is None or _is_shape(shapes):  # Keras 2 cannot build from a structure of shapes
        model.build_from_config(config)
        if _is_built(model) and model.variables:
            return
    # A subclassed model's own build() leaves its layers unbuilt; calling it builds them.
    if shapes:
        generation().call_on_specs(model, _specs(shapes))


def _is_shape(shapes: Any) -> bool:
    return not isinstance(shapes, dict) and all(s is None or isinstance(s, int) for s in shapes)


def _specs(shapes: Any) -> Any:
    """A structure of `tf.TensorSpec`, of one of shapes."""
    tf = require_tensorflow()
    if isinstance(shapes, dict):
        return {name: _specs(shape) for name, shape in shapes.items()}
    if _is_shape(shapes):
        return tf.TensorSpec(shapes, tf.keras.backend.floatx())
    return type(shapes)(map(_specs, shapes))


def needs_call(model: Any) -> bool:
    """Whether a model has to be called before all its variables exist."""
    if keras_names.has_call(model):
        return not model.built or not model.variables
    # Keras 2 has no list of variables before.
    return not all(v.built for v in keras_names.layers_below(model)) or not model.variables


def check_rows_are_independent(model: Any) -> None:
    """Refuses layers that go on, in the next batch, from where each row of the last one stood.

    Raises:
        ModelError: A recurrent layer is stateful; names it and the remedy.
    """
    recurrent = require_tensorflow().keras.layers.RNN
    for layer in keras_names.flat_layers(model):
        if isinstance(layer, recurrent) and layer.stateful:
            raise ModelError(
                "A recurrent layer with stateful=True keeps a state for every row of a batch, and "
                f"workers share the rows. Received: layer {layer.name!r} with stateful=True. Leave "
                "num_processes out, or make the layer with stateful=False."
            )
