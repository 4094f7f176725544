"""`nanotf optimize` prints the table and writes the best program."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
from inference_models import assert_equal, keras_result, model_and_rows

from nanotf import cli, inference


def test_table_and_program(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model with two inputs, whose rows are in one file."""
    model, rows = model_and_rows("several")
    x = rows(6)
    model.save(tmp_path / "model.keras")
    np.savez(tmp_path / "rows.npz", b=x[0], a=x[1])
    command = ["optimize", str(tmp_path / "model.keras"), "--rows", str(tmp_path / "rows.npz")]
    options = ["--engines", "tensorflow,frozen", "--batch-sizes", "2,5", "-o", str(tmp_path / "p")]
    assert cli.main([*command, *options]) == 0
    printed = capsys.readouterr().out
    headings, first, second, *_ = printed.splitlines()
    assert headings.split()[:8] == ["engine", "precision", "ms", "at", "2", "ms", "at", "5"]
    assert first.split()[:2] == ["tensorflow", "f32"] and first.endswith(" ok")
    assert second.split()[:2] == ["frozen", "f32"] and second.endswith(" ok")
    assert "best for batches of 2, 5: " in printed
    program = inference.load(tmp_path / "p")
    assert f"Wrote the program {program.engine} f32 to " in printed
    assert_equal(program(x), keras_result(model, x))


def test_no_engine_is_right(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without any candidate that may be used the exit code is 1."""
    model, rows = model_and_rows("dense")
    model.save(tmp_path / "model.keras")
    np.save(tmp_path / "rows.npy", rows(4))
    command = ["optimize", str(tmp_path / "model.keras"), "--rows", str(tmp_path / "rows.npy")]
    options = ["--engines", "tensorflow", "--seconds", "0.001", "-o", str(tmp_path / "p")]
    for given in (options[:-2], options):
        assert cli.main([*command, *given]) == 1
        assert "too slow" in capsys.readouterr().out
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "The following arguments are required: MODEL, --rows"),
        (["m.keras", "--rows", "x.csv"], "--rows must name a file .npy or .npz. Received: 'x.csv'"),
        (["m.keras", "--rows", "pickled.npy"], "Object arrays cannot be loaded"),
        (["m.keras", "--rows", "rows.npy", "--threads", "x"], "must be a whole number"),
        (["m.keras", "--rows", "rows.npy", "--batch-sizes", "1,a"], "must be a whole number"),
        (["m.keras", "--rows", "rows.npy", "--engines", "ovino"], "`engines` must be one of"),
        (["m.keras", "--rows", "rows.npy", "--precision", "int8"], "Pass `metric` and `y`"),
        (["m.keras", "--rows", "rows.npy"], "Received: 'm.keras', which is not there"),
        (["m.keras", "--rows", "rows.npy", "-o", "rows.npy"], "which nanotf has not written"),
    ],
)
def test_arguments_that_cannot_be_used(
    arguments: list[str],
    text: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("rows.npy", np.zeros((2, 8), "float32"))
    np.save("pickled.npy", np.array([{}], dtype=object), allow_pickle=True)
    assert cli.main(["optimize", *arguments]) == 2
    assert text in capsys.readouterr().err
