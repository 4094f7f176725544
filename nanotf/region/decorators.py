"""Decorators for the steps of a custom training loop.

A step is the user's plain function, called unchanged. In a worker's `@nano` function, its begin
and end are recorded.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

from nanotf.compat import functions, keras_layers
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import InvalidArgumentTypeError
from nanotf.machine import processor
from nanotf.region import context, recording


def is_tf_function(value: Any) -> bool:
    """Returns True if `tf.function` made the value."""
    # By its class: mocks, SQLAlchemy's `func` and the like have every attribute that one asks for.
    return isinstance(value, require_tensorflow().types.experimental.GenericFunction)


class Step:
    """A step of a `@nano` function, made by `nano_multiprocessing`.

    Attribute look-ups fall back to the decorated function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        python = getattr(function, "python_function", function)
        functools.update_wrapper(self, python)
        del vars(self)["__wrapped__"]  # AutoGraph would call `__wrapped__` instead
        with contextlib.suppress(ValueError, TypeError):  # raised for a function written in C
            # `inspect` takes an object with `__get__` for such a function; `tf.function` uses it.
            self.__signature__ = inspect.signature(python)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if context.current is not None:
            return context.current.run_step(self, self.function, args, kwargs)
        value = self.function(*args, **kwargs)
        if recording.is_on() and require_tensorflow().executing_eagerly():
            recording.note_call(getattr(self, "__name__", "a step"), value)
        return value

    def __get__(self, owner: Any, cls: type | None = None) -> Any:
        return self if owner is None else types.MethodType(self, owner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "function":  # a copy without its attributes yet
            raise AttributeError(name)
        return getattr(self.function, name)

    def __reduce__(self) -> Any:
        return Step, (self.function,)


def nano_multiprocessing(function: Callable[..., Any] | None = None) -> Any:
    """Marks a training or test step of a `@nano` function.

    The step computes the same as in one process. Each worker runs all of it, except that calls of
    Keras layers and models compute only the worker's part of the batch's rows. The mark lets
    reports show how long steps take and errors name the step that raised them. After steps, nanotf
    checks that all workers return the same.

    Args:
        function: a function, a method or a `tf.function`. None for `@nano_multiprocessing()`, which
            means the same as without parentheses.

    Returns:
        A callable with the same arguments. Outside `@nano` it only calls the function. Without
        `function`, this decorator.

    Raises:
        InvalidArgumentTypeError: `function` is not callable.

    Example:
        >>> @nano_multiprocessing
        ... @tf.function
        ... def train_step(x, y, model, loss_object, optimizer):
        ...     with tf.GradientTape() as tape:
        ...         loss = loss_object(y, model(x, training=True))
        ...     gradients = tape.gradient(loss, model.trainable_variables)
        ...     optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        ...     return loss
    """
    if function is None:
        return nano_multiprocessing
    if not callable(function):
        raise InvalidArgumentTypeError(
            "@nano_multiprocessing decorates a function. Received: an object of class "
            f"{type(function).__qualname__}. Write it without arguments."
        )
    return Step(function)


class _Loss:
    """A loss made from a plain function of rows; see `nano_multiprocessing_loss`.

    Args:
        function: of targets and predictions.
        options: arguments of `tf.function`; if empty, it is not used.
    """

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        functools.update_wrapper(self, function)
        del vars(self)["__wrapped__"]  # AutoGraph would call `__wrapped__` instead
        self.compiled = function
        if options:
            python = getattr(function, "python_function", function)
            self.compiled = require_tensorflow().function(python, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tf = require_tensorflow()
        values = tf.convert_to_tensor(self.compiled(*args, **kwargs))
        return values if values.shape.rank == 0 else tf.reduce_mean(values)


def nano_multiprocessing_loss(function: Callable[..., Any] | None = None, /, **kwargs: Any) -> Any:
    """Turns a plain function of targets and predictions into a loss for a step.

    The loss is the scalar that the function returns, or the mean of a tensor that it returns.

    Args:
        function: callable, if the decorator is written without parentheses.
        **kwargs: arguments of `tf.function`, such as `jit_compile`. With any, the function runs as
            a `tf.function`; without, it runs as it is.

    Returns:
        The loss, or, without `function`, a decorator that makes one.

    Raises:
        InvalidArgumentTypeError: The decorated object is not callable, or `tf.function` does not
            take the arguments.

    Example:
        >>> @nano_multiprocessing_loss()
        ... def loss_object(y_true, y_pred):
        ...     return tf.reduce_mean(tf.abs(y_true - y_pred), axis=-1)
    """

    def decorate(function: Callable[..., Any]) -> Any:
        if not callable(function):
            raise InvalidArgumentTypeError(
                "@nano_multiprocessing_loss() decorates a function of targets and predictions. "
                f"Received: an object of class {type(function).__qualname__}."
            )
        try:
            return _Loss(function, kwargs)
        except TypeError as error:
            raise InvalidArgumentTypeError(
                "nano_multiprocessing_loss() takes the arguments of tf.function. Received: "
                f"{', '.join(f'{name}={value!r}' for name, value in kwargs.items())}. TensorFlow "
                f"reports: {str(error).rstrip('.')}. Omit arguments that it does not take."
            ) from error

    return decorate if function is None else decorate(function)


def whole(layer: Any) -> Any:
    """Makes a layer or model run undivided, on all rows of a batch, in every worker.

    This is correct for any layer and no faster than one process. A layer whose graph does not show
    that its rows are apart runs this way automatically, except for the layers inside it.

    Args:
        layer: `tf.keras.layers.Layer`.

    Returns:
        The layer.

    Raises:
        InvalidArgumentTypeError: `layer` is not a layer.

    Example:
        >>> attention = nanotf.whole(AttentionOverTheBatch())
    """
    return _declared(layer, keras_layers.WHOLE)


def by_rows(layer: Any) -> Any:
    """Declares that each row of a layer's outputs depends on one row of its inputs.

    For a layer that is divided only then, because its graph does not show it: one that calls Python
    code (`tf.py_function`, `tf.numpy_function`), or an operation of another library. It returns
    tensors with rows along the first axis, and is a function of its arguments and weights: it draws
    no random numbers, assigns no variables and adds no losses. Workers compare its outputs and
    gradients with those of a call on all rows, at its first call, its 2nd, 4th, 8th and so on.

    Args:
        layer: `tf.keras.layers.Layer`.

    Returns:
        The layer.

    Raises:
        InvalidArgumentTypeError: `layer` is not a layer.
        tf.errors.InvalidArgumentError: In a later call of the layer: the declaration is wrong.

    Example:
        >>> features = nanotf.by_rows(WaveletsInNumPy())
    """
    return _declared(layer, keras_layers.BY_ROWS)


def _declared(layer: Any, how: str) -> Any:
    if not isinstance(layer, require_tensorflow().keras.layers.Layer):
        raise InvalidArgumentTypeError(
            f"nanotf.{how}() takes a layer or a model. Received: an object of class "
            f"{type(layer).__qualname__}."
        )
    setattr(layer, keras_layers.DECLARED, how)
    return layer


def nano_bf16(function: Callable[..., Any] | None = None) -> Any:
    """Casts the floating tensors and arrays among a step's arguments to bfloat16.

    Args:
        function: a function, a method or a `tf.function`. None for `@nano_bf16()`, which means the
            same as without parentheses.

    Returns:
        A function with the same arguments. It passes models, optimizers and Python numbers on.
        Without `function`, this decorator.

    Raises:
        InvalidArgumentTypeError: `function` is not callable.
    """
    if function is None:
        return nano_bf16
    if not callable(function):
        raise InvalidArgumentTypeError(
            "@nano_bf16 decorates a function. Received: an object of class "
            f"{type(function).__qualname__}. Write it without arguments."
        )

    if isinstance(function, Step):
        return Step(nano_bf16(function.function))  # outermost, a step's call is still recorded
    processor.warn_of_slow_bfloat16("@nano_bf16")
    inner = getattr(function, "python_function", function)

    @functools.wraps(inner)
    def step(*args: Any, **kwargs: Any) -> Any:
        return inner(*_to_bfloat16(args), **_to_bfloat16(kwargs))

    if not is_tf_function(function):
        return step
    # The casts are part of the graph: an `input_signature` describes the arguments before them.
    in_graph: Callable[..., Any]
    in_graph = require_tensorflow().function(step, **functions.options_of(function))
    return in_graph


def _to_bfloat16(structure: Any) -> Any:
    tf = require_tensorflow()

    def cast(leaf: Any) -> Any:
        is_data = tf.is_tensor(leaf) or hasattr(leaf, "__array_interface__")  # NumPy's numbers, too
        if not is_data or isinstance(leaf, tf.Variable):
            return leaf
        dtype = getattr(leaf.dtype, "name", "")
        return tf.cast(leaf, tf.bfloat16) if dtype in _CAST else leaf

    return tf.nest.map_structure(cast, structure)


_CAST = ("float16", "float32", "float64")
