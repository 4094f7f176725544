"""`smp.step`: a training step, run once for each microbatch.

The step calls the graph of the user's function once for each microbatch; each call waits for the
results of the one before it. So the activations of only one microbatch exist at a time, and
variables that the function assigns (moving averages, metrics) see the microbatches in order. The
function is traced once.

Called eagerly, the step is one graph. A graph returns its results once all its operations with side
effects have run, so all gradients of all microbatches exist at once. In another `tf.function`, such
as the one in which the optimizer applies the gradients, the step is a part of that graph: gradients
are added up, and variables updated, while earlier layers still compute theirs.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.compat import checkpointing, graphs, keras_optimizers, replacements, step_errors
from nanotf.compat.keras_common import tf_variable
from nanotf.compat.replacements import KERAS_2, KERAS_3, Override
from nanotf.compat.versions import is_keras_3
from nanotf.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    ModelError,
    UnavailableError,
)
from nanotf.sagemaker.smp import exchange, partitioned, pipeline, replicas, runtime, step_seeds
from nanotf.sagemaker.smp.shares import Shares
from nanotf.sagemaker.smp.slicing import Slicing
from nanotf.sagemaker.smp.step_output import StepOutput
from nanotf.tracebacks import raising_at_the_call

_OF_BODY = ("autograph", "experimental_autograph_options")  # options for the user's code alone


@raising_at_the_call
def step(
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: Iterable[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    **options: Any,
) -> Any:
    """Makes a function run once for each microbatch of its batch.

    Each tensor among the arguments, also in lists, tuples, sets and dicts, is split into
    `microbatches` equal parts. An object with a method `smp_slice(num_mb, mb, axis)` splits itself.
    Apply, clip and reduce gradients outside, after `StepOutput.accumulate`.

    Args:
        function: the function; None if the decorator is written with arguments.
        non_split_inputs: iterable of str, default empty, arguments that are not split.
        input_split_axes: mapping of an argument's name to the axis to split; the default is 0.
        **options: the arguments of `tf.function`.

    Returns:
        A function that returns the structure that `function` returns, of `StepOutput`s.

    Raises:
        InvalidArgumentError: An argument is named that the function does not have; or, in a call,
            a batch is not divisible by the number of microbatches.

    Example:
        >>> @smp.step
        ... def get_gradients(x, y):
        ...     with tf.GradientTape() as tape:
        ...         loss = loss_object(y, model(x, training=True))
        ...     return tape.gradient(loss, model.trainable_variables), loss
    """
    if function is None:
        return functools.partial(
            step, non_split_inputs=non_split_inputs, input_split_axes=input_split_axes, **options
        )
    if not callable(function):
        raise InvalidArgumentTypeError(
            f"@smp.step decorates a function. Received: {function!r}. Pass options by name."
        )
    if isinstance(non_split_inputs, str):
        raise InvalidArgumentTypeError(
            "non_split_inputs must be a list of names. Received: "
            f"non_split_inputs={non_split_inputs!r}. Write [{non_split_inputs!r}]."
        )
    signature = inspect.signature(function)
    slicing = Slicing(signature, frozenset(non_split_inputs), dict(input_split_axes or {}))
    slicing.check()
    made = PartitionedStep(function, slicing, options)

    @raising_at_the_call
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return made(*args, **kwargs)

    # `PartitionedStep` converts the function itself, and nothing of nanotf's.
    return tf.autograph.experimental.do_not_convert(call)


class PartitionedStep:
    """A decorated function.

    Args:
        function: the user's.
        slicing: splits the function's arguments.
        options: arguments of `tf.function`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        slicing: Slicing | Shares,
        options: dict[str, Any],
    ) -> None:
        self._function, self._slicing, self._options = function, slicing, options
        self._of_graph = {n: value for n, value in options.items() if n not in _OF_BODY}
        self._config: Any = None  # of the call of `init` for which the graphs were made
        self._graphs: dict[Any, Any] = {}  # by what the models train: `_key`
        # Those that the function has called.
        self._models: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._config is not runtime.current():  # a later `init` makes another one, even if equal
            self._config = runtime.current()
            self._graphs.clear()
            self._models.clear()
        made = self._graphs.get(self._key()) or self._make()
        # With options of its own, such as jit_compile, it stays a function.
        inlined = not tf.executing_eagerly() and not self._of_graph
        if inlined:
            args, kwargs = tf.nest.map_structure(_argument, (args, kwargs))
        parts = (made.python_function if inlined else made)(*args, **kwargs)
        # The first call has made the variables.
        self._graphs[self._key()] = made
        flat = tf.nest.flatten(parts)  # empty: no gradients where there are no variables
        if flat and all(part is None for part in flat):
            raise ModelError(
                "A step's function must return a tensor that depends on the model's output. "
                f"Received: {self._function.__name__} returns None."
            )
        return tf.nest.map_structure(_output, *parts)

    def _check_options(self) -> None:
        if self._options.get("jit_compile") and runtime.is_rank():
            raise UnavailableError(
                "XLA cannot compile a step of several ranks: messages between them are code of "
                f"Python. Received: jit_compile={self._options['jit_compile']!r} with "
                f"{runtime.size()} ranks. Leave it out, or give it to a tf.function that the "
                "model's call uses."
            )

    def _key(self) -> Any:
        """Returns what the models train, which a trace is made for."""
        return tuple(
            (id(model), *map(id, partitioned.all_trainable(model))) for model in self._models
        )

    def _make(self) -> Any:
        self._check_options()
        if runtime.is_rank():
            replacements.install(step_errors.TABLE, None)  # an error then ends it with its reason
        replacements.install(TABLE, None)
        function = self._function
        # With several partitions, the body runs in threads that stop where it calls the model
        # (`bodies`), so AutoGraph converts it without a graph of its own.
        if self._options.get("autograph", True):
            features = self._options.get("experimental_autograph_options")
            function = graphs.converted(function, features)
        body = self._allowed(function)
        traces = _BodyTraces(body) if runtime.mp_size() == 1 else None

        def microbatches(*batch: Any, **named: Any) -> list[Any]:
            parts = self._slicing.split(batch, named, runtime.num_microbatches())
            results = pipeline.run(body, parts) if traces is None else _one_by_one(traces, parts)
            models = list(self._models)  # in the order of their calls, on all copies
            replicas.average_states(models, self._written(models))
            # While the step is traced: the models are built, and nothing has computed yet.
            with tf.init_scope():
                replicas.equalize(models)
                runtime.run_hooks()
            return results

        # `tf.function` matches arguments, and an input_signature, by it.
        microbatches.__signature__ = self._slicing.signature  # type: ignore[attr-defined]
        return tf.function(microbatches, autograph=False, **self._of_graph)

    def _written(self, models: Sequence[Any]) -> Callable[[Any], bool]:
        """Returns a function that tells the variables that this step's trace writes."""
        handles = graphs.written_resources(tf.compat.v1.get_default_graph())
        if runtime.mp_size() > 1:  # a call of a stage does not tell which it only reads
            known = [partitioned.of(model) for model in models]
            handles = set().union(*(each.written for each in known if each is not None))
        return lambda variable: id(variable.handle) in handles

    def _allowed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the user's function, in which models may be called."""

        @functools.wraps(self._function)
        def body(*args: Any, **kwargs: Any) -> Any:
            with runtime.allowed(self._models):
                return function(*args, **kwargs)

        return body


