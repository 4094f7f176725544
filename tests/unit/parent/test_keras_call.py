"""Arguments of a call of one of Keras's methods."""

from __future__ import annotations

from typing import Any

import pytest

from nanotf.errors import InvalidArgumentTypeError
from nanotf.parent.keras_call import KerasCall


class _Model:
    """A model with nanotf's method above Keras's."""

    def fit(self, *args: Any, num_processes: int = 1, **kwargs: Any) -> None:
        """nanotf's."""

    def keras_fit(self, x: Any = None, y: Any = None, batch_size: int = 32) -> None:
        """Keras's."""


MODEL = _Model()


def _of(*args: Any, **kwargs: Any) -> KerasCall:
    return KerasCall.of(MODEL, MODEL.keras_fit, args, kwargs, _Model.fit)


def test_arguments_get_their_names() -> None:
    assert _of(1, batch_size=4).given == {"x": 1, "batch_size": 4}


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("num_process", "num_processes"), ("batchsize", "batch_size"), ("bacth_size", "batch_size")],
)
def test_a_misspelt_argument(wrong: str, right: str) -> None:
    with pytest.raises(InvalidArgumentTypeError, match=f"{wrong}=2. Did you mean `{right}`?"):
        _of(**{wrong: 2})


@pytest.mark.parametrize("name", ["callback_list", "z"])
def test_keras_rejects_what_is_like_no_argument(name: str) -> None:
    call = _of(**{name: 2})
    assert call.given is None
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        call()
