"""A checkpoint is complete or absent, comes back equal, and holds no pickle."""

from __future__ import annotations

import json
import logging
import pathlib
import random
from typing import Any

import numpy as np
import pytest

from nanotf.errors import InvalidArgumentError
from nanotf.parent.checkpoints import Folder
from nanotf.parent.encoding import Arrays, Unencodable, decode, encode, mark_of


def _written(path: pathlib.Path, count: int) -> Folder:
    folder = Folder(path)
    for number in range(count):
        folder.write({"number": number}, {"a/0": np.full(100, number)})
    return folder


def _numbers(folder: Folder) -> list[Any]:
    return [
        (stored.manifest["number"], stored.arrays["a/0"][0]) for stored in folder.newest_first()
    ]


def test_the_newest_two_are_kept(tmp_path: pathlib.Path) -> None:
    folder = _written(tmp_path / "new" / "folder", 12)
    assert _numbers(folder) == [(11, 11), (10, 10)]
    assert len(list(folder.path.iterdir())) == 2


@pytest.mark.parametrize("name", ["manifest.json", "arrays.npz"])
@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "empty"])
def test_a_damaged_file(
    name: str, damage: str, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _written(tmp_path, 2)
    file = tmp_path / "00000002" / name
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        changed = (
            content.replace(b"1", b"2") if damage == "changed" else content[: len(content) // 2]
        )
        file.write_bytes(b"" if damage == "empty" else changed)
    with caplog.at_level(logging.WARNING, logger="nanotf"):
        assert _numbers(folder) == [(0, 0)]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "00000002 cannot be used" in line
    folder.write({"number": 7}, {"a/0": np.full(1, 7)})
    assert _numbers(folder)[0] == (7, 7)


def test_a_write_that_fails_leaves_nothing(tmp_path: pathlib.Path) -> None:
    folder = _written(tmp_path, 1)
    with pytest.raises(ValueError, match="Object arrays"):
        folder.write({}, {"b": np.array([object()])})
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"]


def test_another_format(tmp_path: pathlib.Path) -> None:
    folder = _written(tmp_path, 1)
    folder.write({"format": 99}, {})
    with pytest.raises(InvalidArgumentError, match=r"format 2\. Received: .*format 99"):
        list(folder.newest_first())


def test_values_come_back_equal() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = {
        "states": (random.getstate(), np.random.get_state()),
        "numbers": [1, 2.5, float("inf"), True, None, "text", np.float32(0.1), 2**80],
        "arrays": {"b": np.arange(3), 4: np.ones((2, 0)), "c": np.array(1.5)},
        "half": np.ones(2, ml_dtypes.bfloat16),
    }
    arrays: Arrays = {}
    text = json.dumps(encode(values, arrays, "v"))
    found = decode(json.loads(text), arrays)
    assert mark_of(found) == mark_of(values)
    assert found["states"][0] == values["states"][0]
    assert type(found["numbers"][6]) is np.float32
    assert found["half"].dtype == ml_dtypes.bfloat16
    assert list(found["arrays"]) == ["b", 4, "c"]


def test_other_objects_are_refused() -> None:
    with pytest.raises(Unencodable, match="v/1 is an object of class object"):
        encode([1, object()], {}, "v")
    assert mark_of(object()) is None
    assert mark_of(np.zeros(3)) != mark_of(np.ones(3))
