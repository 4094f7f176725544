"""The context of running code: a divided program, a region in it, a proof, or none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nanotf.compat.versions import require_tensorflow

if TYPE_CHECKING:
    from nanotf.region.rows import Exchange

# State of this process, which runs one program at a time.
exchange: Exchange | None = None  # not None while layer calls are divided
region: Any = None  # the `regions.Region` of the call that is being divided, or None
proof: Any = None  # the `proof.traces.Tracing` of the call that is traced for its proof, or None
regions: int = 0  # number of divided calls
wholes: int = 0  # number of calls that could not be divided
ledger: Any = None  # the `ledger.Ledger` of the running program, or None
compiles: bool = False  # whether XLA compiles divided calls
compiled: bool = False  # whether XLA compiles the running code


class NotCompiled(Exception):
    """Raised by code that XLA cannot compile, while it is traced."""

    ag_pass_through = True  # AutoGraph would replace it with another exception


@contextlib.contextmanager
def dividing(by: Exchange | None, noting: Any = None) -> Iterator[None]:
    """Divides outermost layer calls in this context; with None they are not divided.

    Args:
        noting: `ledger.Ledger` that registers the calls, default that of the context around this.
    """
    global exchange, ledger
    before, exchange, ledger = (exchange, ledger), by, ledger if noting is None else noting
    try:
        yield
    finally:
        exchange, ledger = before


@contextlib.contextmanager
def entered(entering: Any) -> Iterator[None]:
    """Runs code in this context inside a region; with None outside any."""
    global region, regions
    before, region = region, entering
    regions += entering is not None and before is None
    try:
        yield
    finally:
        region = before


@contextlib.contextmanager
def compiling(inside: bool = False) -> Iterator[None]:
    """Makes XLA compile divided calls in this context, with `inside` all code in it."""
    global compiles, compiled
    before, compiles, compiled = (compiles, compiled), True, inside
    try:
        yield
    finally:
        compiles, compiled = before


@contextlib.contextmanager
def proving(by: Any) -> Iterator[None]:
    """Traces a call for its proof in this context, outside any region."""
    global proof
    before, proof = proof, by
    try:
        with dividing(None), entered(None):
            yield
    finally:
        proof = before


def graph_here() -> Any:
    """Returns the graph under construction, None when operations run eagerly."""
    tf = require_tensorflow()
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
