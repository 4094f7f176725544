"""The models that a server is told to serve: by its command line, by files, and by clients."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Callable, Iterable, Mapping

from nanotf.errors import InvalidArgumentError
from nanotf.serving.repository.added_models import AddedModels
from nanotf.serving.repository.model_sources import ModelVersion, Wanted
from nanotf.serving.repository.repository import Repository

SETTLING = 0.2  # seconds between two looks that tell whole files from those that are being written


class WantedModels:
    """The models and labels that the last look at the disk has found.

    Args:
        repository: looks.
        added: one of the repository's catalogs: what clients add.
        want: told the versions after each look.

    Attributes:
        names: the models, with or without a version.
        lasting: those of them that no client has added.
        default_model: str or None, for requests that name none.
        labels: dict of a model and a label to the number of a version.
    """

    def __init__(
        self,
        repository: Repository,
        added: AddedModels,
        want: Callable[[Iterable[ModelVersion]], None],
    ) -> None:
        self._repository, self._added, self._want = repository, added, want
        self._looking = asyncio.Lock()
        self.labels: Mapping[tuple[str, str], int] = {}
        self._note_names()

    def _note_names(self) -> None:
        self.names = self._repository.models
        self.default_model = self._repository.default_model
        added = self._repository.listed_by(self._added)
        self.lasting = [model for model in self.names if model not in added]

    async def look(self) -> Wanted:
        """Looks at the disk. One look wants no version that was not there at the look before."""
        loop = asyncio.get_running_loop()
        async with self._looking:  # a repository is for one thread at a time
            wanted = await loop.run_in_executor(None, self._repository.look)
            self.labels = wanted.labels
            self._note_names()
        self._want(wanted.versions)
        return wanted

    async def look_twice(self) -> Wanted:
        """Looks until files that stay as they are count as whole."""
        await self.look()
        await asyncio.sleep(SETTLING)
        return await self.look()

    async def add(self, model: str, folder: pathlib.Path) -> None:
        """Adds a model.

        Raises:
            InvalidArgumentError: The folder holds no model, or none that is whole.
        """
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._added.add, model, folder)
        wanted = await self.look_twice()
        if not any(version.model == model for version in wanted.versions):
            await self.remove(model)
            raise InvalidArgumentError(
                "A model must be whole before a server is told to load it. Received: "
                f"{wanted.problems.get(model, f'{folder}, whose files change')}"
            )

    async def remove(self, model: str) -> bool:
        """Removes a model that was added; returns False if there is none of this name."""
        found = self._added.remove(model)
        await self.look()
        return found
