"""Rules of the source tree: public names, private names, the cost of an import."""

from __future__ import annotations

import ast
import json
import pathlib
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

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
        "by_rows",
        "cluster",
        "data",
        "errors",
        "estimator",
        "get_strategy",
        "hvd",
        "imap",
        "inference",
        "is_chief",
        "job",
        "last_report",
        "keras",
        "map",
        "nano",
        "nano_bf16",
        "nano_multiprocessing",
        "nano_multiprocessing_loss",
        "optimizers",
        "patch_tensorflow",
        "plan",
        "rank",
        "search",
        "set_tf_config",
        "shutdown",
        "size",
        "smp",
        "unpatch_tensorflow",
        "warm_up",
        "whole",
        "worker_pids",
    ],
    "nanotf.data": ["PipeModeDataset", "PipeModeDatasetException", "pad_batches"],
    "nanotf.estimator": [
        "Predictor",
        "ShuffleConfig",
        "TensorFlow",
        "TensorFlowModel",
        "TensorFlowPredictor",
        "TrainingInput",
        "TrainingJob",
        "Transformer",
        "s3_input",
    ],
    "nanotf.estimator.deserializers": [
        "BaseDeserializer",
        "BytesDeserializer",
        "CSVDeserializer",
        "JSONDeserializer",
        "JSONLinesDeserializer",
        "NumpyDeserializer",
        "PandasDeserializer",
        "SimpleBaseDeserializer",
        "StreamDeserializer",
        "StringDeserializer",
    ],
    "nanotf.estimator.serializers": [
        "BaseSerializer",
        "CSVSerializer",
        "DataSerializer",
        "IdentitySerializer",
        "JSONLinesSerializer",
        "JSONSerializer",
        "LibSVMSerializer",
        "NumpySerializer",
        "SimpleBaseSerializer",
        "SparseMatrixSerializer",
        "StringSerializer",
    ],
    "nanotf.estimator.serving": ["Model", "Predictor"],
    "nanotf.hvd": [
        "Adasum",
        "Average",
        "Compression",
        "DistributedGradientTape",
        "DistributedOptimizer",
        "Max",
        "Min",
        "Product",
        "Sum",
        "allgather",
        "allgather_object",
        "allreduce",
        "alltoall",
        "barrier",
        "broadcast",
        "broadcast_global_variables",
        "broadcast_object",
        "broadcast_variables",
        "ccl_built",
        "cross_rank",
        "cross_size",
        "cuda_built",
        "ddl_built",
        "elastic",
        "global_process_set",
        "gloo_built",
        "gloo_enabled",
        "grouped_allgather",
        "grouped_allreduce",
        "grouped_reducescatter",
        "init",
        "is_homogeneous",
        "is_initialized",
        "join",
        "keras",
        "local_rank",
        "local_rank_op",
        "local_size",
        "local_size_op",
        "mpi_built",
        "mpi_enabled",
        "mpi_threads_supported",
        "nccl_built",
        "rank",
        "rank_op",
        "reducescatter",
        "rocm_built",
        "shutdown",
        "size",
        "size_op",
        "sycl_built",
    ],
    "nanotf.inference": [
        "InferenceOptimizer",
        "OptimizeResult",
        "Program",
        "load",
        "make",
        "optimize",
    ],
    "nanotf.keras": [
        "Model",
        "Sequential",
        "layers",
        "nano",
        "nano_bf16",
        "nano_multiprocessing",
        "nano_multiprocessing_loss",
        "optimizers",
    ],
    "nanotf.keras.layers": ["Embedding"],
    "nanotf.keras.optimizers": ["SparseAdam"],
    "nanotf.optimizers": ["SparseAdam"],
    "nanotf.smp": [
        "CheckpointManager",
        "CommGroup",
        "DP_GROUP",
        "DistributedModel",
        "MP_GROUP",
        "RankType",
        "StepOutput",
        "WORLD",
        "allgather",
        "barrier",
        "broadcast",
        "dp_barrier",
        "dp_rank",
        "dp_size",
        "get_dp_group",
        "get_mp_group",
        "gradients",
        "init",
        "last_report",
        "local_rank",
        "local_size",
        "mp_barrier",
        "mp_rank",
        "mp_size",
        "num_microbatches",
        "partition",
        "pp_rank",
        "pp_size",
        "rank",
        "recv_from",
        "register_post_partition_hook",
        "send",
        "size",
        "step",
    ],
}
SHARED_MEMORY = {"memfd_create", "shm_open", "SharedMemory"}


