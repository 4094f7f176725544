"""A worker's model. Unlike the user's model, its steps get parts of batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from nanotf.compat import graphs, keras_common, keras_compiling, keras_metrics
from nanotf.compat.run_ahead import RunAhead
from nanotf.compat.values import write
from nanotf.region import scope
from nanotf.region.rows import Division, length_of
from nanotf.report.stopwatch import Stopwatch
from nanotf.shipping.data.inputs import specs_of_step
from nanotf.shipping.data.outputs import SCALAR
from nanotf.wire import timing

_STEPS = ("train_step", "test_step", "predict_step")


_steps: list[Any] = []  # models whose steps run or are traced now, one in another


def is_in_step() -> bool:
    """Returns True while a model's step runs or is traced."""
    return bool(_steps)


class ReplicaMixin:
    """Mixin, placed before the user's class.

    Keras calls a step with `(data, extent)`: this worker's rows of the batch, and an empty tensor
    with as many rows as the batch. The user's step gets the whole batch: tensors that join all
    workers' rows only when something reads them. If arrays of the batch differ in rows, the data
    are the whole batch and the extent has no rows; calls are then divided as in a custom loop.
    """

    stop_training: bool  # Keras's

    # All are set on the class that `become_replica` makes for each model.
    _nanotf_outputs: Any
    _nanotf_data_end: Any
    _nanotf_stopwatch: Stopwatch
    _nanotf_ahead: RunAhead
    _nanotf_compiles: bool
    _nanotf_unreset: Sequence[tuple[Any, Any]]
    _nanotf_runs_python: bool
    _nanotf_own_steps: frozenset[str]

    def train_step(self, data: Any) -> Any:
        with _calls(self):
            return super().train_step(_batch(self, data))  # type: ignore[misc]

    def test_step(self, data: Any) -> Any:
        with _calls(self):
            return super().test_step(_batch(self, data))  # type: ignore[misc]

    def predict_step(self, data: Any) -> Any:
        """Returns this worker's parts of the outputs, and their lengths: (1, outputs)."""
        with _calls(self):
            outputs = super().predict_step(_batch(self, data))  # type: ignore[misc]
        return _own_outputs(outputs, data)

    def make_train_function(self, force: bool = False) -> Any:
        """Makes Keras's function, which records its executions and may run ahead of its loop."""
        if self.train_function is not None and not force:  # type: ignore[has-type]
            return self.train_function  # type: ignore[has-type]
        ahead, stopwatch = self._nanotf_ahead, self._nanotf_stopwatch
        if keras_compiling.makes_steps_one_by_one(self):
            step = _telling_of_end(
                self, timing.TRAIN, ahead.executes(keras_compiling.step_on_batch(self))
            )
            timed = stopwatch.timed(timing.TRAIN, step, lambda: ahead.count)
            self.train_function = ahead.answers(timed, lambda: self.stop_training)
        else:
            super().make_train_function(force=force)  # type: ignore[misc]
            step = _telling_of_end(self, timing.TRAIN, self.train_function)
            self.train_function = stopwatch.timed(timing.TRAIN, step)
        return self.train_function

    def make_test_function(self, force: bool = False) -> Any:
        """Makes Keras's function, which records its executions."""
        super().make_test_function(force=force)  # type: ignore[misc]
        test_function: Any = self.test_function  # type: ignore[has-type]
        step = _telling_of_end(self, timing.TEST, test_function)
        self.test_function = self._nanotf_stopwatch.timed(timing.TEST, step)
        return self.test_function

    def make_predict_function(self, force: bool = False) -> Any:
        """Makes Keras's function; outputs go to `_nanotf_outputs`, a placeholder to Keras."""
        super().make_predict_function(force=force)  # type: ignore[misc]
        stock: Any = self.predict_function  # type: ignore[has-type]
        if not hasattr(stock, "_nanotf_takes_outputs"):
            step = _found_by_extent(stock)

            def predict_function(data: Any) -> Any:
                self._nanotf_outputs(*step(data))
                return tf.zeros([1])

            predict_function._nanotf_takes_outputs = True  # type: ignore[attr-defined]
            self.predict_function = self._nanotf_stopwatch.timed(timing.PREDICT, predict_function)
        return self.predict_function

    def reset_metrics(self) -> None:
        """Resets the metrics, the first time except those that Keras would not know yet."""
        super().reset_metrics()  # type: ignore[misc]
        for variable, value in self._nanotf_unreset:
            write(variable, value)
        type(self)._nanotf_unreset = ()

    def get_metrics_result(self) -> Any:
        """Returns Keras's result without the losses that only `session` has built."""
        results = super().get_metrics_result()  # type: ignore[misc]
        return keras_compiling.without_unused_losses(self, results)

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Does nothing: `session` has built model, metrics and optimizer (Keras 3)."""


@tf.autograph.experimental.do_not_convert
@contextlib.contextmanager
def _calls(model: Any) -> Iterator[None]:
    _steps.append(model)
    try:
        with scope.compiling() if model._nanotf_compiles else contextlib.nullcontext():
            yield
    finally:
        _steps.pop()
    if not tf.executing_eagerly() and graphs.runs_python(tf.compat.v1.get_default_graph()):
        type(model)._nanotf_runs_python = True


@tf.autograph.experimental.do_not_convert
def _batch(model: Any, data: Any) -> Any:
    """Returns the whole batch; `data` holds this worker's rows of it."""
    rows, extent = data
    if scope.exchange is None or extent.shape[0] == 0:  # None: a trace that makes variables
        return rows
    division = Division.of(scope.exchange, extent)

    def joined(leaf: Any) -> Any:
        if leaf is None:
            return None
        if division.is_known:
            own_shape = tf.TensorShape([division.length]).concatenate(leaf.shape[1:])
            leaf = tf.ensure_shape(leaf, own_shape)
        return division.join(leaf)

    stamp = model._nanotf_stopwatch.stamp(extent)
    if stamp is None or tf.executing_eagerly():  # eager code runs in its own order
        return tf.nest.map_structure(joined, rows)
    with tf.control_dependencies([stamp]):  # the whole step comes after it
        rows = tf.nest.map_structure(lambda t: None if t is None else tf.identity(t), rows)
    return tf.nest.map_structure(joined, rows)


