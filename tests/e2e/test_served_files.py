"""Models that TensorFlow and Keras have saved: the server's front tells a whole one from a part."""

from __future__ import annotations

import pathlib
import shutil

import pytest
import tensorflow as tf

from nanotf.compat.versions import is_keras_3
from nanotf.serving.repository import model_files, sources_of

pytestmark = pytest.mark.both_generations


def _module(folder: pathlib.Path) -> None:
    """A module with an asset and a variable."""

    class _Words(tf.Module):
        def __init__(self, file: str) -> None:
            super().__init__()
            columns = (tf.string, 0, tf.int64, 1)
            initializer = tf.lookup.TextFileInitializer(file, *columns, delimiter=" ")
            self.table = tf.lookup.StaticHashTable(initializer, -1)
            self.offset = tf.Variable([1], dtype=tf.int64)

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="words")])
        def numbers(self, words: tf.Tensor) -> tf.Tensor:
            return self.table.lookup(words) + self.offset

    words = folder.parent / "words.txt"
    words.write_text("one 1\ntwo 2\n")
    tf.saved_model.save(_Words(str(words)), str(folder))


def _constant(folder: pathlib.Path) -> None:
    module = tf.Module()
    spec = tf.TensorSpec([None], tf.float32)
    module.double = tf.function(lambda x: x * 2, input_signature=[spec])
    tf.saved_model.save(module, str(folder))


def _keras(folder: pathlib.Path) -> None:
    layers = [tf.keras.layers.Dense(40, name=f"layer_{n}") for n in range(30)]
    model = tf.keras.Sequential([tf.keras.Input((8,)), *layers])
    model.export(str(folder))


def _graph(folder: pathlib.Path, variable: bool) -> None:
    """A model of TensorFlow 1."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [None])
        factor = v1.get_variable("factor", [1]) if variable else 3.0
        session.run(v1.global_variables_initializer())
        inputs, outputs = {"x": x}, {"y": x * factor}
        v1.saved_model.simple_save(session, str(folder), inputs, outputs)


KINDS = {
    "module": _module,
    "constant": _constant,
    "keras": _keras,
    "graph with a variable": lambda folder: _graph(folder, True),
    "graph": lambda folder: _graph(folder, False),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.every_case
def test_parts_of_a_saved_model_are_not_whole(tmp_path: pathlib.Path, kind: str) -> None:
    whole = tmp_path / "whole"
    KINDS[kind](whole)
    (source,) = sources_of(whole, folder=tmp_path)
    assert source.path == whole
    assert model_files.lacking(whole) is None
    names = [str(p.relative_to(whole)) for p in whole.rglob("*") if p.is_file()]
    needed = [name for name in names if name.startswith(("saved_model", "variables", "assets/"))]
    assert "saved_model.pb" in needed
    for name in needed:
        folder = shutil.copytree(whole, tmp_path / "part", dirs_exist_ok=True)
        (folder / name).unlink()
        assert model_files.model_at(folder) is None or model_files.lacking(folder)
        if name.startswith("assets"):  # nothing says how long it is to be
            continue
        data = (whole / name).read_bytes()
        for length in {0, 1, len(data) // 3, len(data) - 1}:
            (folder / name).write_bytes(data[:length])
            assert str(model_files.lacking(folder)).startswith(name), length


@pytest.mark.parametrize("ending", [".keras", ".h5"])
@pytest.mark.every_case
def test_parts_of_a_keras_file_are_not_whole(tmp_path: pathlib.Path, ending: str) -> None:
    file = tmp_path / f"model{ending}"
    model = tf.keras.Sequential([tf.keras.Input((8,)), tf.keras.layers.Dense(4)])
    model.save(file if is_keras_3() else str(file))
    (source,) = sources_of(file, folder=tmp_path)
    assert (source.model, source.path) == ("model", file)
    assert model_files.lacking(file) is None
    data = file.read_bytes()
    for length in {0, 1, 50, len(data) // 2, len(data) - 1}:
        file.write_bytes(data[:length])
        assert "whole" in str(model_files.lacking(file)), length
