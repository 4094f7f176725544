"""The exceptions that users can catch.

Every nanotf exception derives from `NanoError`. Those that report a wrong argument
also derive from `ValueError` or `TypeError`, so that code written against plain Keras
keeps catching them.
"""

from __future__ import annotations

import contextlib
import difflib
import operator
import pathlib
import signal as signals
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from nanotf import tracebacks


class NanoError(Exception):
    """Base class of all nanotf exceptions.

    Attributes:
        results: dict of int to object, of an error that `nanotf.map` raises: by index, the results
            of the items that had ended.
    """

    results: Mapping[int, Any] = types.MappingProxyType({})


class InvalidArgumentError(NanoError, ValueError):
    """An argument has the right type but a value that cannot be used."""


class InvalidArgumentTypeError(NanoError, TypeError):
    """An argument has a type that cannot be used."""


class PlacementError(InvalidArgumentError):
    """The machine does not have the requested cores."""


class UndividedError(InvalidArgumentError):
    """A call cannot be divided between workers. Where `nanotf run` asks, it runs in one process."""


class ModelError(UndividedError):
    """Workers cannot train a model in its present state."""


class ShippingError(UndividedError):
    """An object cannot be sent to the workers."""


class UnsupportedVersionError(NanoError, ImportError):
    """TensorFlow or Keras is missing, or trains wrongly; or nanotf does not run on this system."""


class CollectiveError(NanoError, RuntimeError):
    """A collective failed: ranks disagree, a rank is missing, or the call was aborted."""


class JobError(NanoError, RuntimeError):
    """A job could not be started or stopped, or has failed."""


class EndpointError(NanoError, RuntimeError):
    """An endpoint could not be started or stopped, has failed, or has refused a request.

    Args:
        message: str, what happened, and what to do about it.
        status: int or None, the HTTP status of an answer; None if there was none.
        text: str, what the server answered.
    """

    def __init__(self, message: str, status: int | None = None, text: str = "") -> None:
        super().__init__(message)
        self.message, self.status, self.text = message, status, text

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        # Exception's own __reduce__ would keep only the message.
        return type(self), (self.message, self.status, self.text)


class UnavailableError(NanoError, NotImplementedError):
    """A request that nanotf does not support, or not yet."""


class ConversionError(NanoError, RuntimeError):
    """An engine of `nanotf.inference` cannot convert a model, or load what it has made of it."""


class RecordError(NanoError, ValueError):
    """A stream of records is corrupt, ends too early, or does not come."""


_PRINTED_LINES = 8  # of an item's output, in the text of its error

_Retold = TypeVar("_Retold", bound="WorkerError")


class WorkerError(NanoError, RuntimeError):
    """A worker reported an exception, or ended before the call did.

    Args:
        message: str, what happened, and what to do about it.
        rank: int or None, the worker's rank.
        pid: int or None, its process id.
        cores: tuple of int, the logical CPUs that it was pinned to.
        exit_code: int or None, its exit code when it exited by itself.
        signal: int or None, the number of the signal that ended it.
        remote_traceback: str, the traceback in the worker, empty if there is none.
        log_tail: str, the last lines of the worker's log.
        what: str, the event without its consequences; if empty, `message` is used.
        partition: int or None, the part of a model that it held (`nanotf.smp`).
        printed: str, what the item had printed, with `nanotf.map(..., output="keep")`; the last
            million characters.
        index: int or None, the item of `nanotf.map` that failed.

    Attributes:
        original: the worker's exception, or None if it raised none or could not be sent.
    """

    original: BaseException | None = None

    def __init__(
        self,
        message: str,
        rank: int | None = None,
        pid: int | None = None,
        cores: tuple[int, ...] = (),
        exit_code: int | None = None,
        signal: int | None = None,
        remote_traceback: str = "",
        log_tail: str = "",
        what: str = "",
        partition: int | None = None,
        printed: str = "",
        index: int | None = None,
    ) -> None:
        Exception.__init__(self, message)  # not that of a class mixed in by `catchable_as`
        self.message = message
        self.rank = rank
        self.pid = pid
        self.cores = cores
        self.exit_code = exit_code
        self.signal = signal
        self.remote_traceback = remote_traceback
        self.log_tail = log_tail
        self.what = what or message
        self.partition = partition
        self.printed = printed
        self.index = index

    def retold(self, kind: type[_Retold], message: str, index: int | None = None) -> _Retold:
        """Returns an error of another class, with another text, about the same process."""
        arguments = (message, *self._arguments()[1:-1], index)
        return kind(*arguments)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        # Exception's own __reduce__ would keep only the message.
        return type(self), self._arguments()

    def _arguments(self) -> tuple[Any, ...]:
        return (
            self.message,
            self.rank,
            self.pid,
            self.cores,
            self.exit_code,
            self.signal,
            self.remote_traceback,
            self.log_tail,
            self.what,
            self.partition,
            self.printed,
            self.index,
        )

    def __str__(self) -> str:
        parts, whole = [self.message], tracebacks.shows_whole()
        if self.remote_traceback and whole:
            parts.append(f"Traceback in the worker:\n{self.remote_traceback.rstrip()}")
        elif self.remote_traceback:
            parts.append(f"{tracebacks.VARIABLE}=full shows the whole traceback.")
        if self.printed.strip():
            lines = self.printed.rstrip().splitlines()
            shown = lines if whole else lines[-_PRINTED_LINES:]
            parts.append("\n".join(["Last lines that it printed:", *shown]))
        if self.log_tail and (whole or not self.remote_traceback):
            parts.append(f"Last lines of its log:\n{self.log_tail.rstrip()}")
        return "\n\n".join(parts)


