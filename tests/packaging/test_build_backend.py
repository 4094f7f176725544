"""The build backend brings a C++ compiler where this machine has none."""

from __future__ import annotations

import importlib.util
import pathlib
from typing import Any

import pytest
from release import ROOT
from setuptools import build_meta

KINDS = ("wheel", "editable")


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with a requirement of setuptools for each kind: its name."""
    for kind in KINDS:
        monkeypatch.setattr(
            build_meta, f"get_requires_for_build_{kind}", lambda settings, kind=kind: [kind]
        )
    monkeypatch.chdir(ROOT)
    path = ROOT / "packaging/build_backend.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiler_is_required_where_none_is_installed(
    backend: Any, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    required = getattr(backend, f"get_requires_for_build_{kind}")
    monkeypatch.setenv("CXX", "c++")
    assert required() == [kind]
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    added = required()
    assert added[0] == kind
    assert [name.partition(">")[0] for name in added[1:]] == ["ziglang"]
