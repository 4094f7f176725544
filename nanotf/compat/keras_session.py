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
    """The session of a process in which one piece of code runs after another.

    Make it when all threads run that are not of such code.
    """

    def __init__(self) -> None:
        from tensorflow.python.framework import ops

        self._graphs, self._parts = ops._default_graph_stack, generation().session_parts
        self._threads = threading.active_count()
        self._mark: tuple[Any, ...] | None = None

    def begins(self) -> None:
        """Notes that the session is as the next piece of code must find it."""
        self._mark = self._now()

    def is_used(self) -> bool:
        """Returns True if a layer was named or a graph made since `begins`, or may have been.

        Keras has a session for each thread. Those of further threads cannot be seen from here.
        """
        if self._mark is None or threading.active_count() > self._threads:
            return True
        now = self._now()
        # By identity, without any object's __eq__. Equal numbers above 256 only clear it in vain.
        return len(self._mark) != len(now) or not all(map(operator.is_, self._mark, now))

    def _now(self) -> tuple[Any, ...]:
        # Keras 2 makes a default graph when it clears the session.
        graph = self._graphs._global_default_graph
        operations = 0 if graph is None else len(graph.get_operations())
        return graph, operations, *self._parts()

    def clear(self) -> None:
        """Clears the session, as `tf.keras.backend.clear_session` does."""
        require_tensorflow().keras.backend.clear_session()
        self._mark = None