@tf.autograph.experimental.do_not_convert
def _own_outputs(outputs: Any, data: Any) -> Any:
    assert scope.exchange is not None
    division = Division.of(scope.exchange, data[1])
    own = tf.nest.map_structure(division.own_of, outputs)
    lengths = [length_of(leaf) for leaf in tf.nest.flatten(own)]
    # Keras joins the steps of one execution, which only their lengths can take apart again.
    known = [tf.cast(SCALAR if n is None else n, tf.int64) for n in lengths]
    return own, tf.reshape(known, [1, len(known)])


def _found_by_extent(step: Any) -> Any:
    """Returns a predict function whose traces are found as those of an iterator's elements are.

    Keras 3 takes the elements from the iterator before it calls the function, Keras 2 in it.
    """
    traces: dict[Any, Any] = {}

    def found(data: Any) -> Any:
        if isinstance(data, tf.data.Iterator) or not hasattr(step, "get_concrete_function"):
            return step(data)
        specs = [specs_of_step(element) for element in data]
        key = tuple(tf.nest.flatten(specs))
        if key not in traces:
            traces[key] = step.get_concrete_function(specs)
        return traces[key](data)

    return found


def _telling_of_end(model: Any, kind: str, step: Any) -> Any:
    """Returns a Keras step function that calls `_nanotf_data_end` when its data end."""
    if step is None or hasattr(step, "_nanotf_kind"):  # Keras has kept a wrapped one
        return step

    def telling(iterator: Any) -> Any:
        try:
            return step(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            if model._nanotf_data_end is not None:
                model._nanotf_data_end(kind)
            raise

    telling.__dict__.update(vars(step), _nanotf_kind=kind)
    return telling


def become_replica(model: Any, stopwatch: Stopwatch) -> RunAhead:
    """Turns a model into one whose steps take `(data, extent)`; it stays the same object.

    Args:
        model: a built model.
        stopwatch: times its steps.

    Returns:
        The part that tells its training how far it may run ahead.
    """
    cls = type(model)
    ahead = RunAhead()
    steps = [name for name in _STEPS if keras_common.has_own_step(model, name)]
    body = {
        "__module__": cls.__module__,
        "_nanotf_outputs": None,
        "_nanotf_data_end": None,
        "_nanotf_stopwatch": stopwatch,
        "_nanotf_ahead": ahead,
        "_nanotf_compiles": bool(model.jit_compile),
        "_nanotf_unreset": (),
        "_nanotf_runs_python": False,
        "_nanotf_own_steps": frozenset(steps),
    }
    model.jit_compile = False  # do not compile the whole step
    # Past the `__setattr__` of Keras and of the user's class.
    object.__setattr__(model, "__class__", type(cls.__name__, (ReplicaMixin, cls), body))
    return ahead


@contextlib.contextmanager
def at_end_of_data(model: Any, hear: Callable[[str], None]) -> Iterator[None]:
    """Calls `hear` with a step's kind, one of `timing.KINDS`, when the step's data end."""
    type(model)._nanotf_data_end = staticmethod(hear)
    try:
        yield
    finally:
        type(model)._nanotf_data_end = None


def leave_unreset(model: Any, values: Mapping[int, Any]) -> None:
    """Makes the model's first reset of its metrics leave some of their variables as they were.

    Args:
        model: a model that `become_replica` has changed.
        values: by place in `keras_metrics.metric_state`.
    """
    variables = keras_metrics.metric_state(model)
    type(model)._nanotf_unreset = [(variables[place], v) for place, v in values.items()]


@contextlib.contextmanager
def outputs_to(model: Any, take: Callable[[Any, Any], None]) -> Iterator[None]:
    """Passes the outputs and counts of every execution of `predict` in this context to `take`."""
    type(model)._nanotf_outputs = staticmethod(take)
    try:
        yield
    finally:
        type(model)._nanotf_outputs = None
