"""Runs several training steps in one call of a graph, if no callback needs the steps between.

In this process for Keras's own `fit` (`ahead_of_loop`), and in each worker.

Keras calls its step function once per step. Each call passes through Python and starts a graph,
which takes a fifth of the time of a small model's step. Here one call runs several steps at once.
Keras's next calls then return immediately, with the result of the last of those steps.

A batch that comes whole (`streams.StreamInput`) has an extent without rows, and a graph of its own.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Protocol

import tensorflow as tf

from nanotf.compat import graphs, keras_compiling
from nanotf.compat.generation import generation
from nanotf.errors import UndividedError

MOST_STEPS = 16  # in one call
MOST_SECONDS = 0.05  # per call, so that the user sees progress and can interrupt training
FEWEST_STEPS = 4  # that must fit into MOST_SECONDS; with fewer, running ahead gains nothing
STEPS_BEFORE = 8  # measured one by one before any run ahead
# Tracing a graph of several steps takes about as long as that graph saves in this many steps.
STEPS_TO_COME = 400


class Arrivals(Protocol):
    """The kinds of the batches that come to a worker, see `shipping.data.streams.Coming`."""

    def is_whole(self, iterator: Any) -> bool | None: ...

    def pass_over(self, iterator: Any, count: int) -> None: ...


class RunAhead:
    """The step function of one model's `fit`, which may run ahead of Keras's loop.

    Attributes:
        count: int, steps of the current execution: it answers this many of Keras's calls.
        made: int, completed steps that Keras has not requested yet.
    """

    def __init__(self) -> None:
        self.count = 1
        self._seconds = float("inf")  # per step
        self._seen = 0
        self._traces: dict[bool, _Trace] = {}  # of a step, by whether its batch is whole
        self._is_ready = False
        self._result: Any = None
        self._coming: Arrivals | None = None
        self._came_whole = False  # the batch of the last step
        self._refuse: Callable[[Exception], None] | None = None
        self._kinds: set[bool] = set()  # of this `fit`'s batches: whole or not
        self.begin_epoch(None, None)

    def begin(self, coming: Arrivals | None, refuse: Callable[[Exception], None]) -> None:
        """Begins a `fit`.

        Args:
            coming: that of its data; None if no batch comes whole.
            refuse: called with the error for a batch that cannot be used.
        """
        self._coming, self._refuse = coming, refuse
        self._came_whole = False
        self._kinds.clear()

    def begin_epoch(self, left: int | None, to_come: int | None) -> None:
        """Resets the counters at the beginning of an epoch.

        Args:
            left: steps of this epoch; None if no step may run ahead.
            to_come: steps of all later epochs; None likewise.
        """
        self._left, self._to_come = left, to_come
        self._until_look: int | None = None
        self.made = 0

    def look_after(self, steps: int) -> None:
        """Makes an execution end after the next `steps` steps of this epoch."""
        self._until_look = steps

    def executes(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns a function of an iterator that runs `count` steps, fewer if the data end.

        Args:
            step: takes one batch; runs in a graph.
        """

        # As in Keras, AutoGraph converts neither this function nor Keras's own around the user's.
        @tf.function(reduce_retracing=True, autograph=False)
        def on_data(data: Any) -> Any:
            self._traces[False] = _Trace(tf.compat.v1.get_default_graph())
            with generation().around_step():
                return step(data)

        @tf.function(reduce_retracing=True, autograph=False)
        def on_whole(rows: Any) -> Any:
            self._traces[True] = _Trace(tf.compat.v1.get_default_graph())
            with generation().around_step():
                return step((rows, tf.zeros([0, 0], tf.bool)))

        @tf.function(reduce_retracing=True, autograph=False)
        def one(iterator: Any) -> Any:
            return on_data(iterator.get_next())

        @tf.function(reduce_retracing=True, autograph=False)
        def one_whole(iterator: Any) -> Any:
            return on_whole(iterator.get_next()[0])

        @tf.function(reduce_retracing=True, autograph=False)
        def left_whole(batch: Any) -> Any:
            return on_whole(batch.get_value()[0])

        @tf.function(reduce_retracing=True, autograph=False)
        def several(iterator: Any, count: Any, result: Any, may_be_whole: bool) -> Any:
            def more(made: Any, is_divided: Any, *_: Any) -> Any:
                return tf.logical_and(is_divided, made < count)

            def step_if_divided(made: Any, _: Any, __: Any, batch: Any, result: Any) -> Any:
                batch = iterator.get_next_as_optional()
                has_data = batch.has_value()
                # Other batches without an extent have no rows.
                is_divided = has_data
                if may_be_whole:
                    is_divided = tf.cond(has_data, lambda: has_extent(batch), lambda: False)
                result = tf.cond(is_divided, lambda: on_data(batch.get_value()), lambda: result)
                is_left = tf.logical_and(has_data, tf.logical_not(is_divided))
                return made + tf.cast(is_divided, tf.int32), is_divided, is_left, batch, result

            none = tf.experimental.Optional.empty(iterator.element_spec)
            start = (tf.constant(0), tf.constant(True), tf.constant(False), none, result)
            # One by one: a batch that fails must not cancel the step before it in the middle.
            made, _, is_left, batch, result = tf.while_loop(
                more, step_if_divided, start, parallel_iterations=1
            )
            return made, result, is_left, batch

        def has_extent(batch: Any) -> Any:
            return tf.shape(batch.get_value()[1])[0] > 0

        def of_kind(is_whole: bool, function: Any, given: Any) -> Any:
            if self._coming is not None and is_whole not in self._kinds:
                self._kinds.add(is_whole)
                function.get_concrete_function(given)
                traces = self._traces.values()
                if len(traces) > 1 and any(trace.has_state for trace in traces):
                    assert self._refuse is not None, "it comes with `coming`"
                    self._refuse(_state_in_two_graphs())
                    raise StopIteration
            self._came_whole = is_whole
            return function(given)

        def execute_one(iterator: Any) -> Any:
            is_whole = None if self._coming is None else self._coming.is_whole(iterator)
            if is_whole is None:  # at the end of the data, Keras's graph counts another step
                is_whole = self._came_whole
            return of_kind(is_whole, one_whole if is_whole else one, iterator)

        def execute(iterator: Any) -> Any:
            if self.count == 1:
                return execute_one(iterator)
            may_be_whole = self._coming is not None
            made, result, is_left, left = several(
                iterator, tf.constant(self.count), self._result, may_be_whole
            )
            self._is_ready = True
            self.count = int(made) + int(is_left)
            if self._coming is not None:
                self._coming.pass_over(iterator, self.count)
            if is_left:  # its last batch came whole, and needs the other graph
                return of_kind(True, left_whole, left)
            if self.count:
                self._came_whole = False
                return result
            self.count = 1  # the data have ended: Keras must get its usual exception
            return execute_one(iterator)

        return execute

    def answers(
        self, execute: Callable[[Any], Any], stops: Callable[[], bool] = lambda: False
    ) -> Callable[[Any], Any]:
        """Returns the function that Keras calls for every step.

        Args:
            execute: from `executes`.
            stops: returns True if Keras's loop ends after the next step.
        """

        def next_step(iterator: Any) -> Any:
            if self._left is not None:
                self._left -= 1
            if self._until_look is not None:
                self._until_look -= 1
            if self.made:
                self.made -= 1
                return self._result
            self.count = 1 if stops() else self._wanted()
            began = time.perf_counter()
            result = execute(iterator)
            self._seconds = (time.perf_counter() - began) / self.count
            self._seen += 1
            self.made = self.count - 1
            self._result = result
            return result

        return next_step

    def _wanted(self) -> int:
        if self._left is None or self._to_come is None:
            return 1
        if self._seen < STEPS_BEFORE:
            return 1
        fitting = int(MOST_SECONDS / self._seconds)
        if fitting < FEWEST_STEPS or not (self._is_ready or self._pays()):
            return 1
        most = self._left if self._until_look is None else min(self._left, self._until_look)
        return min(fitting, MOST_STEPS, most + 1)  # `next_step` has counted the present step

    def _pays(self) -> bool:
        """Returns True if a graph of several steps is possible and saves more than it costs."""
        assert self._left is not None and self._to_come is not None
        if self._left + self._to_come < STEPS_TO_COME or not _is_scalars(self._result):
            return False
        # Their operations have a different state in a graph of several steps.
        return False in self._traces and not self._traces[False].has_state


