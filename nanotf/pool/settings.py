"""Settings that users make through environment variables."""

from __future__ import annotations

import os

from nanotf.errors import NanoError


def seconds(variable: str, default: float) -> float:
    """Reads a time in seconds from an environment variable.

    Raises:
        NanoError: The variable is not a number above 0.
    """
    text = os.environ.get(variable, str(default))
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value > 0:
        raise NanoError(
            f"{variable} must be a number of seconds above 0. "
            f"Received: {variable}={text!r}. Set such a number, or unset it."
        )
    return value
