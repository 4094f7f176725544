"""Random changes of files, with looks in between: no version is wanted that is not whole."""

from __future__ import annotations

import pathlib
import random
import shutil

import pytest
from tiny_models import numbers, saved_model_files, tick

from nanotf.serving.repository import ALL, LATEST, Repository, Source, VersionPolicy

FILES = saved_model_files([90, 30], ["words.txt"])
NUMBERS = range(1, 4)


class _Disk:
    """Version folders that are changed at random. It knows which are whole."""

    def __init__(self, root: pathlib.Path, draw: random.Random) -> None:
        self.base, self._aside, self._draw = root / "base", root / "aside", draw
        self.base.mkdir()
        self._aside.mkdir()

    def is_whole(self, number: int) -> bool:
        folder = self.base / str(number)
        files = [(folder / name, len(data)) for name, data in FILES.items()]
        # An asset may have any length: its file is not described anywhere.
        return all(
            file.is_file() and (file.stat().st_size == size or file.parent.name == "assets")
            for file, size in files
        )

    def content(self, number: int) -> dict[str, bytes]:
        folder = self.base / str(number)
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}

    def change(self) -> None:
        number = self._draw.choice(NUMBERS)
        folder = self.base / str(number)
        changes = [self._write, self._write, self._write_all, self._remove, self._move, self._link]
        self._draw.choice(changes)(folder)

    def complete(self, folder: pathlib.Path) -> None:
        self._remove_folder(folder)
        for name, data in FILES.items():
            self._write_file(folder, name, data)

    def _write(self, folder: pathlib.Path) -> None:
        name, data = self._draw.choice(list(FILES.items()))
        if folder.is_symlink() and not folder.exists():
            folder.unlink()
        self._write_file(folder, name, data[: self._draw.choice([0, 1, len(data) // 2, len(data)])])

    def _write_all(self, folder: pathlib.Path) -> None:
        self.complete(folder)

    def _remove(self, folder: pathlib.Path) -> None:
        if self._draw.random() < 0.3:
            self._remove_folder(folder)
        else:
            (folder / self._draw.choice(list(FILES))).unlink(missing_ok=True)

    def _move(self, folder: pathlib.Path) -> None:
        """Moves a folder away, or one from there into place."""
        away = self._aside / folder.name
        if folder.exists() and not away.exists():
            folder.rename(away)
        elif away.exists() and not folder.exists() and not folder.is_symlink():
            away.rename(folder)

    def _link(self, folder: pathlib.Path) -> None:
        """Makes the folder a link to another one, whole or not."""
        store = self._aside / f"store{self._draw.randrange(10**9)}"
        self.complete(store)
        if self._draw.random() < 0.5:
            (store / self._draw.choice(list(FILES))).unlink()
        self._remove_folder(folder)
        folder.symlink_to(store)

    def _remove_folder(self, folder: pathlib.Path) -> None:
        if folder.is_symlink():
            folder.unlink()
        shutil.rmtree(folder, ignore_errors=True)

    def _write_file(self, folder: pathlib.Path, name: str, data: bytes) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name.startswith("variables/variables.data"):
            data = self._draw.randbytes(len(data))
        (folder / name).write_bytes(data)


@pytest.mark.parametrize("policy", [LATEST, ALL], ids=["latest", "all"])
@pytest.mark.parametrize("seed", range(6))
def test_random_changes(tmp_path: pathlib.Path, policy: VersionPolicy, seed: int) -> None:
    draw = random.Random(seed)
    disk = _Disk(tmp_path, draw)
    repository = Repository([Source("m", disk.base, policy=policy)])
    wanted, accepted = repository.look(), 0
    for _ in range(120):
        contents = {number: disk.content(number) for number in NUMBERS}
        tick(tmp_path)
        for _ in range(draw.choice([0, 0, 1, 1, 2, 5])):
            disk.change()
        before, wanted = wanted, repository.look()
        for version in wanted.versions - before.versions:
            accepted += 1
            assert disk.is_whole(version.number)
            assert disk.content(version.number) == contents[version.number]
        assert wanted.versions or not before.versions
    assert accepted > 3
    for number in NUMBERS:
        disk.complete(disk.base / str(number))
    repository.look()
    assert numbers(repository.look()) == ([3] if policy == LATEST else [1, 2, 3])
