"""Starts an endpoint: checks the request, makes its folder, and hands it to a supervisor."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping

from nanotf.errors import EndpointError, InvalidArgumentError
from nanotf.sagemaker.detached import following, starting
from nanotf.sagemaker.endpoints import endpoint_command
from nanotf.sagemaker.endpoints.endpoint_record import (
    CREATING,
    DELETED,
    FAILED,
    KIND,
    EndpointFolder,
    EndpointRequest,
    new_state,
)
from nanotf.sagemaker.endpoints.model_source import ModelSource
from nanotf.wire import files

SAGEMAKERS_PORT = 8080  # of its containers, and so of the SDK's local mode
DEFAULT_PORTS = (SAGEMAKERS_PORT, 0)
_PAUSE = 0.05  # seconds between two looks at an endpoint that is being created


def start(
    name: str,
    source: ModelSource,
    *,
    output: str | os.PathLike[str] | None = None,
    num_processes: str | None = None,
    ports: tuple[int, ...] = DEFAULT_PORTS,
    environment: Mapping[str, str] | None = None,
    start_seconds: float = EndpointRequest.start_seconds,
) -> EndpointFolder:
    """Starts an endpoint.

    Args:
        name: its name. That of an endpoint that has ended is free: the new one replaces its folder.
        source: what it serves.
        output: the folder of endpoints; None as in `Kind.folder`.
        num_processes: workers of the server, as `-n` takes them; None for its default.
        ports: as in `EndpointRequest`.
        environment: variables of the server.
        start_seconds: seconds until the server must answer.

    Returns:
        The endpoint's folder. A supervisor owns it, and outlives this process.

    Raises:
        InvalidArgumentError: The request cannot be met; or an endpoint of this name runs.
        EndpointError: The disk is full, or the supervisor did not start.
    """
    KIND.check_name(name)
    endpoint = EndpointFolder(KIND.folder(output) / name)
    source.check(endpoint.path)
    _check(ports, start_seconds)

    def fill() -> None:
        model = source.place(endpoint.path)
        request = EndpointRequest(
            name=name,
            model_data=source.model_data,
            model=str(model),
            command=tuple(endpoint_command.server_command(model, num_processes)),
            ports=ports,
            environment=dict(environment or {}),
            start_seconds=start_seconds,
        )
        endpoint.write_request(request)
        endpoint.write_state(new_state())  # last: a folder counts as an endpoint once it has one

    endpoint.path.parent.mkdir(parents=True, exist_ok=True)  # the lock's file needs it
    # Nobody else may replace the old folder, or use the name, meanwhile.
    lock = files.Lock(endpoint.path.parent / f".{name}.lock", waits=True)
    try:
        _remove_ended(endpoint)
        starting.create(endpoint, fill, f"Set {KIND.variable} to another folder")
    finally:
        lock.release(removes=True)
    # Without the lock: by now the state keeps others from the name.
    starting.start_supervisor(endpoint, "nanotf.sagemaker.endpoints.endpoint_supervisor")
    return endpoint


def _check(ports: tuple[int, ...], start_seconds: float) -> None:
    for port in ports:
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 1 << 16:
            raise InvalidArgumentError(
                f"`port` must be a number from 0 to 65535. Received: port={port!r}. 0 takes any "
                "free one."
            )
    if not (start_seconds > 0 and math.isfinite(start_seconds)):
        raise InvalidArgumentError(
            "`container_startup_health_check_timeout` must be a number of seconds above 0. "
            f"Received: {start_seconds}."
        )


def _remove_ended(endpoint: EndpointFolder) -> None:
    """Removes the folder of an endpoint of the same name that has ended."""
    if not (endpoint.path / "state.json").is_file():  # `starting.create` refuses other folders
        return
    state = endpoint.read_state()
    if not state.is_final:
        raise InvalidArgumentError(
            f"The name of an endpoint must be new. Received: {endpoint.name}, whose status is "
            f"{state.status}. Choose another name, or `nanotf endpoints stop {endpoint.name}`."
        )
    shutil.rmtree(endpoint.path)


def wait_for_service(endpoint: EndpointFolder) -> None:
    """Waits until an endpoint is in service.

    Raises:
        EndpointError: It has failed, or was stopped.
    """
    state = following.wait(
        endpoint, None, str, until=lambda state: state.status != CREATING, pause=_PAUSE
    )
    if state.status == FAILED:
        raise EndpointError(
            f"An endpoint must come into service. Received: {endpoint.name}, which has failed: "
            f"{state.failure_reason}\nIts folder: {endpoint.path}"
        )
    if state.status == DELETED:
        raise EndpointError(
            f"An endpoint must come into service. Received: {endpoint.name}, which was stopped."
        )


def stop_and_wait(endpoint: EndpointFolder) -> None:
    """Stops an endpoint, and waits until its server has ended.

    Raises:
        InvalidArgumentError: It has ended, or is being stopped already.
        EndpointError: Its supervisor is on another machine, or does not react.
    """
    following.stop(endpoint)
    following.wait(endpoint, None, str, pause=_PAUSE)  # `str`: no log is read
