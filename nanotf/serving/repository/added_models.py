"""Models that a client has told a running server to load."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

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

    def sources(self) -> Sequence[Source]:
        """Returns the models of now."""
        return tuple(self._sources.values())

    def add(self, model: str, folder: pathlib.Path) -> None:
        """Adds a model.

        Raises:
            InvalidArgumentError: The folder holds no model; see `sources_of`.
        """
        (source,) = sources_of(folder, model, folder=self.path, unpacked=folder.is_dir())
        self._sources[model] = source

    def remove(self, model: str) -> bool:
        """Removes a model; returns False if there is none of this name."""
        return self._sources.pop(model, None) is not None
