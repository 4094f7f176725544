"""Names of other libraries that import nanotf's."""

from __future__ import annotations

import subprocess
import sys

from nanotf.ranks import rank_aliases


def test_names_import_one_module() -> None:
    code = (
        f"from {rank_aliases.__name__} import install; install()\n"
        "import sys\n"
        "import horovod.tensorflow as hvd, horovod, nanotf.hvd\n"
        "assert hvd is nanotf.hvd is horovod.tensorflow\n"
        "assert nanotf.hvd.__spec__.name == 'nanotf.hvd'\n"
        "assert 'tensorflow' not in sys.modules\n"
        "import importlib.util\n"
        "assert importlib.util.find_spec('horovod.tensorflow.elastic') is not None\n"
        "assert importlib.util.find_spec('horovod.torch') is None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_installed_package_stays() -> None:
    code = (
        "import sys, types\n"
        "sys.modules['horovod'] = real = types.ModuleType('horovod')\n"
        f"from {rank_aliases.__name__} import install; install()\n"
        "import horovod\n"
        "assert horovod is real\n"
        "try:\n"
        "    import horovod.tensorflow\n"
        "except ModuleNotFoundError:\n"
        "    pass\n"
        "else:\n"
        "    raise AssertionError\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
