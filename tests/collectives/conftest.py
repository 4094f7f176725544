"""Forks the ranks of a module from one process, which makes the imports once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from collective_runner import template_of_ranks


@pytest.fixture(autouse=True, scope="module")
def _template_of_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """The template of the module named by the test module's constant `RANKS`."""
    module = getattr(request.module, "RANKS", None)
    if module is None:
        yield
        return
    with template_of_ranks(module):
        yield
