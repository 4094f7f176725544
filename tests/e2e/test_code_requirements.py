"""Packages of a model's `requirements.txt`, installed by a real pip."""

from __future__ import annotations

import importlib.util
import pathlib
import zipfile

import pytest

from nanotf.errors import NanoError
from nanotf.sagemaker.serving.code_requirements import prepare
from nanotf.sagemaker.serving.module_scopes import ModuleScopes


@pytest.mark.thorough
def test_packages_are_installed_for_the_model_alone(tmp_path: pathlib.Path) -> None:
    """numpy, which this environment has, is seen; the wheel beside the code is installed."""
    (tmp_path / "inference.py").write_text("import needed, numpy\n")
    (tmp_path / "requirements.txt").write_text("./needed-1-py3-none-any.whl\nnumpy\n")
    for text in ("first", "second"):  # a new start installs what the file says then
        _write_wheel(tmp_path, text)
        prepare(tmp_path, allowed=True)
        scopes = ModuleScopes()
        try:
            module = scopes.load(tmp_path)
            assert text == module.needed.TEXT
            assert not pathlib.Path(module.numpy.__file__).is_relative_to(tmp_path)
        finally:
            scopes.close()
        assert importlib.util.find_spec("needed") is None


def test_packages_that_cannot_be_installed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "requirements.txt").write_text("./none-1-py3-none-any.whl\n")
    with pytest.raises(NanoError, match=r"requirements.txt could not be installed.*`lib`"):
        prepare(tmp_path, allowed=True)
    assert not (tmp_path / ".environment").exists()


def _write_wheel(folder: pathlib.Path, text: str) -> None:
    with zipfile.ZipFile(folder / "needed-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("needed.py", f"TEXT = {text!r}\n")
        about = "needed-1.dist-info"
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: needed\nVersion: 1\n")
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{about}/WHEEL", tag)
        wheel.writestr(f"{about}/RECORD", "")