def _run(code: str) -> str:
    """Returns the output of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_public_names() -> None:
    """nanotf exports the names of `nanotf.keras`; saved models know SparseAdam by name."""
    code = f"""
import importlib, json
import tensorflow as tf
import nanotf, nanotf.keras as k
from nanotf import Model, Sequential, nano, nano_multiprocessing
found = {{name: importlib.import_module(name) for name in {list(PUBLIC)}}}
names = {{name: sorted(module.__all__) for name, module in found.items()}}
[getattr(module, name) for module in found.values() for name in module.__all__]
twins = set(k.__all__) - {{"layers", "optimizers"}}
differ = [name for name in twins if getattr(nanotf, name) is not getattr(k, name)]
same = tf.keras.utils.get_registered_object("nanotf>SparseAdam") is nanotf.optimizers.SparseAdam
print(json.dumps([names, differ, same]))
"""
    wanted = {module: sorted(names) for module, names in PUBLIC.items()}
    assert json.loads(_run(code)) == [wanted, [], True]


def test_import_takes_no_tensorflow() -> None:
    code = "import sys, nanotf; print(*sorted(sys.modules))"
    loaded = {name.split(".")[0] for name in _run(code).split()}
    assert not loaded & {"tensorflow", "keras", "tf_keras", "numpy", "psutil", "cloudpickle"}


def test_a_front_takes_no_numpy() -> None:
    """Its modules, before a request. `test_serving` looks at a process that has answered some."""
    for module in ("httptools", "orjson", "uvloop"):
        pytest.importorskip(module)
    code = """
import sys
import nanotf.sagemaker.serving.invocations, nanotf.serving.front.server
import nanotf.serving.open_inference, nanotf.serving.tensorflow_rest
print(*sorted(sys.modules))
"""
    loaded = {name.split(".")[0] for name in _run(code).split()}
    assert not loaded & {"tensorflow", "keras", "tf_keras", "numpy"}


def test_import_changes_nothing() -> None:
    code = """
import os, signal, sys, threading
before = dict(os.environ), threading.active_count(), [signal.getsignal(s) for s in (2, 15, 17)]
import pytest

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
    """Returns the modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _shares_memory(node: Any) -> bool:
    """Returns True if code makes or maps shared memory; read-only file maps do not count."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "mmap.mmap":
        return "mmap.ACCESS_READ" not in [ast.unparse(k.value) for k in node.keywords]
    return isinstance(node, ast.Attribute) and node.attr in SHARED_MEMORY


def _is_below(path: pathlib.Path, *folders: str) -> bool:
    return path.relative_to(PACKAGE).parts[0] in folders


def test_private_names_are_only_in_compat() -> None:
    private = ("tensorflow.python", "tensorflow.core", "keras.src", "tf_keras.src")
    assert [
        f"{path}: {name}"
        for path in SOURCES
        if not _is_below(path, "compat")
        for name in _imports(path)
        if name.startswith(private)
    ] == []


def _where_defined(names: Iterator[tuple[str, str]]) -> dict[str, list[str]]:
    """Returns the names that are defined more than once, with their places."""
    found: dict[str, list[str]] = {}
    for name, place in names:
        found.setdefault(name, []).append(place)
    return {name: places for name, places in found.items() if len(places) > 1}


def test_a_class_name_is_defined_once() -> None:
    assert not _where_defined(
        (node.name, f"{path}:{node.lineno}")
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )


def test_a_file_name_is_used_once() -> None:
    """Modules that users import by their paths excepted: their names follow Keras."""
    public = {PACKAGE.parent / f"{name.replace('.', '/')}.py" for name in PUBLIC}
    assert not _where_defined(
        (path.name, str(path))
        for path in SOURCES
        if path.name != "__init__.py" and path not in public
    )


