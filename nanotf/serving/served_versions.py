"""Says in the front if a worker can answer for a model's version."""

from __future__ import annotations

from nanotf.serving.interface import Refusal, ServerState

_AVAILABLE = "AVAILABLE"  # of TensorFlow Serving's states: the only one with answers


def served_versions(server: ServerState, model: str) -> list[int]:
    """Returns the versions of a model that answer requests, latest first."""
    return [number for number, state, _ in server.states(model) if state == _AVAILABLE]


def is_served(server: ServerState, model: str, version: int | None) -> bool:
    """Returns True if a version answers requests; without a version, if any does."""
    found = served_versions(server, model)
    return bool(found) if version is None else version in found


def not_found(model: str | None, version: int | None) -> str:
    """Returns TensorFlow Serving's text for a model or version that is not served."""
    what = f"Latest({model})" if version is None else f"Specific({model}, {version})"
    return f"Servable not found for request: {what}"


def known_states(
    server: ServerState, model: str, version: int | None
) -> list[tuple[int, str, str]]:
    """Returns the versions that TensorFlow Serving's status tells of.

    Args:
        version: None for all.

    Returns:
        See `ServerState.states`.

    Raises:
        Refusal: There is none. Status 404.
    """
    states = server.states(model)
    if not states and version is None:
        raise Refusal(404, f"Could not find any versions of model {model}")
    chosen = [each for each in states if version in (None, each[0])]
    if not chosen:
        raise Refusal(404, f"Could not find version {version} of model {model}")
    return chosen
