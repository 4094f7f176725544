"""A folder that a supervisor owns: what was asked for, its state, and how it is found by name.

<output>/<name>/
    request.json    what was asked for; written once, before the supervisor starts
    state.json      the state; replaced in one step, by the owner alone
    logs/           supervisor.log, and what the supervisor's programs print
"""

from __future__ import annotations

import abc
import contextlib
import os
import pathlib
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from nanotf.errors import InvalidArgumentError, NanoError
from nanotf.sagemaker.detached.owner import Owner
from nanotf.wire import files

MAX_NAME = 63
# SageMaker's rule of the names of jobs and endpoints.
_NAME = re.compile(r"[A-Za-z0-9](-*[A-Za-z0-9]){0,62}")


@dataclass(frozen=True)
class Kind:
    """The words for all folders of a class, and where they are."""

    noun: str  # "job"
    a_noun: str  # "a job"
    variable: str  # names their folder, if the caller does not
    default: str  # their folder in the current one; also the command that lists them
    error: type[NanoError]  # for what goes wrong with them
    running: tuple[str, ...]  # the statuses in which one can be stopped

    def folder(self, output: str | os.PathLike[str] | None) -> pathlib.Path:
        """Returns the folder that holds them: `output`, else the variable's, else the default."""
        return pathlib.Path(output or os.environ.get(self.variable) or self.default).absolute()

    def make_name(self, base: str) -> str:
        """Returns a name: the base, then the time in UTC to the millisecond.

        Args:
            base: other characters than letters and digits become "-".
        """
        moment = datetime.now(timezone.utc)
        stamp = f"{moment:%Y-%m-%d-%H-%M-%S}-{moment.microsecond // 1000:03d}"
        words = re.sub(r"[^A-Za-z0-9]+", "-", base).strip("-")
        words = words[: MAX_NAME - len(stamp) - 1].strip("-")
        return f"{words or self.noun}-{stamp}"

    def check_name(self, name: str) -> None:
        """Rejects a name that no folder can have. Raises `InvalidArgumentError`."""
        if not _NAME.fullmatch(name):
            raise InvalidArgumentError(
                f"{_capital(self.a_noun)}'s name must have 1 to {MAX_NAME} letters, digits and "
                f"dashes, with a letter or a digit at both ends. Received: {name!r}."
            )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


class DetachedState(Protocol):
    """The state that a folder has: a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def status(self) -> str:
        """The status, in SageMaker's words."""

    @property
    def owner(self) -> Owner:
        """The process that owns the folder."""

    @property
    def is_final(self) -> bool:
        """True if nothing will change the state any more."""


AnyState = TypeVar("AnyState", bound=DetachedState)
AnyRequest = TypeVar("AnyRequest")
AnyFolder = TypeVar("AnyFolder", bound="DetachedFolder[Any, Any]")


