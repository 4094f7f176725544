"""Keras's step functions: they keep their iterator, and pass over steps of an earlier run.

With tf.data's autotuner on, as it is by default, dropping an iterator waits until the
autotuner wakes from its sleep of 10 ms x 2^k: an epoch of 1.3 s ends in a stall of 1.2 s.
Keras drops one iterator per epoch. Here a step function keeps the last iterator that it was
called with. A short-lived thread drops the previous one, where the wait delays nothing (it does
not hold the GIL).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from nanotf.compat.generation import generation
from nanotf.wire.own_threads import OwnThread


def drop(held: list[Any]) -> None:
    """Empties a list that holds the last reference to an iterator, in a separate thread."""
    if any(iterator is not None for iterator in held):
        # A daemon: the wait must not hold up the end of the process.
        OwnThread(target=held.clear, name="nanotf-drop-iterator", daemon=True).start()


def keeping(step: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    """Makes a Keras step function keep the iterator that it is called with.

    Args:
        step: takes an iterator (`model.train_function`, `model.test_function`), or None.

    Returns:
        A function that runs the step; `let_go` drops the iterator that it keeps.
    """
    if step is None or hasattr(step, "_nanotf_held"):
        return step
    attributes = vars(step)  # others look for theirs, such as `_nanotf_ahead`
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

    step_keeping_iterator.__dict__.update(attributes, _nanotf_held=let_go_of_it)
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


def steps_after(model: Any, index: int, steps: int | None) -> int:
    """Returns the number of an epoch's steps that are complete at the end of an execution.

    Args:
        model: a compiled model.
        index: of a step in the execution, as `on_train_batch_end` gets it.
        steps: of an epoch; None if unknown.
    """
    at_once = generation().steps_at_once(model)
    made = (index // at_once + 1) * at_once
    return made if steps is None else min(made, steps)


def pass_over(model: Any, steps: int, logs: Any, reads: bool) -> None:
    """Makes the next calls of Keras's step function return at once.

    Keras's `fit` can begin at an epoch, not at a step. Its loop counts these steps like others.

    Args:
        model: a model in the middle of `fit`.
        steps: how many of the epoch's steps are complete.
        logs: a dict, the logs of the last of them.
        reads: whether to read the steps' batches, since the data begin before them.
    """
    stock = model.train_function
    each = generation().steps_per_execution(model)
    # Keras 2 shortens the last execution of an epoch; in Keras 3 it exceeds the epoch.
    is_cut = generation().steps_at_once(model) < each
    made = 0

    def passed(iterator: Any) -> Any:
        nonlocal made
        count = min(each, steps - made) if is_cut else each
        for _ in range(count if reads else 0):
            next(iterator)
        made += count
        if made >= steps:
            model.train_function = stock
        return dict(logs) if isinstance(logs, dict) else logs

    model.train_function = passed
