"""Lets one `fit` at a time use a folder of checkpoints."""

from __future__ import annotations

import os
import pathlib

from nanotf.console import logger
from nanotf.errors import InvalidArgumentError
from nanotf.wire import files


class FolderLock:
    """The right to read and write the checkpoints of a folder.

    Args:
        folder: the user's, for errors.
        file: the file in it that is locked; made if it does not exist.

    Raises:
        InvalidArgumentError: Another `fit`, in this process or another, has it.
    """

    def __init__(self, folder: pathlib.Path, file: pathlib.Path) -> None:
        self._lock: files.Lock | None = None
        try:
            self._lock = files.Lock(file)
        except files.LockHeld as held:
            here = f"process {os.getpid()} on "  # how `LockHeld` begins if it is this process
            mine = f"another fit in this process (pid {os.getpid()})"
            who = mine if str(held).startswith(here) else str(held)
            raise InvalidArgumentError(
                "A folder of checkpoints serves one fit at a time. Received: resume="
                f"'{folder}', which {who} uses. Wait until that ends, or pass another folder."
            ) from None
        except OSError as error:  # some file systems of clusters have no locks
            logger.warning(
                "The folder %s cannot be locked (%s). Start no other training that writes its "
                "checkpoints there.",
                folder,
                error,
            )

    def release(self) -> None:
        """Lets others use the folder; a second call does nothing."""
        if self._lock is not None:
            self._lock.release()
