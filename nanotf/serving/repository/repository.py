"""Looks at the disk, and says which versions of which models are wanted.

What a look finds of a version:

    changed since the last look ------> as before: it is being written
    unchanged, holds no model --------> no such version
    unchanged, lacks parts -----------> as before, and one line in the log: a copy may have paused
    unchanged and whole --------------> wanted, if the policy takes it

So a version is wanted from the second look on that finds the same whole files, and stays wanted
until its folder is gone or another whole content has replaced it. A model that had a version keeps
its last ones, whatever becomes of the folder, and so do all if a file system does not answer.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any, Protocol

from nanotf import console
from nanotf.errors import InvalidArgumentError
from nanotf.serving.repository import model_files
from nanotf.serving.repository.model_layouts import check_distinct, code_of
from nanotf.serving.repository.model_sources import ModelVersion, Source, Wanted, version_number
from nanotf.serving.repository.stamps import stamp_of
from nanotf.wire import files


class Catalog(Protocol):
    """A changing list of models, such as a file that names them."""

    path: pathlib.Path

    def sources(self) -> Sequence[Source]:
        """Returns the models of now.

        Raises:
            OSError, InvalidArgumentError: They cannot be told now.
        """


class Repository:
    """The models of a server. The first look after the start finds no version.

    Args:
        sources: models that are served all the time.
        catalogs: lists of further models, asked at each look: `ConfigFile`, `ModelsFolder`.
        default_model: str or None, the model of requests that name none. None for the first one.

    Raises:
        InvalidArgumentError: Two models have the same name, or the default model is none of them.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        catalogs: Sequence[Catalog] = (),
        default_model: str | None = None,
    ) -> None:
        self._sources, self._catalogs, self._default = (
            tuple(sources),
            tuple(catalogs),
            default_model,
        )
        self._listed = {catalog: tuple(catalog.sources()) for catalog in catalogs}
        self._reports = _Reports()
        check_distinct(self._all())
        self._watches = {source.model: _Watch(source, self._reports) for source in self._all()}
        if default_model is not None and default_model not in self._watches:
            raise InvalidArgumentError(
                f"The default model must be one of {', '.join(self._watches) or 'none'}. "
                f"Received: {default_model!r}."
            )

    @property
    def default_model(self) -> str | None:
        """The model of requests that name none; None if there is no such model now."""
        names = [source.model for source in self._all()]
        if self._default is not None:
            return self._default if self._default in names else None
        return names[0] if names else None

    @property
    def models(self) -> list[str]:
        """The names of the models, with or without a version."""
        return [source.model for source in self._all()]

    def listed_by(self, catalog: Catalog) -> list[str]:
        """Returns the names of those models that a catalog has listed."""
        return [source.model for source in self._listed[catalog]]

    def look(self) -> Wanted:
        """Looks at the disk. To be called each second, by one thread at a time."""
        for catalog in self._catalogs:
            self._ask(catalog)
        sources, before = self._all(), self._watches
        self._watches = {}
        for source in sources:
            watch = before.get(source.model) or _Watch(source, self._reports)
            watch.look(source)
            self._watches[source.model] = watch
        return Wanted(
            frozenset(version for watch in self._watches.values() for version in watch.wanted),
            {(source.model, label): n for source in sources for label, n in source.labels},
            {model: watch.problem for model, watch in self._watches.items() if watch.problem},
        )

    def _ask(self, catalog: Catalog) -> None:
        before, problem = self._listed[catalog], ""
        try:
            self._listed[catalog] = tuple(catalog.sources())
            check_distinct(self._all())
        except (OSError, InvalidArgumentError) as error:
            self._listed[catalog] = before
            problem = f"The models stay as they were. {error}"
        self._reports.say(str(catalog.path), problem)

    def _all(self) -> list[Source]:
        return [*self._sources, *(s for listed in self._listed.values() for s in listed)]


class _Reports:
    """Logs what is wrong with each place, once until it is well again."""

    def __init__(self) -> None:
        self._said: dict[str, str] = {}

    def say(self, place: str, problem: str) -> None:
        """Logs a problem.

        Args:
            place: what it is about.
            problem: empty if there is none.
        """
        if not problem:
            self._said.pop(place, None)
        elif self._said.get(place) != problem:
            console.logger.warning("%s", f"{place}: {problem}")
            self._said[place] = problem


