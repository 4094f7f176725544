"""The variables of a call, in one shared block.

    [ values, turn 0 | values, turn 1 ]

All variables are equal on all ranks, and each rank writes an N-th of every large one. If the update
is divided (`region.sharded_update`), each rank writes its own part. There are two sets of values,
written in turn: a worker that dies while writing one leaves the other, the state of the last
completed epoch, intact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from nanotf.collectives.engine import part_of
from nanotf.compat.values import array_of, share, write
from nanotf.errors import ModelError
from nanotf.region.sharded_update import pieces_of
from nanotf.shipping.data.arrays import ArrayRef, PackedArrays, dtype_name, numpy_dtype, view
from nanotf.wire.blocks import Block

_WHOLE = 16384  # elements; rank 0 writes smaller variables alone, which is cheaper


@dataclasses.dataclass(frozen=True)
class _Variable:
    """Name and place of one variable."""

    name: str
    value: ArrayRef


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """The place of each variable in the state block."""

    variables: tuple[_Variable, ...]  # in the order of the list given to `of`
    values_nbytes: int  # size of one set of values
    size: int  # number of workers

    @classmethod
    def of(cls, variables: Sequence[Any], size: int) -> StateLayout:
        """Returns the layout for a list of `tf.Variable` and a number of workers."""
        packed = PackedArrays([_like(v) for v in variables])
        entries = map(_Variable, (v.name for v in variables), packed.refs)
        return cls(tuple(entries), packed.nbytes, size)

    @property
    def nbytes(self) -> int:
        """The block's size in bytes."""
        return 2 * self.values_nbytes

    def check(self, variables: Sequence[Any]) -> None:
        """Raises `ModelError` unless `variables` are those of the layout, by shapes and dtypes."""
        ours = [(e.value.shape, e.value.dtype) for e in self.variables]
        theirs = [(a.shape, dtype_name(a.dtype)) for a in map(_like, variables)]
        if ours != theirs:
            differing = next(
                (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
                min(len(ours), len(theirs)),
            )
            raise ModelError(
                "A worker's copy of the model must have the variables of the original. Received: "
                f"{len(theirs)} variables instead of {len(ours)}; the first that differs is "
                f"number {differing}, {[e.name for e in self.variables[differing:][:1]]}. "
                "Make the model's get_config() (or the arguments of its __init__) complete."
            )


def _like(variable: Any) -> np.ndarray[Any, Any]:
    """Returns an array of a variable's shape and dtype, which takes no memory."""
    return np.broadcast_to(np.empty((), numpy_dtype(variable.dtype.name)), tuple(variable.shape))


@dataclasses.dataclass(frozen=True)
class VectorPart:
    """A variable that holds a part of others, seen as one vector."""

    variable: Any  # `tf.Variable`, whose elements in order are the part
    places: tuple[int, ...]  # the places of the other variables in the layout
    bounds: tuple[int, int]  # the part's first element in that vector, and the one after its last
    only: bool  # whether no other variable of this process holds these elements


class SharedVariables:
    """Variables on one side, the block on the other.

    Args:
        block: of `StateLayout.nbytes` bytes.
        variables: `tf.Variable`s in the layout's order.
        parts: this process leaves out variables that it holds only there.
        lent: ids of those variables that lie in the block, after `load`, until their next value.
            They must get it before the values of the same turn change.

    Raises:
        ModelError: The variables are not those of the layout.
    """

    def __init__(
        self,
        layout: StateLayout,
        block: Block,
        variables: Sequence[Any],
        parts: Sequence[VectorPart] = (),
        lent: Collection[int] = (),
    ) -> None:
        in_parts = {place for part in parts if part.only for place in part.places}
        self.places = [i for i in range(len(layout.variables)) if i not in in_parts]
        layout.check(variables)
        self.layout = layout
        self.block = block
        self.variables = [variables[place] for place in self.places]
        self.parts = list(parts)
        self._lent = lent

    def _start(self, turn: int) -> int:
        return (turn % 2) * self.layout.values_nbytes

    def _values(self, turn: int) -> list[np.ndarray[Any, Any]]:
        start = self._start(turn)
        return [view(self.block, _moved(e.value, start)) for e in self.layout.variables]

    def load(self, turn: int) -> None:
        """Sets the variables from the block's values of `turn`."""
        values = self._values(turn)
        for place, variable in zip(self.places, self.variables, strict=True):
            if id(variable) in self._lent:
                values[place].flags.writeable = False  # of this view
                share(variable, values[place])
            else:
                write(variable, values[place])
        for part in self.parts:
            pieces = [piece for piece, _ in _pieces(part, values)]
            if pieces:
                write(part.variable, np.concatenate(pieces).reshape(part.variable.shape))

    def store(self, turn: int) -> None:
        """Writes all variables to the block's values of `turn`, before any process reads them."""
        start = self._start(turn)
        for place, variable in zip(self.places, self.variables, strict=True):
            self.block.write(start + self.layout.variables[place].value.offset, array_of(variable))

    def reserve(self, turn: int) -> None:
        """Allocates memory for the values of `turn` in the background, so that writing is quick."""
        self.block.reserve(self._start(turn), self.layout.values_nbytes)

    def store_rank(self, turn: int, rank: int) -> None:
        """Writes the part of the values that `rank` is responsible for."""
        for variable, targets in self._targets(turn, rank):
            array = array_of(variable).reshape(-1)
            for target, inside in targets:
                target[...] = array[inside]

    def _targets(
        self, turn: int, rank: int
    ) -> Iterator[tuple[Any, list[tuple[np.ndarray[Any, Any], slice]]]]:
        """Yields the variables that `rank` writes, each with targets and the elements for them."""
        values = self._values(turn)
        for place, variable in zip(self.places, self.variables, strict=True):
            whole = values[place].reshape(-1)
            if whole.size < _WHOLE:
                if rank == 0:
                    yield variable, [(whole, slice(None))]
            else:
                inside = slice(*part_of(rank, self.layout.size, whole.size))
                yield variable, [(whole[inside], inside)]
        for part in self.parts:
            if part.only:
                yield part.variable, _pieces(part, values)

    def spans(self, turn: int) -> tuple[tuple[int, int], ...]:
        """Returns the pieces of the block that `store` writes, as begin and length in bytes."""
        return ((self._start(turn), self.layout.values_nbytes),)

    def spans_of_rank(self, turn: int, rank: int) -> tuple[tuple[int, int], ...]:
        """Returns the pieces of the block that `store_rank` writes, as `spans` does."""
        base = _address(self.block.array(0, (1,), np.uint8))
        found: list[tuple[int, int]] = []
        for _, targets in self._targets(turn, rank):
            for target, _ in targets:
                if target.size:
                    found.append((_address(target) - base, target.nbytes))
        return tuple(found)

    def snapshot(self, turn: int) -> list[np.ndarray[Any, Any]]:
        """Returns a copy of the block's values of `turn`."""
        return [value.copy() for value in self._values(turn)]

    def restore(self, turn: int, values: Sequence[np.ndarray[Any, Any]]) -> None:
        """Writes a snapshot to the block's values of `turn`, and to the variables."""
        for target, value in zip(self._values(turn), values, strict=True):
            target[...] = value
        self.load(turn)

    def differs(self, turn: int) -> bool:
        """Returns True if any variable differs from the block's values of `turn`."""
        return any(True for _ in self._changed(turn))

    def changed(self, turn: int) -> dict[int, np.ndarray[Any, Any]]:
        """Returns the variables that differ from the block's values of `turn`, by place."""
        return {place: array_of(variable).copy() for place, variable in self._changed(turn)}

    def _changed(self, turn: int) -> Iterator[tuple[int, Any]]:
        values = self._values(turn)
        for place, variable in zip(self.places, self.variables, strict=True):
            # By bits: a NaN equals itself, and -0.0 differs from 0.0.
            if not np.array_equal(_bits(array_of(variable)), _bits(values[place])):
                yield place, variable


def _address(array: np.ndarray[Any, Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.reshape(-1).view(np.uint8)


def _pieces(
    part: VectorPart, values: Sequence[np.ndarray[Any, Any]]
) -> list[tuple[np.ndarray[Any, Any], slice]]:
    """Returns the pieces of the values that make up a part, and the place of each in the part."""
    wholes = [values[place] for place in part.places]
    pieces, at = [], 0
    for index, first, last in pieces_of(part.bounds, [whole.shape for whole in wholes]):
        pieces.append((wholes[index].reshape(-1)[first:last], slice(at, at + last - first)))
        at += last - first
    return pieces


def _moved(ref: ArrayRef, start: int) -> ArrayRef:
    return dataclasses.replace(ref, offset=ref.offset + start)
