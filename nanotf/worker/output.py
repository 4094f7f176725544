"""Relays rank 0's prints in a `@nano` function or in a model's steps to the user."""

from __future__ import annotations

import codecs
import collections
import contextlib
import functools
import io
import logging
import os
import pathlib
import select
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from nanotf.console import LIBRARIES, STREAMS, logger, say
from nanotf.region import scope
from nanotf.shipping.orders import Terminal
from nanotf.wire import messages

_PIPE_BYTES = 1 << 16  # what a pipe holds

# Held while text is sent, by Python's streams and by the reader of `tf.print`'s pipe, so that all
# of it arrives in the order in which it was written. User code may print from several threads. It
# may also print in a destructor, when the garbage collector runs in the middle of a print: hence
# an RLock, and one for all.
_order = threading.RLock()


class _Warnings(logging.Handler):
    """Passes on nanotf's own warnings.

    Args:
        file: a text stream.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(logging.WARNING)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage(), self._file)


class _Logs(logging.Handler):
    """Passes on warnings of Keras's and TensorFlow's loggers.

    Args:
        order: its number.
        is_in_step: see `warning_parent`.
    """

    def __init__(
        self,
        send: Callable[[messages.Message], None],
        order: int,
        is_in_step: Callable[[], bool],
    ) -> None:
        super().__init__(logging.WARNING)
        self._send, self._order, self._is_in_step = send, order, is_in_step

    def emit(self, record: logging.LogRecord) -> None:
        if self._is_in_step():
            text = record.getMessage()
            self._send(messages.Logged(self._order, record.name, record.levelno, text))


@contextlib.contextmanager
def warning_parent(session: Any, order: int, is_in_step: Callable[[], bool]) -> Iterator[None]:
    """Passes on Python's warnings, and those of Keras's and TensorFlow's loggers, from rank 0.

    Args:
        order: its number.
        is_in_step: returns True while a model's step runs or is traced. The loop around
            it runs in the parent too, which gives that loop's warnings.
    """
    if session.rank != 0:
        yield
        return
    stock = warnings.showwarning

    def show(message: Any, category: Any, file: str, line: int, *rest: Any, **named: Any) -> None:
        # The parent unpickles it by name, and may not have a class of the user's.
        own = next(c for c in category.__mro__ if c.__module__ == "builtins")
        if is_in_step():
            session.channel.send(messages.Warned(order, str(message), own, file, line))
        stock(message, category, file, line, *rest, **named)  # for this worker's log

    handler = _Logs(session.channel.send, order, is_in_step)
    loggers = LIBRARIES.values()
    warnings.showwarning = show  # type: ignore[assignment]
    for each in loggers:
        each.addHandler(handler)
    try:
        yield
    finally:
        warnings.showwarning = stock
        for each in loggers:
            each.removeHandler(handler)


class _Relay(io.TextIOBase):
    """A text stream that passes on its text, line by line.

    Args:
        send: called with `_order` held.
        is_terminal: returned by `isatty`, which progress bars call.
    """

    encoding = "utf-8"

    def __init__(self, send: Callable[[str], None], is_terminal: bool) -> None:
        super().__init__()
        self._send = send
        self._is_terminal = is_terminal
        self._texts: collections.deque[str] = collections.deque()

    def write(self, text: str) -> int:
        with _order:
            self._texts.append(text)
            if "\n" in text or "\r" in text:  # a bar redraws its line after a return
                self._pass_on()
        return len(text)

    def flush(self) -> None:
        with _order:
            self._pass_on()

    def _pass_on(self) -> None:
        text = ""
        while self._texts:  # a destructor may print, and so append, meanwhile
            text += self._texts.popleft()
        if text:
            self._send(text)

    def isatty(self) -> bool:
        return self._is_terminal

    def writable(self) -> bool:
        return True


class TensorFlowPrints:
    """Pipe for `tf.print`: TensorFlow writes to descriptors, not to `sys.stderr`.

    The pipe lives as long as the process, since traced functions keep its name.
    """

    def __init__(self) -> None:
        self._send: Callable[[str], None] | None = None
        self._stock: Any = None
        self._standard: tuple[Any, ...] = ()  # streams that `tf.print` takes for the user's
        self._replacement = self._make_replacement()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)  # two threads read: one may find nothing left
        self._poll = select.poll()
        self._poll.register(self._reader, select.POLLIN)
        # A read may end in the middle of a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._path = f"file:///proc/self/fd/{self._writer}"
        threading.Thread(target=self._read, name="nanotf-prints", daemon=True).start()

    def _read(self) -> None:
        while True:
            select.select([self._reader], [], [])
            self.pass_on()

    def pass_on(self) -> None:
        """Sends what `tf.print` has written so far."""
        if not self._poll.poll(0):  # an exception would take three times as long
            return
        with _order:
            try:
                written = os.read(self._reader, _PIPE_BYTES)
            except BlockingIOError:
                return
            text = self._decoder.decode(written)
            if self._send is not None and text:
                self._send(text)

    def begin(self, send: Callable[[str], None]) -> None:
        """Passes on the output of `tf.print` until `end`."""
        self._stock, self._send = tf.print, send
        self._standard = (None, sys.stdout, sys.stderr)
        tf.print = self._replacement

    def end(self) -> None:
        """Passes on the rest, and leaves `tf.print` as `begin` has found it."""
        tf.print = self._stock
        self.pass_on()
        self._send = None

    def _make_replacement(self) -> Callable[..., Any]:
        @functools.wraps(tf.print)
        def tf_print(*values: Any, **options: Any) -> Any:
            if scope.proof is not None:  # the user's code runs once more for it
                return None
            if any(options.get("output_stream") is stream for stream in self._standard):
                options["output_stream"] = self._path
            return self._stock(*values, **options)

        return tf_print


@functools.cache
def _tensorflow_prints() -> TensorFlowPrints:
    """Returns the pipe of this process for `tf.print`, made when it is first needed."""
    return TensorFlowPrints()


def to_parent(
    session: Any,
    order: int,
    terminal: Terminal,
    streams: Sequence[str] = STREAMS,
    quiet: bool = False,
) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which the user sees rank 0's prints; others write to their logs.

    Args:
        order: its number.
        streams: Python's streams to relay; `tf.print` and nanotf's own warnings
            are always relayed.
        quiet: whether rank 0 also writes only to its log. Functions traced in this context
            still print for the user in later calls.
    """
    if session.rank != 0:
        return contextlib.nullcontext()
    log = sys.stdout  # before `RelayedOutput` replaces it

    def send(stream: str, text: str) -> None:
        if quiet:
            log.write(text)
        else:
            session.channel.send(messages.Printed(order, stream, text))

    return RelayedOutput(send, terminal, streams)


