"""The command of an endpoint's server."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from nanotf.machine.interpreter import python_command
from nanotf.sagemaker.endpoints.endpoint_record import HOST


def server_command(model: pathlib.Path, num_processes: str | None) -> list[str]:
    """Returns the words of `nanotf serve`, without those of `listening`.

    Args:
        model: what it serves.
        num_processes: its workers, as `-n` takes them; None for its default.
    """
    options = [] if num_processes is None else ["-n", num_processes]
    # This interpreter and this nanotf, whatever PATH has.
    return python_command("nanotf", "serve", str(model), *options, standard_first=True)


def listening(command: Sequence[str], port: int, ready_file: pathlib.Path) -> list[str]:
    """Returns a server's command with the place where it listens.

    Args:
        command: as `server_command` returns it.
        port: 0 for any free one.
        ready_file: the server writes `{"port": ..., "pid": ...}` there, in one step, once it
            answers `GET /ping` with 200.
    """
    return [*command, "--host", HOST, "--port", str(port), "--ready-file", str(ready_file)]
