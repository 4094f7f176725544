"""`nanotf.map` and `nanotf.imap`: many items, one at a time on each worker."""

from __future__ import annotations

import gc
import importlib
import os
import pathlib
import signal
import sys
import threading
from typing import Any

import numpy as np
import psutil
import pytest
import tensorflow as tf
from waiting import wait_until

import nanotf
from nanotf import errors
from nanotf.wire import own_threads

pytestmark = pytest.mark.own_pool

L = tf.keras.layers
MAPS = pathlib.Path("/proc/self/maps")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(256, 64)).astype("float32")  # 64 KB: large enough for shared memory
Y = (X.sum(axis=1) > 0).astype("int32")


def square(item: int) -> int:
    return item * item


def train(item: int, x: Any, y: Any) -> Any:
    """Returns a trained model; dropout and initial weights follow the item's seed."""
    inputs = L.Input((64,))
    model = tf.keras.Model(inputs, L.Dense(2)(L.Dropout(0.2)(L.Dense(8, "relu")(inputs))))
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    model.fit(x, y, epochs=1, batch_size=64, verbose=0)
    return model


# --------------------------------------------------------------------------------- results
def test_order_of_results() -> None:
    expected = [square(item) for item in range(20)]
    assert nanotf.map(square, range(20), 2, verbose=0) == expected
    assert sorted(nanotf.imap(square, iter(range(20)), 2)) == expected
    with nanotf.imap(square, range(20), 2, ordered=True) as results:
        assert [next(results) for _ in range(3)] == expected[:3]
    assert nanotf.map(square, range(3), verbose=0) == expected[:3]


@pytest.mark.both_generations
def test_models_come_back_trained(tmp_path: pathlib.Path) -> None:
    """The number of workers does not matter to the weights, nor does what they ran before.

    Files of the models can be written, in the workers and here.
    """
    shared = {"x": X, "y": Y}
    two = nanotf.map(train, range(3), 2, cores_per_process=1, shared=shared, seed=3, verbose=0)
    one = nanotf.map(train, range(3), 1, cores_per_process=1, shared=shared, seed=3, verbose=0)
    for model, other in zip(two, one, strict=True):
        assert model.name == other.name
        for mine, theirs in zip(model.get_weights(), other.get_weights(), strict=True):
            np.testing.assert_array_equal(mine, theirs)
    assert not np.array_equal(two[0].get_weights()[0], two[1].get_weights()[0])
    assert int(two[0].optimizer.iterations) == 4
    found = nanotf.map(evaluate, [0], 2, shared={"model": two[0], **shared}, verbose=0)
    np.testing.assert_allclose(found[0], two[0].evaluate(X, Y, verbose=0), rtol=1e-5)
    two[0].fit(X, Y, batch_size=64, verbose=0)
    assert int(two[0].optimizer.iterations) == 8
    two[0].save(tmp_path / "here.keras")
    found = nanotf.map(save, [tmp_path / "there.keras"], 2, shared={"model": two[0]}, verbose=0)
    for path in (tmp_path / "here.keras", found[0]):
        loaded = tf.keras.models.load_model(path)
        np.testing.assert_array_equal(loaded.predict(X, verbose=0), two[0].predict(X, verbose=0))


def evaluate(item: int, model: Any, x: Any, y: Any) -> Any:
    return model.evaluate(x, y, verbose=0)


def save(path: pathlib.Path, model: Any) -> pathlib.Path:
    model.save(path)
    return path


@pytest.mark.skipif(not MAPS.exists(), reason="reads Linux's list of mappings")
def test_arrays_are_mapped_once_and_read_only() -> None:
    """Shared and captured arrays lie in the same memory file in all workers."""
    captured = X.copy()

    def where(item: int, shared: Any) -> Any:
        files = [_mapped_file(array.ctypes.data) for array in (shared, captured)]
        return files, shared.flags.writeable, captured.flags.writeable, float(captured.sum())

    found = nanotf.map(where, range(6), 2, shared={"shared": X}, verbose=0)
    assert all(each == found[0] for each in found)
    (files, *flags, total) = found[0]
    assert flags == [False, False] and total == float(X.sum())
    assert len(set(files)) == 1 and "memfd" in files[0]


