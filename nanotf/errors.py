"""The exceptions that users can catch.

Every nanotf exception derives from `NanoError`. Those that report a wrong argument
also derive from `ValueError` or `TypeError`, so that code written against plain Keras
keeps catching them.
"""

from __future__ import annotations

import contextlib
import signal as signals
import sys
import types
from collections.abc import Sequence
from typing import Any


class NanoError(Exception):
    """Base class of all nanotf exceptions."""


class InvalidArgumentError(NanoError, ValueError):
    """An argument has the right type and a value that cannot be used."""


class InvalidArgumentTypeError(NanoError, TypeError):
    """An argument has a type that cannot be used."""


class PlacementError(InvalidArgumentError):
    """The machine does not have the cores that a placement asks for."""


class ModelError(InvalidArgumentError):
    """A model is not in a state in which workers could train it."""


class ShippingError(InvalidArgumentError):
    """An object cannot be sent to the workers."""


class UnsupportedVersionError(NanoError, ImportError):
    """The installed TensorFlow or Keras is missing, or known to train wrongly."""


class CollectiveError(NanoError, RuntimeError):
    """A collective failed: ranks disagree, a rank is missing, or the job was aborted."""


class WorkerError(NanoError, RuntimeError):
    """A worker reported an exception, or ended before its job did.

    Args:
        message: str, what happened, and what to do about it.
        rank: int or None, the worker's rank.
        pid: int or None, its process id.
        cores: tuple of int, the logical CPUs that it was pinned to.
        exit_code: int or None, its exit code when it exited by itself.
        signal: int or None, the number of the signal that ended it.
        remote_traceback: str, the traceback in the worker, empty if there is none.
        log_tail: str, the last lines of the worker's log.
        what: str, what happened, without what comes of it; empty for `message`.
    """

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
    ) -> None:
        Exception.__init__(self, message)  # not that of a class that `catchable_as` has mixed in
        self.message = message
        self.rank = rank
        self.pid = pid
        self.cores = cores
        self.exit_code = exit_code
        self.signal = signal
        self.remote_traceback = remote_traceback
        self.log_tail = log_tail
        self.what = what or message

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        # Exception's own __reduce__ would keep the message alone.
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
        )

    def __str__(self) -> str:
        parts = [self.message]
        if self.remote_traceback:
            parts.append(f"Traceback in the worker:\n{self.remote_traceback.rstrip()}")
        if self.log_tail:
            parts.append(f"Last lines of its log:\n{self.log_tail.rstrip()}")
        return "\n\n".join(parts)


def catchable_as(error: WorkerError, original: BaseException | None, message: str) -> WorkerError:
    """A `WorkerError` that `except` clauses for the exception behind it catch, too.

    Its class derives from both classes. It has the attributes of `original`, except where those of
    `WorkerError` have the same names, and its `args`; `original` is its `__cause__`.

    Args:
        error: `WorkerError`.
        original: the exception that a worker raised, or None if it could not travel.
        message: str, the error's new message.

    Returns:
        The new error, or `error` where no class can derive from both: where Python lays out their
        objects differently, `original` is no `Exception`, or its class allows no other.
    """
    error.__cause__ = original
    # Python gives the two excluded a meaning of their own, as soon as a generator raises them.
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
        # Properties of the same names (TensorFlow's errors have `message`) could not be set.
        **dict.fromkeys(vars(kind(*arguments))),
    }
    made: WorkerError = type(f"{cls.__name__}InWorker", (kind, cls), body)(*arguments)
    made.__dict__.update({n: v for n, v in vars(original).items() if n not in vars(made)})
    for base in cls.__mro__[: cls.__mro__.index(Exception)]:
        for name, member in vars(base).items():  # what builtin exceptions keep, like `errno`
            if isinstance(member, (types.MemberDescriptorType, types.GetSetDescriptorType)):
                with contextlib.suppress(AttributeError, TypeError):
                    setattr(made, name, getattr(original, name))
    made.args = original.args
    made.__cause__ = original
    return made


class WorkerDied(WorkerError):
    """A worker's process ended while it was needed."""


class WorkerStuck(WorkerError):
    """A worker has not gone on for longer than the set time, while others waited for it."""


class DivergedError(WorkerError):
    """Workers that run one program have come to different numbers."""


def describe_exit(returncode: int | None) -> tuple[str, int | None, int | None]:
    """Names the way in which a process ended.

    Args:
        returncode: int or None, as in `subprocess.Popen.returncode`: negative for a signal.

    Returns:
        A tuple of a phrase for people, the exit code or None, the signal number or None.
    """
    if returncode is None:
        return "is still running but closed its channel", None, None
    # Nobody is told then how a child ended, and `subprocess` makes a 0 of that.
    if returncode == 0 and signals.getsignal(signals.SIGCHLD) == signals.SIG_IGN:
        return "has ended (how is unknown: this process ignores SIGCHLD)", None, None
    if returncode >= 0:
        return f"exited with code {returncode}", returncode, None
    number = -returncode
    try:
        name = signals.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    phrase = f"was killed by {name}"
    if number == signals.SIGKILL and sys.platform == "linux":
        phrase += " (the kernel does this when memory runs out; see `dmesg`)"
    return phrase, None, number


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Refuses a value that is none of those that an argument takes.

    Args:
        name: str, the argument's.
        value: what was given for it.
        choices: sequence of str.

    Raises:
        InvalidArgumentError: It is none of them.
    """
    if value not in choices:
        raise InvalidArgumentError(
            f"`{name}` must be one of {', '.join(map(repr, choices))}. Received: {name}={value!r}."
        )
