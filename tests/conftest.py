"""What every test of nanotf can rely on: nothing leaks from one to the next.

After each test the environment variables, the working directory and the threads are what they
were. After each module, when the warm pool has been shut down, so are the child processes, the
file descriptors, the temporary files and the segments in /dev/shm.

`--cases N` runs N cases of a parametrised end-to-end test instead of all, the same ones each time;
those marked `every_case` are left whole.
"""

from __future__ import annotations

import collections
import gc
import os
import pathlib
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator

import psutil
import pytest
from waiting import wait_until

# The pool's own threads live from one test to the next, as it does. `Timer` is its idle timer.
_POOL_THREADS = ("nanotf-", "Thread-")

# Whoever starts the tests may ignore them (nohup, a shell's `&`), and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Set by libraries when they are imported, which may happen inside any test.
_LIBRARY_VARIABLES = ("KMP_", "TF2_BEHAVIOR", "TF_", "PYTEST_", "CUDA_MODULE_LOADING", "TPU_")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases",
        type=int,
        metavar="N",
        help="of a parametrised end-to-end test, run N cases (default: all)",
    )


@pytest.hookimpl(trylast=True)  # among what -m and -k have left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _sample(config, items)
    items.sort(key=_is_grpc)  # workers start anew for another transport


def _is_grpc(item: pytest.Item) -> bool:
    values = getattr(getattr(item, "callspec", None), "params", {}).values()
    return any(isinstance(value, str) and value == "grpc" for value in values)


def _sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves as many cases of each end-to-end test as `--cases` says."""
    number = config.getoption("--cases")
    if number is None:
        return
    end_to_end = pathlib.Path(__file__).parent / "e2e"
    cases = collections.defaultdict(list)
    for item in items:
        sampled = end_to_end in item.path.parents and not item.get_closest_marker("every_case")
        if sampled and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            cases[item.path, item.originalname].append(item)
    left_out = set[pytest.Item]()
    for (path, name), each in cases.items():
        # Drawn by name: of all tests that run over both transports, half run over each.
        draw = random.Random(f"{path.name}::{name}")
        left_out.update(draw.sample(each, max(len(each) - number, 0)))
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(_LIBRARY_VARIABLES)}


def _foreign_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if not t.name.startswith(_POOL_THREADS)}


@pytest.fixture(autouse=True)
def _nothing_leaks_from_a_test() -> Iterator[None]:
    environment, directory, threads = _environment(), pathlib.Path.cwd(), _foreign_threads()
    yield
    assert _environment() == environment, "a test changed environment variables"
    assert pathlib.Path.cwd() == directory, "a test changed the working directory"
    wait_until(lambda: _foreign_threads() <= threads, "a test's threads end")


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _descriptors() -> dict[int, str]:
    found = {}
    for entry in pathlib.Path("/proc/self/fd").iterdir():
        try:
            found[int(entry.name)] = str(entry.readlink())
        except FileNotFoundError:  # the descriptor of this very listing
            continue
    return found


def _own_files(directory: str) -> set[str]:
    path = pathlib.Path(directory)
    if not path.is_dir():
        return set()
    return {entry.name for entry in path.iterdir() if "nanotf" in entry.name}


def _shut_down() -> None:
    pool = sys.modules.get("nanotf.warm")
    if pool is not None:
        pool.shutdown()


@pytest.fixture(autouse=True, scope="module")
def _nothing_leaks_from_a_module() -> Iterator[None]:
    _shut_down()
    children = _children()
    temporary, shared = _own_files(tempfile.gettempdir()), _own_files("/dev/shm")
    descriptors = _descriptors()
    yield
    _shut_down()
    wait_until(lambda: _children() <= children, "child processes end")
    assert _own_files(tempfile.gettempdir()) <= temporary, "temporary files stayed behind"
    assert _own_files("/dev/shm") <= shared, "shared-memory segments stayed behind"

    def leaked() -> dict[int, str]:
        # Libraries keep files and sockets of their own; nanotf holds these three kinds.
        kinds = ("socket:", "/memfd:nanotf", "pipe:")
        new = {fd: path for fd, path in _descriptors().items() if fd not in descriptors}
        return {fd: path for fd, path in new.items() if path.startswith(kinds)}

    def closed() -> bool:
        if leaked():
            gc.collect()  # takes seconds after a module that made many models
        return not leaked()

    wait_until(closed, f"file descriptors are closed: {leaked()}", 150)