def _mapped_file(address: int) -> str:
    """Returns inode and name of the file that an address of this process is in."""
    for line in MAPS.read_text().splitlines():
        begin, end = (int(number, 16) for number in line.split()[0].split("-"))
        if begin <= address < end:
            return " ".join(line.split()[4:6])
    raise AssertionError(f"{address:x} is not mapped")


# -------------------------------------------------------------------------------- failures
def test_items_that_fail() -> None:
    def fail(item: int) -> Any:
        if item == 1:
            raise KeyError("one")
        if item == 2:
            return (n for n in range(item))
        if item == 3:
            os._exit(7)
        return item

    found = nanotf.map(fail, range(6), 2, on_error="return", verbose=0)
    assert [found[n] for n in (0, 4, 5)] == [0, 4, 5]
    assert isinstance(found[1], KeyError) and isinstance(found[1], errors.WorkerError)
    assert "in fail" in found[1].remote_traceback
    assert isinstance(found[2], errors.ShippingError) and "The result" in str(found[2])
    assert isinstance(found[3], errors.WorkerDied) and found[3].exit_code == 7
    assert [error.index for error in found[1:4]] == [1, 2, 3]
    assert "Item 3 of" in str(found[3]) and "max_restarts=1" in str(found[3])
    with pytest.raises(KeyError, match="one") as caught:
        nanotf.map(fail, range(2), 2, verbose=0)
    assert caught.value.index == 1  # type: ignore[attr-defined]


def test_a_worker_is_killed_every_ten_items(tmp_path: pathlib.Path) -> None:
    """All results are right, and none comes twice."""

    def killed(item: int) -> tuple[int, float]:
        with (tmp_path / str(item)).open("a") as file:
            file.write("run\n")
        if item % 10 == 9 and len((tmp_path / str(item)).read_text().splitlines()) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return item, float(np.random.rand())

    found = nanotf.map(killed, range(100), 2, max_restarts=1, seed=1, verbose=0)
    assert [item for item, _ in found] == list(range(100))
    runs = [len((tmp_path / str(item)).read_text().splitlines()) for item in range(100)]
    assert runs == [2 if item % 10 == 9 else 1 for item in range(100)]
    assert nanotf.map(killed, range(100), 1, seed=1, verbose=0) == found


def test_a_batch_of_short_items_ends_as_single_ones_would(tmp_path: pathlib.Path) -> None:
    """One of many dies: those before it are not run again, those after it run elsewhere."""

    def killed(item: int) -> tuple[int, float]:
        with (tmp_path / str(item)).open("a") as file:
            file.write("run\n")
        if item in (500, 501):
            os.kill(os.getpid(), signal.SIGKILL)
        if item == 900:
            raise KeyError("one of many")
        return item, float(np.random.rand())

    found = nanotf.map(killed, range(1000), 2, on_error="return", seed=1, verbose=0)
    lost = [n for n, each in enumerate(found) if isinstance(each, errors.WorkerDied)]
    assert lost == [500, 501] and isinstance(found[900], KeyError)
    assert len({value for _, value in found[:500]}) == 500
    runs = [len((tmp_path / str(item)).read_text().splitlines()) for item in range(1000)]
    assert runs == [1] * 1000


def test_short_items_do_not_wait_behind_a_long_one(tmp_path: pathlib.Path) -> None:
    """The long one waits for the last short one: the other worker must get them all."""
    count = 600

    def wait(item: int) -> int:
        (tmp_path / str(item)).touch()
        if item == 300:
            wait_until(lambda: len(list(tmp_path.iterdir())) == count, "all others have run")
        return item

    with nanotf.imap(wait, range(count), 2) as results:
        assert sorted(results) == list(range(count))


