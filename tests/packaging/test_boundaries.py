"""Rules of the source tree: public names, where private ones may stand, what an import costs."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

import nanotf

PACKAGE = pathlib.Path(nanotf.__file__).parent
ROOT = PACKAGE.parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

PUBLIC = {
    "nanotf": [
        "CheckpointManager",
        "Model",
        "Sequential",
        "__version__",
        "accelerate",
        "errors",
        "get_strategy",
        "is_chief",
        "last_report",
        "keras",
        "nano",
        "nano_bf16",
        "nano_multiprocessing",
        "nano_multiprocessing_loss",
        "optimizers",
        "patch_tensorflow",
        "plan",
        "rank",
        "shutdown",
        "size",
        "unpatch_tensorflow",
        "warm_up",
        "worker_pids",
    ],
    "nanotf.keras": [
        "Model",
        "Sequential",
        "layers",
        "nano",
        "nano_bf16",
        "nano_multiprocessing",
        "nano_multiprocessing_loss",
    ],
    "nanotf.keras.layers": ["Embedding"],
    "nanotf.optimizers": ["SparseAdam"],
}
SHARED_MEMORY = {"memfd_create", "shm_open", "SharedMemory"}


def _run(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names(module: str) -> None:
    code = f"import {module} as m; print(*sorted(m.__all__)); [getattr(m, n) for n in m.__all__]"
    assert _run(code).split() == sorted(PUBLIC[module])


def test_names_of_keras_are_those_of_the_package() -> None:
    code = """
from nanotf import Model, Sequential, nano, nano_multiprocessing
import nanotf, nanotf.keras as k
print([n for n in k.__all__ if n != "layers" and getattr(nanotf, n) is not getattr(k, n)])
"""
    assert _run(code) == "[]"


def test_saved_models_with_sparse_adam_load() -> None:
    """It is known by name as soon as nanotf's models are."""
    code = """
import nanotf.keras, tensorflow as tf
print(tf.keras.utils.get_registered_object("nanotf>SparseAdam").__name__)
"""
    assert _run(code) == "SparseAdam"


def test_import_takes_no_tensorflow() -> None:
    code = "import sys, nanotf; print(*sorted(sys.modules))"
    loaded = {name.split(".")[0] for name in _run(code).split()}
    assert not loaded & {"tensorflow", "keras", "tf_keras", "numpy", "psutil", "cloudpickle"}


def test_import_changes_nothing() -> None:
    code = """
import os, signal, sys, threading
before = dict(os.environ), threading.active_count(), [signal.getsignal(s) for s in (2, 15, 17)]
import nanotf
after = dict(os.environ), threading.active_count(), [signal.getsignal(s) for s in (2, 15, 17)]
print(before == after)
"""
    assert _run(code) == "True"


def test_keras_without_tensorflow_says_what_to_install() -> None:
    code = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "tensorflow" else find(name, *rest)
sys.modules["tensorflow"] = None
try:
    import nanotf.keras
except ImportError as error:
    print(error)
"""
    said = _run(code)
    for extra in ("nanotf[cpu]", "nanotf[intel]", "nanotf[gpu]"):
        assert extra in said


def _imports(path: pathlib.Path) -> set[str]:
    """The modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _shares_memory(node: ast.AST) -> bool:
    """Whether code makes or maps shared memory; a file mapped for reading alone does not."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "mmap.mmap":
        return "mmap.ACCESS_READ" not in [ast.unparse(k.value) for k in node.keywords]
    return isinstance(node, ast.Attribute) and node.attr in SHARED_MEMORY


def _is_below(path: pathlib.Path, *folders: str) -> bool:
    return path.relative_to(PACKAGE).parts[0] in folders


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_private_names_stand_in_compat_alone(path: pathlib.Path) -> None:
    if _is_below(path, "compat"):
        return
    private = ("tensorflow.python", "tensorflow.core", "keras.src", "tf_keras.src")
    assert [name for name in _imports(path) if name.startswith(private)] == []


def test_one_logger() -> None:
    """Without logging configured, its lines begin with nanotf's prefix; see `console`."""
    found = [path for path in SOURCES if "getLogger" in path.read_text()]
    assert found == [PACKAGE / "console.py"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_shared_memory_stands_in_three_packages_alone(path: pathlib.Path) -> None:
    if _is_below(path, "wire", "shipping", "collectives"):
        return
    assert _imports(path) & {"multiprocessing.shared_memory", "_posixshmem"} == set()
    shared = [node for node in ast.walk(ast.parse(path.read_text())) if _shares_memory(node)]
    assert [f"{path}:{node.lineno}" for node in shared] == []
