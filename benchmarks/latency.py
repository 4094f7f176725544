"""Measures the collectives: `python -m benchmarks.latency [--help]`.

Spawns the ranks, pins each to cores of its own, and prints for each size the time of an all-reduce,
the bandwidth (message size over that time), and the ratio to one `memcpy` of the message. One rank
alone times the memcpy between the all-reduces of the same run. The table has medians and best
times; the best are meaningful even on a shared machine. Buffers are reused and results overwrite
the inputs, as in a training step, where TensorFlow lends the op its inputs' memory. No TensorFlow
is involved.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import os
import pickle
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nanotf.collectives import layout
from nanotf.collectives import native_library as native
from nanotf.collectives.native_engine import NativeEngine
from nanotf.collectives.spec import GroupSpec, create_group
from nanotf.machine.interpreter import python_command

SIZES = (4, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 94 << 20)
_SECONDS_PER_SIZE = 0.7

Row = tuple[int, list[float], list[float]]


def measure(spec: GroupSpec, rank: int, fd: int, sizes: Sequence[int]) -> list[Row]:
    """Runs one rank's part.

    Returns:
        For each size: its bytes, the times of the all-reduces and of the memcpys, in seconds.
    """
    engine = NativeEngine(spec, rank, fd)
    rows = []
    for nbytes in sizes:
        values = np.zeros(nbytes // 4, np.float32)
        copy = np.zeros_like(values)
        reduce = _reducer(engine, values)
        for _ in range(3):
            reduce()
        # Every rank must make the same number of calls, so rank 0 decides.
        start = time.perf_counter()
        reduce()
        repeats = _SECONDS_PER_SIZE / 2 / max(time.perf_counter() - start, 1e-5)
        mine = np.asarray([min(max(repeats, 7), 2000)], np.int64)
        repeats = int(engine.broadcast(mine, 3)[0])
        reduces, copies = [], []
        for _ in range(repeats):
            engine.barrier(2)
            reduces.append(_seconds(reduce))
            engine.barrier(2)
            if rank == 0:  # alone: the ratio compares with one memcpy on an idle machine
                copies.append(_seconds(lambda c=copy, v=values: np.copyto(c, v)))  # type: ignore[misc]
        engine.barrier(2)
        rows.append((nbytes, reduces, copies))
    engine.close()
    return rows


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _reducer(engine: NativeEngine, values: np.ndarray[Any, Any]) -> Callable[[], object]:
    """Returns a function that all-reduces `values` in place, with as little Python as possible."""
    shapes = (ctypes.c_int64 * 2)(1, values.size)
    call = native.NanotfCall(1, b"all_reduce(sum)", b"float32", shapes, 1)
    fragment = native.Fragment(values.ctypes.data, values.ctypes.data, values.nbytes)
    failure = layout.RawFailure()
    function, handle = native.load().nanotf_all_reduce, engine.handle

    def reduce() -> None:
        if function(handle, call, 0, 0, fragment, 1, failure):
            raise RuntimeError(failure.unpacked().message)

    return reduce


def _cores(rank: int, size: int) -> list[int]:
    if not hasattr(os, "sched_getaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // size)
    begin = rank * share % len(cores)
    return cores[begin : begin + share]


def run(size: int, sizes: Sequence[int], **options: Any) -> None:
    """Spawns the ranks and prints rank 0's table."""
    with create_group(size, deadline=60.0, **options) as owner:
        task = base64.b64encode(pickle.dumps((owner.spec, owner.fd, list(sizes))))
        command = python_command("benchmarks.latency", "--task", task.decode())
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                pass_fds=(owner.fd,),
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            )
            for rank in range(size)
        ]
        output, _ = ranks[0].communicate(timeout=300)
        if any(rank.wait(30) for rank in ranks):
            raise SystemExit("a rank failed; see above")
        rows = pickle.loads(base64.b64decode(output))
        print(f"{size} ranks, chunk {owner.spec.chunk_bytes >> 10} KiB")
    print(f"{'':>12} {'median':>34}      {'best':>33}")
    columns = f"{'all-reduce':>12} {'GB/s':>6} {'memcpy':>12} {'ratio':>6}"
    print(f"{'bytes':>12} {columns} {columns}")
    for nbytes, reduces, copies in rows:
        print(f"{nbytes:>12,}", end="")
        for summary in (statistics.median, min):
            reduce, copy = summary(reduces), summary(copies)
            print(
                f" {reduce * 1e6:>9,.1f} us {nbytes / reduce / 1e9:>6.2f} "
                f"{copy * 1e6:>9,.1f} us {reduce / copy:>6.2f}",
                end="",
            )
        print()


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--chunk", type=int, help="bytes of a chunk")
    parser.add_argument("--symmetric", type=int, help="largest all-reduce in one step, in bytes")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="in bytes")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        spec, fd, sizes = pickle.loads(base64.b64decode(options.task))
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, _cores(options.rank, spec.size))
        print(base64.b64encode(pickle.dumps(measure(spec, options.rank, fd, sizes))).decode())
        return
    extra = {}
    if options.chunk is not None:
        extra["chunk_bytes"] = options.chunk
    if options.symmetric is not None:
        extra["symmetric_bytes"] = options.symmetric
    run(options.ranks, options.sizes, **extra)


if __name__ == "__main__":
    main()
