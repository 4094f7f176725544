"""Formats: what is whole, and what lacks a part."""

from __future__ import annotations

import os
import pathlib

import pytest
from tiny_models import (
    field,
    hdf5_bytes,
    index,
    keras_bytes,
    prefixed,
    saved_model,
    saved_model_files,
    table,
    tick,
    write,
)

from nanotf.serving.repository import model_files, stamps, wire_format

FILES = saved_model_files([100, 31], ["vocabulary.txt"])


def test_a_whole_saved_model_lacks_nothing(tmp_path: pathlib.Path) -> None:
    folder = write(tmp_path / "3", FILES)
    assert model_files.model_at(folder) == folder
    assert model_files.lacking(folder) is None


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_saved_model_lacks_a_file(tmp_path: pathlib.Path, name: str) -> None:
    folder = write(tmp_path / "3", {n: data for n, data in FILES.items() if n != name})
    if name == "saved_model.pb":
        assert model_files.model_at(folder) is None
    else:
        assert model_files.lacking(folder) == f"{name} is missing"


@pytest.mark.parametrize("name", sorted(n for n in FILES if not n.startswith("assets")))
def test_a_saved_model_lacks_the_end_of_a_file(tmp_path: pathlib.Path, name: str) -> None:
    """A copy that pauses leaves such a file; it looks the same at any two looks."""
    folder = write(tmp_path / "3", FILES)
    for length in range(len(FILES[name])):
        (folder / name).write_bytes(FILES[name][:length])
        said = model_files.lacking(folder)
        assert said is not None and said.startswith(name), (length, said)


def test_a_graph_of_tensorflow_1_needs_no_variables(tmp_path: pathlib.Path) -> None:
    folder = write(tmp_path / "3", {"saved_model.pb": field(2, field(2, b"graph"))})
    (folder / "variables").mkdir()
    assert model_files.lacking(folder) is None
    write(folder, {"variables/variables.data-00000-of-00001": b"w"})
    assert model_files.lacking(folder) == "variables/variables.index is missing"


def test_a_graph_of_tensorflow_1_with_a_saver_needs_variables(tmp_path: pathlib.Path) -> None:
    folder = write(tmp_path / "3", {"saved_model.pb": field(2, field(3, b"saver"))})
    assert model_files.lacking(folder) == "variables/variables.index is missing"


def test_a_saved_model_as_text(tmp_path: pathlib.Path) -> None:
    files = {n: data for n, data in FILES.items() if n.startswith("variables")}
    folder = write(tmp_path / "3", {"saved_model.pbtxt": b"...", **files})
    assert model_files.model_at(folder) == folder
    assert model_files.lacking(folder) is None
    (folder / "variables/variables.data-00001-of-00002").unlink()
    assert model_files.lacking(folder) == "variables/variables.data-00001-of-00002 is missing"


@pytest.mark.parametrize(("name", "data"), [("model.keras", keras_bytes()), ("m.h5", hdf5_bytes())])
def test_a_keras_file_is_whole_or_not(tmp_path: pathlib.Path, name: str, data: bytes) -> None:
    file = tmp_path / name
    file.write_bytes(data)
    assert model_files.lacking(file) is None
    for length in range(0, len(data), 7):
        file.write_bytes(data[:length])
        assert "whole" in str(model_files.lacking(file))


