"""What a writer of summaries was made with (seen alike in 2.15 to 2.21).

| name | why |
| --- | --- |
| `SummaryWriter._init_op_fn` | a `functools.partial` that holds the arguments of `tf.summary.create_file_writer` |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def remade(options: dict[str, Any] | None) -> Any:
    """A writer like the one whose `options_of` these are."""
    if options is None:
        return tf.summary.create_noop_writer()
    return tf.summary.create_file_writer(**options)


def options_of(writer: Any) -> dict[str, Any] | None:
    """The arguments of `tf.summary.create_file_writer`; None for a writer that writes nothing."""
    init = getattr(writer, "_init_op_fn", None)
    if init is None:
        return None
    return {
        name: value.decode() if isinstance(value := tensor.numpy(), bytes) else int(value)
        for name, tensor in init.keywords.items()
    }


def flush(values: Sequence[Any]) -> None:
    """Writes to their files what the writers among some objects hold."""
    for value in values:
        if isinstance(value, tf.summary.SummaryWriter):
            value.flush()