class _BodyTraces:
    """The traces of a step's function: one for all microbatches, or for each if it draws."""

    def __init__(self, body: Callable[..., Any]) -> None:
        self._body = body
        self._functions: list[Any] = []
        self._draws = False

    def of(self, microbatch: int) -> Any:
        """Returns the `tf.function` of a microbatch; all before it have been called."""
        if microbatch > 0 and not self._draws:  # known since the first one was traced
            return self._functions[0]
        while len(self._functions) <= microbatch:
            traced = functools.partial(self._trace, len(self._functions))
            self._functions.append(
                tf.function(functools.wraps(self._body)(traced), autograph=False)
            )
        return self._functions[microbatch]

    def _trace(self, microbatch: int, /, *args: Any, **kwargs: Any) -> Any:
        seeds = step_seeds.SeedStream(microbatch, runtime.dp_rank())
        seeds.continues_in(tf.compat.v1.get_default_graph())
        with step_seeds.drawing_from(seeds):
            results = self._body(*args, **kwargs)
        self._draws = self._draws or seeds.has_drawn
        return results


def _one_by_one(traces: _BodyTraces, parts: Sequence[Any]) -> list[Any]:
    """Calls a step's function for each microbatch, once the one before has ended."""
    line, results = exchange.Line(), []
    for microbatch, part in enumerate(parts):
        args, kwargs = line.copies(part)
        with line.following():
            results.append(traces.of(microbatch)(*args, **kwargs))
        line.ends_with(results[-1])
    return results


