"""Imports Optuna, which is an optional dependency."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from nanotf.errors import UnavailableError


@functools.cache
def require_optuna() -> Any:
    """Imports Optuna.

    Returns:
        The module `optuna`.

    Raises:
        UnavailableError: It is not installed.
    """
    try:
        return importlib.import_module("optuna")
    except ModuleNotFoundError as error:
        raise UnavailableError(
            "nanotf.search needs an installed Optuna, with its dependencies. Received: no module "
            f"named {error.name!r}. Install it: pip install 'nanotf[search]'."
        ) from error
