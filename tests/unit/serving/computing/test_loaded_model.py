"""A version of a model in several workers: what one has found out, others read."""

from __future__ import annotations

import pathlib
import types
from typing import Any

import pytest

from nanotf.serving.computing import loaded_model
from nanotf.serving.computing.loaded_model import LoadedModel
from nanotf.serving.repository.model_sources import ModelVersion
from nanotf.serving.worker_messages import WorkerOptions


class Program:
    """A program that counts who asks for proofs, which take long."""

    asked = 0
    signatures: dict[str, Any] = {"a": None, "b": None}  # noqa: RUF012

    def reason_to_keep_together(self, name: str) -> str:
        Program.asked += 1
        return "" if name == "a" else "Mean combines rows"


def _load(folder: pathlib.Path, stamp: int) -> LoadedModel:
    options = WorkerOptions((), (), None, 1, folder, 32, 1000)
    model = LoadedModel(ModelVersion("m", 1, folder / "model", None, (stamp,)), options)
    model.load()
    return model


@pytest.mark.parametrize("is_program", [True, False])
def test_the_proof_of_a_version_is_made_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, is_program: bool
) -> None:
    made: list[pathlib.Path] = []

    def make(*_: Any, folder: pathlib.Path, **__: Any) -> Program:
        folder.mkdir()
        made.append(folder)
        return Program()

    fake = types.SimpleNamespace(
        is_loaded_as_it_is=lambda folder, engine: is_program,
        load=lambda *_: Program(),
        make=make,
        TENSORFLOW="tensorflow",
    )
    monkeypatch.setattr(loaded_model, "program", fake)
    monkeypatch.setattr(Program, "asked", 0)
    for _ in range(3):
        model = _load(tmp_path, stamp=0)
        assert model.kept_together == {"b": "Mean combines rows"}
        assert model.has_rows_apart("a") and not model.has_rows_apart("b")
    assert (Program.asked, len(made)) == (2, 0 if is_program else 1)
    _load(tmp_path, stamp=1)  # other files of the version
    assert (Program.asked, len(made)) == (4, 0 if is_program else 2)
