"""The table of engines: names, precisions, and what is to be installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from nanotf.errors import InvalidArgumentError, UnsupportedVersionError
from nanotf.inference.engines import engine_table
from nanotf.inference.engines.inference_engine import F32

WITHOUT_TENSORFLOW = """
import sys
import nanotf.inference.signature, nanotf.inference.structure, nanotf.inference.program_folder
import nanotf.inference.engines.engine_table
import nanotf.inference.program
packages = {"tensorflow", "keras", "tf_keras", "openvino", "onnxruntime", "ai_edge_litert"}
print(packages & set(sys.modules))
"""


def test_names() -> None:
    expected = ["tensorflow", "frozen", "xla", "openvino", "onnxruntime", "litert"]
    assert list(engine_table.ENGINES) == expected
    assert all(F32 in engine.precisions for engine in engine_table.ENGINES.values())


@pytest.mark.parametrize(("name", "precision"), [("tensorrt", "f32"), ("xla", "int8")])
def test_unknown(name: str, precision: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"Received: (engine|precision)="):
        engine_table.check_engine(name, precision)


@pytest.mark.parametrize(
    ("name", "precision", "lacks", "extra"),
    [
        ("openvino", "f32", "openvino", "openvino"),
        ("openvino", "int8", "nncf", "openvino-int8"),
        ("onnxruntime", "f32", "tf2onnx", "onnxruntime"),
        ("litert", "f32", "ai_edge_litert", "litert"),
    ],
)
def test_missing_packages(
    monkeypatch: pytest.MonkeyPatch, name: str, precision: str, lacks: str, extra: str
) -> None:
    found: Any = object()
    find = lambda module: None if module == lacks else found  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", find)
    with pytest.raises(
        UnsupportedVersionError, match=rf"'{lacks}'.*pip install 'nanotf\[{extra}\]'"
    ):
        engine_table.check_engine(name, precision)


def test_calibration_needs_rows() -> None:
    engine = engine_table.ENGINES["openvino"]
    with pytest.raises(InvalidArgumentError, match="Received: rows=None"):
        engine_table.check_rows(engine, "int8", None)
    engine_table.check_rows(engine, "int8", np.zeros((2, 2)))
    engine_table.check_rows(engine, "f32", None)


def test_nothing_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TENSORFLOW],
        capture_output=True, text=True, timeout=250, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "set()"
