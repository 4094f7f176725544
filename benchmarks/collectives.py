"""Measures all-reduce through shared memory against one memcpy of the message, without TensorFlow.

The ranks are pinned like workers, and measure with `benchmarks.latency`. Buffers are reused. Rank 0
times the memcpy between the all-reduces while the other ranks wait.
"""

from __future__ import annotations

import base64
import os
import pickle
import statistics
import subprocess
import sys
from typing import Any

import nanotf
from benchmarks.apart import ROOT

SIZES = (4, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 94 << 20)
QUICK_SIZES = (1 << 10, 64 << 10, 1 << 20, 94 << 20)
DEADLINE = 300.0  # seconds


def measure(num_processes: int, sizes: tuple[int, ...] = SIZES) -> list[dict[str, float]]:
    """Measures latency by message size.

    Returns:
        A list of dicts of `bytes`, `seconds` (median of an all-reduce) and `memcpy_seconds`.

    Raises:
        RuntimeError: A rank failed.
    """
    from nanotf.collectives import create_group

    plan = nanotf.plan(num_processes)
    with create_group(num_processes, deadline=60.0) as owner:
        ranks = []
        try:
            for placement in plan.placements:
                cores = placement.cores if placement.pin else ()
                task = (owner.spec, owner.fd, placement.rank, cores, sizes)
                code = base64.b64encode(pickle.dumps(task)).decode()
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "benchmarks.collectives", code],
                        cwd=ROOT,
                        pass_fds=(owner.fd,),
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                    )
                )
            outputs = [rank.communicate(timeout=DEADLINE) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        if rank.returncode:
            last = errors.decode(errors="replace").strip().splitlines()[-1:]
            raise RuntimeError(f"a rank of the all-reduce measurement failed: {last}")
    rows = pickle.loads(base64.b64decode(outputs[0][0]))
    return [
        {
            "bytes": nbytes,
            "seconds": statistics.median(reduces),
            "memcpy_seconds": statistics.median(copies),
        }
        for nbytes, reduces, copies in rows
    ]


def _main(code: str) -> None:
    from benchmarks import latency

    task: Any = pickle.loads(base64.b64decode(code))
    spec, fd, rank, cores, sizes = task
    if cores:
        os.sched_setaffinity(0, cores)
    print(base64.b64encode(pickle.dumps(latency.measure(spec, rank, fd, sizes))).decode())


if __name__ == "__main__":
    _main(sys.argv[1])
