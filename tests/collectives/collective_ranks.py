"""Functions that the ranks of the tests run: plain functions of (spec, rank, fd, ...)."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import mmap
import os
import random
import signal
import struct
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
from collective_runner import wait_for

from nanotf.collectives.engine import part_of
from nanotf.collectives.native_engine import NativeEngine
from nanotf.errors import CollectiveError
from nanotf.wire.failures import Failure

try:  # comes with TensorFlow
    from ml_dtypes import bfloat16

    BFLOAT16: tuple[Any, ...] = (np.dtype(bfloat16),)
except ImportError:
    BFLOAT16 = ()

REDUCIBLE = (*map(np.dtype, ("f4", "f8", "f2", "i4", "i8")), *BFLOAT16)
MOVABLE = (*REDUCIBLE, *map(np.dtype, ("?", "i1", "u1", "i2", "u2", "u4", "u8", "c8", "c16")))
CHUNK = 4096
SYMMETRIC = 4 * CHUNK
# Offsets in `RankHeader` and `SlotHeader` of native/layout.h.
STATE, PID = 64, 68
POSTED, REDUCED, SIGNATURE = 0, 64, 128


class ForgedRank:
    """A rank that attaches, and then writes to its first slot what no engine would write."""

    def __init__(self, spec: Any, rank: int, fd: int) -> None:
        self._places = spec.layout
        self._memory = mmap.mmap(fd, self._places.total_bytes)
        self._region, self._first = self._places.region(rank), self._places.region(0)
        struct.pack_into("<I", self._memory, self._region + PID, os.getpid())
        struct.pack_into("<I", self._memory, self._region + STATE, 1)

    def copy_header(self) -> None:
        """Copies the header of rank 0's first slot, after rank 0 has entered a call."""
        wait_for(lambda: self._tag() != 0)
        size = self._places.slot_header_bytes
        theirs, own = (r + self._places.slot_headers for r in (self._first, self._region))
        self._memory[own : own + size] = self._memory[theirs : theirs + size]

    def set(self, field: int, value: int) -> None:
        """Writes a word of the slot's header."""
        place = self._region + self._places.slot_headers + field
        struct.pack_into("<Q", self._memory, place, value)

    def enter(self) -> None:
        """Posts the tag of rank 0's call."""
        struct.pack_into("<Q", self._memory, self._region + self._places.tags, self._tag())

    def _tag(self) -> int:
        return int(struct.unpack_from("<Q", self._memory, self._first + self._places.tags)[0])


@contextlib.contextmanager
def engine_of(spec: Any, rank: int, fd: int) -> Iterator[Any]:
    engine = NativeEngine(spec, rank, fd)
    try:
        yield engine
    finally:
        engine.close()


def error_of(function: Any, *arguments: Any) -> str:
    """Returns the text of the CollectiveError that `function` must raise."""
    try:
        function(*arguments)
    except CollectiveError as error:
        return str(error)
    raise AssertionError("no CollectiveError")


def failure_of(engine: Any, function: Any, *arguments: Any) -> Failure:
    """Returns the failure recorded by the engine after `function` raised, as it must."""
    before, _ = engine.failures()
    text = error_of(function, *arguments)
    count, failure = engine.failures()
    assert count == before + 1
    assert failure.message == text
    found: Failure = failure
    return found


