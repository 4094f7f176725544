"""Begins to serve in a worker. The front imports this, and not TensorFlow."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from nanotf.serving.worker_messages import WorkerOptions


def serve(options: WorkerOptions, descriptors: Sequence[int]) -> None:
    """Serves until the front closes the link; see `serving_loop.serve`.

    Args:
        descriptors: that of the link's socket.
    """
    from nanotf.serving.computing import serving_loop  # imports TensorFlow

    serving_loop.serve(options, socket.socket(fileno=descriptors[0]))
