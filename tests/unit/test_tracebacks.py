"""Frames that users see."""

from __future__ import annotations

import traceback
from typing import Any

import pytest

from nanotf import errors, tracebacks
from nanotf.tracebacks import raising_at_the_call


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
    assert [file for file in files if tracebacks.is_nanotfs(file)] == [tracebacks.__file__]


def test_frames_of_nanotf_go() -> None:
    files = _files(errors.check_choice, "size", 7, (1, 2))
    assert [file for file in files if tracebacks.is_nanotfs(file)] == [tracebacks.__file__]


@pytest.mark.parametrize(("name", "value"), [(tracebacks.VARIABLE, "full"), ("NANOTF_RANK", "0")])
def test_whole_tracebacks(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the user asks for them, and in a worker, whose errors bring them to the parent."""
    monkeypatch.setenv(name, value)
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