def ahead_of_loop(model: Any) -> Any:
    """Returns Keras's training function of a model, or one that may run ahead of Keras's loop.

    Args:
        model: a model whose `make_train_function` has just made Keras's.

    Returns:
        A function of an iterator. It runs step by step unless `callback` is among the callbacks.
    """
    stock = model.train_function
    is_divided = tf.distribute.has_strategy() or (
        model.distribute_strategy is not tf.distribute.get_strategy()
    )
    if is_divided or model.jit_compile or not keras_compiling.makes_steps_one_by_one(model):
        return stock
    ahead = RunAhead()
    execute = ahead.executes(keras_compiling.step_on_batch(model))
    answer = ahead.answers(execute, lambda: model.stop_training)

    def train_function(iterator: Any) -> Any:
        # `train_on_batch` gives a generator of one batch.
        return (answer if isinstance(iterator, tf.data.Iterator) else stock)(iterator)

    train_function._nanotf_ahead = ahead  # type: ignore[attr-defined]
    return train_function


def callback() -> Any:
    """Returns a Keras callback that lets the training function of its model run ahead."""

    def begin_epoch(self: Any, epoch: int, logs: Any = None) -> None:
        ahead = _of(self.model)
        steps, epochs = self.params["steps"], self.params["epochs"]
        if ahead is not None and steps is not None:
            ahead.begin_epoch(steps, steps * (epochs - epoch - 1))

    base = tf.keras.callbacks.Callback
    return type("LetsRunAhead", (base,), {"on_epoch_begin": begin_epoch})()


def end(model: Any) -> None:
    """Makes a model's training function run step by step again, from the next call on."""
    ahead = _of(model)
    if ahead is not None:
        ahead.begin_epoch(None, None)


def _of(model: Any) -> RunAhead | None:
    found: RunAhead | None
    found = getattr(getattr(model, "train_function", None), "_nanotf_ahead", None)
    return found


class _Trace:
    """A trace of a step.

    Args:
        graph: `tf.Graph`, complete by the time that `has_state` is read.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    @functools.cached_property
    def has_state(self) -> bool:
        """True if operations, such as random draws, have a state of their own."""
        return any(graphs.drawing(self._graph.as_graph_def()))


def _is_scalars(result: Any) -> bool:
    """Returns True if a step's result has the same shape after every step."""
    return all(tf.is_tensor(leaf) and leaf.shape == () for leaf in tf.nest.flatten(result))


def _state_in_two_graphs() -> UndividedError:
    return UndividedError(
        "If a step draws random numbers whose state is in its graph, the arrays of all its batches "
        "must have the same number of rows, or those of none. Received: batches of both kinds, for "
        "which workers need two graphs; each would begin its own random numbers. Draw with "
        "keras.random or tf.random.Generator, or leave num_processes (`-n` of `nanotf run`) out."
    )
