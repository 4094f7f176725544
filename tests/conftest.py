"""Fixtures and options of all tests. Checks that nothing leaks from one test to the next.

After each test the environment variables, the working directory and the threads are unchanged.
After each module the child processes, the temporary files, the segments in /dev/shm and, if the
warm pool is the same, the file descriptors are also unchanged; after the session all of these are.

`--cases N` runs N cases of a parametrized end-to-end test instead of all, the same cases each time.
Tests marked `every_case` run whole. `--of-each-file N` draws N tests of each file in the same way.
`--part 1/2` runs every second test file of each folder, `--part 2/2` the rest.
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

# Folders of tests with real workers or shells, and how many cases of a test count as one.
_REAL = {"e2e": 1, "programs": 5, "scripts": 4}
# The pool's own threads live from one test to the next, like the pool. `Timer` is its idle timer.
_POOL_THREADS = ("nanotf-", "Thread-")

# The shell that starts the tests may ignore these signals (nohup, `&`), and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Set by libraries on import, which may happen inside any test.
_LIBRARY_VARIABLES = (
    *("KMP_", "TF2_BEHAVIOR", "TF_", "PYTEST_", "CUDA_MODULE_LOADING", "TPU_"),
    *("ENABLE_RUNTIME_UPTIME_TELEMETRY", "HDF5_PLUGIN_PATH"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases",
        type=int,
        metavar="N",
        help="of a parametrised end-to-end test, run N cases (default: all)",
    )
    parser.addoption(
        "--of-each-file",
        type=int,
        metavar="N",
        help="run N tests of each file with end-to-end tests (default: all)",
    )
    parser.addoption(
        "--part",
        metavar="I/N",
        default="1/1",
        help="run the I-th of N parts of the files with tests (default: all)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Gives the run its own directory for temporary files, apart from other runs."""
    gc.disable()  # until all is imported
    directory = tempfile.TemporaryDirectory(prefix="run-", ignore_cleanup_errors=True)
    config.add_cleanup(directory.cleanup)
    os.environ["TMPDIR"] = tempfile.tempdir = directory.name


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Takes every N-th file of a folder with `--part`; the others are not even imported."""
    part, parts = map(int, config.getoption("--part").split("/"))
    files = sorted(collection_path.parent.glob("test_*.py"))
    of_others = collection_path in files and files.index(collection_path) % parts != part - 1
    return of_others or None


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _sample(config, items)
    _draw_of_each_file(config, items)
    items.sort(key=_pool_wanted)


def pytest_collection_finish() -> None:
    """Leaves all that was imported to no collection, which would look through TensorFlow: 0.3 s.

    Keras makes one in each `clear_session`, pytest five at its end.
    """
    gc.freeze()
    gc.enable()


def _pool_wanted(item: pytest.Item) -> tuple[bool, ...]:
    """Sorts by pool: none, the warm pool, another transport's, a pool that the module breaks."""
    return (
        item.path.parent.name in _REAL,
        item.get_closest_marker("own_pool") is not None,
        _is_grpc(item),
    )


def _is_grpc(item: pytest.Item) -> bool:
    values = getattr(getattr(item, "callspec", None), "params", {}).values()
    return any(isinstance(value, str) and value == "grpc" for value in values)


