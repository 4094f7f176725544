"""`nanotf.inference`: programs of TensorFlow's engines compute what Keras does."""

from __future__ import annotations

import json
import pathlib
import pickle
import shutil
from typing import Any

import inference_models
import numpy as np
import pytest
import tensorflow as tf
from inference_models import (
    MODELS,
    assert_equal,
    check_batches,
    keras_result,
    model_and_rows,
)

from nanotf import errors, inference
from nanotf.errors import ConversionError
from nanotf.inference import exported, program_folder
from nanotf.inference.signature import DEFAULT
from nanotf.wire import files

L = tf.keras.layers
# What an engine does not take: tables are no variables, and XLA knows no text.
UNABLE = {("frozen", "text"), ("xla", "text")}


class Doubler(tf.Module):
    """A module with a signature of its own, of a variable."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = tf.Variable(2.0)

    @tf.function(input_signature=[tf.TensorSpec((None, 2), tf.float32, name="x")])
    def double(self, x: Any) -> Any:
        return {"y": x * self.factor}

    @tf.function(input_signature=[tf.TensorSpec((), tf.float32, name="x")])
    def square(self, x: Any) -> Any:
        return {"y": x * x}


# ---------------------------------------------------------------------------------- numbers
@pytest.mark.both_generations
@pytest.mark.every_case
@pytest.mark.parametrize("kind", MODELS)
def test_same_as_keras(kind: str) -> None:
    model, rows = model_and_rows(kind)
    check_batches(inference.make(model), model, rows)


@pytest.mark.both_generations
@pytest.mark.parametrize(
    ("engine", "kind"),
    [(e, k) for e in ("frozen", "xla") for k in MODELS if (e, k) not in UNABLE],
)
def test_other_engines_of_tensorflow(engine: str, kind: str) -> None:
    model, rows = model_and_rows(kind)
    program = inference.make(model, engine)
    assert program.engine == engine
    check_batches(program, model, rows)


@pytest.mark.every_case
@pytest.mark.parametrize(("engine", "kind"), sorted(UNABLE))
def test_models_that_an_engine_does_not_take(engine: str, kind: str) -> None:
    with pytest.raises(ConversionError, match="Choose engine='tensorflow'"):
        inference.make(model_and_rows(kind)[0], engine)


def test_names_are_those_of_keras() -> None:
    signature = inference.make(model_and_rows("several")[0]).signatures[DEFAULT]
    assert signature.input_names == ("b", "a")
    assert [spec.name for spec in signature.outputs] == ["q", "p"]
    signature = inference.make(model_and_rows("dicts")[0]).signatures[DEFAULT]
    assert signature.input_names == ("b", "a")
    assert sorted(spec.name for spec in signature.outputs) == ["y", "z"]
    shared = L.Dense(2, name="d")
    a, b = L.Input((3,), name="a-1"), L.Input((3,), name="b.2")
    signature = inference.make(tf.keras.Model([a, b], [shared(a), shared(b)])).signatures[DEFAULT]
    assert signature.input_names == ("a-1", "b.2")
    assert [spec.name for spec in signature.outputs] == ["d", "d_1"]


def test_inputs_by_name_or_in_order() -> None:
    model, rows = model_and_rows("several")
    program, (b, a) = inference.make(model), rows(4)
    expected = keras_result(model, [b, a])
    assert_equal(program({"a": a, "b": b}), expected)
    assert_equal(program((b.tolist(), a)), expected)
    found = program.run({"a": a, "b": b})
    assert_equal([found["q"], found["p"]], expected)


@pytest.mark.both_generations
def test_dtypes_of_a_subclassed_model_come_from_rows() -> None:
    """Keras 3 keeps none, and ids would become floats."""
    _, rows = model_and_rows("ids")

    class Ids(tf.keras.Model):
        def call(self, ids: Any) -> Any:
            return tf.cast(ids % 1000, "float32")

    model, x = Ids(), rows(5)
    expected = model.predict(x, verbose=0)
    program = inference.make(model, rows=x)
    assert program.signatures[DEFAULT].inputs[0].dtype == "int32"
    assert_equal(program(x), expected)


def test_training_code_does_not_run() -> None:
    x = np.ones((64, 4), "float32")
    model = tf.keras.Sequential([L.Input((4,)), L.Dropout(0.9), L.BatchNormalization()])
    program = inference.make(model)
    assert_equal(program(x), model.predict(x, verbose=0))
    assert_equal(program(x), program(x))


# -------------------------------------------------------------------------------- the folder
@pytest.mark.both_generations
def test_save_and_load(tmp_path: pathlib.Path) -> None:
    model, rows = model_and_rows("dicts")
    x, path = rows(6), tmp_path / "program"
    expected = keras_result(model, x)  # first: AutoGraph keeps what callers' frames hold then
    program = inference.make(model)
    program.save(path)
    temporary = program.folder
    again = inference.load(path)
    assert_equal(again(x), expected)
    assert (again.folder, again.engine, again.precision) == (path, "tensorflow", "f32")
    assert again.signatures == program.signatures
    assert_equal(pickle.loads(pickle.dumps(again))(x), expected)
    del program
    assert not temporary.exists()
    moved = shutil.move(path, tmp_path / "moved")
    assert_equal(inference.load(moved)(x), expected)


def test_written_to_a_folder(tmp_path: pathlib.Path) -> None:
    (first, rows), (second, _) = model_and_rows("dense"), model_and_rows("dense")
    second.set_weights([2 * w for w in second.get_weights()])
    path, x = tmp_path / "program", rows(3)
    old = inference.make(first, folder=path)
    assert old.folder == path
    new = inference.make(second, folder=path)
    for program in (new, inference.load(path)):
        assert_equal(program(x), second.predict(x, verbose=0))
    assert_equal(old(x), first.predict(x, verbose=0))  # it is loaded
    state = new.state
    new.save(path)  # where it is already
    assert inference.load(path).state == state
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "file").touch()
    with pytest.raises(errors.InvalidArgumentError, match="which nanotf has not written"):
        new.save(tmp_path / "notes")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["notes", "program"]


def test_replaced_while_it_is_loaded(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state is that of the program that was described, so workers refuse the new one."""
    path = tmp_path / "program"
    model, _ = model_and_rows("dense")
    state, other = inference.make(model, folder=path).state, inference.make(model)
    read = program_folder.read_description

    def replaced(folder: pathlib.Path) -> program_folder.Description:
        found = read(folder)
        monkeypatch.undo()  # `save` reads, too
        other.save(path)
        return found

    monkeypatch.setattr(program_folder, "read_description", replaced)
    assert inference.load(path).state == state != inference.load(path).state


