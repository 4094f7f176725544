"""The reason of an error, and the user's lines in which it occurred (TensorFlow 2.14 to 2.21).

An error of an operation in a graph has one text: the stack of the operation's definition, most of
it TensorFlow's, and at its end the reason. The function that makes the text (`TABLE`) here also
notes what it made it from. AutoGraph puts the user's stack into the texts of errors that occur
while it traces, and keeps what it made them from in `ag_error_metadata`.

Both replace the classes of nanotf's errors: AutoGraph those that it does not know, TensorFlow those
of Python code that an operation runs. `CLASSES` and `python_operation` keep them.
"""

from __future__ import annotations

import collections
import functools
import itertools
import linecache
import traceback
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nanotf import tracebacks
from nanotf.compat.replacements import Override
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import NanoError

_SHOWN = 5  # frames

# By the text of an error, the reason and the frames that it was made from; the last few.
_noted: collections.OrderedDict[str, tuple[str, list[traceback.FrameSummary]]]
_noted = collections.OrderedDict()
_KEPT = 8


def reason(error: BaseException) -> str:
    """Returns the text of an error, without the stacks that TensorFlow has put into it."""
    source, text = _source(error), str(error)
    return text.replace(str(source).strip(), _own_reason(source))


def users_lines(error: BaseException) -> str:
    """Returns the frames of the user's code in which an error occurred, as Python prints them.

    The last ones come last; empty if none is the user's.
    """
    source = _source(error)
    walked = list(traceback.walk_tb(source.__traceback__))
    more: list[traceback.FrameSummary] = []
    if (metadata := _of_autograph(source)) is not None:
        walked = [(frame, line) for frame, line in walked if not _is_converted(frame)]
        more = [
            traceback.FrameSummary(f.filename, f.lineno, f.function_name, line=f.code)
            for f in reversed(metadata.translated_stack)
        ]
    elif (noted := _of_step(source)) is not None:
        more = noted[1]
    frames = [*traceback.StackSummary.extract(iter(walked)), *more]
    users = [frame for frame in frames if _is_users(frame.filename)]
    return "".join(traceback.format_list(users[-_SHOWN:])).rstrip()


def in_short(error: BaseException, begin: types.TracebackType | None) -> str:
    """Returns what a process prints that an error ends; empty if the error's text has no stack.

    Args:
        begin: the traceback, from the first frame that is printed.
    """
    if _own_reason(_source(error)) == str(_source(error)).strip():
        return ""
    calls = "".join(traceback.format_tb(tracebacks.of_users(begin)))
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    return f"Traceback (most recent call last):\n{calls}{kind}: {_told(error)}"


def reason_first(trace: Callable[[], None]) -> None:
    """Calls a function that traces code, and puts the reason first in the text of its error.

    AutoGraph's stack, of its converted code, goes from the text and from the traceback.
    """
    try:
        trace()
    except Exception as error:
        if _of_autograph(error) is None or tracebacks.shows_whole():
            raise
        error.args = (_told(error),)
        raise error.with_traceback(None)  # noqa: B904 - it is the same error


def _told(error: BaseException) -> str:
    told, code = reason(error).strip(), users_lines(error)
    hint = f"{tracebacks.VARIABLE}=full shows the whole traceback."
    return f"{told}\n\nRaised in:\n{code}\n\n{hint}" if code else told


def _source(error: BaseException) -> BaseException:
    """Returns the error whose text has a stack. Keras replaces it with one that has its text."""
    found: BaseException | None = error
    while found is not None:
        if _of_autograph(found) is not None or _of_step(found) is not None:
            return found
        # Keras raises its own `from None`. Another context is an error of its own.
        found = found.__context__ if found.__suppress_context__ else None
    return error


def _own_reason(error: BaseException) -> str:
    if (metadata := _of_autograph(error)) is not None:
        return str(metadata.cause_message).removeprefix(f"{type(error).__name__}: ").strip()
    noted = _of_step(error)
    return str(error).strip() if noted is None else noted[0]


def _is_converted(frame: types.FrameType) -> bool:
    """Returns True for code that AutoGraph has made: its functions share this free variable."""
    return "ag__" in frame.f_code.co_freevars


