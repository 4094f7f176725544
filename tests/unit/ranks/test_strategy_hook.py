"""Code that runs once TensorFlow has been imported; a small module stands for TensorFlow."""

from __future__ import annotations

import pathlib
import subprocess
import sys

from nanotf.ranks import strategy_hook


def test_after_the_import_and_once(tmp_path: pathlib.Path) -> None:
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("import tensorflow.inside\nvalue = 1\n")
    (tmp_path / "tensorflow" / "inside.py").write_text("")
    (tmp_path / "tensorflow" / "data.txt").write_text("resource")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"from {strategy_hook.__name__} import _AfterImport\n"
        "calls = []\n"
        "call = lambda: calls.append(sys.modules['tensorflow'].value)\n"
        "sys.meta_path.insert(0, _AfterImport(call))\n"
        "import importlib.util\n"
        "assert importlib.util.find_spec('tensorflow').name == 'tensorflow'\n"
        "assert calls == []\n"
        "import tensorflow, tensorflow.inside\n"
        "assert calls == [1], calls\n"
        "assert not any(isinstance(finder, _AfterImport) for finder in sys.meta_path)\n"
        "import importlib.resources as resources\n"
        "assert resources.files('tensorflow').joinpath('data.txt').read_text() == 'resource'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
