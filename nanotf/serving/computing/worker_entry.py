"""Begins to serve in a worker. The front imports this, and not TensorFlow."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Sequence

from nanotf.serving.worker_messages import WorkerOptions


def serve(options: WorkerOptions, temporary: str, descriptors: Sequence[int]) -> None:
    """Serves until the front closes the link; see `serving_loop.serve`.

    Args:
        temporary: the folder for temporary files of this process, such as AutoGraph's. The front
            deletes it: a worker that is killed cannot.
        descriptors: that of the link's socket.
    """
    # Both: `tempfile` may have looked at the variable before, programs started from here have not.
    tempfile.tempdir = os.environ["TMPDIR"] = temporary
    from nanotf.serving.computing import serving_loop  # imports TensorFlow

    serving_loop.serve(options, socket.socket(fileno=descriptors[0]))