def test_a_zip_file_that_keras_has_not_saved(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "model.keras"
    file.write_bytes(keras_bytes().replace(b"config.json", b"konfig.json"))
    assert "Keras" in str(model_files.lacking(file))


def test_a_program_is_whole_or_not(tmp_path: pathlib.Path) -> None:
    folder = write(tmp_path / "3", {"program.json": b'{"engine": "tensorflow"}'})
    assert model_files.model_at(folder) == folder
    assert model_files.lacking(folder) == "engine is missing"
    write(folder, prefixed("engine", FILES))
    assert model_files.lacking(folder) is None
    write(folder, {"engine/saved_model.pb": b""})
    assert model_files.lacking(folder) == "engine/saved_model.pb is not whole: it holds no graph"
    (folder / "engine/saved_model.pb").unlink()
    write(folder, {"engine/model.xml": b""})
    assert model_files.lacking(folder) is None
    (folder / "program.json").write_bytes(b'{"engine": "tens')
    assert model_files.lacking(folder) == "program.json is not whole"


def test_the_one_keras_file_of_a_folder_is_the_model(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "model.keras"
    write(tmp_path, {"model.keras": b"", "x.weights.h5": b"", "._model.keras": b""})
    assert model_files.model_at(tmp_path) == file
    (tmp_path / "other.h5").touch()
    assert model_files.model_at(tmp_path) is None


def test_a_pipe_is_never_opened(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "saved_model.pb")
    os.mkfifo(tmp_path / "model.keras")
    assert model_files.model_at(tmp_path) is None


def test_sizes_of_data_files_of_an_index_of_many_blocks() -> None:
    sizes = [100 * n + 1 for n in range(50)]
    assert wire_format.shard_sizes(index(sizes)) == sizes


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"text" * 30,
        table([(b"", field(1, 1)), (b"a", field(3, 7) + field(5, 10))]),  # a shard too many
        index([10])[:-8] + b"\0" * 8,
        index([10]).replace(b"\0CRC4", b"\1CRC4", 1),  # compressed
    ],
)
def test_what_is_no_index(data: bytes) -> None:
    with pytest.raises(wire_format.NotWholeError):
        wire_format.shard_sizes(data)


def test_damaged_indexes_are_told(tmp_path: pathlib.Path) -> None:
    """No byte makes the reader raise anything else, read on without end, or miss a short file."""
    whole = index([40, 60])
    for place in range(len(whole)):
        for value in (0, 0x7F, 0x80, 0xFF):
            data = whole[:place] + bytes([value]) + whole[place + 1 :]
            try:
                sizes = wire_format.shard_sizes(data)
            except wire_format.NotWholeError:
                continue
            assert len(sizes) < 1 << 20


def test_a_stamp_differs_after_each_change(tmp_path: pathlib.Path) -> None:
    folder = saved_model(tmp_path / "3")
    file = folder / "saved_model.pb"
    old = stamps.stamp_of(folder)
    assert stamps.stamp_of(folder) == old
    times, data = file.stat(), file.read_bytes()
    tick(tmp_path)
    file.unlink()  # the new one may get the old inode
    file.write_bytes(data)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert stamps.stamp_of(folder) != old
    old = stamps.stamp_of(folder)
    file.rename(folder / "other.pb")
    assert stamps.stamp_of(folder) != old


def test_a_stamp_includes_the_code_but_not_what_python_writes_there(
    tmp_path: pathlib.Path,
) -> None:
    folder = saved_model(tmp_path / "model")
    code = write(tmp_path / "code", {"inference.py": b"x = 1"})
    old = stamps.stamp_of(folder, code)
    write(code, {"__pycache__/inference.cpython-311.pyc": b""})
    assert stamps.stamp_of(folder, code) == old
    write(code, {"lib/more.py": b""})
    assert stamps.stamp_of(folder, code) != old


def test_links_in_a_model(tmp_path: pathlib.Path) -> None:
    """Files may be links, as in Hugging Face's cache; circles and dangling links do no harm."""
    store = write(tmp_path / "store", prefixed("blobs", FILES))
    folder = tmp_path / "3"
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(store / "blobs" / name)
    (folder / "self").symlink_to(folder)
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "gone").symlink_to(tmp_path / "nowhere")
    assert model_files.lacking(folder) is None
    old = stamps.stamp_of(folder)
    (store / "blobs/saved_model.pb").write_bytes(b"")
    assert stamps.stamp_of(folder) != old
