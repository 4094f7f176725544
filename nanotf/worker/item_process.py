"""The process of a worker of `nanotf.map`, which each item finds as if it were the first.

`isolation` does the same for the function.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from nanotf.compat import chance
from nanotf.compat.keras_session import KerasSession
from nanotf.compat.process_state import ProcessState
from nanotf.shipping import orders

# The part of a worker's time in which it may look for garbage. After an item of nothing that would
# take as long as the item; Python looks for garbage, too.
_SHARE_OF_GARBAGE = 0.02


class ItemProcess:
    """The state of this process, from item to item."""

    def __init__(self) -> None:
        self._restore: Callable[[], None] = lambda: None
        self._keras: KerasSession | None = None
        self._collected = time.perf_counter()  # when garbage was last looked for
        self._took = 0.0  # seconds of that

    def begin_call(self, state: ProcessState, terminal: orders.Terminal) -> None:
        """Takes the state of the user's process, which all items of a call find."""
        if self._keras is None:  # no earlier: now it sees all threads but the user's
            self._keras = KerasSession()
        state.restore()
        columns = {"COLUMNS": str(terminal.columns)}  # as `output.RelayedOutput` sets it
        self._restore = state.with_environ({**state.values["environ"], **columns}).restorer()

    def begin(self, seed: int) -> None:
        """Makes Keras and all random numbers the same, whatever ran in this process before.

        Keras counts the layers of a process to name them. The seeds come last: the
        settings must not draw from it.
        """
        assert self._keras is not None, "the call has begun"
        if self._keras.is_used():
            self._keras.clear()
        self._restore()
        chance.seed(seed)
        self._keras.begins()

    def end(self, thoroughly: bool) -> None:
        """Frees the models of an item, which are in reference cycles and in Keras's lists.

        Args:
            thoroughly: whether garbage must not stay, however short the item was.
        """
        if self._keras is not None and self._keras.is_used():
            self._keras.clear()
            thoroughly = True
        begin = time.perf_counter()
        if thoroughly or self._took <= _SHARE_OF_GARBAGE * (begin - self._collected):
            gc.collect()
            self._collected = time.perf_counter()
            self._took = self._collected - begin
