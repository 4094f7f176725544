"""Pickles of what a job consists of: Keras objects, user code, arrays.

Functions and classes that a worker cannot import, those of `__main__` above all, travel by
value (cloudpickle). Keras objects travel as what rebuilds them in the worker, under its
strategy, since variables cannot be pickled into another process:

| object | travels as |
| --- | --- |
| model | `models.ModelRecipe`: class, configuration or constructor arguments, weights apart |
| optimizer | as a metric; its slots apart, in the state block |
| metric | class and configuration, of a user's class the attributes beside it |
| layer outside a model | class and configuration |
| loss, learning-rate schedule, initializer | class and attributes |
| tensor | its value |
| `tf.function` | the Python function and the options, wrapped again |

An object that stands in several places is one object again after loading.
"""

from __future__ import annotations
import __future__

import contextlib
import copy
import copyreg
import dataclasses
import inspect
import io
import linecache
import pathlib
import pickle
import types
from collections.abc import Iterator
from typing import Any

import cloudpickle
import numpy as np

from nanotf.compat import functions, keras_names, keras_optimizers
from nanotf.compat.generation import generation
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import ShippingError
from nanotf.region.decorators import is_tf_function
from nanotf.shipping import classes, constructors, user_modules


def rebuild_from_config(
    cls: Any, config: Any, custom_objects: dict[str, Any], attributes: dict[str, Any] | None = None
) -> Any:
    """Makes what `Pickler.from_config` has described."""
    from nanotf.shipping import models

    # Objects in a configuration are the receiver's own: another pickle may refer to them, too.
    known = {id(value): value for value in config.values() if not _is_serialized(value)}
    config = copy.deepcopy(config, known)
    with models.makers(custom_objects):
        if isinstance(config.get("inner_optimizer"), keras_optimizers.optimizer_classes()):
            made = cls(config.pop("inner_optimizer"), **config)
        else:
            made = models.maker_of(cls, custom_objects).from_config(config)
    for name, value in (attributes or {}).items():
        setattr(made, name, value)
    return made


_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, types.FunctionType)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(item) for item in value)
    return isinstance(value, _PLAIN)


def _is_serialized(value: Any) -> bool:
    """Whether a value of a configuration is not an object that stands there as it is."""
    tf = require_tensorflow()
    schedule = tf.keras.optimizers.schedules.LearningRateSchedule
    return not isinstance(value, (schedule, *keras_optimizers.optimizer_classes()))


def _completed(obj: Any, config: Any) -> Any:
    """The configuration that fits the `__init__` of a user's class without `get_config()`.

    Such a metric or optimizer can be used in a single process. Keras's configuration lacks the
    class's own arguments, and has Keras's, which the class need not take.
    """
    parameters = inspect.signature(type(obj).__init__).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    completed = {name: v for name, v in config.items() if takes_any or name in parameters}
    for parameter in parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name == "learning_rate":  # Keras 2 leaves it to each class
            completed.setdefault("learning_rate", keras_optimizers.rate_of(obj))
        kept, value = constructors.kept_value(obj, parameter.name)
        if kept:
            completed.setdefault(parameter.name, value)
    return completed


@contextlib.contextmanager
def _schedules_by_value(optimizer: Any) -> Iterator[dict[str, Any]]:
    """Lets an optimizer say its configuration though its schedule has none to say.

    A schedule needs no `get_config()` to be used in a single process.

    Args:
        optimizer: an optimizer, or None.

    Yields:
        A dict, what has to replace in the configuration what stands for such a schedule.
    """

    found: dict[str, Any] = {}
    named = []
    at = optimizer
    while at is not None:  # the inner one of a loss-scaling optimizer is asked by that
        schedule = keras_optimizers.schedule_of(at)
        cls: Any = type(schedule)
        if schedule is not None and classes.is_foreign(cls) and not classes.has_own_get_config(cls):
            if at is optimizer:
                found["learning_rate"] = schedule
            vars(schedule)["get_config"] = dict
            named.append(schedule)
        at = getattr(at, "inner_optimizer", None)
    try:
        yield found
    finally:
        for schedule in named:
            del vars(schedule)["get_config"]


