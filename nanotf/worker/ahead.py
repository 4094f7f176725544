"""Several steps of training in one call of a graph, where nobody looks between them.

Keras calls its step function once for each step. What such a call costs beside the step, going
through Python and starting a graph, is a fifth of a small model's step. Here the first of
some calls makes the steps of all, and the others return what the last of these returned.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

MOST_STEPS = 16  # in one call
MOST_SECONDS = 0.05  # of one call, so that the user can stop it, and sees how far it is
FEWEST_STEPS = 4  # in that time, for which it is worth while
STEPS_BEFORE = 8  # that show how long a step takes
# Making a graph of several steps takes as long as it saves in about so many.
STEPS_TO_COME = 400


class Ahead:
    """The step function of one model's `fit`, which may run ahead of Keras's loop.

    Attributes:
        count: int, how many of Keras's calls the execution under way answers.
        made: int, steps that were made, and that Keras has not asked for.
    """

    def __init__(self) -> None:
        self.count = 1
        self._seconds = float("inf")  # of a step
        self._seen = 0
        self._graph: Any = None  # of a step
        self._is_ready = False
        self._result: Any = None
        self.begin_epoch(None, None)

    def begin_epoch(self, left: int | None, to_come: int | None) -> None:
        """Keras begins an epoch.

        Args:
            left: int, steps of this epoch, or None where no step may run ahead.
            to_come: int, steps of the epochs after it.
        """
        self._left, self._to_come = left, to_come
        self.made = 0

    def executes(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A function of an iterator that makes `count` steps, or as many as there are data for.

        Args:
            step: function of one batch, in a graph.
        """

        # As in Keras, AutoGraph converts neither this function nor Keras's own around the user's.
        @tf.function(reduce_retracing=True, autograph=False)
        def on_data(data: Any) -> Any:
            self._graph = tf.compat.v1.get_default_graph()
            return step(data)

        @tf.function(reduce_retracing=True, autograph=False)
        def one(iterator: Any) -> Any:
            return on_data(iterator.get_next())

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
            if self.count > 1:
                made, result = several(iterator, tf.constant(self.count), self._result)
                self._is_ready = True
                self.count = int(made)
                if self.count:
                    return result
                self.count = 1  # the data have ended, which Keras shall hear as ever
            return one(iterator)

        return execute

    def answers(self, execute: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The function that Keras calls for every step; `execute` is what `executes` returned."""

        def next_step(iterator: Any) -> Any:
            if self._left is not None:
                self._left -= 1
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
        if self._left is None or self._to_come is None or self._seen < STEPS_BEFORE:
            return 1
        fitting = int(MOST_SECONDS / self._seconds)
        if fitting < FEWEST_STEPS or not (self._is_ready or self._pays()):
            return 1
        return min(fitting, MOST_STEPS, self._left + 1)

    def _pays(self) -> bool:
        """Returns True if a graph of several steps can be made, and is worth its time."""
        assert self._left is not None and self._to_come is not None
        if self._left + self._to_come < STEPS_TO_COME or not _is_scalars(self._result):
            return False
        if self._graph is not None and _keeps_random_state(self._graph):
            self._graph = None
        return self._graph is not None


def _is_scalars(result: Any) -> bool:
    """Returns True if a step's result has the same shape after every step."""
    return all(tf.is_tensor(leaf) and leaf.shape == () for leaf in tf.nest.flatten(result))


def _keeps_random_state(graph: Any) -> bool:
    """Returns True if an operation of a graph draws from a state of its own.

    In another graph the same operation has another state. Such are all that take `seed` and
    `seed2`, which `tf.random.uniform` makes, and dropout in Keras 2.
    """
    definition = graph.as_graph_def()
    parts = [definition.node, *(f.node_def for f in definition.library.function)]
    return any({"seed", "seed2"} <= set(node.attr) for nodes in parts for node in nodes)
