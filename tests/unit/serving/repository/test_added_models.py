"""Models that clients add: what was unpacked of them goes with them."""

from __future__ import annotations

import pathlib

import pytest
from tiny_models import archive, prefixed, saved_model, saved_model_files, settled

from nanotf.errors import InvalidArgumentError
from nanotf.serving.repository import Repository
from nanotf.serving.repository.added_models import AddedModels


def test_an_archive_stays_until_nobody_uses_it(tmp_path: pathlib.Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    added = AddedModels(own)
    file = archive(tmp_path / "m.tar.gz", prefixed("half/1", saved_model_files([100])))
    added.add("m", file)
    repository = Repository([], [added])
    (version,) = settled(repository).versions
    assert added.unused([]) == []  # it is wanted
    assert added.remove("m") and not added.remove("m")
    assert added.unused([version.path]) == []
    (folder,) = added.unused([])
    assert version.path.is_relative_to(folder) and folder.parent == own.resolve()
    assert added.unused([]) == []


def test_a_folder_of_the_user_stays(tmp_path: pathlib.Path) -> None:
    own, model = tmp_path / "own", saved_model(tmp_path / "model")
    own.mkdir()
    added = AddedModels(own)
    added.add("m", model)
    added.remove("m")
    assert all(folder.is_relative_to(own.resolve()) for folder in added.unused([]))


def test_an_archive_without_a_model_leaves_nothing(tmp_path: pathlib.Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    with pytest.raises(InvalidArgumentError):
        AddedModels(own).add("m", archive(tmp_path / "m.tar.gz", {"text.txt": b""}))
    assert list(own.iterdir()) == []
