"""The scope of the running code: a divided program, a region in it, a trial, or none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nanotf.compat.versions import require_tensorflow

if TYPE_CHECKING:
    from nanotf.region.rows import Exchange

# Of this process, which runs one program at a time.
exchange: Exchange | None = None  # set while calls of layers are divided
region: Any = None  # the `regions.Region` of the call that is being divided, or None
trial: Any = None  # the `trial.Trial` that a layer is in, or None
regions: int = 0  # how many calls were divided
compiles: bool = False  # whether XLA compiles calls that are divided
compiled: bool = False  # whether it compiles the code that runs


class NotCompiled(Exception):
    """Raised by code that XLA cannot compile, while it is traced."""

    ag_pass_through = True  # AutoGraph would replace it by another


@contextlib.contextmanager
def dividing(by: Exchange | None) -> Iterator[None]:
    """In this context outermost calls of layers are divided; with None they are not."""
    global exchange
    before, exchange = exchange, by
    try:
        yield
    finally:
        exchange = before


@contextlib.contextmanager
def entered(entering: Any) -> Iterator[None]:
    """In this context code runs inside a region; with None outside any."""
    global region, regions
    before, region = region, entering
    regions += entering is not None and before is None
    try:
        yield
    finally:
        region = before


@contextlib.contextmanager
def compiling(inside: bool = False) -> Iterator[None]:
    """In this context XLA compiles calls that are divided; `inside` of one, all code."""
    global compiles, compiled
    before, compiles, compiled = (compiles, compiled), True, inside
    try:
        yield
    finally:
        compiles, compiled = before


@contextlib.contextmanager
def trying(layer_in: Any) -> Iterator[None]:
    """In this context a layer is tried, outside regions."""
    global trial
    before, trial = trial, layer_in
    try:
        with dividing(None), entered(None):
            yield
    finally:
        trial = before


def graph_here() -> Any:
    """The graph that is being made; None where operations run at once."""
    tf = require_tensorflow()
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