def test_results_that_fit_no_pipe_come_too() -> None:
    def repeat(item: int) -> Any:
        if item % 3 == 1:
            print("spoken", item)
        return np.full(1 << 14, item) if item % 7 == 5 else "x" * item * 40

    found = nanotf.map(repeat, range(300), 2, output="drop", verbose=0)
    for item, each in enumerate(found):
        assert np.array_equal(each, repeat(item)) if item % 7 == 5 else each == "x" * item * 40


def test_ctrl_c_ends_the_workers(tmp_path: pathlib.Path) -> None:
    def wait(item: int) -> None:
        (tmp_path / str(item)).touch()
        threading.Event().wait()

    def interrupt() -> None:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2, "two items run")
        pids.extend(nanotf.worker_pids())
        os.kill(os.getpid(), signal.SIGINT)

    pids: list[int] = []
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        nanotf.map(wait, range(4), 2, verbose=0)
    thread.join()
    assert len(pids) == 2 and not any(psutil.pid_exists(pid) for pid in pids)
    assert nanotf.map(square, [3], 1, verbose=0) == [9]


def test_ctrl_c_while_a_call_begins(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warm workers have items before the caller waits for results."""

    def wait(item: int) -> None:
        (tmp_path / str(item)).touch()
        threading.Event().wait()

    def start(thread: threading.Thread) -> None:
        threading.Thread.start(thread)
        if thread.name == "nanotf-map":
            wait_until(lambda: len(list(tmp_path.iterdir())) == 2, "two items run")
            pids.extend(nanotf.worker_pids())
            raise KeyboardInterrupt

    pids: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(own_threads.OwnThread, "start", start, raising=False)
        with pytest.raises(KeyboardInterrupt):
            nanotf.map(wait, range(4), 2, verbose=0)
    assert len(pids) == 2 and not any(psutil.pid_exists(pid) for pid in pids)


class _Unsendable:
    def __reduce__(self) -> Any:
        raise TypeError("stays here")


UNSENDABLE = _Unsendable()
BAD = {
    "no items": ((square, []), {}, ValueError, "list without any"),
    "not iterable": ((square, 3), {}, TypeError, "items=3"),
    "not callable": ((3, [1]), {}, TypeError, "`function` must be callable"),
    "too many processes": ((square, [1], 10**6), {}, errors.PlacementError, "1000000"),
    "on_error": ((square, [1]), {"on_error": "skip"}, ValueError, "'raise', 'return'.*'skip'"),
    "shared": ((square, [1]), {"shared": {"x": X}}, TypeError, r"square\(item.*shared=\['x'\]"),
    "function": (
        (lambda item: UNSENDABLE, [1]),
        {},
        errors.ShippingError,
        "The function <lambda>.*stays here",
    ),
    "item": ((square, [1, UNSENDABLE]), {}, errors.ShippingError, "Item 1.*stays here"),
    "recycle_after": ((square, [1]), {"recycle_after": 0}, ValueError, "recycle_after=0"),
    "memory_limit": ((square, [1]), {"memory_limit": "1G"}, TypeError, "memory_limit='1G'"),
    "max_restarts": ((square, [1]), {"max_restarts": -1}, ValueError, "max_restarts=-1"),
    "seed": ((square, [1]), {"seed": 1.5}, TypeError, r"seed=1\.5"),
    "verbose": ((square, [1]), {"verbose": 3}, ValueError, "verbose=3"),
    "output": ((square, [1]), {"output": "show"}, ValueError, "'prefix', 'keep'.*'show'"),
}


@pytest.mark.every_case
@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    arguments, named, kind, text = BAD[case]
    with pytest.raises(kind, match=f"(?s){text}") as caught:
        nanotf.map(*arguments, **named)
    assert isinstance(caught.value, errors.NanoError)
    assert not isinstance(caught.value, errors.WorkerError)  # no worker saw it


# ------------------------------------------------------------------------------ long series
def pid(item: int) -> int:
    return os.getpid()


def test_workers_are_replaced() -> None:
    assert len(set(nanotf.map(pid, range(8), 2, recycle_after=2, verbose=0))) >= 4
    assert len(set(nanotf.map(pid, range(6), 2, memory_limit=1, verbose=0))) == 6


@pytest.mark.thorough
def test_workers_that_grow_are_replaced() -> None:
    """Here by what a library keeps: what the function itself keeps ends with each item."""

    def keep(item: int) -> int:
        vars(np).setdefault("kept_by_test", []).append(np.ones(40 << 20, "u1"))
        return os.getpid()

    assert len(set(nanotf.map(keep, range(20), 1, verbose=0))) == 3
    assert len(set(nanotf.map(keep, range(9), 1, verbose=0, memory_limit=None))) == 1


def test_lazy_modules_of_a_module_are_not_imported(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optuna has such modules; what they import may not be installed.

    Nor are attributes read of what only says that it is a module, as libraries of cffi do.
    """
    monkeypatch.setitem(sys.modules, "library_of_mine", None)  # undone after the test
    (tmp_path / "broken_of_mine.py").write_text("raise ImportError('imported')\n")
    (tmp_path / "lazy_of_mine.py").write_text(LAZY)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("lazy_of_mine")
    assert nanotf.map(module.square, range(3), 1, verbose=0) == [0, 1, 4]


LAZY = """
import importlib.util
import sys
import types

class Library:
    __slots__ = ()
    __class__ = property(lambda self: types.ModuleType)

library = sys.modules["library_of_mine"] = Library()

class Lazy(types.ModuleType):
    def __getattr__(self, name):
        raise ImportError("imported")

lazy = Lazy("missing_of_mine")
spec = importlib.util.find_spec("broken_of_mine")
spec.loader = importlib.util.LazyLoader(spec.loader)
lazily_loaded = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lazily_loaded)

def square(item):
    return item * item
"""


@pytest.mark.both_generations
def test_graphs_of_ended_items_are_freed() -> None:
    def count(item: int, x: Any, y: Any) -> int:
        from tensorflow.python.framework.func_graph import FuncGraph

        before = sum(isinstance(each, FuncGraph) for each in gc.get_objects())
        train(item, x, y)
        return before

    found = nanotf.map(count, range(5), 1, shared={"x": X, "y": Y}, verbose=0)
    assert found[2:] == [found[1]] * 3  # Keras 2 keeps a few, of its import and its first model


def test_custom_gradients_of_functions_that_an_item_keeps() -> None:
    """A kept function can be differentiated by a later item, as in one process; also twice."""
    kept: list[Any] = []

    def differentiate(item: int) -> list[float]:
        @tf.custom_gradient
        def cube(x: Any) -> Any:
            return x**3, lambda gradient: gradient * 3.0 * x**2 + 1.0

        if not kept:
            kept.append(tf.function(lambda x: cube(x)))
        x = tf.Variable(2.0)
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                y = kept[0](x)
            first = tape.gradient(y, x)
        return [float(y), float(first), float(outer.gradient(first, x))]

    found = nanotf.map(differentiate, range(3), 1, verbose=0)
    assert found == [differentiate(item) for item in range(3)]
    assert found[0][:2] == [8.0, 13.0]


@pytest.mark.thorough
def test_memory_is_flat_over_200_items() -> None:
    def memory(item: int, x: Any, y: Any) -> int:
        train(item, x, y)
        found = psutil.Process().memory_info()
        return int(found.rss - found.shared)

    shared = {"x": X, "y": Y}
    found = nanotf.map(memory, range(200), 1, shared=shared, memory_limit=None, verbose=0)
    assert max(found[20:]) < 1.03 * found[19]