def test_other_sources(tmp_path: pathlib.Path) -> None:
    """A Keras file and a SavedModel's folder, which is used as it is."""
    model, rows = model_and_rows("dense")
    x = rows(5)
    expected = model.predict(x, verbose=0)
    for name in ("model.keras", "model.h5"):
        model.save(tmp_path / name)
        assert_equal(inference.load(tmp_path / name)(x), expected)
        assert_equal(inference.make(tmp_path / name, "xla")(x), expected)
    folder = tmp_path / "saved"
    exported.export(model, folder)
    before = sorted(folder.rglob("*"))
    program = inference.load(folder)
    assert program.folder == folder
    assert sorted(folder.rglob("*")) == before
    found = program(x)  # its structure is not known
    assert_equal([*found.values()], [expected])
    program.save(tmp_path / "program")
    assert_equal(inference.load(tmp_path / "program")(x), found)
    assert_equal(inference.load(folder, "frozen").run({"x": x}), found)


def test_modules_and_their_signatures(tmp_path: pathlib.Path) -> None:
    module, x = Doubler(), np.ones((3, 2), "float32")
    signatures = {DEFAULT: module.double, "square": module.square}
    tf.saved_model.save(module, tmp_path / "saved", signatures=signatures)
    loaded = tf.saved_model.load(tmp_path / "saved")
    for program in (inference.load(tmp_path / "saved"), inference.make(loaded)):
        assert sorted(program.signatures) == [DEFAULT, "square"]
        np.testing.assert_array_equal(program(x)["y"], 2 * x)
        assert program.run({"x": 3.0}, "square")["y"] == 9.0
        with pytest.raises(errors.InvalidArgumentError, match="Received: signature='cube'"):
            program.run({"x": 3.0}, "cube")
    assert list(inference.make(tmp_path / "saved", "frozen").signatures) == [DEFAULT]


# -------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize("content", ["", "{}", '{"format": 1, "engine": "tensorflow"}'])
def test_damaged_programs(tmp_path: pathlib.Path, content: str) -> None:
    (tmp_path / "program.json").write_text(content)
    with pytest.raises(files.Damaged, match=r"program\.json is not as nanotf writes it"):
        inference.load(tmp_path)


def test_missing_files(tmp_path: pathlib.Path) -> None:
    program = inference.make(model_and_rows("dense")[0], folder=tmp_path / "program")
    shutil.rmtree(tmp_path / "program" / "engine" / "variables")
    with pytest.raises(ConversionError, match="must be able to load the model"):
        inference.load(program.folder)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "saved_model.pb").write_bytes(b"\x0f\x00")
    with pytest.raises(errors.InvalidArgumentError, match="A SavedModel must be complete"):
        inference.load(tmp_path / "saved")


