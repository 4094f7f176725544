"""Keras's session, which is cleared only if something has used it.

To clear it takes 20 us with Keras 3, and milliseconds with Keras 2, which makes a graph.

| private name | versions | why |
| --- | --- | --- |
| `tensorflow.python.framework.ops._default_graph_stack._global_default_graph` | 2.14-2.21 | tells if there is a default graph; the public function makes one |
"""

from __future__ import annotations

import operator
import threading
from typing import Any

from nanotf.compat.generation import generation
from nanotf.compat.versions import require_tensorflow


class KerasSession:
    """The session of a process in which one piece of code runs after another."""

    def __init__(self) -> None:
        self._threads = threading.active_count()
        self._mark: tuple[Any, ...] | None = None

    def begins(self) -> None:
        """Notes that the session is as the next piece of code must find it."""
        self._mark = _mark()

    def is_used(self) -> bool:
        """Returns True if a layer was named or a graph made since `begins`, or may have been.

        Keras has a session for each thread. Those of further threads cannot be seen from here.
        """
        mark, now = self._mark, _mark()
        is_same = mark is not None and len(mark) == len(now) and all(map(operator.is_, mark, now))
        return not is_same or threading.active_count() > self._threads

    def clear(self) -> None:
        """Clears the session, as `tf.keras.backend.clear_session` does."""
        require_tensorflow().keras.backend.clear_session()
        self._mark = None


def _mark() -> tuple[Any, ...]:
    return _default_graph(), *generation().session_parts()


def _default_graph() -> Any:
    from tensorflow.python.framework import ops

    return ops._default_graph_stack._global_default_graph