def _of_autograph(error: BaseException) -> Any:
    return getattr(error, "ag_error_metadata", None)


def _of_step(error: BaseException) -> tuple[str, list[traceback.FrameSummary]] | None:
    message = getattr(error, "message", None)  # of any kind, in a user's class
    return _noted.get(message) if isinstance(message, str) else None


def _is_users(filename: str) -> bool:
    if filename.startswith("<") and filename not in linecache.cache:  # there is no line to show
        return False
    libraries = (tracebacks.is_standard, tracebacks.is_nanotfs, tracebacks.is_beneath)
    return not any(is_library(filename) for is_library in libraries)


def _interpolate(stock: Callable[..., str], _: Any) -> Callable[..., str]:
    @functools.wraps(stock)
    def interpolate(self: Any, message: str, node_names: Any, graph_debug_info: Any) -> str:
        text = stock(self, message, node_names, graph_debug_info)
        _noted[text] = message.strip(), _frames_of(node_names, graph_debug_info)
        while len(_noted) > _KEPT:
            _noted.popitem(last=False)
        return text

    return interpolate


def _frames_of(nodes: Iterable[str], graph_debug_info: Any) -> list[traceback.FrameSummary]:
    """Returns the frames in which the first node that has some was defined."""
    from tensorflow.python.util import tf_stack

    traces = tf_stack.LoadTracesFromDebugInfo(graph_debug_info)
    for node in nodes:
        if node in traces:
            return [
                traceback.FrameSummary(frame.filename, frame.lineno, frame.name)
                for frame in traces[node]
            ]
    return []


# By a text in the error of the operation, the errors that Python code of operations has raised.
_carried: dict[str, NanoError] = {}
_numbers = itertools.count()


def python_operation(
    function: Callable[..., Any],
    tensors: Sequence[Any],
    like: Sequence[Any],
    name: str | None = None,
) -> list[Any]:
    """Makes an operation that calls a function with arrays, by `tf.numpy_function`.

    The function's errors of nanotf's leave graphs as they are, see `CLASSES`.

    Args:
        like: have the dtypes and shapes of the results. The operation does not know shapes.
    """
    tf, kinds = require_tensorflow(), [each.dtype for each in like]
    found = tf.numpy_function(_carried_by(function), list(tensors), kinds, name=name)
    results: list[Any] = tf.nest.flatten(found)  # in eager execution, one is no list
    for tensor, each in zip(results, like, strict=True):
        tensor.set_shape(each.shape)
    return results


def _carried_by(function: Callable[..., Any]) -> Callable[..., Any]:

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        try:
            return function(*args)
        except NanoError as error:
            text = f"(nanotf error {next(_numbers)})"  # two errors may have the same text
            _carried[text] = error
            raise RuntimeError(f"{error} {text}") from error

    return run


def _leaving(stock: Callable[..., Any], _: Any) -> Callable[..., Any]:
    @functools.wraps(stock)
    def __exit__(self: Any, typ: Any, exc: Any, tb: Any) -> Any:
        result = stock(self, typ, exc, tb)
        message = str(getattr(exc, "message", "")) if _carried and exc is not None else ""
        for text in [text for text in _carried if text in message]:
            raise _carried.pop(text) from None
        return result

    return __exit__


def _creating(stock: Callable[..., Any], _: Any) -> Callable[..., Any]:
    @functools.wraps(stock)
    def create_exception(self: Any, source_error: Any) -> Any:
        return source_error if isinstance(source_error, NanoError) else stock(self, source_error)

    return create_exception


CLASSES = (
    Override(
        "tensorflow.python.eager.polymorphic_function.atomic_function:"
        "InterpolateRuntimeError.__exit__",
        "errors that an operation's Python code raises keep their class",
        _leaving,
    ),
    Override(
        "tensorflow.python.autograph.impl.api:_ErrorMetadata.create_exception",
        "errors that occur while a function is traced keep their class",
        _creating,
    ),
)
TABLE = (
    Override(
        "tensorflow.python.eager.polymorphic_function.atomic_function:"
        "InterpolateRuntimeError.interpolate",
        "errors of steps say the reason first, and the user's lines",
        _interpolate,
    ),
)
