"""Says in the front if a worker can answer for a model's version."""

from __future__ import annotations

from nanotf.serving.interface import ServerState

_AVAILABLE = "AVAILABLE"  # of TensorFlow Serving's states: the only one with answers


def served_versions(server: ServerState, model: str) -> list[int]:
    """Returns the versions of a model that answer requests, latest first."""
    return [number for number, state, _ in server.states(model) if state == _AVAILABLE]


def is_served(server: ServerState, model: str, version: int | None) -> bool:
    """Returns True if a version answers requests; without a version, if any does."""
    found = served_versions(server, model)
    return bool(found) if version is None else version in found
