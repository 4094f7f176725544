"""Worker errors that users can also catch as the original class."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from nanotf.errors import CollectiveError, ReaderDied, WorkerDied, WorkerError, catchable_as


class Coded(RuntimeError):
    """Its `args` differ from its constructor's arguments."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code

    def __str__(self) -> str:
        return f"code {self.code}"


class Ranked(Exception):
    """Has a property with the name of an attribute of `WorkerError`."""

    @property
    def rank(self) -> int:
        return 17


class Particular(Exception):
    """Cannot be constructed without its argument."""

    def __new__(cls, _: Any) -> Particular:
        return super().__new__(cls)


def _error() -> WorkerError:
    return WorkerError("Worker 1 raised", 1, 1234, (0,), remote_traceback="Trace", log_tail="Log")


@pytest.mark.parametrize(
    ("original", "attributes"),
    [
        (ValueError("a"), {}),
        (KeyError("a"), {}),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), {"start": 0, "reason": "bad"}),
        (FileNotFoundError(2, "none", "path"), {"errno": 2, "filename": "path"}),
        (ImportError("a", name="module"), {"name": "module"}),
        (SyntaxError("a", ("file", 3, 1, "text")), {"lineno": 3}),
        (Coded(7, "text"), {"code": 7}),
        (Ranked("a"), {}),
        (CollectiveError("a"), {}),
    ],
)
def test_error_of_both_classes(original: Exception, attributes: dict[str, Any]) -> None:
    made = catchable_as(_error(), original, f"{original}\n\nWorker 1 raised")
    for error in (made, pickle.loads(pickle.dumps(made))):
        assert isinstance(error, WorkerError)
        assert isinstance(error, type(original))
        assert (error.args, error.rank, error.pid) == (original.args, 1, 1234)
        assert str(error).startswith(f"{original}\n\nWorker 1 raised\n\nNANOTF_TRACEBACK=full")
        for name, value in attributes.items():
            assert getattr(error, name) == value
    assert made.original is original
    assert made.__cause__ is None, "Python would print it above the error"


@pytest.mark.parametrize(
    "original",
    [
        Particular(1),
        StopIteration(1),
        KeyboardInterrupt(),
        SystemExit(1),
        WorkerDied("a"),
        None,
    ],
)
def test_error_that_no_class_can_be_made_of(original: BaseException | None) -> None:
    error = _error()
    assert catchable_as(error, original, "text") is error
    assert error.original is original
    assert error.message == "Worker 1 raised"


def test_an_error_told_again() -> None:
    """Of another class and text, about the same process."""
    died = WorkerDied("It ended.", 1, 4711, (2, 3), signal=9, log_tail="last words", what="It.")
    told = died.retold(ReaderDied, "Batch 3 is lost.", 3)
    assert type(told) is ReaderDied
    assert (told.message, told.args, told.index) == ("Batch 3 is lost.", ("Batch 3 is lost.",), 3)
    same = ("rank", "pid", "cores", "signal", "log_tail", "what")
    assert [getattr(told, name) for name in same] == [getattr(died, name) for name in same]
