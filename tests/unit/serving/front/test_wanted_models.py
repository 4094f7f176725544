"""The models that a server is told to serve, between the disk, the desk and the fleet."""

import asyncio
import pathlib
import types

import pytest

from nanotf.errors import InvalidArgumentError
from nanotf.serving.front import wanted_models
from nanotf.serving.front.wanted_models import WantedModels
from nanotf.serving.repository.model_sources import ModelVersion, Wanted


class Disk:
    """A repository whose looks find what clients have added, from the second look on."""

    def __init__(self):
        self.added, self.seen, self.looks = {}, set(), 0

    @property
    def models(self):
        return list(self.added)

    @property
    def default_model(self):
        return next(iter(self.added), None)

    def look(self):
        self.looks += 1
        found = {ModelVersion(name, 1, path, None, ()) for name, path in self.added.items()}
        wanted, self.seen = found & self.seen, found
        problems = {v.model: f"{v.path}: It lacks a part." for v in found - wanted}
        return Wanted(frozenset(wanted), {(v.model, "stable"): 1 for v in wanted}, problems)

    def listed_by(self, catalog):
        return self.models

    def add(self, model, folder):
        self.added[model] = folder

    def remove(self, model):
        return self.added.pop(model, None) is not None


def test_a_model_that_a_client_adds_and_removes(monkeypatch):
    monkeypatch.setattr(wanted_models, "SETTLING", 0.0)
    disk, told = Disk(), []

    async def script():
        wanted = WantedModels(disk, disk, lambda versions: told.append({v.model for v in versions}))
        assert (wanted.names, wanted.default_model, wanted.labels) == ([], None, {})
        await wanted.add("m", pathlib.Path("/m"))
        assert told == [set(), {"m"}]
        assert (wanted.names, wanted.default_model) == (["m"], "m")
        assert wanted.lasting == []  # what clients add makes the server no less ready
        assert wanted.labels == {("m", "stable"): 1}
        assert not await wanted.remove("other")
        assert await wanted.remove("m")
        assert told[-1] == set() and wanted.names == []

    asyncio.run(script())


def test_a_model_that_is_not_whole_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(wanted_models, "SETTLING", 0.0)
    disk = Disk()
    look = disk.look

    def look_at_a_copy():
        disk.seen = set()  # its files change between all looks
        return look()

    async def script():
        repository = types.SimpleNamespace(
            models=[], default_model=None, look=look_at_a_copy, listed_by=disk.listed_by
        )
        wanted = WantedModels(repository, disk, lambda versions: None)
        with pytest.raises(InvalidArgumentError, match="/m: It lacks a part"):
            await wanted.add("m", pathlib.Path("/m"))

    asyncio.run(script())
    assert disk.added == {}


def test_looks_come_one_after_another():
    disk, busy = Disk(), []

    def look():
        assert not busy
        busy.append(True)
        found = Disk.look(disk)
        busy.pop()
        return found

    async def script():
        repository = types.SimpleNamespace(
            models=[], default_model=None, look=look, listed_by=disk.listed_by
        )
        wanted = WantedModels(repository, disk, lambda versions: None)
        await asyncio.gather(*(wanted.look() for _ in range(20)))

    asyncio.run(script())
    assert disk.looks == 20
