"""Tests of the compiled library: how it is found, rejected and built; its Python constants."""

from __future__ import annotations

import ctypes
import logging

import pytest

from nanotf.collectives import build, create_group, layout, native_library, native_status, rule_out
from nanotf.wire.failures import Failure, FailureKind

needs_native = pytest.mark.skipif(not native_status()[0], reason=native_status()[1])


@needs_native
@pytest.mark.parametrize(("size", "nodes"), [(1, 1), (2, 1), (3, 1), (64, 1), (6, 3), (64, 2)])
@pytest.mark.parametrize("chunk_bytes", [64, 4096, 131072])
def test_both_layouts_agree(size, nodes, chunk_bytes):
    sizes = layout.Layout(size, chunk_bytes, nodes)
    assert native_library.native_layout(size, chunk_bytes, nodes) == [
        layout.MAGIC,
        layout.SLOTS,
        layout.BUFFERS,
        layout.DESCRIBING,
        layout.PAGE,
        layout.ABORTED,
        layout.COMMON_RECORD,
        layout.RECORD_FAILURE,
        ctypes.sizeof(layout.RawFailure),
        layout.RawFailure.rank.offset,
        layout.RawFailure.missing.offset,
        layout.RawFailure.text.offset,
        layout.RawFailure.remedy.offset,
        layout.STATE,
        layout.TAGS,
        layout.RANK_RECORD,
        layout.SLOT_HEADERS,
        layout.SLOT_HEADER_BYTES,
        layout.REDUCED,
        layout.COMBINED,
        layout.SIGNATURE,
        layout.ROWS,
        layout.TEXT_LENGTH,
        layout.TEXT,
        layout.TEXT_BYTES,
        layout.ACKNOWLEDGEMENTS,
        sizes.part_bytes,
        sizes.buffers,
        sizes.slot_bytes,
        sizes.region_bytes,
        sizes.total_bytes,
    ]


@needs_native
def test_status_names_the_library_and_its_vectors():
    available, reason = native_status()
    assert available
    assert reason.startswith("_shm.so, ")


def test_the_environment_forces_python(monkeypatch, caplog):
    monkeypatch.setenv("NANOTF_NATIVE", "0")
    assert native_status() == (False, "NANOTF_NATIVE=0")
    with caplog.at_level(logging.INFO, logger="nanotf"), create_group(2) as owner:
        assert owner.spec.implementation == "python"
    assert caplog.messages == []  # the user asked for it


def test_a_library_that_was_not_built(monkeypatch, tmp_path, caplog):
    monkeypatch.delenv("NANOTF_NATIVE", raising=False)
    monkeypatch.setattr(native_library, "LIBRARY", tmp_path / "_shm.so")
    available, reason = native_status()
    assert not available
    assert reason == "_shm.so was not built"
    with create_group(2) as owner, create_group(2):
        assert owner.spec.implementation == "python"
    [message] = caplog.messages  # once, though there are two groups
    assert "in pure Python, which is slower: _shm.so was not built." in message


def test_a_library_that_a_worker_could_not_use(monkeypatch):
    monkeypatch.delenv("NANOTF_NATIVE", raising=False)
    monkeypatch.setattr(native_library, "_unusable", [])
    rule_out("_ops.so is not to TensorFlow's taste")
    assert native_status() == (False, "_ops.so is not to TensorFlow's taste")


def test_build_without_a_compiler(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.main() == 1
    assert "a C++17 compiler is needed. Received: none of" in capsys.readouterr().err


@needs_native
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
