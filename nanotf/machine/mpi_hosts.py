"""Prints the host of each process of `mpirun` by rank, this process's rank, and a name of the run.

`cluster` runs this module in every process of `mpirun`, each time in a process of its own: MPI must
not be in a process that starts others. The MPI library finds the others by the variables that
`mpirun` has set.
"""

from __future__ import annotations

import json
import secrets
import socket


def main() -> None:
    """Prints `[names, rank, run]` as JSON. Waits until all processes of `mpirun` have called it."""
    from mpi4py import MPI

    names = MPI.COMM_WORLD.allgather(socket.gethostname())
    run = MPI.COMM_WORLD.bcast(secrets.token_hex(16))
    print(json.dumps([names, MPI.COMM_WORLD.Get_rank(), run]))


if __name__ == "__main__":
    main()
