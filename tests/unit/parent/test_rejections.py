"""What is raised where Keras's own step says something else than nanotf."""

from __future__ import annotations

import pytest

from nanotf.errors import ModelError
from nanotf.parent import rejections


def test_what_was_raised_first_is_the_cause_of_what_the_step_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def says(*_: object) -> None:
        raise ValueError("of the step")

    monkeypatch.setattr(rejections, "looks_wrong", lambda *_: False)
    monkeypatch.setattr(rejections, "trace_step", says)
    first = AttributeError("the reason")
    step_says = pytest.raises(ValueError, match="of the step")
    with step_says as caught, rejections.in_words_of_keras(None, None, "fit"):
        raise first
    assert caught.value.__cause__ is first
    own = ModelError("of nanotf")
    with (
        pytest.raises(ModelError, match="of nanotf"),
        rejections.in_words_of_keras(None, None, "fit"),
    ):
        raise own
    monkeypatch.setattr(rejections, "trace_step", lambda *_: None)
    reason = pytest.raises(AttributeError, match="the reason")
    with reason, rejections.in_words_of_keras(None, None, "fit"):
        raise first
