"""The pure-Python implementation: the protocol of `native/layout.h`, one-step rounds only.

It is used if the native library was not built. A sleeping rank polls, since Python has no futex.
Reductions are NumPy's, in the order of ranks, so that all ranks get identical bits.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from nanotf.collectives import layout
from nanotf.collectives.description import CollectiveDescription, describe, difference
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
from nanotf.collectives.shared_view import CollectiveFailed, SharedView
from nanotf.collectives.spec import GroupSpec
from nanotf.errors import CollectiveError, InvalidArgumentError
from nanotf.wire.failures import Failure, FailureKind

_REDUCE: dict[str, Callable[..., Any]] = {"sum": np.add, "min": np.minimum, "max": np.maximum}

_MAX_NUMBER = 2**32 - 1  # of calls with a key: the lower half of a tag


class PythonEngine(Engine):
    """One rank of a group, in pure Python. See `Engine`.

    Args:
        fd: int, the group's file; the caller keeps it.
    """

    def __init__(self, spec: GroupSpec, rank: int, fd: int) -> None:
        super().__init__(spec, rank)
        try:
            self.view = SharedView(spec, rank, fd)
        except CollectiveFailed as failed:
            raise CollectiveError(failed.failure.message) from None
        # Guards the fields below. Held only briefly, never during a wait.
        self._lock = threading.Lock()
        self._calls: dict[int, int] = {}
        self._in_flight: set[int] = set()
        self._busy: set[int] = set()
        self._times = RankTimes()
        self._failures = 0
        self._last_failure: Failure | None = None

    def all_reduce(self, arrays: Sequence[Array], key: int, op: str = "sum") -> list[Array]:
        arrays = [np.asarray(array, order="C") for array in arrays]
        check_reducible([array.dtype.name for array in arrays])
        check_reduction(op)
        return self._all_reduce(describe(f"all_reduce({op})", arrays), arrays, key, op)

    def _all_reduce(
        self, description: CollectiveDescription, arrays: Sequence[Array], key: int, op: str
    ) -> list[Array]:
        flat = (
            arrays[0].reshape(-1)
            if len(arrays) == 1
            else np.concatenate([array.reshape(-1) for array in arrays])
        )
        result = np.empty_like(flat)
        source, target = _raw(flat), _raw(result)
        chunk = self.spec.chunk_bytes
        ranks = range(self.size)
        with self._call(key, description) as call:

            def consume(number: int) -> None:
                out = target[number * chunk : (number + 1) * chunk]
                inputs = [
                    np.frombuffer(call.buffer(rank, number, len(out)), np.uint8).view(flat.dtype)
                    for rank in ranks
                ]
                _reduce(_REDUCE[op], inputs, out.view(flat.dtype))

            call.run(source, call.rounds(flat.nbytes), consume)
        ends = np.cumsum([array.size for array in arrays])[:-1]
        parts = np.split(result, ends)
        return [part.reshape(a.shape) for part, a in zip(parts, arrays, strict=True)]

    def reduce_scatter(self, arrays: Sequence[Array], key: int) -> Array:
        arrays = [np.asarray(array, order="C") for array in arrays]
        check_reducible([array.dtype.name for array in arrays])
        # The traffic of an all-reduce: a second protocol in Python is not worth it.
        sums = self._all_reduce(describe("reduce_scatter", arrays), arrays, key, "sum")
        flat = np.concatenate([array.reshape(-1) for array in sums])
        begin, end = part_of(self.rank, self.size, flat.size)
        return flat[begin:end]

    def gather_parts(self, part: Array, likes: Sequence[Array], key: int) -> list[Array]:
        part = np.asarray(part, order="C")
        check_parts(part, likes, self.rank, self.size)
        flat = self._all_gather(describe("gather_parts", likes), part, key)
        ends = np.cumsum([like.size for like in likes])[:-1]
        pieces = np.split(flat, ends)
        return [piece.reshape(like.shape) for piece, like in zip(pieces, likes, strict=True)]

    def all_gather(self, array: Array, key: int) -> Array:
        array = np.asarray(array, order="C")
        check_rows(array.ndim)
        return self._all_gather(describe("all_gather", [array], any_rows=True), array, key)

    def _all_gather(self, description: CollectiveDescription, array: Array, key: int) -> Array:
        row_bytes = array.dtype.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
        chunk = self.spec.chunk_bytes
        with self._call(key, description, rows=array.shape[0]) as call:
            results: list[Array] = []
            targets: list[Array] = []

            def allocate() -> int:
                rows = [call.rows(rank) for rank in range(self.size)]
                results.append(np.empty((sum(rows), *array.shape[1:]), array.dtype))
                ends = np.cumsum([count * row_bytes for count in rows])[:-1]
                targets.extend(np.split(_raw(results[0]), ends))
                return call.rounds(max(rows) * row_bytes)

            def consume(number: int) -> None:
                for rank, target in enumerate(targets):
                    out = target[number * chunk : (number + 1) * chunk]
                    out[:] = np.frombuffer(call.buffer(rank, number, len(out)), np.uint8)

            call.run(_raw(array), call.rounds(array.nbytes), consume, allocate)
        return results[0]

    def broadcast(self, array: Array, key: int, root: int = 0) -> Array:
        array = np.asarray(array, order="C")
        if not 0 <= root < self.size:
            raise InvalidArgumentError(
                f"root must be a rank, 0 to {self.size - 1}. Received: root={root}."
            )
        result = np.empty_like(array)
        target = _raw(result)
        chunk = self.spec.chunk_bytes
        description = describe(f"broadcast from rank {root}", [array])
        with self._call(key, description) as call:

            def consume(number: int) -> None:
                out = target[number * chunk : (number + 1) * chunk]
                out[:] = np.frombuffer(call.buffer(root, number, len(out)), np.uint8)

            source = _raw(array) if self.rank == root else _raw(array)[:0]
            call.run(source, call.rounds(array.nbytes), consume)
        return result

    def barrier(self, key: int) -> None:
        with self._call(key, describe("barrier")) as call:
            call.run(np.empty(0, np.uint8), 1, lambda number: None)

    def times(self, steps_begin: bool = False) -> RankTimes:
        return self._times

    def calls(self) -> int:
        return self._times.calls

    def add_times(self, calls: int = 0, in_calls: int = 0, waited: int = 0) -> None:
        """Counts a completed call, or a wait in a call."""
        with self._lock:
            old = self._times
            self._times = RankTimes(
                old.calls + calls, old.in_calls + in_calls, old.waited + waited, old.input
            )

    def failures(self) -> tuple[int, Failure | None]:
        with self._lock:
            return self._failures, self._last_failure

    def abort(self, text: str) -> None:
        self.view.abort(Failure(FailureKind.ABORTED, self.rank, text))

    def close(self) -> None:
        self.view.close()

    @contextlib.contextmanager
    def _call(
        self, key: int, description: CollectiveDescription, rows: int = 0
    ) -> Iterator[_PythonCall]:
        """Runs a collective and remembers its failure."""
        try:
            with _PythonCall(self, key, description, rows) as call:
                yield call
        except CollectiveFailed as failed:
            with self._lock:
                self._failures += 1
                self._last_failure = failed.failure
            raise CollectiveError(failed.failure.message) from None

    # ---------------------------------------------------------------- for `_PythonCall`
    def enter(self, key: int) -> int:
        """Returns the number of this call with `key`."""
        with self._lock:
            if key in self._in_flight:
                raise self.view.misused(
                    "one rank may have one collective of a key in flight. Received: "
                    f"key={key} on rank {self.rank} from two threads at once",
                    "Give each its own key.",
                )
            # Numbers begin at 1, since 0 would be the tag of an unused slot. None is used twice,
            # since a slot may still have the tag of the first call with that number.
            number = self._calls.get(key, 0) + 1
            if number > _MAX_NUMBER:
                raise self.view.misused(
                    "a group numbers 2**32 - 1 collectives of a key. Received: one more of "
                    f"key={key} on rank {self.rank}",
                    "Attach to a new group.",
                )
            self._in_flight.add(key)
            self._calls[key] = number
            return number

    def leave(self, key: int, slot: int | None) -> None:
        """Releases what `enter` and `try_claim` took."""
        with self._lock:
            self._in_flight.discard(key)
            self._busy.discard(-1 if slot is None else slot)

    def try_claim(self) -> int | None:
        """Claims a slot that no thread uses and all peers have finished; None if there is none."""
        view = self.view
        peers = [rank for rank in range(self.size) if rank != self.rank]
        with self._lock:
            for slot in range(layout.SLOTS):
                if slot in self._busy:
                    continue
                tag = view.word(view.tag(self.rank, slot))
                if all(view.word(view.acknowledged(p, self.rank, slot)) == tag for p in peers):
                    self._busy.add(slot)
                    return slot
        return None


class _PythonCall:
    """One collective from call to return. The step numbers are those of `native/layout.h`."""

    def __init__(
        self, engine: PythonEngine, key: int, description: CollectiveDescription, rows: int = 0
    ) -> None:
        self.engine = engine
        self.view = engine.view
        self.key = check_key(key)
        self.description = description
        self._rows = rows
        self._slots: dict[int, int] = {}
        self._met = False
        self._slot: int | None = None

    def __enter__(self) -> _PythonCall:
        self._began = time.monotonic_ns()
        self.number = self.engine.enter(self.key)
        self.tag = self.key << 32 | self.number
        try:
            self.view.check_aborted()
            self._claim()
        except BaseException:
            self.engine.leave(self.key, None)
            raise
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        view, own = self.view, self.engine.rank
        if self._met:  # step 7
            for peer in self._peers():
                view.set_word(view.acknowledged(own, peer, self._slots[peer]), self.tag)
        self.engine.leave(self.key, self._slot)
        self.engine.add_times(calls=1, in_calls=time.monotonic_ns() - self._began)

    def rounds(self, nbytes: int) -> int:
        """Returns the number of chunks for `nbytes`, at least one."""
        return max(1, -(-nbytes // self.engine.spec.chunk_bytes))

    def rows(self, rank: int) -> int:
        """Returns the number of rows that a rank gives to a gather."""
        return self.view.word(self._header(rank) + layout.ROWS)

    def buffer(self, rank: int, number: int, nbytes: int) -> memoryview:
        """Returns the buffer that a rank filled in a round."""
        return self.view.buffer(rank, self._slots[rank], number, nbytes)

    def run(
        self,
        source: Array,
        rounds: int,
        consume: Callable[[int], None],
        total: Callable[[], int] | None = None,
    ) -> None:
        """Runs steps 2 to 6: sends `source` as bytes and calls `consume` for each round.

        `total` is called when all ranks have arrived, and returns the number of rounds.
        """
        chunk = self.engine.spec.chunk_bytes
        produced = number = 0

        def produce_until(wanted: int) -> None:
            nonlocal produced
            while produced < min(wanted, rounds):
                data = source[produced * chunk : (produced + 1) * chunk]
                target = self.buffer(self.engine.rank, produced, len(data))
                np.frombuffer(target, np.uint8)[:] = data
                produced += 1
                self._post(produced)

        while number < rounds:
            produce_until(number + 2)
            if number == 0:
                self._meet()
                rounds = total() if total is not None else rounds
            else:
                self._await_posted(number + 1)
            consume(number)
            number += 1

    def _peers(self) -> list[int]:
        return [rank for rank in range(self.engine.size) if rank != self.engine.rank]

    def _header(self, rank: int) -> int:
        return self.view.slot_header(rank, self._slots[rank])

    def _claim(self) -> None:
        """Runs step 1."""
        claimed: list[int] = []

        def try_claim() -> bool:
            slot = None if claimed else self.engine.try_claim()
            claimed.extend([] if slot is None else [slot])
            return bool(claimed)

        def look_around(waited: float) -> None:
            if waited > self.engine.spec.deadline and not try_claim():
                self._give_up(
                    FailureKind.EXPIRED,
                    f"rank {self.engine.rank} waited {self.engine.spec.deadline:g} s to begin "
                    f"{self._describe()}, because {layout.SLOTS} collectives were in flight",
                    f"Ranks that begin more than {layout.SLOTS} at once must begin the same ones.",
                )

        self.view.wait(try_claim, look_around)
        self._slot = self._slots[self.engine.rank] = claimed[0]
        view, header = self.view, self._header(self.engine.rank)
        view.set_word(header + layout.POSTED, 0)
        view.set_word(header + layout.SIGNATURE, self.description.signature)
        view.set_word(header + layout.ROWS, self._rows)
        text = self.description.summary.encode()[: layout.TEXT_BYTES]
        view.bytes[header + layout.TEXT : header + layout.TEXT + len(text)] = text
        view.set_half(header + layout.TEXT_LENGTH, len(text))

    def _post(self, rounds: int) -> None:
        view, own = self.view, self.engine.rank
        view.set_word(self._header(own) + layout.POSTED, rounds)
        if rounds == 1:
            view.set_word(view.tag(own, self._slots[own]), self.tag)

    def _meet(self) -> None:
        """Runs step 4 in round 0."""
        for peer in self._peers():
            self._await(peer, lambda peer=peer: self._find(peer))  # type: ignore[misc]
        self._met = True
        view = self.view
        first = view.word(self._header(0) + layout.SIGNATURE)
        for rank in range(1, self.engine.size):
            if view.word(self._header(rank) + layout.SIGNATURE) != first:
                details = self._exchange(self.description.details)
                raise CollectiveFailed(
                    Failure(
                        FailureKind.DIFFERENT,
                        self.engine.rank,
                        "all ranks must call the same collective on the same type and shape. "
                        f"Received: {difference(details[0], rank, details[rank])} "
                        f"(key {self.key}, call {self.number})",
                        "Check that every rank runs the same model on batches of the same "
                        "structure.",
                    )
                )

    def _exchange(self, details: bytes) -> list[bytes]:
        """Runs step 4a: sends the details of this rank's call, returns those of all ranks."""
        view, own, chunk = self.view, self.engine.rank, self.engine.spec.chunk_bytes
        found = [b""] * self.engine.size
        view.set_word(self._header(own) + layout.ROWS, len(details))
        begin = longest = 0
        while begin == 0 or begin < longest:
            number = layout.DESCRIBING + begin // chunk
            piece = details[begin : begin + chunk]
            self.buffer(own, number, len(piece))[:] = piece
            view.set_word(self._header(own) + layout.POSTED, number + 1)
            self._await_posted(number + 1)
            for rank in range(self.engine.size):
                left = max(0, self.rows(rank) - begin)
                longest = max(longest, begin + left)
                found[rank] += self.buffer(rank, number, min(chunk, left))
            begin += chunk
        return found

    def _find(self, peer: int) -> bool:
        view = self.view
        for slot in range(layout.SLOTS):
            if view.word(view.tag(peer, slot)) == self.tag:
                self._slots[peer] = slot
                return True
        return False

    def _await_posted(self, rounds: int) -> None:
        for peer in self._peers():
            posted = self._header(peer) + layout.POSTED
            self._await(peer, lambda posted=posted: self.view.word(posted) >= rounds)  # type: ignore[misc]

    def _await(self, peer: int, ready: Callable[[], bool]) -> None:
        def look_around(waited: float) -> None:
            how = self.view.lost(peer)
            if how is not None and not ready():  # it may have posted, then exited
                pid = self.view.half(self.view.layout.region(peer) + layout.PID)
                self._give_up(
                    FailureKind.LOST,
                    f"rank {peer} (process {pid}) {how} while rank {self.engine.rank} waited "
                    f"for it in {self._describe()}",
                    "See that rank's log.",
                    [peer],
                )
            if waited > self.engine.spec.deadline and not ready():
                missing = self._missing(peer)
                self._give_up(
                    FailureKind.EXPIRED,
                    f"rank {self.engine.rank} waited {self.engine.spec.deadline:g} s in "
                    f"{self._describe()} for {', '.join(missing.values())}",
                    "Ranks must call the same collectives; if one is only slow, raise the "
                    "deadline.",
                    list(missing),
                )

        if ready():
            return
        began = time.monotonic_ns()
        try:
            self.view.wait(ready, look_around)
        finally:
            self.engine.add_times(waited=time.monotonic_ns() - began)

    def _give_up(
        self, kind: FailureKind, text: str, remedy: str, missing: Sequence[int] = ()
    ) -> NoReturn:
        """Aborts the group and raises."""
        failure = Failure(kind, self.engine.rank, text, remedy, tuple(missing))
        self.view.abort(failure)
        raise CollectiveFailed(failure)

    def _describe(self) -> str:
        return f"{self.description.summary} (key {self.key}, call {self.number})"

    def _missing(self, awaited: int) -> dict[int, str]:
        """Returns the ranks that have not arrived or made no progress, with texts that name them.

        The result includes at least `awaited`.
        """
        missing = {}
        here = self.view.word(self._header(self.engine.rank) + layout.POSTED)
        for peer in self._peers():
            # A rank looks for its peers one by one, so it has not yet looked for later ones.
            found = peer in self._slots or self._find(peer)
            # Until all have met, none can proceed; in a gather they begin with different rounds.
            if found and (
                not self._met or self.view.word(self._header(peer) + layout.POSTED) >= here
            ):
                continue
            missing[peer] = self._lacking(peer, found)
        return missing or {awaited: self._lacking(awaited, True)}

    def _lacking(self, peer: int, found: bool) -> str:
        state = self.view.half(self.view.layout.region(peer) + layout.STATE)
        how = "came, did not finish" if found else "did not come"
        return f"rank {peer} ({'never attached' if state == layout.ABSENT else how})"


def _raw(array: Array) -> Array:
    """Returns the bytes of a contiguous array."""
    return array.reshape(-1).view(np.uint8)


def _reduce(function: Callable[..., Any], inputs: Sequence[Array], out: Array) -> None:
    """Computes out = inputs[0] op inputs[1] op ...; sums 16-bit floats in float32."""
    wide = out.dtype.itemsize == 2
    first = inputs[0].astype(np.float32) if wide else inputs[0]
    total = np.empty(out.shape, np.float32) if wide else out
    if len(inputs) == 1:
        total[:] = first
    for number, other in enumerate(inputs[1:]):
        function(total if number else first, other.astype(np.float32) if wide else other, total)
    if wide:
        out[:] = total.astype(out.dtype)
