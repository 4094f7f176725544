"""The main of a worker with an interpreter of its own: FD RANK CORES NUMA_NODE TRANSPORT PARENT.

Started by `pool.local.WorkerProcess`, which passes the inherited socket's descriptor and writes
the secret key to standard input.
"""

from __future__ import annotations

import sys

from nanotf.wire.channel import KEY_NBYTES
from nanotf.worker import life, process


def main(arguments: list[str]) -> int:
    """Runs a worker until its parent says stop or goes away. Returns the exit code."""
    fd, rank, cores, numa_node, transport, parent = arguments
    process.leave_interrupts_to_parent()
    process.end_with_parent(int(parent))
    # Not until the end of the file: a fork of the parent's, made just now, may hold it open.
    key = sys.stdin.buffer.read(KEY_NBYTES)
    return life.run(
        int(fd),
        key,
        int(rank),
        tuple(int(core) for core in cores.split(",") if core),
        int(numa_node) if numa_node else None,
        transport,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
