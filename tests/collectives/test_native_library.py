"""Tests of the compiled library: how it is found, rejected and built."""

from __future__ import annotations

import importlib.machinery
import importlib.util

import pytest

from nanotf.collectives import build, create_group, layout, native_library, native_status
from nanotf.errors import NanoError
from nanotf.wire.failures import Failure, FailureKind


def test_status_names_the_library_and_its_vectors():
    available, reason = native_status()
    assert available, reason
    assert reason.startswith("_shm.so, ")
    native_library.check_available("This test needs")


def test_a_library_that_was_not_built(monkeypatch, tmp_path):
    monkeypatch.setattr(native_library, "LIBRARY", tmp_path / "_shm.so")
    assert native_status() == (False, "_shm.so was not built")
    message = (
        r"^Several workers need nanotf's native library\. Received: _shm\.so was not built\. "
        r"`python -m nanotf\.collectives\.build` builds it, with a C\+\+ compiler or "
        r"`pip install ziglang`\.$"
    )
    with pytest.raises(NanoError, match=message):
        create_group(2)


def test_a_library_of_another_version(monkeypatch):
    monkeypatch.setattr(layout, "MAGIC", layout.MAGIC + 1)
    assert native_status() == (False, "_shm.so is from another version; rebuild it")


@pytest.fixture
def _no_compiler(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("_no_compiler")
def test_build_without_a_compiler(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert build.main() == 1
    assert "a C++17 compiler is needed. Received: none of" in capsys.readouterr().err


@pytest.mark.usefixtures("_no_compiler")
@pytest.mark.parametrize("installed", [(), ("c++", "g++")])  # they are too old
def test_ziglang_compiles_where_no_other_compiles_the_library(installed, monkeypatch, tmp_path):
    for name in installed:
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    found = importlib.machinery.ModuleSpec("ziglang", None, origin="/site/ziglang/__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", {"ziglang": found}.get)
    assert build.compiler()[:2] == ["/site/ziglang/zig", "c++"]


def test_a_call_on_a_group_that_is_closed():
    failure = layout.RawFailure()
    call = native_library.NanotfCall(1, b"x" * 5000, b"", None, 0)
    library = native_library.load()
    assert library.nanotf_barrier(12345, call, failure) == 1
    found = failure.unpacked()
    assert (found.kind, found.rank, found.missing) == (FailureKind.MISUSED, -1, ())
    assert found.message == (
        "nanotf collective: the group is closed in this process. Trace the function again with "
        "the present group."
    )
    assert library.nanotf_failures(12345, failure) == 0


def test_a_failure_in_shared_memory():
    last = layout.MAX_SIZE - 1
    failure = Failure(FailureKind.EXPIRED, 7, "rank 7 waited", "raise it", (0, 31, 32, last))
    assert layout.RawFailure.of(failure).unpacked() == failure
    long = layout.RawFailure.of(Failure(FailureKind.ABORTED, -1, "x" * 5000, "y" * 5000))
    assert long.unpacked() == Failure(FailureKind.ABORTED, -1, "x" * 1651, "y" * 255)