def test_names_are_global_in_three_modules() -> None:
    """They own what a process has once: its pool, its zygote, the context of the running code."""
    found = {
        str(path.relative_to(PACKAGE))
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Global)
    }
    assert found == {"pool/warm.py", "pool/forks.py", "region/scope.py"}


def test_one_logger() -> None:
    """Without logging configured, its lines begin with nanotf's prefix; see `console`."""
    found = [path for path in SOURCES if "getLogger" in path.read_text()]
    assert found == [PACKAGE / "console" / "lines.py"]


def test_datasets_of_generators_have_one_maker() -> None:
    """TensorFlow's makes all tensors of a process slower; see `compat.generators`."""
    found = [path for path in SOURCES if ".from_generator(" in path.read_text()]
    assert found == [PACKAGE / "compat" / "generators.py"]


def test_shared_memory_is_only_in_three_packages() -> None:
    found = []
    for path in SOURCES:
        if not _is_below(path, "wire", "shipping", "collectives"):
            nodes = ast.walk(ast.parse(path.read_text()))
            found += [f"{path}:{node.lineno}" for node in nodes if _shares_memory(node)]
            found += _imports(path) & {"multiprocessing.shared_memory", "_posixshmem"}
    assert found == []


def test_a_fork_ends_nothing_of_its_parent() -> None:
    """Only those whose functions know a fork call `atexit` themselves."""
    known = {"machine/own_exit.py", "pool/warm.py", "pool/forks.py"}
    found = {str(p.relative_to(PACKAGE)) for p in SOURCES if "atexit.register" in p.read_text()}
    assert found == known


def test_lists_of_promises_name_tests_that_exist() -> None:
    """A list names a test as `file.py::test`, with or without its folder, `file.py`, or `test`."""
    tests = {f"/{path}": path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    missing = []
    for document in (ROOT / "tests/README.md", ROOT / "docs/reliability.md"):
        named = re.findall(r"`([\w/]+\.py)?(?:::)?(test_\w+)?`", document.read_text())
        assert len(named) > 20
        for file, name in named:
            found = [text for path, text in tests.items() if not file or path.endswith(f"/{file}")]
            if not any(not name or f"\ndef {name}(" in text for text in found):
                missing.append(f"{document.name}: {file}::{name}")
    assert missing == []


def test_every_test_does_something() -> None:
    """One that only defines functions checks nothing."""
    definitions = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    idle = [
        f"{path.name}::{node.name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if all(
            isinstance(part, definitions)
            or (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
            for part in node.body
        )
    ]
    assert idle == []


def test_make_test_runs_the_test_of_every_promise() -> None:
    named = set(re.findall(r"(\w+\.py)::(\w+)`", (ROOT / "tests/README.md").read_text()))
    left_out = [
        f"{path.name}::{node.name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and (path.name, node.name) in named
        for mark in node.decorator_list
        if ast.unparse(mark) in ("pytest.mark.thorough", "pytest.mark.slow")
    ]
    assert left_out == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (
            "tf.types.experimental.PolymorphicFunction",
            ["tf.types.experimental.PolymorphicFunction"],
        ),
        ("require_tensorflow().keras.ops.add(1, 2)", ["tf.keras.ops"]),
        ("types = tf.types; types.nothing.at.all", ["tf.types.nothing"]),
        ("tf, n = versions.require_tensorflow(), 1; tf.nothing", ["tf.nothing"]),
        ("self._tf = tf; self._tf.nothing", ["tf.nothing"]),
        ("if (keras := tf.keras): keras.nothing", ["tf.keras.nothing"]),
        ("tf.types.experimental.GenericFunction; tf.data.Dataset.nothing; tf.__version__", []),
        ("types = tf.types; types = other(); types.nothing", []),
        ("def use(tf): tf.nothing", []),
    ],
)
def test_names_that_the_oldest_tensorflow_lacks(code: str, found: list[str]) -> None:
    tool = runpy.run_path(str(ROOT / "tools/check_tensorflow_names.py"))
    lacking = tool["lacking"]("import tensorflow as tf\n" + code, tool["known_names"]())
    assert lacking == [(2, name) for name in found]
