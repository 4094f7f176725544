"""Frames that users see."""

from __future__ import annotations

import functools
import json
import sys
import traceback
from typing import Any

import pytest

from nanotf import errors, tracebacks
from nanotf.tracebacks import raising_at_the_call

# Python 3.10 leaves the decorator's own frame.
OWN = [] if sys.version_info >= (3, 11) else [tracebacks.__file__]


@raising_at_the_call
def _public(function: Any, *arguments: Any) -> Any:
    return function(*arguments)


def _users() -> None:
    raise KeyError("a reason")


def _files(action: Any, *arguments: Any) -> list[str]:
    with pytest.raises((KeyError, errors.InvalidArgumentError)) as caught:
        _public(action, *arguments)
    return [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_the_users_frames_stay() -> None:
    files = _files(_users)
    assert files.count(__file__) == 3  # the call, the public function and what it calls
    assert [file for file in files if tracebacks.is_nanotfs(file)] == OWN


def test_frames_of_nanotf_go() -> None:
    files = _files(errors.check_choice, "size", 7, (1, 2))
    assert [file for file in files if tracebacks.is_nanotfs(file)] == OWN


def test_frames_of_the_errors_above_go() -> None:
    def raise_from() -> None:
        try:
            errors.check_choice("size", 7, (1, 2))
        except ValueError as error:
            raise KeyError("size") from error

    with pytest.raises(KeyError) as caught:
        _public(raise_from)
    cause = caught.value.__cause__
    assert cause is not None
    assert [f.filename for f in traceback.extract_tb(cause.__traceback__)] == [__file__]


def test_a_frame_of_pythons_library_belongs_to_its_caller() -> None:
    with pytest.raises(ValueError) as caught:
        _public(json.loads, "{")
    assert json.decoder.__file__ in [
        frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)
    ]
    with pytest.raises(ValueError) as caught:
        _public(errors.check_choice, "size", Unprintable(), (1, 2))
    assert traceback.extract_tb(caught.value.__traceback__)[-1].filename == __file__


class Unprintable:
    """An argument whose description raises in Python's library, called by nanotf."""

    __repr__ = staticmethod(functools.partial(json.loads, "{"))  # type: ignore[assignment]


@pytest.mark.parametrize("in_worker", [True, False])
def test_whole_tracebacks(in_worker: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the user asks for them, and in a worker, whose errors bring them to the parent."""
    if in_worker:
        monkeypatch.setattr(tracebacks._here, "is_worker", False)
        tracebacks.enter_worker()
    else:
        monkeypatch.setenv(tracebacks.VARIABLE, "full")
    assert errors.__file__ in _files(errors.check_choice, "size", 7, (1, 2))


def test_the_function_keeps_its_signature_and_its_context() -> None:
    assert _public.__name__ == "_public"
    with pytest.raises(KeyError) as caught:
        _public(_users)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_a_deep_recursion() -> None:
    def deeper() -> None:
        deeper()

    with pytest.raises(RecursionError) as caught:
        _public(deeper)
    assert len(traceback.extract_tb(caught.value.__traceback__)) > 100