@dataclass(frozen=True)
class DetachedFolder(abc.ABC, Generic[AnyRequest, AnyState]):
    """The folder of a supervisor. A subclass says what its request and its state are."""

    path: pathlib.Path  # the folder, whose name is the name

    kind: ClassVar[Kind]

    @staticmethod
    @abc.abstractmethod
    def request_of(value: dict[str, Any]) -> AnyRequest:
        """Reads a request that `dataclasses.asdict` has written. Raises if it is damaged."""

    @staticmethod
    @abc.abstractmethod
    def state_of(value: dict[str, Any]) -> AnyState:
        """Reads a state that `dataclasses.asdict` has written. Raises if it is damaged."""

    @staticmethod
    @abc.abstractmethod
    def failed(state: AnyState, reason: str, ended: str | None = None) -> AnyState:
        """Returns the state after a failure.

        Args:
            ended: the time, as `now` returns it; None if nobody knows it.
        """

    @classmethod
    def may_stop(cls, state: AnyState) -> bool:
        """Returns True in a state in which a supervisor reacts to a stop."""
        return state.status in cls.kind.running

    @staticmethod
    def notice_of(state: AnyState) -> str | None:
        """Returns what whoever waits should know of a state; None for nothing."""
        return None

    @property
    def name(self) -> str:
        """The name."""
        return self.path.name

    @property
    def logs(self) -> pathlib.Path:
        """The folder of logs."""
        return self.path / "logs"

    @property
    def supervisor_log(self) -> pathlib.Path:
        """The log of the supervisor itself."""
        return self.logs / "supervisor.log"

    def write_request(self, request: Any) -> None:
        """Writes the request. Raises `OSError` if the disk is full."""
        path = self.path / "request.json"
        files.write_json(path, asdict(request), indent=2, mode=files.PRIVATE)

    def read_request(self) -> AnyRequest:
        """Reads the request. Raises an error of the kind if it is damaged."""
        path = self.path / "request.json"
        with self._readable(path):
            return self.request_of(files.read_json(path))

    def write_state(self, state: AnyState) -> None:
        """Replaces the state in one step. Only the owner calls this. Raises `OSError`."""
        files.write_json(self._state, asdict(state), indent=2, mode=files.PRIVATE)

    def state_stamp(self) -> tuple[int, ...]:
        """Returns numbers that change when the state is written. Raises `OSError`."""
        found = self._state.stat()
        # Each write makes a new file. Its inode may be a freed one, and the clock's tick the same.
        return found.st_ino, found.st_mtime_ns, found.st_size

    @property
    def _state(self) -> pathlib.Path:
        return self.path / "state.json"

    def read_state(self) -> AnyState:
        """Reads the state. An unfinished one whose owner has ended becomes a failure.

        Raises:
            NanoError: The file is damaged. The error is of the kind's class.
        """
        with self._readable(self._state):
            value = files.read_json(self._state)
            state = self.state_of(value)
        if state.is_final or state.owner.is_alive():
            return state
        with self._readable(self._state):
            again = files.read_json(self._state)  # its last act may have been to write
        if again != value:
            return self.read_state()
        return self.failed(
            state,
            f"The supervisor of the {self.kind.noun} (process {state.owner.pid}) ended without "
            "recording an end: it was killed, the machine restarted, or the disk was full. "
            f"See {self.supervisor_log}.",
        )

    @contextlib.contextmanager
    def _readable(self, path: pathlib.Path) -> Iterator[None]:
        """Names a file that nobody can read in an error of the kind's class."""
        try:
            with files.doubting(path):
                yield
        except OSError as error:
            raise self.kind.error(
                f"The record of {self.kind.a_noun} must be readable. Received: {error}. If its "
                "disk does not answer now, try again later."
            ) from error
        except files.Damaged as error:
            raise self.kind.error(
                f"The record of {self.kind.a_noun} must be as nanotf has written it. Received: "
                f"{error}. The {self.kind.noun}'s folder has its logs and what it has saved; "
                "delete it when you do not need them."
            ) from error


def may_pass(error: Exception) -> bool:
    """Returns True for an error of a disk that does not answer now, such as one on the network.

    Args:
        error: of `read_state` or `read_request`, or an `OSError`.
    """
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and not isinstance(cause, files.GONE)


def now() -> str:
    """Returns the time, in UTC, as ISO 8601 with milliseconds."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def find(
    kind: type[AnyFolder], name: str, output: str | os.PathLike[str] | None = None
) -> AnyFolder:
    """Returns the folder of a name.

    Args:
        kind: its class.
        output: the folder that holds it; None as in `Kind.folder`.

    Raises:
        InvalidArgumentError: There is none.
    """
    words = kind.kind
    words.check_name(name)
    folder = words.folder(output)
    found = kind(folder / name)
    if not (found.path / "state.json").is_file():
        raise InvalidArgumentError(
            f"The {words.noun} must exist. Received: {name}, which is not in {folder}. `nanotf "
            f"{words.default} list` shows the {words.default} there; --output or {words.variable} "
            "names another folder."
        )
    return found


def find_all(
    kind: type[AnyFolder], output: str | os.PathLike[str] | None = None
) -> Iterator[AnyFolder]:
    """Yields the folders of a class, by name."""
    for path in sorted(kind.kind.folder(output).glob("*/state.json")):
        if _NAME.fullmatch(path.parent.name):
            yield kind(path.parent)
