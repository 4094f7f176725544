"""Arguments that name one of a few things."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nanotf.errors import InvalidArgumentError


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