def _attributes_that_differ(obj: Any, twin: Any) -> dict[str, Any]:
    theirs = vars(twin)
    return {
        name: value
        for name, value in vars(obj).items()
        if _is_plain(value)
        and name not in ("name", "_name", "built", "_built")
        and name not in keras_optimizers.own_attributes()
        # Lists of slots are empty in an optimizer that needs none of that kind.
        and (_differs(value, theirs[name]) if name in theirs else value not in ([], ()))
    }


def _differs(value: Any, other: Any) -> bool:
    if isinstance(value, types.FunctionType) and isinstance(other, types.FunctionType):
        return value.__code__ != other.__code__  # `__init__` may make one for each object
    return _is_plain(other) and bool(other != value)


def rebuild_function(python_function: Any, options: dict[str, Any]) -> Any:
    """Makes a `tf.function`, as a `Pickler` has described it."""
    return functions.for_worker(python_function, options)


def _empty_cell() -> types.CellType:
    return types.CellType()


def _fill_cell(cell: types.CellType, values: tuple[Any, ...]) -> None:
    for value in values:
        cell.cell_contents = value


def _same(value: Any) -> Any:
    return value


def _rebuild_tensor(value: Any) -> Any:
    return require_tensorflow().constant(value)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A cloudpickle that knows Keras's and TensorFlow's objects.

    Args:
        file: `io.BytesIO`.
        buffer_callback: as in `pickle.Pickler`.
    """

    def __init__(self, file: io.BytesIO, buffer_callback: Any = None) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self._tf = require_tensorflow()
        keras = self._tf.keras
        self._by_attributes = (keras.losses.Loss, keras.optimizers.schedules.LearningRateSchedule)
        self._by_config = (
            *keras_optimizers.optimizer_classes(),
            keras.metrics.Metric,
            keras.layers.Layer,
        )
        self._metric = keras.metrics.Metric

    def from_config(self, obj: Any) -> tuple[Any, ...]:
        """What `rebuild_from_config` takes to make a layer, a metric or an optimizer."""
        from nanotf.shipping import models

        custom_objects = models.custom_objects_of(obj)
        is_optimizer = isinstance(obj, keras_optimizers.optimizer_classes())
        cls = type(obj)
        with (
            models.configured_by_name(obj, custom_objects),
            _schedules_by_value(obj if is_optimizer else None) as by_value,
        ):
            config = _config_of(obj)
        own = classes.is_foreign(cls) and (is_optimizer or isinstance(obj, self._metric))
        if own and not classes.has_own_get_config(cls):
            config = _completed(obj, config)
        if is_optimizer:
            config = {**config, **by_value}
            if "inner_optimizer" in config:
                config["inner_optimizer"] = obj.inner_optimizer
        attributes: dict[str, Any] = {}
        if own:
            try:
                with keras_names.kept_random_states():
                    twin = rebuild_from_config(cls, config, custom_objects)
            except Exception as error:
                raise _not_configurable(obj, f"rebuilding it raised {error!r}") from error
            attributes = _attributes_that_differ(obj, twin)
        if isinstance(obj, self._metric):
            attributes.update(keras_names.unconfigured(obj))
        if is_optimizer:
            attributes.update(keras_optimizers.excluded_by_name(obj))
        return cls, config, custom_objects, attributes

    def reducer_override(self, obj: Any) -> Any:
        from nanotf.shipping import models

        if isinstance(obj, type):
            original = classes.original_class(obj)
            if original is not obj:  # made by `accelerate`; workers make their own
                return _same, (original,)
            return self._by_name_or_value(obj)
        # Keras's and TensorFlow's own containers, which track what they hold.
        if isinstance(obj, (list, dict, set)) and _is_tracking(type(obj)):
            if isinstance(obj, dict):
                return dict, (dict(obj.items()),)
            return (list if isinstance(obj, list) else set), (list(obj),)
        if isinstance(obj, self._tf.keras.Model):
            recipe = models.recipe_of(obj)
            return models.rebuild, (recipe,)
        plain = generation().untracked(obj)
        if plain is not None:
            return _same, (plain,)
        if isinstance(obj, self._by_config):
            return rebuild_from_config, self.from_config(obj)
        if isinstance(obj, self._by_attributes):
            # Keras 3 would pickle these through a saved model, which loses local classes.
            return copyreg.__newobj__, (type(obj),), vars(obj)  # type: ignore[attr-defined]
        if self._tf.is_tensor(obj) and hasattr(obj, "numpy") and not hasattr(obj, "assign"):
            return _rebuild_tensor, (obj.numpy(),)
        if is_tf_function(obj):
            return rebuild_function, (obj.python_function, functions.options_of(obj))
        if isinstance(obj, types.CellType):
            # Not as cloudpickle has it: functions that share a variable go on sharing it.
            return _empty_cell, (), self.contents_of_cell(obj), None, None, _fill_cell
        reduced = self._by_name_or_value(obj)
        if isinstance(obj, types.FunctionType) and isinstance(reduced, tuple):
            reduced[2][1]["__globals__"].update(_for_autograph(obj))
        return reduced

    def contents_of_cell(self, cell: types.CellType) -> tuple[Any, ...]:
        """A tuple of the value of a closure's variable, empty if it has none."""
        try:
            return (cell.cell_contents,)
        except ValueError:
            return ()

    def _function_getnewargs(self, func: types.FunctionType) -> tuple[Any, ...]:
        code, base_globals, name, defaults, _ = super()._function_getnewargs(func)
        return code, base_globals, name, defaults, func.__closure__

    def _by_name_or_value(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        is_code = isinstance(obj, (type, types.FunctionType))
        if reduced is NotImplemented and is_code and obj.__module__:
            user_modules.check_importable(obj.__module__)
        return reduced


def _for_autograph(function: types.FunctionType) -> dict[str, Any]:
    """What AutoGraph needs in the worker, next to the globals that a function refers to.

    The features that its module imports from `__future__`: it looks for them among the globals,
    to know whether annotations are to be evaluated, which may name what is not there. And the
    source of a function that was typed into a notebook.
    """
    flags = function.__code__.co_flags
    features = {name: getattr(__future__, name) for name in __future__.all_feature_names}
    found: dict[str, Any] = {n: f for n, f in features.items() if flags & f.compiler_flag}
    path = function.__code__.co_filename
    if path in linecache.cache and not pathlib.Path(path).is_file():
        found["__nanotf_source__"] = _Source(path, linecache.getlines(path))
    return found


@dataclasses.dataclass(frozen=True)
class _Source:
    """A source text without a file, known to `inspect` wherever this is unpickled."""

    path: str
    lines: list[str]

    def __reduce__(self) -> Any:
        return _remember_source, (self.path, self.lines)


def _remember_source(path: str, lines: list[str]) -> _Source:
    # Without a time of modification it is never looked for on disk.
    linecache.cache[path] = (sum(map(len, lines)), None, lines, path)
    return _Source(path, lines)


def _is_tracking(cls: type) -> bool:
    return cls.__module__.split(".")[0] in ("keras", "tf_keras", "tensorflow")


def _config_of(obj: Any) -> Any:
    try:
        return obj.get_config()
    except Exception as error:
        raise _not_configurable(obj, f"get_config() raised {error!r}") from error


def _not_configurable(obj: Any, received: str) -> ShippingError:
    return ShippingError(
        f"An object of class {type(obj).__name__} cannot be sent to the workers, which "
        f"rebuild it from its configuration. Received: {received}. "
        "Define get_config(), returning the arguments of __init__ as a dict."
    )


def dumps(obj: Any) -> bytes:
    """Pickles an object for the workers.

    Args:
        obj: anything described at the top of this module.

    Returns:
        bytes, for `loads` in a worker.

    Raises:
        ShippingError: Something in it cannot be sent; the message names it.
    """
    file = io.BytesIO()
    dump(Pickler(file), obj)
    return file.getvalue()


def dump(pickler: Pickler, obj: Any) -> None:
    """Pickles an object; raises `ShippingError` as `dumps` does."""
    try:
        pickler.dump(obj)
    except ShippingError:
        raise
    except Exception as error:
        raise ShippingError(
            "What a job refers to must be picklable to reach the workers. "
            f"Received: {_describe(obj)}, and {type(error).__name__}: {error}. "
            "Keep open files, locks, threads and the like out of models, losses, metrics and "
            "the functions that they use."
        ) from error


def _describe(obj: Any) -> str:
    return f"an object of class {type(obj).__module__}.{type(obj).__qualname__}"


def loads(data: bytes) -> Any:
    """Undoes `dumps`, in a worker."""
    return pickle.loads(data)


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Says, in a `ShippingError` raised inside, which argument of the user's it is about."""
    try:
        yield
    except ShippingError as error:
        raise ShippingError(f"{what} cannot be sent to the workers. {error}") from error
