"""Code of several models in one worker, and packages that it needs."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import sys

import pytest
from hosting_fakes import HostServer, double, value, with_code

from nanotf.sagemaker.serving.code_requirements import prepare
from nanotf.sagemaker.serving.module_scopes import ModuleScopes

USES = """
    import dataclasses, json, sys
    import features

    @dataclasses.dataclass
    class Row:
        name: str

    def transform_fn(data, content_type, accept):
        import late
        assert sys.modules[Row.__module__].Row is Row
        return json.dumps([features.NAME, late.NAME, Row("x").name])
"""


def test_each_model_has_its_own_modules(tmp_path: pathlib.Path) -> None:
    paths, models = list(sys.path), []
    for name in ("a", "b"):
        model = dataclasses.replace(double(), name=name)
        files = {each: f"NAME = '{each} of {name}'" for each in ("features", "late")}
        models.append(with_code(model, tmp_path / name, USES, **files))
    server = HostServer(*models)
    for name in ("a", "b", "a"):
        found = value(server.ask("POST", f"/models/{name}/invoke"))
        assert found == [f"features of {name}", f"late of {name}", "x"]
    server.interface.close()
    assert sys.path == paths
    assert not {"inference", "features", "late"} & set(sys.modules)


def test_a_package_without_init(tmp_path: pathlib.Path) -> None:
    """It has no `__file__`, and it may be a package with `__init__.py` in another model's code."""
    codes = {}
    for name in ("bare", "whole", "other"):
        codes[name] = tmp_path / name / "code"
        package = codes[name] / "features"
        package.mkdir(parents=True)
        (package / "late.py").write_text(f"NAME = {name!r}")
        (codes[name] / "inference.py").write_text(
            "def late():\n    import features.late\n    return features.late.NAME\n"
        )
    (codes["whole"] / "features" / "__init__.py").touch()
    scopes = ModuleScopes()
    for _ in range(2):
        for name, code in codes.items():
            assert scopes.load(code).late() == name
    scopes.close()
    assert not {"inference", "features", "features.late"} & set(sys.modules)


def test_a_package_without_init_that_others_extend(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, codes = tmp_path / "own", [tmp_path / "a" / "code", tmp_path / "b" / "code"]
    for folder in (own, *codes):
        (folder / "extended").mkdir(parents=True)
    (own / "extended" / "of_all.py").touch()
    for code in codes:
        (code / "extended" / "late.py").write_text(f"NAME = {code.parent.name!r}")
        (code / "inference.py").write_text(
            "import extended.of_all\n"
            "def late():\n    from extended import late\n    return late.NAME\n"
        )
    monkeypatch.syspath_prepend(own)
    scopes = ModuleScopes()
    try:
        for code in [*codes, *codes]:
            assert scopes.load(code).late() == code.parent.name
        scopes.close()
        assert {"extended", "extended.of_all"} <= set(sys.modules)
        assert not hasattr(sys.modules["extended"], "late")
    finally:
        for name in ("extended", "extended.of_all"):
            sys.modules.pop(name, None)


def test_models_of_one_archive_share_the_code(tmp_path: pathlib.Path) -> None:
    first = with_code(
        double(),
        tmp_path,
        "calls = []\ndef transform_fn(a, b, c): calls.append(1); return str(len(calls))\n",
    )
    server = HostServer(first, dataclasses.replace(first, name="other"))
    for count, name in enumerate(("half", "other"), 1):
        answer = server.ask("POST", f"/models/{name}/invoke")
        assert answer is not None and answer.body == str(count).encode()
    server.interface.close()


def test_lib_comes_first(tmp_path: pathlib.Path) -> None:
    model = with_code(double(), tmp_path, "import features\n", features="NAME = 'beside'")
    assert model.code
    (model.code / "lib").mkdir()
    (model.code / "lib" / "features.py").write_text("NAME = 'lib'")
    scopes = ModuleScopes()
    assert scopes.load(model.code).features.NAME == "lib"
    scopes.close()


def test_code_that_raises_leaves_nothing(tmp_path: pathlib.Path) -> None:
    model = with_code(double(), tmp_path, "import features\n1 / 0\n", features="")
    scopes = ModuleScopes()
    assert model.code
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            scopes.load(model.code)
    scopes.close()
    assert not {"inference", "features"} & set(sys.modules)


def _script(folder: pathlib.Path) -> None:
    (folder / "code").mkdir(exist_ok=True)
    (folder / "code" / "inference.py").touch()


def test_requirements_are_not_installed_without_leave(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "requirements.txt").write_text("no-such-package-at-all\n")
    with caplog.at_level(logging.WARNING, "nanotf"):
        prepare(tmp_path, allowed=False)
    assert "requirements.txt is not installed" in caplog.text
    (tmp_path / "lib").mkdir()
    with caplog.at_level(logging.WARNING, "nanotf"):
        prepare(tmp_path, allowed=True)
    assert "is ignored, since the folder lib is beside it" in caplog.text
    assert sorted(each.name for each in tmp_path.iterdir()) == ["lib", "requirements.txt"]


def test_nothing_is_required(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    prepare(tmp_path, allowed=True)
    assert not caplog.text and not list(tmp_path.iterdir())
