"""TCP ports of this machine."""

from __future__ import annotations

import socket


class PortTaken(Exception):
    """Another process took a port that had just been free. Starting again finds another port."""


def free_port() -> int:
    """Returns a TCP port of the loopback interface that is free at this moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def is_free(port: int) -> bool:
    """Returns True if a server could listen on a port of all interfaces, as TensorFlow's does."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # gRPC also sets it
        try:
            sock.bind(("0.0.0.0", port))
        except OSError:
            return False
        return True
