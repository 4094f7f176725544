"""Collectives over several hosts, in two levels: shared memory on a host, TCP between hosts.

    all ranks of a host      sum through shared memory (the host's own group)
    rank 0 of each host      exchanges one buffer with each other host (`peers`), sums in the order
                             of hosts
    all ranks of a host      get the result from its rank 0 through shared memory

Each host sends a short vector whole to every other host, and all hosts sum: one exchange. A long
vector is divided: each host sums its part and sends it to the others. That takes two exchanges, but
each host sends `2 (H - 1) / H` times the vector instead of `H - 1` times. One host sums an element,
or all hosts do so in the same order, so all ranks get identical bits.

A rank that has joined follows the calls on its host. A leader follows whole calls, those of its
host's ranks first, and after these have joined those of other hosts, whose frames say what they do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from nanotf.collectives.description import CollectiveDescription, describe
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
from nanotf.collectives.joined_rank import (
    CollectiveKind,
    CollectiveOffer,
    last_joined,
    take_part,
)
from nanotf.collectives.native_engine import NativeEngine
from nanotf.collectives.peers import CallNote, PeerFailed, Peers
from nanotf.collectives.spec import HostsSpec, read_abort_record, write_abort_record
from nanotf.errors import CollectiveError
from nanotf.wire.failures import Failure, FailureKind

ONE_STEP_BYTES = 64 << 10  # sending this much takes about as long as one more wait for a host
# `np.minimum` and `np.maximum` keep a NaN, as the reductions in C do; `np.fmin` would not.
_REDUCE: dict[str, Callable[..., Any]] = {"sum": np.add, "min": np.minimum, "max": np.maximum}
_SUMMED_WIDE = ("float16", "bfloat16")  # in float32, rounded once


class HostsEngine(Engine):
    """One rank of a group that spans hosts. See `Engine`.

    Args:
        local: this host's own group.
        fds: descriptors of the leader's connections (see `Peers`); empty on other ranks.
        memory: descriptor of the memory of the host's group; the caller keeps it.
    """

    def __init__(
        self, local: NativeEngine, hosts: HostsSpec, fds: Sequence[int], memory: int
    ) -> None:
        self._first = hosts.ranks(hosts.index)[0]
        spec = dataclasses.replace(local.spec, size=hosts.size, nodes=1)
        super().__init__(spec, self._first + local.rank)
        self._local, self._hosts = local, hosts
        local.named_rank = self.rank  # errors count ranks over all hosts
        self._peers = Peers(hosts, fds, self._failed_here) if local.rank == 0 else None
        # For the leader, which reads this host's abort records, and writes one when another host
        # fails (`_failed`).
        self._memory = mmap.mmap(memory, local.spec.layout.total_bytes)
        # Guards the fields below, but the two of `join`: no other thread makes a call meanwhile.
        self._lock = threading.Lock()
        self._numbers: dict[int, int] = {}  # calls by key; the n-th meets the n-th of other hosts
        self._joins = 0  # tells the frames of one join from those of the next
        self._has_joined = False
        self._done, self._in_calls = 0, 0  # completed calls, and nanoseconds in them
        self._failures = 0
        self._last_failure: Failure | None = None

    # ------------------------------------------------------------------------ collectives
    def all_reduce(self, arrays: Sequence[Array], key: int, op: str = "sum") -> list[Array]:
        arrays = [np.asarray(array, order="C") for array in arrays]
        check_reducible([array.dtype.name for array in arrays])
        flat = _flat(arrays, check_reduction(op))
        offer = CollectiveOffer(key, CollectiveKind.ALL_REDUCE, flat.dtype.name, op, flat.nbytes)
        with self._call(offer, describe(f"all_reduce({op})", arrays)) as call:
            mine = self._local.all_reduce([flat], key, op)[0]
            total = call.spread(lambda: call.reduce(mine, op), mine.shape, mine.dtype)
        return _shaped(total, arrays)

    def reduce_scatter(self, arrays: Sequence[Array], key: int) -> Array:
        arrays = [np.asarray(array, order="C") for array in arrays]
        check_reducible([array.dtype.name for array in arrays])
        flat = _flat(arrays, "sum")
        bounds = self._bounds(flat.size)
        begin, end = bounds[self._hosts.index]
        offer = CollectiveOffer(key, CollectiveKind.OTHER)
        with self._call(offer, describe("reduce_scatter", arrays)) as call:
            # The whole sum: the leader sends the other hosts their parts of it.
            mine = self._local.all_reduce([flat], key, kind=offer.kind)[0]
            part = call.spread(lambda: call.sum_own(mine, bounds), (end - begin,), mine.dtype)
        own = part_of(self.rank, self.size, flat.size)
        return part[own[0] - begin : own[1] - begin].astype(arrays[0].dtype)

    def gather_parts(self, part: Array, likes: Sequence[Array], key: int) -> list[Array]:
        part = np.asarray(part, order="C")
        check_parts(part, likes, self.rank, self.size)
        size = sum(like.size for like in likes)
        offer = CollectiveOffer(key, CollectiveKind.OTHER)
        with self._call(offer, describe("gather_parts", likes)) as call:
            # A host's ranks follow each other, so the parts of the hosts join to the vector.
            mine = self._local.all_gather(part.reshape(-1), key, kind=offer.kind)
            total = call.spread(lambda: np.concatenate(call.swap(mine)), (size,), part.dtype)
        return _shaped(total, likes)

    def all_gather(self, array: Array, key: int) -> Array:
        array = np.asarray(array, order="C")
        check_rows(array.ndim)
        row_bytes = array.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
        offer = CollectiveOffer(key, CollectiveKind.ALL_GATHER, nbytes=row_bytes)
        with self._call(offer, describe("all_gather", [array], any_rows=True)) as call:
            mine = self._local.all_gather(array, key)
            found: list[Array] = []

            def rows() -> Array:
                found.append(np.concatenate(call.swap(mine)))
                return np.array([len(found[0])], np.int64)

            # The other ranks of the host need the length before they can receive the rows.
            count = int(call.spread(rows, (1,), np.int64)[0])
            return call.spread(lambda: found[0], (count, *array.shape[1:]), array.dtype)

    def broadcast(self, array: Array, key: int, root: int = 0) -> Array:
        array = np.asarray(array, order="C")
        source = next(h for h in range(len(self._hosts.counts)) if root in self._hosts.ranks(h))
        offer = CollectiveOffer(key, CollectiveKind.BROADCAST)
        with self._call(offer, describe(f"broadcast from rank {root}", [array])) as call:
            if source == self._hosts.index:
                array = self._local.broadcast(array, key, root - self._first)
            # A first step, unlike those that spread what a host has already reduced or gathered.
            return call.spread(
                lambda: call.copy_from(source, array), array.shape, array.dtype, offer.kind
            )

    def barrier(self, key: int) -> None:
        nothing = np.empty(0, np.uint8)
        offer = CollectiveOffer(key, CollectiveKind.BARRIER)
        with self._call(offer, describe("barrier")) as call:
            # First: what the leader then swaps says that all ranks of its host are here.
            self._local.barrier(key)
            call.spread(lambda: call.swap(nothing)[0], nothing.shape, nothing.dtype)

    def join(self, key: int) -> int:
        count = self._local.follow(key) if self._peers is None else self._follow(key)
        last = last_joined(self, key, count)
        if self._peers is not None:
            self._peers.forget((key, self._joins, 0))
        return last

    def _follow(self, key: int) -> int:
        count = 0
        self._joins, self._has_joined = self._joins + 1, True
        self._local.begin_join()
        with self._local.following():
            while (offer := self._next_here()) is not None:
                count += take_part(self, offer, self.rank)
        # Not before: until then a rank of this host may still begin a call with the others.
        self._tell_joined(key)
        while (offer := self._next_elsewhere(key)) is not None:
            count += take_part(self, offer, self.rank)
        self._has_joined = False
        return count

    def _next_here(self) -> CollectiveOffer | None:
        """Waits for a call of this host's ranks; None once all of them have joined."""
        with self._reported():
            return self._local.next_offer()

    def _tell_joined(self, key: int) -> None:
        """Tells the other hosts that all ranks of this one have joined."""
        assert self._peers is not None, "only leaders exchange"
        note = CallNote(0, "join", CollectiveOffer(key, CollectiveKind.NOTHING))
        with self._reported():
            for host in self._hosts.others:
                self._peers.send(host, (key, self._joins, 0), note, np.empty(0, np.uint8))

    def _next_elsewhere(self, key: int) -> CollectiveOffer | None:
        """Waits for a call of other hosts; None once all their ranks have joined."""
        assert self._peers is not None, "only leaders exchange"
        with self._reported():
            offer = self._peers.next_offer(self._numbers, (key, self._joins, 0))
        # A host that already knows of all others continues with this key.
        return None if offer is None or offer.key == key else offer

    def _bounds(self, elements: int) -> list[tuple[int, int]]:
        """Returns the parts of a vector that the ranks of each host get in a reduce-scatter."""
        ranks = [self._hosts.ranks(host) for host in range(len(self._hosts.counts))]
        return [
            (part_of(r[0], self.size, elements)[0], part_of(r[-1], self.size, elements)[1])
            for r in ranks
        ]

    # ------------------------------------------------------------------------------ calls
    @contextlib.contextmanager
    def _call(
        self, offer: CollectiveOffer, description: CollectiveDescription
    ) -> Iterator[_HostsCall]:
        key = check_key(offer.key)
        with self._lock:
            number = self._numbers[key] = self._numbers.get(key, 0) + 1
        began = time.monotonic_ns()
        text = f"{description.summary} (key {key}, call {number})"
        note = CallNote(0 if self._has_joined else description.signature, text, offer)
        with self._reported():
            yield _HostsCall(self._local, self._peers, self._hosts, note, number)
        with self._lock:
            self._done += 1
            self._in_calls += time.monotonic_ns() - began

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Reports a failure in this context to all ranks of all hosts."""
        try:
            yield
        except PeerFailed as failed:
            raise self._failed(failed.failure) from None
        except CollectiveError as error:
            _, failure = self._local.failures()
            failure = failure or Failure(FailureKind.ABORTED, -1, str(error))
            raise self._failed(self._seen_from_all(failure)) from None

    def _failed(self, failure: Failure) -> CollectiveError:
        """Reports a failure to all ranks of all hosts. Returns the exception to raise."""
        with self._lock:
            is_new = self._failures == 0  # later failures follow from the first
            self._failures += 1
            self._last_failure = failure
        if self._peers is not None and is_new:
            self._peers.tell_all(failure)
            # Without a rank, which tells `_seen_from_all` that ranks are counted over all hosts.
            places = self._local.spec.layout
            own = places.region(self._local.rank) + places.rank_record
            write_abort_record(self._memory, places, own, dataclasses.replace(failure, rank=-1))
        return CollectiveError(failure.message)

    def _failed_here(self) -> Failure | None:
        spec = self._local.spec
        failure = read_abort_record(self._memory, spec.layout, spec.size)
        return None if failure is None else self._seen_from_all(failure)

    def _seen_from_all(self, failure: Failure) -> Failure:
        """Returns a failure of the host's group, with ranks counted over all hosts.

        A failure without a rank came from a leader, which has counted so already.
        """
        if failure.rank < 0:
            return failure
        missing = tuple(self._first + rank for rank in failure.missing)
        return dataclasses.replace(failure, rank=self._first + failure.rank, missing=missing)

    def times(self, steps_begin: bool = False) -> RankTimes:
        local = self._local.times(steps_begin)
        # A wait is counted at its end, which is before that of its call.
        waited = local.waited + (0 if self._peers is None else self._peers.waited)
        return RankTimes(self._done, self._in_calls, min(waited, self._in_calls), local.input)

    def calls(self) -> int:
        return self._done

    def failures(self) -> tuple[int, Failure | None]:
        return self._failures, self._last_failure

    def abort(self, text: str) -> None:
        # For other ranks the leader tells the other hosts, as soon as it has noticed the abort.
        self._local.abort(text)
        if self._peers is not None:
            self._peers.tell_all(Failure(FailureKind.ABORTED, -1, text))

    def close(self) -> None:
        if self._peers is not None:
            self._peers.close()
        self._local.close()


class _HostsCall:
    """One collective of one rank: what the leader exchanges with other hosts, and how it spreads.

    Args:
        peers: None on ranks that are not their host's leader.
        note: of the call.
        number: of the call with its key; the same on all ranks.
    """

    def __init__(
        self,
        local: NativeEngine,
        peers: Peers | None,
        hosts: HostsSpec,
        note: CallNote,
        number: int,
    ) -> None:
        self._local, self._peers, self._hosts = local, peers, hosts
        self._note, self._key = note, note.offer.key
        self._number, self._step = number, 0

    def spread(
        self,
        found: Callable[[], Array],
        shape: tuple[int, ...],
        dtype: Any,
        kind: CollectiveKind = CollectiveKind.SPREAD,
    ) -> Array:
        """Returns on all ranks of the host what `found` returns on its leader."""
        # If `found` raises, the abort record of `_failed` wakes the ranks that wait here.
        mine = found() if self._peers is not None else np.empty(shape, dtype)
        return self._local.broadcast(mine, self._key, 0, kind)

    # The methods below run on leaders alone.
    def swap(self, mine: Array) -> list[Array]:
        """Returns the arrays of all hosts, which may differ in their first dimension, in order."""
        place = self._next()
        # All sends come first: threads of the peers read at any time, so no host waits its turn.
        for host in self._hosts.others:
            self._send(host, place, mine)

        def take(host: int) -> Array:
            rows = self._take(host, place, mine.dtype)
            return rows.reshape(len(rows), *mine.shape[1:])

        return self._from_all(mine, take)

    def sum_own(self, mine: Array, bounds: Sequence[tuple[int, int]], op: str = "sum") -> Array:
        """Returns the reduction over hosts of this host's part of a vector."""
        place = self._next()
        for host in self._hosts.others:
            self._send(host, place, mine[slice(*bounds[host])])
        own = mine[slice(*bounds[self._hosts.index])]
        parts = self._from_all(own, lambda h: self._take(h, place, mine.dtype).reshape(-1))
        return _reduce(op, parts)

    def reduce(self, mine: Array, op: str) -> Array:
        """Returns the reduction of a vector over hosts."""
        if mine.nbytes <= ONE_STEP_BYTES:
            return _reduce(op, self.swap(mine))
        count = len(self._hosts.counts)
        bounds = [part_of(host, count, mine.size) for host in range(count)]  # equal work per host
        return np.concatenate(self.swap(self.sum_own(mine, bounds, op)))

    def copy_from(self, source: int, array: Array) -> Array:
        """Returns the array of one host."""
        place = self._next()
        if source != self._hosts.index:
            found: Array = self._take(source, place, array.dtype).reshape(array.shape)
            return found
        for host in self._hosts.others:
            self._send(host, place, array)
        return array

    def _next(self) -> int:
        self._step += 1
        return self._step

    def _from_all(self, own: Array, take: Callable[[int], Array]) -> list[Array]:
        hosts = range(len(self._hosts.counts))
        return [own if host == self._hosts.index else take(host) for host in hosts]

    def _send(self, host: int, step: int, data: Array) -> None:
        assert self._peers is not None, "only leaders exchange"
        place = (self._key, self._number, step)
        self._peers.send(host, place, self._note, np.ascontiguousarray(data))

    def _take(self, host: int, step: int, dtype: Any) -> Array:
        assert self._peers is not None, "only leaders exchange"
        place = (self._key, self._number, step)
        # An array of rows, see `Peers.take`.
        return self._peers.take(host, place, self._note).view(dtype)


def _flat(arrays: Sequence[Array], op: str) -> Array:
    """Returns arrays of one dtype as one vector, in the dtype in which they are reduced."""
    flat = (
        arrays[0].reshape(-1)  # not copied: the host's sum goes to other memory
        if len(arrays) == 1
        else np.concatenate([array.reshape(-1) for array in arrays])
    )
    wide = op == "sum" and flat.dtype.name in _SUMMED_WIDE
    return flat.astype(np.float32) if wide else flat


def _shaped(flat: Array, likes: Sequence[Array]) -> list[Array]:
    ends = np.cumsum([like.size for like in likes])[:-1]
    pieces = np.split(flat.astype(likes[0].dtype, copy=False), ends)
    return [piece.reshape(like.shape) for piece, like in zip(pieces, likes, strict=True)]


def _reduce(op: str, vectors: Sequence[Array]) -> Array:
    total: Array = vectors[0].copy()
    for vector in vectors[1:]:
        _REDUCE[op](total, vector, out=total)
    return total
