"""The variables of a job, in one shared block.

    [ values, turn 0 | values, turn 1 | local values of rank 0 | ... | of rank N-1 ]

A mirrored variable is equal on all ranks, so rank 0 alone writes it. A variable that is
synchronised when it is read (metrics, moving averages of batch normalisation) differs between
ranks: every rank writes its own value, and the parent combines them as the variable's
aggregation says. The values exist twice and are written in turn, so that a worker that dies
while it writes leaves the state of the last completed epoch whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from nanotf.compat.versions import require_tensorflow
from nanotf.errors import ModelError
from nanotf.shipping.arrays import ArrayRef, lay_out, numpy_dtype, view
from nanotf.shipping.blocks import Block, aligned

SEED_DISTANCE = 1_000_003  # between the seeds of two ranks; a seed counts up by 1 a draw

_REDUCTIONS = {"SUM": "sum", "MEAN": "mean", "ONLY_FIRST_REPLICA": "first", "NONE": "first"}


@dataclasses.dataclass(frozen=True)
class _Variable:
    """Place and kind of one variable: `local` is set if it differs between ranks."""

    name: str
    value: ArrayRef
    local: ArrayRef | None
    reduction: str


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """Where each variable lies in the state block.

    Args:
        variables: tuple of `_Variable`, in the order of the lists given to `of`.
        values_nbytes: int, size of one set of values.
        local_nbytes: int, size of one rank's local values.
        size: int, number of workers.
    """

    variables: tuple[_Variable, ...]
    values_nbytes: int
    local_nbytes: int
    size: int

    @classmethod
    def of(cls, variables: Sequence[Any], size: int, averaged: Sequence[Any] = ()) -> StateLayout:
        """The layout for a list of `tf.Variable`.

        Args:
            variables: sequence of `tf.Variable`.
            size: int, number of workers.
            averaged: sequence of those among them which differ between ranks though TensorFlow
                does not know it, and whose mean counts.
        """
        means = {id(variable) for variable in averaged}
        specs = [_Spec(tuple(v.shape), numpy_dtype(v.dtype.name)) for v in variables]
        values, values_nbytes = lay_out(specs)
        is_local = [_is_local(v) or id(v) in means for v in variables]
        chosen = [spec for spec, local in zip(specs, is_local, strict=True) if local]
        locals_, local_nbytes = lay_out(chosen)
        rest = iter(locals_)
        entries = tuple(
            _Variable(
                v.name,
                ref,
                next(rest) if local else None,
                "mean" if id(v) in means else _REDUCTIONS[v.aggregation.name],
            )
            for v, ref, local in zip(variables, values, is_local, strict=True)
        )
        return cls(entries, aligned(values_nbytes), aligned(local_nbytes), size)

    @property
    def nbytes(self) -> int:
        """The block's size in bytes."""
        return 2 * self.values_nbytes + self.size * self.local_nbytes

    def check(self, variables: Sequence[Any]) -> None:
        """Raises `ModelError` unless `variables` are of the layout's shapes and dtypes."""
        ours = [(e.value.shape, e.value.dtype) for e in self.variables]
        theirs = [
            (r.shape, r.dtype)
            for r in lay_out([_Spec(tuple(v.shape), numpy_dtype(v.dtype.name)) for v in variables])[
                0
            ]
        ]
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


@dataclasses.dataclass(frozen=True)
class _Spec:
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def _is_local(variable: Any) -> bool:
    tf = require_tensorflow()
    return bool(variable.synchronization == tf.VariableSynchronization.ON_READ)


class State:
    """Variables on one side, the block on the other.

    Args:
        layout: `StateLayout`.
        block: `Block` of `layout.nbytes` bytes.
        variables: sequence of `tf.Variable`, as the layout lists them.
        strategy: the `tf.distribute.Strategy` that the variables belong to, or None.
        seeds: sequence of `tf.Variable` among them, which ranks get different values of: their
            random layers shall not draw the same numbers. Rank 0 has the parent's.
        rank: int.
    """

    def __init__(
        self,
        layout: StateLayout,
        block: Block,
        variables: Sequence[Any],
        strategy: Any = None,
        seeds: Sequence[Any] = (),
        rank: int = 0,
    ) -> None:
        layout.check(variables)
        self._seed_offsets = [
            rank * SEED_DISTANCE if any(v is seed for seed in seeds) else 0 for v in variables
        ]
        self.layout = layout
        self.block = block
        self.variables = list(variables)
        if strategy is not None:
            # The plain variable that this process holds of a distributed one: reading and
            # assigning it takes a tenth of the time, and no collective.
            self.variables = [strategy.experimental_local_results(v)[0] for v in variables]

    def _values(self, turn: int) -> list[np.ndarray[Any, Any]]:
        start = (turn % 2) * self.layout.values_nbytes
        return [view(self.block, _moved(e.value, start)) for e in self.layout.variables]

    def _locals(self, rank: int) -> list[np.ndarray[Any, Any] | None]:
        start = 2 * self.layout.values_nbytes + rank * self.layout.local_nbytes
        return [
            None if e.local is None else view(self.block, _moved(e.local, start))
            for e in self.layout.variables
        ]

    def load(self, turn: int) -> None:
        """Sets the variables from the block's values of `turn`."""
        for variable, value, offset in zip(
            self.variables, self._values(turn), self._seed_offsets, strict=True
        ):
            variable.assign(value + np.array(offset, value.dtype) if offset else value)

    def store(self, turn: int) -> None:
        """Writes all variables to the block's values of `turn`."""
        for variable, value in zip(self.variables, self._values(turn), strict=True):
            value[...] = variable.numpy()

    def store_rank(self, turn: int, rank: int) -> None:
        """Writes what `rank` has to write: its local values, and as rank 0 all others."""
        values, locals_ = self._values(turn), self._locals(rank)
        for variable, value, local in zip(self.variables, values, locals_, strict=True):
            if local is not None:
                local[...] = variable.numpy()
            elif rank == 0:
                value[...] = variable.numpy()

    def combine(self, turn: int) -> None:
        """Completes the values of `turn` with the combined local values of all ranks."""
        by_rank = [self._locals(rank) for rank in range(self.layout.size)]
        for entry, value, *locals_ in zip(
            self.layout.variables, self._values(turn), *by_rank, strict=True
        ):
            if entry.local is None:
                continue
            if entry.reduction == "first":
                value[...] = locals_[0]
            else:
                total = sum(x.astype(_accumulator(value.dtype)) for x in locals_)
                value[...] = total / len(locals_) if entry.reduction == "mean" else total

    def differs(self, turn: int) -> bool:
        """Whether any variable differs from the block's values of `turn`."""
        return any(
            not np.array_equal(v.numpy(), value, equal_nan=value.dtype.kind == "f")
            for v, value in zip(self.variables, self._values(turn), strict=True)
        )


def _accumulator(dtype: np.dtype[Any]) -> Any:
    return np.float64 if dtype.kind in "fV" else dtype


def _moved(ref: ArrayRef, start: int) -> ArrayRef:
    return dataclasses.replace(ref, offset=ref.offset + start)
