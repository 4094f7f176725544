"""TensorFlow's state of summaries, and the operations that write them (identical in 2.14 to 2.21).

| name | why |
| --- | --- |
| `summary_ops_v2._summary_state` | the default writer, step and condition of this thread; only the step has a public getter |
| `gen_summary_ops.write_summary`, `write_raw_proto_summary` | what `tf.summary.scalar` and the like end in, also when they are traced |
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tensorflow.python.ops import gen_summary_ops, summary_ops_v2

_WRITES = ("write_summary", "write_raw_proto_summary")


class WriterState(NamedTuple):
    """The default writer, step and condition, as `tf.summary` finds them."""

    writer: Any  # `tf.summary.SummaryWriter` or None
    step: Any  # number, tensor or variable; None if not set
    condition: Any  # bool, tensor or callable of `record_if`; None if not set


def state() -> WriterState:
    """Returns the state of this thread."""
    here = summary_ops_v2._summary_state
    return WriterState(here.writer, here.step, here.is_recording)


@contextlib.contextmanager
def as_state(new: WriterState) -> Iterator[None]:
    """Sets the state in this context."""
    here, before = summary_ops_v2._summary_state, state()
    here.writer, here.step, here.is_recording = new
    try:
        yield
    finally:
        here.writer, here.step, here.is_recording = before


def is_closed(writer: Any) -> bool:
    """Returns True if a writer of files is closed."""
    return bool(getattr(writer, "_closed", False))


def intercept(is_other: Callable[[Any], bool], write: Callable[..., Any]) -> None:
    """Makes the operations call a function instead, if the writer's resource is of another kind.

    Args:
        is_other: takes the resource.
        write: takes the resource, the step and the operation's other inputs; returns a
            tensor or an operation.
    """
    for name in _WRITES:
        stock = getattr(gen_summary_ops, name)

        @functools.wraps(stock)
        def either(
            writer: Any, step: Any, *inputs: Any, name: Any = None, stock: Any = stock
        ) -> Any:
            if is_other(writer):
                return write(writer, step, *inputs)
            return stock(writer, step, *inputs, name=name)

        setattr(gen_summary_ops, name, either)  # callers look it up in the module each time
