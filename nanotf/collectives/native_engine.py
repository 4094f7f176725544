"""The engine of one host: `native/`, called through ctypes on NumPy arrays.

`group.py` calls the same library through TensorFlow ops. Both use one handle.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from nanotf.collectives import native_library as native
from nanotf.collectives.engine import (
    Array,
    Engine,
    RankTimes,
    check_key,
    check_parts,
    check_reducible,
    check_reduction,
    check_rows,
    part_of,
)
from nanotf.collectives.joined_rank import CollectiveKind, CollectiveOffer, last_joined, take_part
from nanotf.collectives.layout import RawFailure
from nanotf.collectives.patience import Patience
from nanotf.collectives.spec import GroupSpec
from nanotf.errors import CollectiveError
from nanotf.wire.failures import Failure

_LOOK_SECONDS = 0.5  # between two looks at the deadline, and at signals
_TYPE_NAMES = {number: name for name, number in native.TYPES.items()}
_REDUCTION_NAMES = {number: name for name, number in native.REDUCTIONS.items()}


class NativeEngine(Engine):
    """One rank of a group, in C++. See `Engine`.

    Args:
        fd: the group's file; the caller keeps it.

    Attributes:
        follows: bool, True while this rank, which has joined, makes the calls of another one.
        named_rank: int, this rank in messages; on one of several hosts, that among all ranks.

    Collectives that are a step of one over hosts take its `kind`, by which ranks that have joined
    decide whether they take part. NOTHING stands for the collective's own kind.
    """

    def __init__(self, spec: GroupSpec, rank: int, fd: int) -> None:
        super().__init__(spec, rank)
        self._library = native.load()
        self.follows = False
        self.named_rank = rank
        # Reused by `times`: only one thread calls it, twice for each execution of steps.
        self._numbers = (ctypes.c_int64 * len(RankTimes()))()
        self._read_times = self._library.nanotf_times
        self._begin_steps = self._library.nanotf_begin_steps
        config = native.NanotfConfig(
            spec.nonce,
            spec.size,
            spec.chunk_bytes,
            spec.nodes,
            spec.symmetric_bytes,
            spec.spin_seconds,
            spec.deadline,
        )
        failure = RawFailure()
        self.handle: int = self._library.nanotf_attach(config, fd, rank, failure)
        if self.handle == 0:
            raise CollectiveError(failure.unpacked().message)

    def all_reduce(
        self,
        arrays: Sequence[Array],
        key: int,
        op: str = "sum",
        kind: CollectiveKind = CollectiveKind.NOTHING,
    ) -> list[Array]:
        arrays = [np.asarray(array, order="C") for array in arrays]  # C takes addresses, no strides
        check_reducible([array.dtype.name for array in arrays])
        check_reduction(op)
        results = [np.empty_like(array) for array in arrays]
        self._call(
            self._library.nanotf_all_reduce,
            key,
            f"all_reduce({op})",
            arrays,
            native.TYPES[arrays[0].dtype.name],
            native.REDUCTIONS[op],
            _fragments(list(zip(arrays, results, strict=True))),
            len(arrays),
            kind=kind,
        )
        return results

    def reduce_scatter(self, arrays: Sequence[Array], key: int) -> Array:
        arrays = [np.asarray(array, order="C") for array in arrays]
        check_reducible([array.dtype.name for array in arrays])
        begin, end = part_of(self.rank, self.size, sum(array.size for array in arrays))
        result = np.empty(end - begin, arrays[0].dtype)
        self._call(
            self._library.nanotf_reduce_scatter,
            key,
            "reduce_scatter",
            arrays,
            native.TYPES[arrays[0].dtype.name],
            _fragments([(array, None) for array in arrays]),
            len(arrays),
            result.ctypes.data,
            result.nbytes,
        )
        return result

    def gather_parts(self, part: Array, likes: Sequence[Array], key: int) -> list[Array]:
        part = np.asarray(part, order="C")
        check_parts(part, likes, self.rank, self.size)
        results = [np.empty(like.shape, like.dtype) for like in likes]
        self._call(
            self._library.nanotf_gather_parts,
            key,
            "gather_parts",
            results,  # the description: parts may differ in length between ranks
            part.ctypes.data,
            part.nbytes,
            part.itemsize * int(np.prod(part.shape[1:], dtype=np.int64)),
            _fragments([(None, result) for result in results]),
            len(results),
        )
        return results

    def drop_values(self, place: int) -> bool:
        return not self._library.nanotf_drop_values(self.handle, place)  # 0 is success

    def all_gather(
        self, array: Array, key: int, kind: CollectiveKind = CollectiveKind.NOTHING
    ) -> Array:
        array = np.asarray(array, order="C")
        check_rows(array.ndim)
        results: list[Array] = []

        def allocate(context: Any, rows: int, out: Any) -> int:
            # C calls it, which no exception can cross; 1 tells it that memory is lacking.
            with contextlib.suppress(MemoryError):
                results.append(np.empty((rows, *array.shape[1:]), array.dtype))
                out[0] = results[0].ctypes.data
                return 0
            return 1

        row_bytes = array.dtype.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
        self._call(
            self._library.nanotf_all_gather,
            key,
            "all_gather",
            [array],
            array.ctypes.data,
            array.shape[0],
            row_bytes,
            native.Allocate(allocate),  # `_call` holds it until C has returned
            None,
            any_rows=True,
            kind=kind,
        )
        return results[0]

    def broadcast(
        self,
        array: Array,
        key: int,
        root: int = 0,
        kind: CollectiveKind = CollectiveKind.NOTHING,
    ) -> Array:
        array = np.asarray(array, order="C")
        result = np.empty_like(array)
        self._call(
            self._library.nanotf_broadcast,
            key,
            f"broadcast from rank {root}",
            [array],
            root,
            array.ctypes.data,
            result.ctypes.data,
            array.nbytes,
            kind=kind,
        )
        return result

    def barrier(self, key: int) -> None:
        self._call(self._library.nanotf_barrier, key, "barrier", [])

    def join(self, key: int) -> int:
        return last_joined(self, key, self.follow(key))

    def follow(self, key: int) -> int:
        """Takes part in the others' collectives until all have joined; see `join`.

        Returns:
            The number of collectives.
        """
        self.begin_join()
        count = 0
        with self.following():
            # Rank 0 sees first that all have joined. Its call with `key`, in `last_joined`, tells.
            while (offer := self.next_offer()) is not None and offer.key != key:
                count += take_part(self, offer, self.named_rank)
        return count

    def begin_join(self) -> None:
        """Tells the other ranks that this one makes no more calls of its own."""
        self._library.nanotf_join(self.handle)

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Lets this rank's calls be described as those of the rank that it follows."""
        self.follows = True
        try:
            yield
        finally:
            self.follows = False

    def next_offer(self) -> CollectiveOffer | None:
        """Waits for a call of the ranks that have not joined.

        Returns:
            None once all ranks of this engine have joined, but only on rank 0. The others follow
            that one then.
        """
        found, failure = native.NanotfOffer(), RawFailure()
        patience = Patience(self.spec.deadline)
        while True:
            milliseconds = int(1000 * _LOOK_SECONDS)
            if self._library.nanotf_next(self.handle, milliseconds, found, failure):
                raise CollectiveError(failure.unpacked().message)
            kind = CollectiveKind(found.kind)
            if kind is CollectiveKind.ALL_JOINED:
                return None
            if kind is not CollectiveKind.NOTHING:
                names = _TYPE_NAMES[found.type], _REDUCTION_NAMES[found.reduction]
                return CollectiveOffer(found.key, kind, *names, found.bytes)
            if patience.is_over():
                text = (
                    f"rank {self.named_rank} has joined, and waited {self.spec.deadline:g} s for a "
                    "collective of the ranks that have not"
                )
                self.abort(text)
                raise CollectiveError(text)

    def times(self, steps_begin: bool = False) -> RankTimes:
        (self._begin_steps if steps_begin else self._read_times)(self.handle, self._numbers)
        return RankTimes._make(self._numbers[:])

    def calls(self) -> int:
        # Not the array of `times`: any thread may call this.
        numbers = (ctypes.c_int64 * len(RankTimes()))()
        self._read_times(self.handle, numbers)
        return RankTimes._make(numbers[:]).calls

    def failures(self) -> tuple[int, Failure | None]:
        last = RawFailure()
        count = self._library.nanotf_failures(self.handle, last)
        return count, last.unpacked() if count else None

    def abort(self, text: str) -> None:
        self._library.nanotf_abort(self.handle, text.encode("utf-8", "replace"))

    def close(self) -> None:
        self._library.nanotf_close(self.handle)

    def _call(
        self,
        function: Callable[..., int],
        key: int,
        name: str,
        arrays: Sequence[Array],
        *arguments: object,
        any_rows: bool = False,
        kind: CollectiveKind = CollectiveKind.NOTHING,
    ) -> None:
        shapes = [number for array in arrays for number in (array.ndim, *array.shape)]
        if any_rows:
            shapes[1] = -1  # the first dimension: any length
        call = native.NanotfCall(
            check_key(key),
            name.encode(),
            arrays[0].dtype.name.encode() if arrays else b"",
            (ctypes.c_int64 * len(shapes))(*shapes),
            len(arrays),
            self.follows,
            kind,
        )
        failure = RawFailure()
        if function(self.handle, call, *arguments, failure):
            raise CollectiveError(failure.unpacked().message)


def _fragments(pairs: Sequence[tuple[Array | None, Array | None]]) -> Any:
    """Builds the C array of (source, target) pairs; either may be None."""

    def fragment(source: Array | None, target: Array | None) -> native.Fragment:
        known = source if source is not None else target
        assert known is not None
        addresses = [None if array is None else array.ctypes.data for array in (source, target)]
        return native.Fragment(*addresses, known.nbytes)

    return (native.Fragment * len(pairs))(*[fragment(*pair) for pair in pairs])
