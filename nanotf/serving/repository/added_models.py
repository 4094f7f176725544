"""Models that a client has told a running server to load."""

from __future__ import annotations

import pathlib
import shutil
import tempfile
from collections.abc import Collection, Sequence

from nanotf.serving.repository.model_layouts import sources_of
from nanotf.serving.repository.model_sources import Source


class AddedModels:
    """A list of models that grows and shrinks; one of a `Repository`'s catalogs.

    Args:
        folder: a private folder, into which archives are unpacked.

    Attributes:
        path: what the log names as the place of these models.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.path = folder
        self._sources: dict[str, Source] = {}
        self._unpacked: dict[str, pathlib.Path] = {}  # by model, what is deleted with it
        self._removed: list[pathlib.Path] = []  # folders of models that workers may still use

    def sources(self) -> Sequence[Source]:
        """Returns the models of now."""
        return tuple(self._sources.values())

    def add(self, model: str, folder: pathlib.Path) -> None:
        """Adds a model.

        Raises:
            InvalidArgumentError: The folder holds no model; see `sources_of`.
        """
        # Without links, as `ModelVersion.path`, which `unused` compares with it.
        own = pathlib.Path(tempfile.mkdtemp(prefix="added-", dir=self.path)).resolve()
        try:
            (source,) = sources_of(folder, model, folder=own, unpacked=folder.is_dir())
        except BaseException:
            shutil.rmtree(own, ignore_errors=True)
            raise
        self._sources[model], self._unpacked[model] = source, own

    def remove(self, model: str) -> bool:
        """Removes a model; returns False if there is none of this name."""
        if model not in self._sources:
            return False
        del self._sources[model]
        self._removed.append(self._unpacked.pop(model))
        return True

    def unused(self, paths: Collection[pathlib.Path]) -> list[pathlib.Path]:
        """Returns the folders of removed models that hold none of some paths, once each."""
        used = [path for path in self._removed if any(p.is_relative_to(path) for p in paths)]
        found = [path for path in self._removed if path not in used]
        self._removed = used
        return found
