"""The parts of a program that were divided, and those that were not; for the user's report."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from nanotf.region import scope
from nanotf.wire.parts import Part


class Ledger:
    """The parts of one model or program, in the order of their first calls.

    It is kept as long as the graphs of the program's steps, which later calls run again.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[str, int], Part] = {}
        self._running: list[set[tuple[str, int]]] = []  # the parts inside each running `around`

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts."""
        return tuple(self._parts.values())

    def note(self, owner: Any, part: Part) -> None:
        """Registers a part that is computed as a whole, or by rows."""
        key = part.name, id(owner)  # several layers may have one name
        self._parts[key] = part
        for inside in self._running:
            inside.add(key)

    @contextlib.contextmanager
    def around(self, owner: Any, part: Part) -> Iterator[None]:
        """Registers a part that is not divided, after the parts inside it, which this context runs.

        It is left out if there are parts inside and no operations besides theirs.
        """
        inside: set[tuple[str, int]] = set()
        self._running.append(inside)
        try:
            yield
        finally:
            self._running.pop()
        theirs = sum(self._parts[key].operations or 0.0 for key in inside)
        if part.operations is not None:
            part = dataclasses.replace(part, operations=max(part.operations - theirs, 0.0))
        if part.operations or not inside:
            self.note(owner, part)


def note(owner: Any, part: Part) -> None:
    """Registers a part of the program that runs, see `Ledger.note`."""
    if scope.ledger is not None:
        scope.ledger.note(owner, part)


def around(owner: Any, part: Part) -> contextlib.AbstractContextManager[None]:
    """Registers a part of the program that runs, see `Ledger.around`."""
    if scope.ledger is None:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[None] = scope.ledger.around(owner, part)
    return context
