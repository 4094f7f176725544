"""The programs, by name: each trains something as tutorials and guides do, and returns numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PROGRAMS: dict[str, Callable[..., Any]] = {}


def program(function: Callable[..., Any]) -> Callable[..., Any]:
    """Enters a program into the catalogue.

    Args:
        function: takes a decorator for the training loop, and one for steps. In one process both
            return what they decorate; with workers they are `nano(num_processes=2)` and
            `nano_multiprocessing`. Returns a structure of numbers and arrays.
    """
    assert function.__name__ not in PROGRAMS, function.__name__
    PROGRAMS[function.__name__] = function
    return function