def lengths(itemsize: int) -> list[int]:
    """Returns numbers of elements on either side of every threshold, and odd ones."""
    edges = [CHUNK, 2 * CHUNK, 4 * CHUNK, SYMMETRIC, 5 * CHUNK, 11 * CHUNK]
    around = {edge // itemsize + step for edge in edges for step in (-1, 0, 1)}
    return [0, 1, 2, 7, 63, 65, 1023, 1025, *sorted(around)]


@functools.lru_cache(1000)
def sample(dtype: Any, shape: Any, seed: int) -> Any:
    """Returns values of every kind; the same in every process."""
    array = _sample(dtype, shape, seed)
    array.setflags(write=False)  # cached: making them took most of a test's time
    return array


def _sample(dtype: Any, shape: Any, seed: int) -> Any:
    random_state = np.random.RandomState(seed % 2**31)
    if dtype.kind == "b":
        return np.asarray(random_state.rand(*shape) < 0.5)
    if dtype.kind in "iu":
        return np.asarray(random_state.randint(0, 100, shape)).astype(dtype)
    values = random_state.standard_normal(shape) * 10.0 ** random_state.randint(-6, 5, shape)
    if dtype.kind == "c":
        values = values + 1j
    with np.errstate(all="ignore"):
        array = np.asarray(values).astype(dtype)
    flat = array.reshape(-1)
    for number, special in enumerate((np.inf, -np.inf, np.nan, -0.0, 1e-7, 6e-5, 65519.0)):
        with np.errstate(all="ignore"):
            flat[number + seed % 3 :: 97] = np.asarray(special).astype(dtype)
    return array


def expected_reduction(inputs: list[Any], op: str) -> Any:
    """Reduces in the order of ranks; 16-bit floats in float32, rounded once."""
    function = {"sum": np.add, "min": np.minimum, "max": np.maximum}[op]
    dtype = inputs[0].dtype
    wide = [x.astype(np.float32) if dtype.itemsize == 2 else x for x in inputs]
    total = wide[0].copy()
    with np.errstate(all="ignore"):
        for other in wide[1:]:
            total = function(total, other)
        return total.astype(dtype)


def expected_by_nodes(spec: Any, inputs: list[Any], op: str) -> Any:
    """Reduces within each node, then across nodes; 16-bit floats as `expected_reduction`."""
    if inputs[0].dtype.itemsize == 2:
        return expected_reduction(inputs, op)
    here = spec.size // spec.nodes
    firsts = range(0, spec.size, here)
    of_nodes = [expected_reduction(inputs[first : first + here], op) for first in firsts]
    return expected_reduction(of_nodes, op)


def expected_all_reduce(spec: Any, inputs: list[Any], op: str, nbytes: int) -> Any:
    """Reduces by nodes, but in one step for small messages."""
    in_one_step = nbytes <= spec.symmetric_bytes
    return expected_reduction(inputs, op) if in_one_step else expected_by_nodes(spec, inputs, op)


def same(a: Any, b: Any) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.itemsize == 2 and a.dtype.kind not in "iu":
        a, b = a.astype(np.float32), b.astype(np.float32)
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"))


def reduce_everything(spec: Any, rank: int, fd: int) -> str:
    """Reduces every dtype, reduction and length. Returns a digest of all bits of all results."""
    digest = hashlib.sha256()
    with engine_of(spec, rank, fd) as engine:
        for dtype in REDUCIBLE:
            for op in ("sum", "min", "max"):
                for count in lengths(dtype.itemsize) if op == "sum" else (0, 1, 1025, 9 * CHUNK):
                    inputs = [sample(dtype, (count,), count + r) for r in range(spec.size)]
                    (result,) = engine.all_reduce([inputs[rank]], 1, op)
                    expected = expected_all_reduce(spec, inputs, op, result.nbytes)
                    assert same(result, expected), (dtype, op, count)
                    digest.update(result.tobytes())
            scalar = np.asarray(rank + 1).astype(dtype)
            assert engine.all_reduce([scalar], 2)[0].shape == ()
    return digest.hexdigest()


def take_turns(spec: Any, rank: int, fd: int) -> str:
    """Alternates small and large collectives of every kind, without a pause.

    Returns a digest of all results that are equal on all ranks. Rank 0 checks them.
    """
    digest, everyone = hashlib.sha256(), range(spec.size)
    with engine_of(spec, rank, fd) as engine:
        for repeat in range(6):
            for count in (1, 17 * CHUNK // 4 + repeat):
                mine = sample(np.dtype("f4"), (count,), repeat + rank)
                (total,) = engine.all_reduce([mine], 1)
                gathered = engine.all_gather(mine, 2)
                part = engine.reduce_scatter([mine], 3)
                begin, end = part_of(rank, spec.size, count)
                (back,) = engine.gather_parts(part, [total], 5)
                assert same(back[begin:end], part)
                for result in (total, gathered, back):
                    digest.update(result.tobytes())
                if rank == 0:
                    inputs = [sample(np.dtype("f4"), (count,), repeat + r) for r in everyone]
                    assert same(total, expected_all_reduce(spec, inputs, "sum", total.nbytes))
                    assert same(gathered, np.concatenate(inputs))
                    assert same(back, expected_by_nodes(spec, inputs, "sum"))
            engine.barrier(4)
    return digest.hexdigest()


def reduce_pieces_that_vanish(spec: Any, rank: int, fd: int) -> None:
    """Sums 1 on rank 0 and, on the other ranks, pieces that rounding at each step would lose."""
    with engine_of(spec, rank, fd) as engine:
        for dtype, eps in [(np.dtype("f2"), 2.0**-10), *((b, 2.0**-7) for b in BFLOAT16)]:
            for count in (5, 3 * CHUNK):
                piece = np.array(1.0 if rank == 0 else eps / (spec.size - 1)).astype(dtype)
                mine = np.full(count, piece)
                (total,) = engine.all_reduce([mine], 1)
                assert (total.astype("f4") == 1 + eps).all(), dtype
                assert (engine.reduce_scatter([mine], 2).astype("f4") == 1 + eps).all(), dtype


def reduce_many(spec: Any, rank: int, fd: int) -> None:
    """Reduces several tensors in one call, including empty ones and ones across chunk borders."""
    shapes = [(3, 5), (0,), (), (CHUNK // 4 - 7,), (17, 0, 2), (3 * CHUNK // 4 + 1, 2), (1,)]
    with engine_of(spec, rank, fd) as engine:
        for repeat in range(3):
            inputs = [
                [sample(np.dtype("f4"), shape, 31 * repeat + i + 7 * r) for r in range(spec.size)]
                for i, shape in enumerate(shapes)
            ]
            results = engine.all_reduce([values[rank] for values in inputs], 9)
            nbytes = sum(result.nbytes for result in results)
            for result, values in zip(results, inputs, strict=True):
                assert same(result, expected_all_reduce(spec, values, "sum", nbytes))


def scatter_and_gather(spec: Any, rank: int, fd: int) -> None:
    """Scatters every dtype: few elements, empty tensors, tensors across parts and chunks."""
    many = [(3, 5), (0,), (), (CHUNK // 4 - 7,), (17, 0, 2), (3 * CHUNK // 4 + 1, 2), (1,)]
    with engine_of(spec, rank, fd) as engine:
        for dtype in REDUCIBLE:
            for shapes in ([()], [(0,), (3,)], [(CHUNK,)], [(2, 7), (5 * CHUNK + 3,)], many):
                inputs = [
                    [sample(dtype, shape, 3 * i + r) for i, shape in enumerate(shapes)]
                    for r in range(spec.size)
                ]
                sums = [
                    expected_by_nodes(spec, list(values), "sum")
                    for values in zip(*inputs, strict=True)
                ]
                whole = np.concatenate([array.reshape(-1) for array in sums])
                begin, end = part_of(rank, spec.size, whole.size)
                part = engine.reduce_scatter(inputs[rank], 11)
                assert same(part, whole[begin:end]), (dtype, shapes)
                for found, array in zip(engine.gather_parts(part, sums, 12), sums, strict=True):
                    assert same(found, array), (dtype, shapes)


def gather_and_broadcast(spec: Any, rank: int, fd: int) -> None:
    with engine_of(spec, rank, fd) as engine:
        for dtype in MOVABLE:
            for base, rest in [(0, ()), (1, ()), (1, (3,)), (1500, ()), (2000, (3,)), (5, (0,))]:
                rows = [(base + 700 * r) % 2600 if r else base for r in range(spec.size)]
                inputs = [sample(dtype, (n, *rest), n + r) for r, n in enumerate(rows)]
                result = engine.all_gather(inputs[rank], 3)
                assert same(result, np.concatenate(inputs)), (dtype, rows, rest)
            for root in range(spec.size):
                for shape in [(), (0, 4), (7,), (CHUNK + 1,), (31, 377)]:
                    inputs = [sample(dtype, shape, 5 * r + 1) for r in range(spec.size)]
                    result = engine.broadcast(inputs[rank], 4, root)
                    assert same(result, inputs[root]), (dtype, root, shape)


def barrier(spec: Any, rank: int, fd: int, directory: Path) -> None:
    with engine_of(spec, rank, fd) as engine:
        for step in range(20):
            (directory / f"{step}-{rank}").touch()
            engine.barrier(7)
            assert all((directory / f"{step}-{r}").exists() for r in range(spec.size))


def repeated(spec: Any, rank: int, fd: int, calls: int) -> None:
    """Uses one key repeatedly, with lengths going up and down: slots and buffers are reused."""
    random_state = random.Random(5)
    with engine_of(spec, rank, fd) as engine:
        for call in range(calls):
            count = random_state.choice([1, 30, CHUNK // 4, CHUNK, 3 * CHUNK + 5, 6 * CHUNK])
            values = np.arange(count, dtype=np.int32) + call
            (result,) = engine.all_reduce([values + rank], 1)
            total = values * spec.size + sum(range(spec.size))
            assert np.array_equal(result, total), call


def many_threads(spec: Any, rank: int, fd: int, threads: int, calls: int) -> None:
    """Uses a key per thread; ranks start the threads in different orders."""
    failures = []
    with engine_of(spec, rank, fd) as engine:

        def work(key: int) -> None:
            try:
                for call in range(calls):
                    values = np.full(1 + key * 300, key * 1000 + call, np.float64)
                    (result,) = engine.all_reduce([values + rank], key)
                    assert (result == values * spec.size + sum(range(spec.size))).all()
                    gathered = engine.all_gather(np.full(key, rank, np.int8), 1000 + key)
                    assert gathered.tolist() == np.repeat(range(spec.size), key).tolist()
            except BaseException as error:
                failures.append((key, error))

        keys = list(range(threads))
        random.Random(rank).shuffle(keys)
        workers = [threading.Thread(target=work, args=(key,)) for key in keys]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert not failures, failures[0]


def one_key_twice(spec: Any, rank: int, fd: int, directory: Path) -> Failure | None:
    """Makes a second call of a key that is in flight on this rank, which raises an error."""
    with engine_of(spec, rank, fd) as engine:
        if rank == 0:
            # Rank 1 has not come, so whichever of the two enters first blocks.
            with futures.ThreadPoolExecutor(2) as threads:
                calls = [threads.submit(failure_of, engine, engine.barrier, 5) for _ in range(2)]
                refused, blocked = futures.wait(calls, 30, futures.FIRST_COMPLETED)
                (directory / "go").touch()
                (failure,) = [call.result() for call in refused]
                for call in blocked:
                    assert call.exception() is not None, "two were refused"
            return failure
        wait_for((directory / "go").exists)
        engine.barrier(5)
        return None


def mismatches(spec: Any, rank: int, fd: int) -> list[Failure]:
    """Returns the failures of calls in which the last rank differs; the group stays usable."""
    last = rank == spec.size - 1
    ones = np.ones
    with engine_of(spec, rank, fd) as engine:
        found = [
            failure_of(engine, engine.all_reduce, [ones((2, 3 if last else 4), np.float32)], 1),
            failure_of(engine, engine.all_reduce, [ones(9, np.int32 if last else np.int64)], 1),
            failure_of(engine, engine.all_reduce, [ones(9, np.int32)], 1, "max" if last else "sum"),
            failure_of(engine, engine.broadcast, ones(9), 1, 1 if last else 0),
            failure_of(engine, engine.all_gather, ones((2, 3 if last else 4)), 1),
            failure_of(engine, engine.all_reduce, [ones(1 if last else 300_000)], 1),
        ]
        if last:
            found.append(failure_of(engine, engine.all_gather, ones(9), 1))
        else:
            found.append(failure_of(engine, engine.all_reduce, [ones(9)], 1))
        assert engine.all_reduce([ones(9)], 1)[0][0] == spec.size
    return found


def mismatches_of_many(spec: Any, rank: int, fd: int) -> list[str]:
    """Does the same as `mismatches` for calls of many tensors; `like` makes them from shapes."""
    last = rank == spec.size - 1

    def like(*shapes: Any, dtype: Any = np.float32) -> list[Any]:
        return [np.zeros(shape, dtype) for shape in shapes]

    def part_of_all(shapes: Any) -> Any:
        begin, end = part_of(rank, spec.size, sum(array.size for array in like(*shapes)))
        return np.zeros(end - begin, np.float32)

    image, turned = (3, 64, 64, 3), [(2, 2), (2, 3) if last else (3, 2)]
    with engine_of(spec, rank, fd) as engine:
        texts = [
            error_of(engine.all_reduce, like(3, 4 if last else 3, *[5] * 6), 1),
            error_of(engine.all_reduce, like(*[image] * 24, (1, 2) if last else image), 1),
            error_of(engine.all_reduce, like(*[3] * 6, dtype=np.int32 if last else np.int64), 1),
            error_of(engine.all_reduce, like(*[3] * (9 if last else 8)), 1),
            error_of(engine.all_reduce, like(*[3] * (1 if last else 2)), 1),
            error_of(engine.all_reduce, like(*[3] * 6), 1, "max" if last else "sum"),
            error_of(engine.reduce_scatter, like(*turned), 1),
            error_of(engine.gather_parts, part_of_all(turned), like(*turned), 1),
            # Descriptions that need more rounds than there are buffers, and different numbers of
            # rounds.
            error_of(engine.all_reduce, like(*[1] * 3000, 2 if last else 1), 1),
            error_of(engine.all_reduce, like(*[0] * (1 if last else 9000)), 1),
        ]
        if last:
            texts.append(error_of(engine.reduce_scatter, like(3, 4), 1))
        else:
            texts.append(error_of(engine.all_reduce, like(3, 4), 1))
        # Enough calls to use every slot again.
        for _ in range(spec.layout.slots + 1):
            assert engine.all_reduce([np.ones(9)], 1)[0][0] == spec.size
    return texts


def differs_and_stops(spec: Any, rank: int, fd: int, directory: Path, how: str) -> Failure | None:
    """Makes the last rank enter a different call without describing it, then stop."""
    if rank < spec.size - 1:
        with engine_of(spec, rank, fd) as engine:
            failure = failure_of(engine, engine.all_reduce, [np.ones(3)] * 6, 42)
        (directory / f"failed-{rank}").touch()
        return failure
    forged = ForgedRank(spec, rank, fd)
    forged.copy_header()
    forged.set(SIGNATURE, 1)
    forged.set(POSTED, 1)
    forged.enter()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    for other in range(rank):
        wait_for((directory / f"failed-{other}").exists)
    return None


def last_rank_dies(spec: Any, rank: int, fd: int, how: str) -> list[Failure]:
    """Ends the last rank while the others run large all-reduces."""
    engine = NativeEngine(spec, rank, fd)
    values = np.ones(200_000, np.float32)
    for _ in range(3):
        engine.all_reduce([values], 1)
    if rank == spec.size - 1:
        if how == "raise":
            raise RuntimeError("a user's error")
        if how == "close":
            engine.close()
            engine.barrier(2)
        done = threading.Event()

        def work() -> None:
            while True:
                engine.all_reduce([values], 1)
                done.set()

        threading.Thread(target=work, daemon=True).start()
        done.wait(20)
        os.kill(os.getpid(), signal.SIGKILL)

    def proceed() -> None:
        while True:
            engine.all_reduce([values], 1)

    return [failure_of(engine, proceed), failure_of(engine, engine.barrier, 2)]


def aborted(spec: Any, rank: int, fd: int, directory: Path) -> list[Failure]:
    """Blocks all but the last rank when the abort comes; the last enters after it."""
    with engine_of(spec, rank, fd) as engine:
        if rank == spec.size - 1:
            wait_for((directory / "aborted").exists)
            return [failure_of(engine, engine.barrier, 1)]
        (directory / f"entering-{rank}").touch()
        return [
            failure_of(engine, engine.barrier, 1),
            failure_of(engine, engine.all_reduce, [np.ones(3)], 2),
        ]


def rank_aborts(spec: Any, rank: int, fd: int) -> Failure | None:
    with engine_of(spec, rank, fd) as engine:
        if rank == 0:
            engine.abort("rank 0 had enough")
        return failure_of(engine, engine.barrier, 1)


def absent(
    spec: Any, rank: int, fd: int, directory: Path, missing: int, method: str = "all_reduce"
) -> Failure:
    """Leaves one attached rank absent. In a gather, rank 0 has more rounds than the other ranks."""
    values = np.ones(2 * CHUNK if method == "all_gather" and rank == 0 else 3)
    with engine_of(spec, rank, fd) as engine:
        call = getattr(engine, method)
        values = [values] if method == "all_reduce" else values
        (directory / f"attached-{rank}").touch()
        for other in range(spec.size):
            wait_for((directory / f"attached-{other}").exists)
        if rank == missing:
            wait_for((directory / "expired").exists)
            return failure_of(engine, call, values, 42)
        failure = failure_of(engine, call, values, 42)
        (directory / "expired").touch()
        return failure


def came_and_did_not_reduce(spec: Any, rank: int, fd: int, directory: Path) -> Failure | None:
    """Makes rank 1 post all its input, in a copy of rank 0's slot, and reduce nothing."""
    if rank == 0:
        with engine_of(spec, rank, fd) as engine:
            failure = failure_of(engine, engine.all_reduce, [np.ones(CHUNK)], 42)
        (directory / "expired").touch()
        return failure
    forged = ForgedRank(spec, rank, fd)
    forged.copy_header()
    forged.set(POSTED, 1 << 40)
    forged.set(REDUCED, 0)
    forged.enter()
    wait_for((directory / "expired").exists)
    return None


def frozen(spec: Any, rank: int, fd: int, directory: Path, method: str) -> None:
    """Makes rank 0 wait for rank 1, which comes when the parent tells it to."""
    with engine_of(spec, rank, fd) as engine:
        (directory / f"pid-{rank}-{os.getpid()}").touch()
        if rank == 1:
            wait_for((directory / "go").exists)
        getattr(engine, method)(6)


def without_proc(spec: Any, rank: int, fd: int, directory: Path) -> None:
    """Hides the other ranks' processes in /proc from rank 0."""
    with engine_of(spec, rank, fd) as engine:
        if rank == 0:
            entered = directory / "entered"
            (directory / "root").mkdir()
            entered.touch()
            os.chroot(directory / "root")
        else:
            wait_for((directory / "entered").exists)
            began = time.monotonic()
            wait_for(lambda: time.monotonic() > began + 0.5)  # rank 0 checks this rank meanwhile
        engine.barrier(6)


def never_attached(spec: Any, rank: int, fd: int) -> Failure | None:
    with engine_of(spec, rank, fd) as engine:
        return failure_of(engine, engine.barrier, 8)


def attach_twice(spec: Any, rank: int, fd: int) -> str:
    engine = NativeEngine(spec, rank, fd)
    text = error_of(NativeEngine, spec, rank, fd)
    engine.close()
    engine.close()
    assert "closed" in error_of(engine.barrier, 1)
    return text


def wrong_descriptor(spec: Any, rank: int, fd: int, nonce: int) -> list[str]:
    import dataclasses

    other = dataclasses.replace(spec, nonce=nonce)
    with Path(os.devnull).open("rb") as small:
        return [
            error_of(NativeEngine, other, 0, fd),
            error_of(NativeEngine, spec, 0, small.fileno()),
        ]
