"""Counts each rank's collectives when TensorFlow's own collectives are used.

The memory of transport "shm" shows who waits for whom. TensorFlow's collectives do not: a rank
whose peer has left waits forever. So each rank counts the collectives that it has begun. Ranks
that run the same program begin the same collectives in the same order. Therefore

- a rank in its collective n + 1 waits for a rank that has ended after n collectives;
- two ranks diverged if they have begun equally many but different collectives.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

# Attribute of a graph: the result of its last collective. The next is counted only after it is
# done: the counting and the collectives share no variable, so TensorFlow would see no order. (A
# dictionary by graph would keep all graphs: results refer to theirs.)
_BEFORE = "_nanotf_last_collective"


@dataclasses.dataclass(frozen=True)
class CollectiveProgress:
    """The collectives that a rank has begun."""

    count: int = 0  # their number
    fingerprint: int = 0  # equal for equal collectives
    what: str = ""  # description of the last one for people

    def since(self, earlier: CollectiveProgress) -> CollectiveProgress:
        """Returns the progress made after `earlier`."""
        count = self.count - earlier.count
        return CollectiveProgress(count, self.fingerprint - earlier.fingerprint, self.what)


class Tally:
    """Counts the collectives of a process, both eager and in graphs.

    Attributes:
        active: bool, whether to count. Counting takes time; it is done in `@nano` functions.
        step: str, the step being traced or run, for people.
    """

    def __init__(self) -> None:
        self.active = False
        self.step = ""
        self._known: list[str] = []  # by number
        # Variables hold the counts, so that graphs count what they run, not what they trace.
        with tf.init_scope(), tf.device("CPU:0"):
            self._counts = tf.Variable(tf.zeros(2, tf.int64), trainable=False)
            self._last = tf.Variable(tf.constant(-1, tf.int64), trainable=False)

    def begin(self, name: str, tensor: Any) -> Any:
        """Counts a collective.

        Args:
            name: its kind, for people.
            tensor: this rank's input.

        Returns:
            The tensor. Operations that depend on it run after the counting.
        """
        if not self.active:
            return tensor
        counted = self._counting(name, tensor)
        waits = [tensor]
        if not tf.executing_eagerly():
            before = getattr(tf.compat.v1.get_default_graph(), _BEFORE, None)
            waits += [] if before is None else [before]
        with tf.control_dependencies(waits):
            done = counted()
        if tf.executing_eagerly():
            return tensor
        with tf.control_dependencies(done):
            return tf.identity(tensor)

    def begin_initial_value(self, tensor: Any) -> None:
        """Counts the broadcast of a variable's initial value, at once.

        TensorFlow lifts it, with everything it depends on, out of the graph that makes the
        variable. So it must not depend on the counting.
        """
        if self.active:
            counted = self._counting("broadcast of an initial value", tensor)
            with tf.init_scope():
                counted()

    def _counting(self, name: str, tensor: Any) -> Callable[[], list[Any]]:
        """Returns a function that counts a collective."""
        kind = f"{name} of {tensor.dtype.name}"
        where = f" in the step {self.step}" if self.step else " outside steps"
        shape = "?" if tensor.shape.rank is None else tensor.shape.as_list()
        what = f"{kind}{shape}{where}"
        if what not in self._known:
            self._known.append(what)
        # The code omits shapes: a rank may have traced for any number of rows.
        code, place = zlib.crc32((kind + where).encode()), self._known.index(what)

        def counted() -> list[Any]:
            with tf.device("CPU:0"):
                return [
                    self._counts.assign_add(tf.constant([1, code], tf.int64), read_value=False),
                    self._last.assign(tf.constant(place, tf.int64), read_value=False),
                ]

        return counted

    def end(self, result: Any) -> Any:
        """Records a collective's result and returns it."""
        if self.active and not tf.executing_eagerly():
            setattr(tf.compat.v1.get_default_graph(), _BEFORE, result)
        return result

    def progress(self) -> CollectiveProgress:
        """Returns this process's progress. Any thread may call it."""
        with tf.init_scope():
            count, code = self._counts.numpy().tolist()
            last = int(self._last.numpy())
        return CollectiveProgress(count, code, self._known[last] if last >= 0 else "")