def _deselect(config: pytest.Config, items: list[pytest.Item], left_out: set[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps `--cases` cases of each end-to-end test."""
    number = config.getoption("--cases")
    if number is None:
        return
    cases = collections.defaultdict(list)
    for item in items:
        sampled = item.path.parent.name in _REAL and not item.get_closest_marker("every_case")
        if sampled and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            cases[item.path, item.originalname].append(item)
    left_out = set[pytest.Item]()
    for (path, name), each in cases.items():
        draw = random.Random(f"{path.name}::{name}")  # the same ones each time
        draw.shuffle(each)
        each.sort(key=_is_grpc)  # last: gRPC has a module of its own (test_transport_grpc)
        left_out.update(each[number * _REAL[path.parent.name] :])
    _deselect(config, items, left_out)


def _draw_of_each_file(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps `--of-each-file` tests of each file with end-to-end tests."""
    number = config.getoption("--of-each-file")
    if number is None:
        return
    files = collections.defaultdict(list)
    for item in items:
        if item.path.parent.name in _REAL:
            files[item.path].append(item)
    left_out = set[pytest.Item]()
    for path, each in files.items():
        left_out.update(random.Random(path.name).sample(each, max(0, len(each) - number)))
    _deselect(config, items, left_out)


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
        except FileNotFoundError:  # the descriptor of this listing itself
            continue
    return found


def _own_files(directory: str) -> set[str]:
    path = pathlib.Path(directory)
    if not path.is_dir():
        return set()
    return {entry.name for entry in path.iterdir() if "nanotf" in entry.name}


def _pool() -> tuple[int, ...]:
    """Returns the processes of the warm pool; empty if there is none."""
    warm = sys.modules.get("nanotf.pool.warm")
    return () if warm is None else warm.worker_pids()


def _zygote() -> int | None:
    """Returns the process that workers are forked from, if there is one."""
    zygote = sys.modules.get("nanotf.pool.forks")
    return None if zygote is None else zygote.pid()


def _descriptors_of_zygote() -> set[int]:
    """Its channel and its log, if there is a zygote; it serves the next modules, too."""
    zygote = getattr(sys.modules.get("nanotf.pool.forks"), "_zygote", None)
    return set() if zygote is None else {zygote._channel.fileno(), zygote.log.fileno()}


def shut_down() -> None:
    warm = sys.modules.get("nanotf.pool.warm")
    if warm is not None:
        warm.shutdown()


def _strangers() -> set[psutil.Process]:
    """Returns children outside the warm pool."""
    return {child for child in _children() if child.pid not in (*_pool(), _zygote())}


def _kept_open() -> set[tuple[int, str]]:
    # Libraries keep files and sockets of their own; nanotf holds these three kinds.
    kinds = ("socket:", "/memfd:nanotf", "pipe:")
    of_pool, of_zygote = _memory_of_pool(), _descriptors_of_zygote()
    return {
        (fd, path)
        for fd, path in _descriptors().items()
        if path.startswith(kinds) and _file_number(fd) != of_pool and fd not in of_zygote
    }


def _memory_of_pool() -> int | None:
    """The memory file that the warm pool keeps for the state of its next job."""
    warm = sys.modules.get("nanotf.pool.warm")
    block = None if warm is None or warm._pool is None else warm._pool._state_block
    return None if block is None else _file_number(block.fd)


def _file_number(fd: int) -> int | None:
    try:
        return os.fstat(fd).st_ino
    except OSError:  # closed since it was listed
        return None


@pytest.fixture(scope="module")
def pool_of_module() -> None:
    """The pool for a module; end-to-end tests override this with a warm pool (real_workers.py)."""


@pytest.fixture(autouse=True, scope="module")
def _nothing_leaks_from_a_module(pool_of_module: None) -> Iterator[None]:
    pool, strangers, open_before = _pool(), _strangers(), _kept_open()
    temporary, shared = _own_files(tempfile.gettempdir()), _own_files("/dev/shm")
    yield
    if _pool() != pool:  # its descriptors and files would look like leaks
        sys.modules["nanotf.pool.warm"].end_pool()
    wait_until(lambda: _strangers() <= strangers, "child processes end")
    assert _own_files(tempfile.gettempdir()) <= temporary, "temporary files leaked"
    assert _own_files("/dev/shm") <= shared, "shared-memory segments leaked"

    def closed() -> bool:
        if not _kept_open() <= open_before:
            gc.collect()  # takes seconds after a module that made many models
        return _kept_open() <= open_before

    wait_until(closed, f"file descriptors are closed: {_kept_open() - open_before}", 150)


@pytest.fixture(autouse=True, scope="session")
def _nothing_outlives_the_session() -> Iterator[None]:
    yield
    shut_down()
    wait_until(lambda: not _children(), "child processes end")
