"""Files that a server has made of models, and that no worker uses any more."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pathlib
import shutil
from collections.abc import Iterable

from nanotf.serving.repository.added_models import AddedModels
from nanotf.serving.repository.model_sources import PLACES, ModelVersion


class Leftovers:
    """Deletes converted programs of old versions, and unpacked archives of models that are gone.

    Args:
        folder: the server's own, see `ModelVersion.place_in`.
        added: has unpacked the archives.
    """

    def __init__(self, folder: pathlib.Path, added: AddedModels) -> None:
        self._folder, self._added = folder, added
        self._numbers = itertools.count()

    def keep(self, versions: Iterable[ModelVersion]) -> None:
        """Deletes what belongs to other versions.

        The names go at once: a worker that starts later makes its files anew. The content goes in a
        thread, since a program may be large.
        """
        kept = tuple(versions)
        names = {version.place_in(self._folder).name for version in kept}
        unused = [p for p in self._folder.glob(f"{PLACES}*") if p.name not in names]
        unused += self._added.unused([version.path for version in kept])
        gone = list(map(self._renamed, unused))
        if gone:
            asyncio.get_running_loop().run_in_executor(None, _delete, gone)

    def _renamed(self, path: pathlib.Path) -> pathlib.Path:
        gone = self._folder / f"unused-{next(self._numbers)}"
        with contextlib.suppress(OSError):  # the server's end deletes it
            path.rename(gone)
        return gone


def _delete(folders: Iterable[pathlib.Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
