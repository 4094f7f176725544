"""An endpoint's folder.

<output>/<name>/
    request.json    what was asked for
    state.json      the state: where the server listens, its process, or why it has failed
    logs/           server.log, what the server prints; supervisor.log
    model...        what it serves: model.tar.gz, or a copy of a folder or file
    ready.json      written by a server that answers, in one step: its port and process
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from nanotf.errors import EndpointError
from nanotf.sagemaker.detached import folders
from nanotf.sagemaker.detached.folders import DetachedFolder, Kind, now
from nanotf.sagemaker.detached.owner import Owner, must

CREATING, IN_SERVICE, DELETING = "Creating", "InService", "Deleting"
FAILED, DELETED = "Failed", "Deleted"  # in SageMaker, a deleted one is no longer found
FINAL = (FAILED, DELETED)
HOST = "127.0.0.1"  # an endpoint answers this machine alone

KIND = Kind(
    "endpoint",
    "an endpoint",
    "NANOTF_ENDPOINTS",
    "endpoints",
    EndpointError,
    running=(CREATING, IN_SERVICE),
)


@dataclass(frozen=True)
class EndpointRequest:
    """The description of an endpoint. `endpoint_start.start` makes and checks it."""

    name: str
    model_data: str  # as the caller named it
    model: str  # what the server is to serve, in the endpoint's folder
    command: tuple[str, ...]  # the server's words, without port and ready file
    # The ports to try, in this order; 0 is any free one. The next one is tried if another program
    # has taken a port.
    ports: tuple[int, ...]
    environment: dict[str, str] = field(default_factory=dict)  # variables of the server alone
    start_seconds: float = 600.0  # until the server must answer
    stop_seconds: float = 30.0  # from SIGTERM to SIGKILL, as in SageMaker

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> EndpointRequest:
        """Reads what `asdict` has written. Raises if something else has written it."""
        # JSON has lists alone; the fields are tuples.
        tuples = {"command": tuple(value["command"]), "ports": tuple(value["ports"])}
        found = cls(**value | tuples)
        texts = (found.name, found.model_data, found.model, *found.command)
        must(all(isinstance(text, str) for text in texts), "texts")
        must(all(type(p) is int and 0 <= p < 1 << 16 for p in found.ports), "ports")
        must(all(isinstance(v, str) for v in found.environment.values()), "environment")
        must(isinstance(found.start_seconds, int | float), "start_seconds")
        must(isinstance(found.stop_seconds, int | float), "stop_seconds")
        return found


@dataclass(frozen=True)
class EndpointState:
    """The state of an endpoint. Times are UTC as ISO 8601."""

    status: str  # "Creating", "InService", "Deleting", or final: "Failed", "Deleted"
    owner: Owner
    created: str  # the folder was made
    ended: str | None = None  # the state became final
    port: int | None = None  # where the server listens; stays when it is started again
    server: int | None = None  # its process; None while none answers
    restarts: int = 0  # how often a server that had answered was started again
    failure_reason: str | None = None

    @property
    def is_final(self) -> bool:
        """True if the endpoint has ended."""
        return self.status in FINAL

    @property
    def url(self) -> str | None:
        """The server's address; None before it has answered."""
        return None if self.port is None else f"http://{HOST}:{self.port}"

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> EndpointState:
        """Reads what `asdict` has written. Raises if something else has written it."""
        state = cls(**value | {"owner": Owner.from_json(value["owner"])})
        may_lack = (state.ended, state.failure_reason)
        must(state.status in (CREATING, IN_SERVICE, DELETING, *FINAL), "status")
        must(isinstance(state.created, str), "created")
        must(all(isinstance(t, str | None) for t in may_lack), "texts")
        must(all(isinstance(n, int | None) for n in (state.port, state.server)), "numbers")
        must(isinstance(state.restarts, int), "restarts")
        return state


@dataclass(frozen=True)
class EndpointFolder(DetachedFolder[EndpointRequest, EndpointState]):
    """An endpoint on disk."""

    kind = KIND

    @staticmethod
    def request_of(value: dict[str, Any]) -> EndpointRequest:
        """Reads a request."""
        return EndpointRequest.from_json(value)

    @staticmethod
    def state_of(value: dict[str, Any]) -> EndpointState:
        """Reads a state."""
        return EndpointState.from_json(value)

    @staticmethod
    def failed(state: EndpointState, reason: str, ended: str | None = None) -> EndpointState:
        """Returns the state after a failure."""
        # No server: the kernel ends it with its supervisor, whatever ended that.
        return replace(state, status=FAILED, server=None, failure_reason=reason, ended=ended)

    @property
    def server_log(self) -> pathlib.Path:
        """The log of the server."""
        return self.logs / "server.log"

    @property
    def ready_file(self) -> pathlib.Path:
        """The file that the server writes once it answers."""
        return self.path / "ready.json"


def find(name: str, output: str | os.PathLike[str] | None = None) -> EndpointFolder:
    """Returns an endpoint, as `folders.find` does."""
    return folders.find(EndpointFolder, name, output)


def find_all(output: str | os.PathLike[str] | None = None) -> Iterator[EndpointFolder]:
    """Yields the endpoints of a folder, by name."""
    return folders.find_all(EndpointFolder, output)


def new_state() -> EndpointState:
    """Returns the state of an endpoint that this process launches."""
    return EndpointState(CREATING, Owner.this_process(), now())


def describe(endpoint: EndpointFolder) -> dict[str, Any]:
    """Returns an endpoint with the keys of SageMaker's DescribeEndpoint, and some of its own."""
    request, state = endpoint.read_request(), endpoint.read_state()
    description = {
        "EndpointName": endpoint.name,
        "EndpointArn": f"local:endpoint/{endpoint.name}",
        "EndpointStatus": state.status,
        "FailureReason": state.failure_reason,
        "CreationTime": state.created,
        "EndTime": state.ended,
        "Url": state.url,
        "ServerProcess": state.server,
        "SupervisorProcess": state.owner.pid,
        "Restarts": state.restarts,
        "ModelDataUrl": request.model_data,
        "Model": request.model,
        "Environment": request.environment,
        "Folder": str(endpoint.path),
    }
    return {key: value for key, value in description.items() if value is not None}