def catchable_as(error: WorkerError, original: BaseException | None, message: str) -> WorkerError:
    """Makes a `WorkerError` that can also be caught as the class of the worker's exception.

    Its class derives from both classes. It has the `args` and attributes of `original`; attributes
    of `WorkerError` win where names are equal. Its attribute `original` is `original`; as
    `__cause__` Python would print it above the error, which says all that it says.

    Args:
        error: the error to report. Its `original` is set, too.
        original: the exception that a worker raised, or None if it could not be sent.
        message: str, the error's new message.

    Returns:
        The new error, or `error` if no class can derive from both: Python lays out their objects
        differently, `original` is no `Exception`, or its class does not allow it.
    """
    error.original = original
    # A generator that raises StopIteration or StopAsyncIteration gives it a special meaning.
    if not isinstance(original, Exception) or isinstance(
        original, (StopIteration, StopAsyncIteration, WorkerError)
    ):
        return error
    arguments = error._arguments()
    try:
        return _both(type(error), original, (message, *arguments[1:]))
    except Exception:
        return error


def _both(kind: type[WorkerError], original: Exception, arguments: tuple[Any, ...]) -> WorkerError:
    cls = type(original)
    body: dict[str, Any] = {
        "__module__": __name__,
        "__doc__": f"A worker raised {cls.__name__}.",
        "__new__": lambda new, *_: cls.__new__(new),
        "__reduce__": lambda self: (_both, (kind, original, arguments)),
        # Hides properties of the same names (`message` of TensorFlow's errors): they are read-only.
        **dict.fromkeys(vars(kind(*arguments))),
    }
    made: WorkerError = type(f"{cls.__name__}InWorker", (kind, cls), body)(*arguments)
    made.__dict__.update({n: v for n, v in vars(original).items() if n not in vars(made)})
    for base in cls.__mro__[: cls.__mro__.index(Exception)]:
        for name, member in vars(base).items():  # attributes of builtin exceptions: `errno`
            if isinstance(member, (types.MemberDescriptorType, types.GetSetDescriptorType)):
                with contextlib.suppress(AttributeError, TypeError):
                    setattr(made, name, getattr(original, name))
    made.args = original.args
    made.original = original
    return made


class WorkerDied(WorkerError):
    """A worker's process ended while it was needed."""


class WorkerStuck(WorkerError):
    """A worker made no progress for longer than the timeout, while others waited for it."""


class ReaderDied(WorkerError):
    """A process that reads a dataset (`read_processes`) has ended too often."""


class DivergedError(WorkerError):
    """Workers that run the same program have computed different numbers."""


def describe_exit(returncode: int | None) -> tuple[str, int | None, int | None]:
    """Describes how a process ended.

    Args:
        returncode: int or None, as in `subprocess.Popen.returncode`: negative for a signal.

    Returns:
        A tuple of a phrase for people, the exit code or None, the signal number or None.
    """
    if returncode is None:
        return "is still running but closed its channel", None, None
    # The kernel then reports no exit status of children, and `subprocess` returns 0.
    if returncode == 0 and signals.getsignal(signals.SIGCHLD) == signals.SIG_IGN:
        return "has ended (exit status unknown: this process ignores SIGCHLD)", None, None
    if returncode >= 0:
        return f"exited with code {returncode}", returncode, None
    number = -returncode
    try:
        name = signals.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    phrase = f"was killed by {name}"
    if number == signals.SIGKILL and kills_for_memory() > _KILLS_BEFORE:
        phrase += " (the kernel has ended processes since memory ran out; see `dmesg`)"
    return phrase, None, number


def kills_for_memory() -> int:
    """Returns how many processes of this machine the kernel has ended for lack of memory.

    The line "oom_kill" of /proc/vmstat counts those of control groups, too (Linux 4.13). 0 if there
    is no such line.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = pathlib.Path("/proc/vmstat").read_text(encoding="ascii")
        return int(text.split("\noom_kill ", 1)[1].split("\n", 1)[0])
    return 0


_KILLS_BEFORE = kills_for_memory()  # the kernel counts since it booted


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Rejects a value that an argument does not accept.

    Args:
        name: str, the argument's name.
        value: the argument's value.
        choices: sequence of str, the accepted values.

    Raises:
        InvalidArgumentError: The value is not one of the choices.
    """
    if value not in choices:
        raise InvalidArgumentError(
            f"`{name}` must be one of {', '.join(map(repr, choices))}. Received: {name}={value!r}."
        )


_ALIKE = 0.8  # `difflib`'s ratio: a letter or two are missing, added or exchanged


def meant(word: str, known: Iterable[str]) -> str | None:
    """Returns the known word that was misspelled, or None if no word is that much alike."""
    return next(iter(difflib.get_close_matches(word, list(known), 1, _ALIKE)), None)


def check_integer(name: str, value: Any, remedy: str, *, least: int = 1, more: str = "") -> int:
    """Rejects a value that is not an integer, or too small.

    Args:
        name: str, the argument's name.
        value: the argument's value.
        remedy: str, an imperative; an example follows it.
        least: int, default 1, the smallest accepted value.
        more: str, what else to say of a value of another type.

    Returns:
        The value as an int.

    Raises:
        InvalidArgumentTypeError: It is not an integer (bool and float are not).
        InvalidArgumentError: It is below `least`.
    """
    try:
        # NumPy's integers are accepted like Python's. True is an int, but never meant as one.
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise InvalidArgumentTypeError(
            f"`{name}` must be an integer. Received: {name}={value!r} "
            f"({type(value).__name__}). {remedy}, such as {name}=2.{more}"
        )
    if number < least:
        raise InvalidArgumentError(
            f"`{name}` must be at least {least}. Received: {name}={value!r}. {remedy}, such as "
            f"{name}=2."
        )
    return number
