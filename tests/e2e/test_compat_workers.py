"""The installed TensorFlow: its version, workers' OpenMP threads, and what workers replace."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import pathlib
import sys
import types
from typing import Any

import pytest
import tensorflow as tf

import nanotf
from nanotf import errors
from nanotf.compat import replacements as replacing
from nanotf.compat import versions
from nanotf.compat.replacements import Override
from nanotf.keras import nano
from nanotf.machine import installed

pytestmark = pytest.mark.both_generations

OPENMP = installed.find_installed().libiomp5


@pytest.mark.skipif(OPENMP is None, reason="TensorFlow's kernels use no OpenMP")
def test_openmp_has_a_thread_for_each_core_of_a_worker() -> None:
    def threads_and_cores(rank: int) -> tuple[int, set[int]]:
        tf.linalg.matmul(tf.ones((500, 500)), tf.ones((500, 500)))
        threads = [int(path.name) for path in pathlib.Path("/proc/self/task").iterdir()]
        cores = set[int]().union(*map(os.sched_getaffinity, threads))
        return ctypes.CDLL(OPENMP).omp_get_max_threads(), cores

    (threads, mine), (others, theirs) = nanotf.map(threads_and_cores, range(2), num_processes=2)
    assert (threads, others) == (len(mine), len(theirs))
    assert not mine & theirs, "no thread leaves its worker's cores"


def test_versions() -> None:
    versions.check_keras()
    assert versions.keras_version() >= (2, 14)
    assert versions.parse_version("3.10.0rc1") == (3, 10, 0)


def test_versions_that_train_wrongly_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "keras_version", lambda: (3, 9, 2))
    with pytest.raises(errors.UnsupportedVersionError, match=r"Received: keras==3\.9\.2\."):
        versions.check_keras()


@pytest.mark.skipif(not versions.is_keras_3(), reason="Keras 2 has one backend")
def test_another_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    versions.check_backend()
    monkeypatch.setattr("keras.backend.backend", lambda: "torch")
    with pytest.raises(errors.UnsupportedVersionError, match=r"backend\(\)='torch'. Set KERAS_BAC"):
        versions.check_backend()


def test_replacing_twice_replaces_the_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacing, "_stock", {})
    monkeypatch.setattr(replacing, "_installed", {})
    modules = [types.ModuleType(name) for name in ("that_defines", "that_imports")]
    stock = lambda: "stock"  # noqa: E731
    for module in modules:
        module.function = stock  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    row = Override("that_defines:function", "", lambda stock, given: lambda: (given, stock()))
    other = dataclasses.replace(row, target="that_is_not:there", versions=((1,), (2,)))
    for given in (1, 2):
        replacing.install([row, other], given)
        assert [module.function() for module in modules] == [(given, "stock")] * 2
        assert row.is_installed() and not other.is_installed()


def test_a_fork_looks_only_through_modules_that_came_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modules = [types.ModuleType(name) for name in ("that_defines_it", "that_comes_later")]
    stock = lambda: "stock"  # noqa: E731
    row = Override("that_defines_it:function", "", lambda stock, given: given)
    for module in modules:
        module.function = module.other_name = stock  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        replacing.find([row])
    replacing.install([row], "ours")
    for module in modules:
        assert (module.function, module.other_name) == ("ours", "ours")


def test_workers_have_replaced_them() -> None:
    @nano(num_processes=2)
    def missing(data: Any, trained: Any) -> list[str]:
        from nanotf.compat import replacements
        from nanotf.region import overrides

        table = [row for row in overrides.TABLE if row.applies()]
        stock = {
            id(replacements._stock[row.target]) for row in table if replacements._is_function(row)
        }
        left = [
            f"{module.__name__}.{name}"
            for module in list(sys.modules.values())
            if isinstance(module, types.ModuleType) and not module.__name__.startswith("nanotf")
            for name, value in list(vars(module).items())
            if id(value) in stock
        ]
        return left + [row.target for row in table if not row.is_installed()]

    assert missing(tf.data.Dataset.range(2).batch(2), tf.Variable(0.0)) == []
