"""Prints the host of each process of `mpirun` by rank, and this process's rank, as JSON.

`cluster` runs this module in every process of `mpirun`, each time in a process of its own: MPI must
not be in a process that starts others. The MPI library finds the others by the variables that
`mpirun` has set.
"""

from __future__ import annotations

import json
import socket


def main() -> None:
    """Prints `[names, rank]`. Waits until all processes of `mpirun` have called it."""
    from mpi4py import MPI

    names = MPI.COMM_WORLD.allgather(socket.gethostname())
    print(json.dumps([names, MPI.COMM_WORLD.Get_rank()]))


if __name__ == "__main__":
    main()
