"""Makes a folder, and hands it to a supervisor."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

from nanotf.errors import InvalidArgumentError, NanoError
from nanotf.machine.interpreter import python_command
from nanotf.sagemaker.detached.folders import AnyState, DetachedFolder, now
from nanotf.wire import files
from nanotf.wire.log_files import last_lines

_TAIL = 4000  # characters of the supervisor's log in an error
_START_SECONDS = 120.0  # a new interpreter, on a busy machine


def create(
    folder: DetachedFolder[Any, AnyState],
    fill: Callable[[], None],
    remedy: str = "Choose another --output",
) -> None:
    """Makes a folder with its content, or nothing at all.

    Args:
        fill: writes the content, the state last: a folder counts once it has a state.
        remedy: how to name another disk.

    Raises:
        InvalidArgumentError: The name is in use, or its folder cannot be made.
        NanoError: The disk is full. The error is of the kind's class.
    """
    kind, parent = folder.kind, folder.path.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder.path.mkdir(mode=0o700)  # requests, logs and models may hold secrets
    except OSError as error:
        if isinstance(error, FileExistsError) and os.path.lexists(folder.path):
            raise InvalidArgumentError(
                f"The name of {kind.a_noun} must be new. Received: {folder.name}, which is in use "
                f"in {parent}. Choose another name, or delete the folder of the old {kind.noun}."
            ) from None
        raise InvalidArgumentError(
            f"{kind.a_noun.capitalize()} needs a folder that nanotf can make. Received: {error}. "
            f"{remedy}."
        ) from error
    try:
        folder.logs.mkdir()
        fill()
    except BaseException as error:
        shutil.rmtree(folder.path, ignore_errors=True)  # it has never been
        if isinstance(error, OSError) and error.errno in files.FULL:
            raise kind.error(
                f"{kind.a_noun.capitalize()} needs room on the disk for its files. Received: "
                f"{error.strerror} in {parent}. Make room. {remedy}, if another disk has some."
            ) from error
        raise


def start_supervisor(folder: DetachedFolder[Any, AnyState], module: str) -> None:
    """Starts the supervisor, and waits until it owns the folder.

    Args:
        module: its module, whose `main` is `detached_supervisor.detach`.

    Raises:
        NanoError: It does not start. The error is of the kind's class.
    """
    kind = folder.kind
    try:
        command = python_command(module, str(folder.path), standard_first=True)
        with folder.supervisor_log.open("ab") as log:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=_START_SECONDS,
                check=True,
            )
    except BaseException as error:
        received = error if isinstance(error, Exception) else type(error).__name__  # Ctrl-C
        reason = f"The supervisor of the {kind.noun} must start. Received: {received}"
        state = folder.read_state()
        # Only the owner writes the state: a supervisor that took over records its own failure.
        if not state.owner.is_supervisor:
            with contextlib.suppress(OSError):  # readers see that the owner has ended
                folder.write_state(folder.failed(state, reason, now()))
        if not isinstance(error, (NanoError, OSError, subprocess.SubprocessError)):
            raise
        said = last_lines(folder.supervisor_log, _TAIL)
        raise kind.error(f"{reason}\n{said}") from error
