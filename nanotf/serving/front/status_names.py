"""The statuses of HTTP by the names that gRPC, and TensorFlow Serving's metrics, have for them."""

from __future__ import annotations

# Names of `absl::StatusCode`, which are those of gRPC's codes.
_NAMES = {
    400: "INVALID_ARGUMENT",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    409: "ALREADY_EXISTS",
    413: "INVALID_ARGUMENT",
    415: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def status_name(status: int) -> str:
    """Returns the name of a status of HTTP."""
    return _NAMES.get(status, "OK" if status < 400 else "UNKNOWN")
