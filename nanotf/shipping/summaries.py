"""Summaries that workers write: rank 0 sends them, and the parent writes them to its writers.

A writer that a program refers to is another one in the workers, with the number that the writer has
among the program's objects. Code that writes to the default writer of `fit` uses one without a
number. Its writer, step and condition are those that the parent has when the first summary of a
pass arrives, since TensorFlow keeps them in the graph that it traces then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from nanotf.compat.versions import require_tensorflow
from nanotf.wire import messages

_DEFAULT = -1  # the number of the default writer
_NO_STEP = -(2**62)  # a summary that names no step


@dataclasses.dataclass(frozen=True)
class _Place:
    """The resource of a writer that a worker has in place of the parent's."""

    number: int


@functools.cache
def _writer_class() -> Any:
    class RelayedWriter(require_tensorflow().summary.SummaryWriter):  # type: ignore[misc]
        def __init__(self, number: int) -> None:
            self._resource = _Place(number)

        def init(self) -> None:
            """Does nothing: the parent's writer is ready."""

        def flush(self) -> None:
            """Does nothing: the parent flushes its own."""

        def close(self) -> None:
            """Does nothing: the parent's writer outlives the call."""

    return RelayedWriter


@dataclasses.dataclass(frozen=True)
class WriterMaker:
    """Maker of a worker's writer."""

    number: int  # of the parent's writer among the objects of the program

    def __call__(self) -> Any:
        return _writer_class()(self.number)


@functools.cache
def is_writer_class(cls: Any) -> bool:
    """Returns True for a class of writers of summaries."""
    return issubclass(cls, require_tensorflow().summary.SummaryWriter)


# ----------------------------------------------------------------------------------- a worker
@dataclasses.dataclass(frozen=True)
class Sender:
    """Destination of a worker's summaries."""

    order: int  # its number
    tell: Callable[[messages.Message], None]  # sends a message if this is rank 0
    kind: Callable[[], str] = str  # what the model does now: "train", "test", "predict"; or ""
    counters: Sequence[Any] = ()  # variables that the parent's steps and conditions may depend on

    def send(self, number: int, step: Any, count: int, *values: Any) -> bool:
        """Sends one summary; `values` are the operation's other inputs and the counters."""
        content = tuple(v if isinstance(v, bytes) else np.asarray(v) for v in values[:count])
        counts = tuple(int(v) for v in values[count:])
        step = None if int(step) == _NO_STEP else int(step)
        self.tell(messages.Summary(self.order, number, self.kind(), step, content, counts))
        return True


# The last one counts, in any thread: operations of a graph run in TensorFlow's own.
_senders: list[Sender] = []


@functools.cache
def _intercept() -> None:
    from nanotf.compat import summary_state

    summary_state.intercept(lambda resource: isinstance(resource, _Place), _write)


def _write(place: _Place, step: Any, *inputs: Any) -> Any:
    """Replaces the operation that writes a summary; the same on all ranks."""
    tf = require_tensorflow()
    if not _senders:
        return tf.constant(False)
    counts = [variable.read_value() for variable in _senders[-1].counters]

    def send(step: Any, *values: Any) -> bool:
        return bool(_senders) and _senders[-1].send(place.number, step, len(inputs), *values)

    return tf.numpy_function(send, [tf.cast(step, tf.int64), *inputs, *counts], tf.bool)


@contextlib.contextmanager
def sending(sender: Sender, with_default: bool = False) -> Iterator[None]:
    """Sends the summaries of code in this context.

    Args:
        with_default: whether the parent has a default writer.
    """
    from nanotf.compat import summary_state

    _intercept()
    _senders.append(sender)
    default = summary_state.WriterState(_writer_class()(_DEFAULT), _NO_STEP, True)
    try:
        with summary_state.as_state(default) if with_default else contextlib.nullcontext():
            yield
    finally:
        _senders.pop()


# --------------------------------------------------------------------------------- the parent
def has_default() -> bool:
    """Returns True if this thread has a default writer."""
    from nanotf.compat import summary_state

    return summary_state.state().writer is not None


def write(
    message: messages.Summary,
    numbered: Sequence[Any],
    states: dict[str, Any],
    counters: Sequence[Any] = (),
) -> None:
    """Writes a worker's summary.

    Args:
        numbered: the program's objects.
        states: `WriterState`s by `Summary.kind`, which this function fills.
        counters: the parent's variables, as those of `Sender`.
    """
    from nanotf.compat import summary_state

    tf = require_tensorflow()
    if message.kind not in states:
        found = summary_state.state()
        step = found.step  # a graph keeps the number, or reads the variable
        if step is not None and not hasattr(step, "assign"):
            found = found._replace(step=int(step))
        states[message.kind] = found
    state = states[message.kind]
    if message.writer != _DEFAULT:
        state = state._replace(writer=numbered[message.writer])
    if state.writer is None or summary_state.is_closed(state.writer):
        return
    with summary_state.as_state(state), _counting(counters, message.counts):
        if len(message.content) == 1:
            tf.summary.experimental.write_raw_pb(_plain(message.content[0]), message.step)
        else:
            tensor, tag, metadata = message.content
            tf.summary.write(_plain(tag).decode(), tensor, message.step, _plain(metadata))


def _plain(content: Any) -> bytes:
    found = content if isinstance(content, bytes) else content.item()
    return found if isinstance(found, bytes) else str(found).encode()


@contextlib.contextmanager
def _counting(variables: Sequence[Any], values: Sequence[int]) -> Iterator[None]:
    """Gives the parent's counters the worker's values while a summary is written."""
    before = [variable.numpy() for variable in variables]
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