class RelayedOutput(contextlib.AbstractContextManager[None]):
    """A context in which this process's output is passed on. It may be entered again and again.

    Args:
        send: called with the stream's name, "stdout" or "stderr", and a text.
        streams: as in `to_parent`.
    """

    def __init__(
        self,
        send: Callable[[str, str], None],
        terminal: Terminal,
        streams: Sequence[str] = STREAMS,
    ) -> None:
        def send_in_order(stream: str, text: str) -> None:
            if self._prints is not None:
                self._prints.pass_on()
            send(stream, text)

        self._relays = {
            stream: _Relay(functools.partial(send_in_order, stream), terminal.is_terminal[stream])
            for stream in STREAMS
        }
        self._streams, self._columns = streams, str(terminal.columns)
        self._own = None if "stderr" in streams else _Warnings(self._relays["stderr"])
        self._of_tensorflow = functools.partial(send, "stderr")
        # That folder has a name of the pipe for `tf.print`.
        has_names = pathlib.Path("/proc/self/fd").is_dir()
        self._prints = _tensorflow_prints() if has_names else None
        self._before: tuple[dict[str, Any], str | None] = {}, None

    def __enter__(self) -> None:
        columns = os.environ.get("COLUMNS")
        if columns != self._columns:
            # `shutil.get_terminal_size` returns it: progress bars get the width of the user's
            # terminal.
            os.environ["COLUMNS"] = self._columns
        self._before = {stream: getattr(sys, stream) for stream in self._streams}, columns
        for stream in self._streams:
            setattr(sys, stream, self._relays[stream])
        if self._own is not None:
            logger.addHandler(self._own)
        if self._prints is not None:
            self._prints.begin(self._of_tensorflow)

    def __exit__(self, *_: object) -> None:
        if self._prints is not None:
            self._prints.end()
        streams, columns = self._before
        for stream, before in streams.items():
            setattr(sys, stream, before)
        if self._own is not None:
            logger.removeHandler(self._own)
        for relay in self._relays.values():
            relay.flush()
        if columns is None:
            os.environ.pop("COLUMNS", None)
        elif columns != self._columns:
            os.environ["COLUMNS"] = columns
