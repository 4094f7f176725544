"""The interface of an engine: collectives on NumPy arrays, one object per rank."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from nanotf.collectives.spec import REDUCTIONS, GroupSpec
from nanotf.errors import InvalidArgumentError, InvalidArgumentTypeError
from nanotf.wire.failures import Failure

Array = np.ndarray[Any, Any]

# The dtypes that TensorFlow's own collectives reduce; 16-bit floats are summed in float32.
REDUCIBLE = ("float32", "float64", "float16", "bfloat16", "int32", "int64")
MAX_KEY = 2**32 - 1  # a tag has 32 bits for the key, see `native/layout.h`


class RankTimes(NamedTuple):
    """A rank's times since it attached. Concurrent collectives add up."""

    calls: int = 0  # completed collectives
    in_calls: int = 0  # nanoseconds in them
    waited: int = 0  # part of `in_calls` spent waiting for peers
    input: int = 0  # nanoseconds that steps waited for their data, if they were stamped


class Engine(abc.ABC):
    """One rank of a group. Collectives with different keys may run in several threads at once.

    All collectives raise `CollectiveError` on every rank when ranks call different collectives,
    when a rank exits, leaves or aborts, and when the deadline of the group passes.
    """

    # By which the native ops find the group; None if only these methods run its collectives.
    handle: int | None = None

    def __init__(self, spec: GroupSpec, rank: int) -> None:
        if not 0 <= rank < spec.size:
            raise InvalidArgumentError(f"rank must be 0 to {spec.size - 1}. Received: rank={rank}.")
        self.spec = spec
        self.rank = rank
        self.size = spec.size

    @abc.abstractmethod
    def all_reduce(self, arrays: Sequence[Array], key: int, op: str = "sum") -> list[Array]:
        """Reduces arrays of one dtype as one vector; returns new arrays."""

    @abc.abstractmethod
    def reduce_scatter(self, arrays: Sequence[Array], key: int) -> Array:
        """Sums arrays of one dtype, seen as one vector; returns this rank's part of it."""

    @abc.abstractmethod
    def gather_parts(self, part: Array, likes: Sequence[Array], key: int) -> list[Array]:
        """Reverses `reduce_scatter`: joins all ranks' parts to arrays of the shapes of `likes`.

        Args:
            part: a vector of elements; or an array of rows, as many to each rank as if they were
                elements.
        """

    def drop_values(self, place: int) -> bool:
        """Frees a place of `group.Group.gather_parts`; False if this engine shares no values."""
        return False

    @abc.abstractmethod
    def all_gather(self, array: Array, key: int) -> Array:
        """Concatenates the ranks' arrays along axis 0; only that dimension may differ."""

    @abc.abstractmethod
    def broadcast(self, array: Array, key: int, root: int = 0) -> Array:
        """Returns the root's array. Other ranks' arrays only give dtype and shape."""

    @abc.abstractmethod
    def barrier(self, key: int) -> None:
        """Returns when every rank has arrived."""

    @abc.abstractmethod
    def join(self, key: int) -> int:
        """Takes part in the others' collectives, without data, until all ranks have joined.

        Meanwhile no other thread of this rank may make a collective.

        Args:
            key: of joining alone.

        Returns:
            The rank that has joined last.
        """

    @abc.abstractmethod
    def times(self, steps_begin: bool = False) -> RankTimes:
        """Returns this rank's times; `steps_begin` marks the start of an execution of steps."""

    @abc.abstractmethod
    def calls(self) -> int:
        """Returns the number of collectives this rank has completed; any thread may call it."""

    @abc.abstractmethod
    def failures(self) -> tuple[int, Failure | None]:
        """Returns the number of this rank's failed collectives and the last failure."""

    @abc.abstractmethod
    def abort(self, text: str) -> None:
        """Makes every rank's present and future collectives of the group raise `text`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Leaves the group; ranks that still wait for this one raise. May be called twice."""


def part_of(rank: int, size: int, elements: int) -> tuple[int, int]:
    """Returns the part of a vector that a rank gets in a reduce-scatter.

    Args:
        size: number of ranks.
        elements: length of the vector.

    Returns:
        A tuple of the first index and the index after the last.
    """
    each = -(-elements // size)  # rounded up: only the last parts can be short or empty
    return min(rank * each, elements), min((rank + 1) * each, elements)


def check_key(key: int) -> int:
    """Returns the key as a Python int.

    Raises:
        InvalidArgumentError: if it does not fit in 32 unsigned bits.
    """
    key = int(key)
    if not 0 <= key <= MAX_KEY:
        raise InvalidArgumentError(
            f"key must be 0 to {MAX_KEY}. Received: key={key}. Use the same key on all ranks."
        )
    return key


def check_reduction(op: str) -> str:
    """Returns `op` if it is one of `REDUCTIONS`, else raises `InvalidArgumentError`."""
    if op not in REDUCTIONS:
        raise InvalidArgumentError(
            f"op must be one of {REDUCTIONS}. Received: op={op!r}. "
            "For a mean, sum and divide by the number of ranks."
        )
    return op


def check_reducible(dtypes: Sequence[str]) -> None:
    """Raises `InvalidArgumentTypeError` unless all dtypes are the same reducible one."""
    if not dtypes:
        raise InvalidArgumentError("all_reduce needs at least one tensor. Received: none.")
    if len(set(dtypes)) > 1 or dtypes[0] not in REDUCIBLE:
        raise InvalidArgumentTypeError(
            f"all_reduce needs tensors of one dtype, one of {REDUCIBLE}. "
            f"Received: {', '.join(sorted(set(dtypes)))}. Cast first, or make one call per dtype."
        )


def check_parts(part: Array, likes: Sequence[Array], rank: int, size: int) -> None:
    """Raises `InvalidArgumentError` unless `part` is the rank's part of arrays like `likes`."""
    row = max(1, int(np.prod(part.shape[1:], dtype=np.int64)))  # rows may have no elements
    rows, rest = divmod(sum(like.size for like in likes), row)
    begin, end = part_of(rank, size, rows)
    is_part = part.ndim > 0 and len(part) == end - begin and rest == 0
    if not is_part or any(like.dtype != part.dtype for like in likes):
        raise InvalidArgumentError(
            f"gather_parts needs a part of {end - begin} elements with the dtype of `likes`. "
            f"Received: {part.dtype.name}{list(part.shape)}."
        )


def check_rows(dimensions: int) -> None:
    """Raises `InvalidArgumentError` for a scalar, which has no axis to gather along."""
    if dimensions == 0:
        raise InvalidArgumentError(
            "all_gather needs a tensor with at least one dimension. Received: a scalar. "
            "Reshape it to [1]."
        )
