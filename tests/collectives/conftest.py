"""Ranks of a module are forked from one process, which imports what they need once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from collective_runner import template_of_ranks


@pytest.fixture(autouse=True, scope="module")
def _template_of_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """That of the module's constant `RANKS`, a module's name."""
    module = getattr(request.module, "RANKS", None)
    if module is None:
        yield
        return
    with template_of_ranks(module):
        yield
