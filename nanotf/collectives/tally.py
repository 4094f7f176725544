"""A rank's position among the collectives of a program, with TensorFlow's own collectives.

The memory of transport "shm" tells everybody who waits for whom. TensorFlow's collectives tell
nothing: a rank whose peer has left waits forever. Here each rank counts the collectives that it
has begun. Ranks that run the same program begin the same ones in the same order, so that

- a rank that has ended after n collectives is missed by one that has begun its n+1st;
- two ranks that have begun as many, and not the same ones, have parted.
"""

from __future__ import annotations

import dataclasses
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Progress:
    """A rank's position in the program.

    Args:
        count: int, the collectives that it has begun.
        fingerprint: int, which ones: equal for equal collectives.
        what: str, the last of them, for people.
    """

    count: int = 0
    fingerprint: int = 0
    what: str = ""

    def since(self, earlier: Progress) -> Progress:
        """Returns what was begun after `earlier`."""
        count = self.count - earlier.count
        return Progress(count, self.fingerprint - earlier.fingerprint, self.what)


class Tally:
    """Counts the collectives of a process, eager ones and those in graphs.

    Attributes:
        active: bool, whether collectives are counted, which takes time: in `@nano` functions.
        step: str, the step that is traced or run, for people.
    """

    def __init__(self) -> None:
        self.active = False
        self.step = ""
        self._known: list[str] = []  # by number
        # A number's place is a variable's, so that graphs count what they run, not what they trace.
        with tf.init_scope(), tf.device("CPU:0"):
            self._counts = tf.Variable(tf.zeros(2, tf.int64), trainable=False)
            self._last = tf.Variable(tf.constant(-1, tf.int64), trainable=False)
        # By graph, its last collective. Another is counted when that is over: no variable is
        # shared by the counting and the collectives, so that TensorFlow does not see an order.
        self._before: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def begin(self, name: str, tensor: Any) -> Any:
        """Counts a collective.

        Args:
            name: str, its kind.
            tensor: what this rank gives.

        Returns:
            The tensor; what depends on it happens after the counting.
        """
        if not self.active:
            return tensor
        counted = self._counting(name, tensor)
        waits = [tensor]
        if not tf.executing_eagerly():
            before = self._before.get(tf.compat.v1.get_default_graph())
            waits += [] if before is None else [before]
        with tf.control_dependencies(waits):
            done = counted()
        if tf.executing_eagerly():
            return tensor
        with tf.control_dependencies(done):
            return tf.identity(tensor)

    def begin_initial_value(self, tensor: Any) -> None:
        """Counts the broadcast of a variable's initial value, at once.

        TensorFlow takes it out of the graph in which the variable is made, and what it depends on
        with it; so it must not depend on the counting.
        """
        if self.active:
            counted = self._counting("broadcast of an initial value", tensor)
            with tf.init_scope():
                counted()

    def _counting(self, name: str, tensor: Any) -> Callable[[], list[Any]]:
        """A function that counts a collective."""
        kind = f"{name} of {tensor.dtype.name}"
        where = f" in the step {self.step}" if self.step else " outside steps"
        shape = "?" if tensor.shape.rank is None else tensor.shape.as_list()
        what = f"{kind}{shape}{where}"
        if what not in self._known:
            self._known.append(what)
        # Shapes are no part of it: a rank may have traced for any number of rows.
        code, place = zlib.crc32((kind + where).encode()), self._known.index(what)

        def counted() -> list[Any]:
            with tf.device("CPU:0"):
                return [
                    self._counts.assign_add(tf.constant([1, code], tf.int64), read_value=False),
                    self._last.assign(tf.constant(place, tf.int64), read_value=False),
                ]

        return counted

    def end(self, result: Any) -> Any:
        """Notes a collective's result; returns it."""
        if self.active and not tf.executing_eagerly():
            self._before[tf.compat.v1.get_default_graph()] = result
        return result

    def progress(self) -> Progress:
        """Returns how far this process has come; may be called by any thread."""
        with tf.init_scope():
            count, code = self._counts.numpy().tolist()
            last = int(self._last.numpy())
        return Progress(count, code, self._known[last] if last >= 0 else "")
