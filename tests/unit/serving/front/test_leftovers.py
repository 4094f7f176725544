"""Deletes what a server has made of models, with the last worker that uses it."""

import asyncio
import pathlib

from nanotf.serving.front.leftovers import Leftovers
from nanotf.serving.repository.model_sources import ModelVersion


class Added:
    def __init__(self, *folders):
        self.folders = list(folders)

    def unused(self, paths):
        found, self.folders = self.folders, []
        return found


def version(number, stamp=0):
    return ModelVersion("m", number, pathlib.Path("/m"), None, (stamp,))


def test_folders_of_other_versions_go(tmp_path):
    archive = tmp_path / "added-1"
    made = [each.place_in(tmp_path) for each in (version(1), version(2), version(2, stamp=1))]
    for folder in (*made, archive, tmp_path / "model-of-the-command-line"):
        (folder / "program").mkdir(parents=True)

    async def script():
        leftovers = Leftovers(tmp_path, Added(archive))
        leftovers.keep([version(1), version(2, stamp=1)])
        # At once, so that a worker that starts now makes its own.
        assert not made[1].exists() and not archive.exists()
        leftovers.keep([version(2, stamp=1)])

    asyncio.run(script())  # waits for the threads
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model-of-the-command-line", made[2].name]
