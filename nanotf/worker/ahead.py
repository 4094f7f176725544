"""Runs several training steps in one call of a graph, if no callback needs the steps between.

Keras calls its step function once per step. Each call passes through Python and starts a graph,
which takes a fifth of the time of a small model's step. Here one call runs several steps at once.
Keras's next calls then return immediately, with the result of the last of those steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from nanotf.errors import UndividedError
from nanotf.shipping.random_operations import with_state

MOST_STEPS = 16  # in one call
MOST_SECONDS = 0.05  # per call, so that the user sees progress and can interrupt training
FEWEST_STEPS = 4  # that must fit into MOST_SECONDS; with fewer, running ahead gains nothing
STEPS_BEFORE = 8  # measured one by one before any run ahead
# Tracing a graph of several steps takes about as long as that graph saves in this many steps.
STEPS_TO_COME = 400


class Ahead:
    """The step function of one model's `fit`, which may run ahead of Keras's loop.

    Attributes:
        count: int, steps of the current execution: it answers this many of Keras's calls.
        made: int, completed steps that Keras has not requested yet.
        refuse: callable of the error for a batch that cannot be used, if batches may have an extent
            without rows, see `ReplicaMixin`; otherwise None. Their steps have a graph of their own,
            and no step runs ahead.
    """

    def __init__(self) -> None:
        self.count = 1
        self.refuse: Callable[[Exception], None] | None = None
        self._seconds = float("inf")  # per step
        self._seen = 0
        self._graph: Any = None  # of a step
        self._is_ready = False
        self._result: Any = None
        self.begin_epoch(None, None)

    def begin_epoch(self, left: int | None, to_come: int | None) -> None:
        """Resets the counters at the beginning of an epoch.

        Args:
            left: int, steps of this epoch, or None if no step may run ahead.
            to_come: int, steps of all later epochs, or None likewise.
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
            step: function of one batch, run in a graph.
        """

        # As in Keras, AutoGraph converts neither this function nor Keras's own around the user's.
        @tf.function(reduce_retracing=True, autograph=False)
        def on_data(data: Any) -> Any:
            self._graph = tf.compat.v1.get_default_graph()
            return step(data)

        @tf.function(reduce_retracing=True, autograph=False)
        def one(iterator: Any) -> Any:
            return on_data(iterator.get_next())

        graphs: dict[Any, Any] = {}  # by specs, for batches that are divided and that are not

        def one_of_both(iterator: Any) -> Any:
            assert self.refuse is not None
            try:
                rows, extent = iterator.get_next()
            except tf.errors.OutOfRangeError:
                return one(iterator)  # as in Keras, whose graph also counts the step without data
            specs = iterator.element_spec
            both = graphs.setdefault(tuple(tf.nest.flatten(specs)), {})
            is_whole = extent.shape[0] == 0
            if is_whole not in both:
                given = (specs[0], tf.TensorSpec(extent.shape, tf.bool)) if is_whole else specs
                function = tf.function(step, autograph=False)
                both[is_whole] = function.get_concrete_function(given)
                definitions = [made.graph.as_graph_def() for made in both.values()]
                if len(both) > 1 and any(any(with_state(each)) for each in definitions):
                    self.refuse(_state_in_two_graphs())
                    raise StopIteration
            return both[is_whole]((rows, extent))

        @tf.function(reduce_retracing=True, autograph=False)
        def several(iterator: Any, count: Any, result: Any) -> Any:
            def more(made: Any, has_data: Any, _: Any) -> Any:
                return tf.logical_and(has_data, made < count)

            def step_if_data(made: Any, _: Any, result: Any) -> Any:
                batch = iterator.get_next_as_optional()
                has_data = batch.has_value()
                result = tf.cond(has_data, lambda: on_data(batch.get_value()), lambda: result)
                return made + tf.cast(has_data, tf.int32), has_data, result

            start = (tf.constant(0), tf.constant(True), result)
            made, _, result = tf.while_loop(more, step_if_data, start)
            return made, result

        def execute(iterator: Any) -> Any:
            if self.refuse is not None:
                return one_of_both(iterator)
            if self.count > 1:
                made, result = several(iterator, tf.constant(self.count), self._result)
                self._is_ready = True
                self.count = int(made)
                if self.count:
                    return result
                self.count = 1  # the data have ended: Keras must get its usual exception
            return one(iterator)

        return execute

    def answers(self, execute: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns the function that Keras calls for every step; `execute` is from `executes`."""

        def next_step(iterator: Any) -> Any:
            if self._left is not None:
                self._left -= 1
            if self._until_look is not None:
                self._until_look -= 1
            if self.made:
                self.made -= 1
                return self._result
            self.count = self._wanted()
            began = time.perf_counter()
            result = execute(iterator)
            self._seconds = (time.perf_counter() - began) / self.count
            self._seen += 1
            self.made = self.count - 1
            self._result = result
            return result

        return next_step

    def _wanted(self) -> int:
        if self.refuse is not None or self._left is None or self._to_come is None:
            return 1
        if self._seen < STEPS_BEFORE:
            return 1
        fitting = int(MOST_SECONDS / self._seconds)
        if fitting < FEWEST_STEPS or not (self._is_ready or self._pays()):
            return 1
        most = self._left if self._until_look is None else min(self._left, self._until_look)
        return min(fitting, MOST_STEPS, most + 1)

    def _pays(self) -> bool:
        """Returns True if a graph of several steps is possible and saves more than it costs."""
        assert self._left is not None and self._to_come is not None
        if self._left + self._to_come < STEPS_TO_COME or not _is_scalars(self._result):
            return False
        # Their operations have a different state in a graph of several steps.
        if self._graph is not None and any(with_state(self._graph.as_graph_def())):
            self._graph = None
        return self._graph is not None


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
