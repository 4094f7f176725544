"""Registers what runs when this process ends, and not when a fork of it does.

A fork inherits what `atexit` has to call. A script that forks, whose child ends by `sys.exit`,
would so leave a group or end a run for its parent, which still needs it.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable


def at_own_exit(function: Callable[[], object]) -> Callable[[], None]:
    """Calls a function when this process ends, as `atexit.register` does.

    Returns:
        What `atexit.unregister` takes.
    """
    process = os.getpid()

    def call() -> None:
        if os.getpid() == process:
            function()

    return atexit.register(call)