def test_what_is_no_model(tmp_path: pathlib.Path) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="which is not there"):
        inference.load(tmp_path / "nothing")
    with pytest.raises(errors.InvalidArgumentError, match="a folder without a SavedModel"):
        inference.load(tmp_path)
    with pytest.raises(errors.InvalidArgumentTypeError, match="Received: int"):
        inference.make(3)
    with pytest.raises(errors.InvalidArgumentError, match="Received: Module with none"):
        inference.make(tf.Module())
    with pytest.raises(errors.ModelError, match="Call it on a batch"):
        inference.make(tf.keras.Sequential([L.Dense(2)]))
    program = inference.make(model_and_rows("dense")[0], folder=tmp_path / "program")
    with pytest.raises(errors.InvalidArgumentError, match="has one engine, 'tensorflow'"):
        inference.load(program.folder, "xla")
    with pytest.raises(errors.InvalidArgumentError, match="already: `load` takes it"):
        inference.make(program.folder, "xla")


def test_wrong_inputs() -> None:
    program = inference.make(model_and_rows("dense")[0])
    with pytest.raises(errors.InvalidArgumentError, match=r"shape \(None, 8\). Received: \(8,\)"):
        program(np.zeros(8))
    with pytest.raises(errors.InvalidArgumentTypeError, match="type float32"):
        program([["a"] * 8])
    with pytest.raises(errors.InvalidArgumentError, match="Received: 'y'"):
        program({"y": np.zeros((1, 8))})
    with pytest.raises(errors.InvalidArgumentError, match="batch_size=0"):
        program.predict(np.zeros((1, 8)), batch_size=0)


# ---------------------------------------------------------------------------------- workers
@pytest.mark.both_generations
@pytest.mark.parametrize("kind", ["several", "text", "dense"])
def test_predict_on_workers(kind: str, tmp_path: pathlib.Path) -> None:
    model, rows = model_and_rows(kind)
    program = inference.make(model)
    for count in (101, 128, 1, 0):
        x = rows(count)
        found = program.predict(x, batch_size=8, num_processes=2)
        assert_equal(found, program.predict(x, batch_size=8))
        if count:
            assert_equal(found, keras_result(model, x))


def test_workers_see_another_program(tmp_path: pathlib.Path) -> None:
    """A worker keeps a program until another takes its place in the folder."""
    (model, rows), path = model_and_rows("dense"), tmp_path / "program"
    x = rows(40)
    old = inference.make(model, folder=path)
    assert_equal(old.predict(x, num_processes=2), model.predict(x, verbose=0))
    model.set_weights([2 * w for w in model.get_weights()])
    new = inference.make(model, folder=path)
    assert_equal(new.predict(x, num_processes=2), model.predict(x, verbose=0))
    with pytest.raises(errors.InvalidArgumentError, match="which has changed since"):
        old.predict(x, num_processes=2)


def test_rows_that_cannot_be_divided(tmp_path: pathlib.Path) -> None:
    module = Doubler()
    tf.saved_model.save(module, tmp_path / "saved", signatures={DEFAULT: module.square})
    with pytest.raises(errors.InvalidArgumentError, match="Call the program itself"):
        inference.load(tmp_path / "saved").predict(np.float32(3.0), num_processes=2)


def test_description_of_a_program(tmp_path: pathlib.Path) -> None:
    program = inference.make(model_and_rows("several")[0], folder=tmp_path / "program")
    found = json.loads((program.folder / program_folder.DESCRIPTION).read_text())
    assert found["tensorflow"].split(".")[:2] == tf.__version__.split(".")[:2]
    assert found["inputs"] == {"list": ["b", "a"]}
    assert found["outputs"] == {"list": ["q", "p"]}


def test_xla_adds_no_rows_to_those_that_meet(tmp_path: pathlib.Path) -> None:
    """A padding row would change the mean. Rows of models that keep them apart may get some."""
    tf.saved_model.save(inference_models.Centring(), str(tmp_path / "saved"))
    program = inference.make(tmp_path / "saved", "xla", folder=tmp_path / "program")
    assert program.reason_to_keep_together()
    x = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
    for each in (program, inference.load(tmp_path / "program")):
        found = each.run({"x": x})["centred"]
        np.testing.assert_allclose(found, x - x.mean(0), rtol=1e-5, atol=1e-6)
        assert each.run({"x": x[:0]})["centred"].shape == (0, 4)
