"""The programs, by name: each trains a model in the style of tutorials, and returns numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PROGRAMS: dict[str, Callable[..., Any]] = {}


def program(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds a program to the catalogue.

    Args:
        function: takes a decorator for the training loop, and one for steps. In one process both
            return the decorated function; with workers they are `nano(num_processes=2)` and
            `nano_multiprocessing`. Returns a structure of numbers and arrays.
    """
    assert function.__name__ not in PROGRAMS, function.__name__
    PROGRAMS[function.__name__] = function
    return function
