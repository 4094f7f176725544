"""Drops the iterators of datasets without waiting for them.

With tf.data's autotuner on, as it is by default, dropping an iterator waits until the
autotuner wakes from its sleep of 10 ms x 2^k: an epoch of 1.3 s ends in a stall of 1.2 s.
Keras drops one iterator per epoch. Here a step function keeps the last iterator that it was
called with. A short-lived thread drops the previous one, where the wait delays nothing (it does
not hold the GIL).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


def drop(held: list[Any]) -> None:
    """Empties a list that holds the last reference to an iterator, in a separate thread."""
    if any(iterator is not None for iterator in held):
        threading.Thread(target=held.clear, name="nanotf-drop-iterator", daemon=True).start()


def keeping(step: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    """Makes a Keras step function keep the iterator that it is called with.

    Args:
        step: function of an iterator (`model.train_function`, `model.test_function`), or None.

    Returns:
        A function that runs the step; `let_go` drops the iterator that it keeps.
    """
    if step is None or hasattr(step, "_nanotf_held"):
        return step
    held: list[Any] = []

    def step_keeping_iterator(iterator: Any) -> Any:
        nonlocal held
        if not held or held[0] is not iterator:
            old, held = held, [iterator]
            drop(old)
        return step(iterator)

    def let_go_of_it() -> None:
        nonlocal held
        old, held = held, []
        drop(old)

    step_keeping_iterator._nanotf_held = let_go_of_it  # type: ignore[attr-defined]
    return step_keeping_iterator


def let_go(*steps: Any) -> None:
    """Drops the iterators that step functions made by `keeping` still hold."""
    for step in steps:
        release = getattr(step, "_nanotf_held", None)
        if release is not None:
            release()


@contextlib.contextmanager
def letting_go(model: Any) -> Iterator[None]:
    """Drops, at the end of this context, the iterators that a model's step functions still hold."""
    try:
        yield
    finally:
        let_go(getattr(model, "train_function", None), getattr(model, "test_function", None))
