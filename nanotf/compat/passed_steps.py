"""The steps of an epoch that an earlier run completed, in Keras's loop."""

from __future__ import annotations

from typing import Any

from nanotf.compat.generation import generation


def steps_after(model: Any, index: int, steps: int | None) -> int:
    """Returns the number of an epoch's steps that are complete at the end of an execution.

    Args:
        model: a compiled model.
        index: int, of a step in the execution, as `on_train_batch_end` gets it.
        steps: int or None, of an epoch, if known.
    """
    at_once = generation().steps_at_once(model)
    made = (index // at_once + 1) * at_once
    return made if steps is None else min(made, steps)


def pass_over(model: Any, steps: int, logs: Any, reads: bool) -> None:
    """Makes the next calls of Keras's step function return at once.

    Keras's `fit` can begin at an epoch, not at a step. Its loop counts these steps like others.

    Args:
        model: a model in the middle of `fit`.
        steps: int, how many steps are complete.
        logs: dict, the logs of the last of them.
        reads: bool, whether to read the steps' batches, since the data begin before them.
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