class _Watch:
    """The versions of one model."""

    def __init__(self, source: Source, reports: _Reports) -> None:
        self.wanted: frozenset[ModelVersion] = frozenset()
        self.problem = ""  # that the last look has found
        self._source, self._reports = source, reports
        self._seen: dict[int, tuple[Any, ...]] = {}  # stamps of the last look, by number
        self._whole: dict[int, ModelVersion] = {}

    def look(self, source: Source) -> None:
        """Finds the versions that are wanted now.

        Args:
            source: which may have changed.
        """
        source = self._with_code(source)
        if (source.path, source.code) != (self._source.path, self._source.code):
            self._seen, self._whole = {}, {}
        self._source, self.problem = source, ""
        try:
            found, problem = self._versions(), "It holds no version."
        except OSError as error:
            found, problem = None, f"The versions of {source.model!r} stay as they were. {error}"
        chosen = self._chosen(found or {})
        if found is not None:
            self._seen = {n: stamp for n, stamp in self._seen.items() if n in chosen}
            self._whole = {n: v for n, v in chosen.items() if v is not None}
            self.wanted = frozenset(self._whole.values()) or self.wanted
        self._say(source.path, "" if found else problem)

    def _say(self, place: pathlib.Path, problem: str) -> None:
        self._reports.say(str(place), problem)
        if problem:
            self.problem = f"{place}: {problem}"

    def _with_code(self, source: Source) -> Source:
        """Returns a source with the code that has appeared since it was made.

        Code that is gone stays known, so that its version stays as it was: without its code the
        model would answer otherwise.
        """
        if source.code is not None or source.home is None:
            return source
        try:
            code = code_of(source.home)
        except OSError:  # the file system does not answer
            code = None
        if code is None and source.home == self._source.home:
            code = self._source.code
        return dataclasses.replace(source, code=code)

    def _versions(self) -> dict[int, str]:
        """Returns the names of the version folders that are there, by number."""
        source = self._source
        if source.number is not None:
            source.path.stat()  # raises if it is not there
            return {source.number: ""}
        found: dict[int, str] = {}
        with os.scandir(source.path) as entries:
            names = [e.name for e in entries if e.is_symlink() or e.is_dir(follow_symlinks=False)]
        for name in sorted(names, key=len):  # of 3 and 003 the shorter
            number = version_number(name)
            if number is not None:
                found.setdefault(number, name)
        return found

    def _chosen(self, found: dict[int, str]) -> dict[int, ModelVersion | None]:
        """Returns the versions that were looked at, latest first, until the policy had enough."""
        policy = self._source.policy
        chosen: dict[int, ModelVersion | None] = {}
        count = 0
        for number in policy.order(found):
            if policy.limit is not None and count >= policy.limit:
                break
            chosen[number] = self._examined(number, self._source.path / found[number])
            count += chosen[number] is not None
        return chosen

    def _examined(self, number: int, path: pathlib.Path) -> ModelVersion | None:
        """Returns a version, or None if it cannot be served."""
        before, known, problem = self._seen.pop(number, None), self._whole.get(number), ""
        try:
            stamp = stamp_of(path, self._source.code)
            self._seen[number] = stamp
            if stamp == before and (known is None or known.stamp != stamp):
                known, problem = self._checked(number, path, stamp)
            else:
                return known
        except files.GONE:  # between two reads; or a link leads nowhere
            known = known if os.path.exists(path) else None  # noqa: PTH110
        except OSError as error:
            if before is not None:
                self._seen[number] = before
            problem = f"The version stays as it was. {error}"
        self._say(path, problem)
        return known

    def _checked(
        self, number: int, path: pathlib.Path, stamp: tuple[Any, ...]
    ) -> tuple[ModelVersion | None, str]:
        """Returns a version whose files have not changed since the last look, or what is wrong."""
        source, known = self._source, self._whole.get(number)
        model = model_files.model_at(path)
        if model is None and source.number is not None and source.code is not None:
            model = path  # for code that computes by itself
        elif model is None:
            return None, "It is not served: it holds no model, or more than one."
        elif (missing := model_files.lacking(model)) is not None:
            return known, f"It is not served yet: {missing}."
        # Links may lead elsewhere later. A file keeps its name, by which Keras knows its format.
        real = model.resolve() if model.is_dir() else model.parent.resolve() / model.name
        if stamp_of(path, source.code) != stamp:  # it was written while it was checked
            return known, ""
        return ModelVersion(source.model, number, real, source.code, stamp), ""
