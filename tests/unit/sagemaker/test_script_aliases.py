"""Names of SageMaker's packages in scripts: by the finder, and by packages on PYTHONPATH."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from nanotf.sagemaker import script_aliases

SCRIPT = """
import sys
import sagemaker, nanotf.data, nanotf.estimator, nanotf.smp
from sagemaker.tensorflow import TensorFlow
from sagemaker.tensorflow.estimator import TensorFlow as again
from sagemaker.tensorflow.serving import Model
from sagemaker.inputs import TrainingInput
from sagemaker.session import s3_input
import sagemaker.serializers
import smdistributed.modelparallel.tensorflow as smp
import sagemaker_tensorflow
assert TensorFlow is again is nanotf.estimator.TensorFlow
assert TrainingInput is s3_input is sagemaker.s3_input
assert sagemaker.serializers.JSONSerializer and Model
assert smp is nanotf.smp
assert sagemaker_tensorflow is nanotf.data
assert "tensorflow" not in sys.modules
try:
    sagemaker.Session
except AttributeError as error:
    assert "Received: Session. Leave sessions" in str(error)
else:
    raise SystemExit("Session")
"""


def _run(code: str, *python_path: pathlib.Path) -> str:
    paths = [*map(str, python_path), os.environ.get("PYTHONPATH", "")]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=environ, check=True, stdout=subprocess.PIPE, text=True, timeout=60
    ).stdout


@pytest.fixture
def aliases(tmp_path: pathlib.Path) -> pathlib.Path:
    script_aliases.write(tmp_path / "aliases")
    return tmp_path / "aliases"


def test_the_finder() -> None:
    _run(f"from {script_aliases.__name__} import install; install()\n{SCRIPT}")


def test_packages_on_the_path(aliases: pathlib.Path) -> None:
    _run(SCRIPT, aliases)


@pytest.mark.parametrize("by", ["finder", "packages"])
def test_an_installed_package_comes_first(aliases: pathlib.Path, by: str) -> None:
    real = aliases.parent / "real"
    (real / "sagemaker_tensorflow").mkdir(parents=True)
    (real / "sagemaker_tensorflow/__init__.py").write_text("from .inner import name")
    (real / "sagemaker_tensorflow/inner.py").write_text("name = 'the real one'")
    (real / "smdistributed").mkdir()  # a folder without code is no package
    code = "import sagemaker_tensorflow, sys; print(sagemaker_tensorflow.name)"
    if by == "finder":
        code = f"from {script_aliases.__name__} import install; install(); {code}"
        assert _run(code, real) == "the real one\n"
    else:
        assert _run(code, aliases, real) == "the real one\n"
        _run("import smdistributed.modelparallel.tensorflow", aliases, real)


def test_a_module_beside_the_script_comes_first(tmp_path: pathlib.Path) -> None:
    """`nanotf run` adds the finder before `sys.path` is the script's."""
    (tmp_path / "sagemaker.py").write_text("name = 'beside'")
    found = _run(
        f"from {script_aliases.__name__} import install; install()\n"
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import sagemaker, horovod.tensorflow; print(sagemaker.name)\n"
    )
    assert found == "beside\n"


def test_horovods_names_import_one_module() -> None:
    _run(
        f"from {script_aliases.__name__} import install; install()\n"
        "import sys\n"
        "import horovod.tensorflow as hvd, horovod, nanotf.hvd\n"
        "assert hvd is nanotf.hvd is horovod.tensorflow\n"
        "assert nanotf.hvd.__spec__.name == 'nanotf.hvd'\n"
        "assert 'tensorflow' not in sys.modules\n"
        "import importlib.util\n"
        "assert importlib.util.find_spec('horovod.tensorflow.elastic') is not None\n"
        "assert importlib.util.find_spec('horovod.torch') is None\n"
    )


def test_a_module_that_stands_for_a_package_stays() -> None:
    _run(
        "import sys, types\n"
        "sys.modules['horovod'] = real = types.ModuleType('horovod')\n"
        f"from {script_aliases.__name__} import install; install()\n"
        "import horovod\n"
        "assert horovod is real\n"
        "try:\n"
        "    import horovod.tensorflow\n"
        "except ModuleNotFoundError:\n"
        "    pass\n"
        "else:\n"
        "    raise AssertionError\n"
    )
