"""Pickles of what a job consists of: Keras objects, user code, arrays.

Functions and classes that a worker cannot import, those of `__main__` above all, travel by
value (cloudpickle). Keras objects travel as what rebuilds them in the worker, under its
strategy, since variables cannot be pickled into another process:

| object | travels as |
| --- | --- |
| model | `models.ModelRecipe`: class, configuration or constructor arguments, weights apart |
| optimizer | class and configuration; its slots apart, in the state block |
| metric, layer outside a model | class and configuration |
| loss, learning-rate schedule, initializer | class and attributes |
| tensor | its value |
| `tf.function` | the Python function, wrapped again |

An object that stands in several places is one object again after loading.
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import pickle
from collections.abc import Iterator
from typing import Any

import cloudpickle

from nanotf.compat import keras_names
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import ShippingError


def _rebuild_from_config(cls: Any, config: Any, custom_objects: dict[str, Any]) -> Any:
    tf = require_tensorflow()
    with tf.keras.utils.custom_object_scope(custom_objects):
        return cls.from_config(config)


def _rebuild_function(python_function: Any) -> Any:
    return require_tensorflow().function(python_function)


def _same(value: Any) -> Any:
    return value


def _rebuild_tensor(value: Any) -> Any:
    return require_tensorflow().constant(value)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A cloudpickle that knows Keras's and TensorFlow's objects."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self._tf = require_tensorflow()
        keras = self._tf.keras
        self._by_attributes = (keras.losses.Loss, keras.optimizers.schedules.LearningRateSchedule)
        self._by_config = (
            keras.optimizers.Optimizer,
            keras.optimizers.legacy.Optimizer
            if hasattr(getattr(keras.optimizers, "legacy", None), "Optimizer")
            else keras.optimizers.Optimizer,
            keras.metrics.Metric,
            keras.layers.Layer,
        )

    def reducer_override(self, obj: Any) -> Any:
        from nanotf.shipping import models

        if isinstance(obj, type):
            original = models.original_class(obj)
            if original is not obj:  # made by `accelerate`; workers make their own
                return _same, (original,)
            return super().reducer_override(obj)
        if isinstance(obj, self._tf.keras.Model):
            recipe = models.recipe_of(obj)
            return models.rebuild, (recipe,)
        plain = keras_names.untracked(obj)
        if plain is not None:
            return _same, (plain,)
        if isinstance(obj, self._by_config):
            return _rebuild_from_config, (
                type(obj),
                _config_of(obj),
                models.custom_objects_of(obj),
            )
        if isinstance(obj, self._by_attributes):
            # Keras 3 would pickle these through a saved model, which loses local classes.
            return copyreg.__newobj__, (type(obj),), vars(obj)  # type: ignore[attr-defined]
        if self._tf.is_tensor(obj) and hasattr(obj, "numpy") and not hasattr(obj, "assign"):
            return _rebuild_tensor, (obj.numpy(),)
        if hasattr(obj, "python_function") and hasattr(obj, "get_concrete_function"):
            return _rebuild_function, (obj.python_function,)
        return super().reducer_override(obj)


def _config_of(obj: Any) -> Any:
    try:
        return obj.get_config()
    except Exception as error:
        raise ShippingError(
            f"An object of class {type(obj).__name__} cannot be sent to the workers, which "
            f"rebuild it from its configuration. Received: get_config() raised {error!r}. "
            "Define get_config(), returning the arguments of __init__ as a dict."
        ) from error


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
    try:
        _Pickler(file).dump(obj)
    except ShippingError:
        raise
    except Exception as error:
        raise ShippingError(
            "What a job refers to must be picklable to reach the workers. "
            f"Received: {_describe(obj)}, and {type(error).__name__}: {error}. "
            "Keep open files, locks, threads and the like out of models, losses, metrics and "
            "the functions that they use."
        ) from error
    return file.getvalue()


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