def _applying_none(stock: Any, _: Any) -> Any:
    @functools.wraps(stock)
    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)  # it may be an iterator
        if _is_part() and all(gradient is None for gradient, _ in pairs):
            pairs = []  # Keras raises if there are none at all; other partitions have some
        if pairs or not is_keras_3():  # Keras 3 unpacks `zip(*pairs)`, which fails without pairs
            stock(self, pairs, *args, **kwargs)
        # The optimizers of other partitions count this step.
        if not pairs and _is_part():
            keras_optimizers.step_without_gradients(self)
        return self.iterations

    return apply_gradients


def _is_part() -> bool:
    return runtime.is_used() and runtime.mp_size() > 1


def _getting(stock: Any, _: Any) -> Any:
    def get_gradients(self: Any, loss: Any, params: Sequence[Any]) -> list[Any]:
        """Returns what `smp.gradients` does, for scripts written for Keras's older optimizers."""
        return gradients(loss, params)

    return get_gradients


_OPTIMIZERS = (
    ("base_optimizer:BaseOptimizer", KERAS_3),
    ("optimizer:_BaseOptimizer", KERAS_2),
)
TABLE = (
    *(
        Override(
            f"keras.src.optimizers.{place}.get_gradients",
            "scripts written for smp get their gradients by it",
            _getting,
            versions,
            adds=True,
        )
        for place, versions in _OPTIMIZERS
    ),
    checkpointing.asking_optimizers(
        partitioned.check_optimizer, "a rank has the slots of one partition"
    ),
    *step_seeds.TABLE,
    *step_errors.CLASSES,
    *(
        Override(
            f"keras.src.optimizers.{place}.apply_gradients",
            "the variables of a partition may all be frozen, or no loss may depend on them",
            _applying_none,
            versions,
        )
        # Keras 2's subclass looks for gradients first.
        for place, versions in (_OPTIMIZERS[0], ("optimizer:Optimizer", KERAS_2))
    ),
)


def _argument(leaf: Any) -> Any:
    """Converts arrays and numbers of NumPy, as a `tf.function` does with those that it gets."""
    is_array = isinstance(leaf, (np.ndarray, np.number, np.bool_))
    return tf.convert_to_tensor(leaf) if is_array else leaf


def _output(*parts: Any) -> StepOutput | None:
    return None if parts[0] is None else StepOutput(parts)


def gradients(loss: Any, variables: Sequence[Any]) -> list[Any]:
    """Returns the gradients of a loss, in a step without a `tf.GradientTape`.

    For scripts that call get_gradients of an optimizer, which Keras 3 does not have.

    Args:
        loss: tensor, computed in this step.
        variables: sequence of variables, of either generation of Keras.

    Returns:
        list of tensors; None for a variable that the loss does not depend on.

    Raises:
        InvalidArgumentError: The call is not in a function decorated by `smp.step`.
    """
    if tf.executing_eagerly() or runtime.calling.get() is None:
        raise InvalidArgumentError(
            "smp.gradients is called in a function decorated by smp.step. Received: a call "
            "outside one. Use a tf.GradientTape there."
        )
    found: list[Any] = tf.gradients(loss, [tf_variable(variable) for variable in variables])
    return found
