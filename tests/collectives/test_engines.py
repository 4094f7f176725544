"""Tests the native engine without TensorFlow: real processes, all collectives and failures."""

from __future__ import annotations

import os
import signal
import stat
import time
from pathlib import Path

import collective_ranks as ranks
import numpy as np
import pytest
from collective_runner import (
    Outcome,
    run_ranks,
    values,
    wait_for,
)

from nanotf.collectives import create_group
from nanotf.collectives.engine import check_parts
from nanotf.errors import CollectiveError, InvalidArgumentError
from nanotf.pool import stalls
from nanotf.wire.failures import Failure, FailureKind

RANKS = "collective_ranks"

SIZES = pytest.mark.parametrize("size", range(1, 6))
_HANGS = 900  # seconds; far more than 56 ranks need on a core that other programs use, too


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No descriptor stays open here, and no name appears in /dev/shm."""

    def state():
        names = {path.name for path in Path("/dev/shm").glob("*nanotf*")}
        return len(list(Path("/proc/self/fd").iterdir())), names

    before = state()
    yield
    assert state() == before


def group(size, **options):
    sizes = {"chunk_bytes": ranks.CHUNK, "symmetric_bytes": ranks.SYMMETRIC}
    return create_group(size, **{"deadline": 30, **sizes, **options})


def time_passes(seconds):
    """Lets time pass, so that another process can block or wake."""
    end = time.monotonic() + seconds
    wait_for(lambda: time.monotonic() > end)


@SIZES
def test_all_reduce_gives_equal_bits_on_all_ranks(size):
    with group(size) as owner:
        digests = values(run_ranks(owner, ranks.reduce_everything))
    assert len(set(digests)) == 1


@pytest.mark.parametrize("vectors", ["baseline", "avx2"])
def test_all_reduce_with_other_vector_instructions(vectors):
    with group(3) as owner:
        limits = {"NANOTF_VECTORS": vectors}
        digests = values(run_ranks(owner, ranks.reduce_everything, environment=limits))
    assert len(set(digests)) == 1


@pytest.mark.parametrize(
    ("size", "nodes"),
    [(4, 2), *(pytest.param(6, count, marks=pytest.mark.thorough) for count in (2, 3))],
)
def test_all_reduce_of_several_nodes(size, nodes):
    """Each node first reduces its own ranks' input."""
    with group(size, nodes=nodes) as owner:
        digests = values(run_ranks(owner, ranks.reduce_everything))
    assert len(set(digests)) == 1
    for function in (ranks.reduce_many, ranks.scatter_and_gather):
        with group(size, nodes=nodes) as owner:
            values(run_ranks(owner, function))


@pytest.mark.parametrize(
    ("size", "nodes"),
    [(8, 1), (8, 2), pytest.param(56, 2, marks=pytest.mark.thorough)],
)
@pytest.mark.timeout(_HANGS + 60)
def test_more_ranks_than_cores(size, nodes):
    with group(size, nodes=nodes, deadline=_HANGS) as owner:
        digests = values(run_ranks(owner, ranks.take_turns, deadline=_HANGS))
    assert len(set(digests)) == 1


@pytest.mark.parametrize("size", [3, 5])
def test_16_bit_floats_are_summed_in_float32(size):
    with group(size) as owner:
        values(run_ranks(owner, ranks.reduce_pieces_that_vanish))


@SIZES
def test_all_reduce_of_many_tensors(size):
    with group(size) as owner:
        values(run_ranks(owner, ranks.reduce_many))


@SIZES
def test_reduce_scatter_and_back(size):
    with group(size) as owner:
        values(run_ranks(owner, ranks.scatter_and_gather))


@SIZES
def test_gather_and_broadcast(size):
    with group(size) as owner:
        values(run_ranks(owner, ranks.gather_and_broadcast))


@SIZES
def test_barrier(size, tmp_path):
    with group(size) as owner:
        values(run_ranks(owner, ranks.barrier, tmp_path))


@SIZES
def test_repeated_calls(size):
    with group(size) as owner:
        values(run_ranks(owner, ranks.repeated, 3000))


@pytest.mark.parametrize(("size", "threads"), [*((size, 2) for size in range(1, 6)), (3, 20)])
def test_keys_in_different_orders(size, threads):
    """20 threads: more than a rank has slots."""
    with group(size) as owner:
        values(run_ranks(owner, ranks.many_threads, threads, 30 if threads == 2 else 5))


def test_a_second_call_of_a_key_in_flight_is_refused(tmp_path):
    with group(2) as owner:
        failure, _ = values(run_ranks(owner, ranks.one_key_twice, tmp_path))
    assert (failure.kind, failure.rank) == (FailureKind.MISUSED, 0)
    assert "key=5 on rank 0 from two threads at once" in failure.text


@pytest.mark.parametrize("size", [2, 3])
def test_a_difference_is_an_error_on_every_rank(size):
    with group(size) as owner:
        per_rank = values(run_ranks(owner, ranks.mismatches))
    last = size - 1
    expected = [
        ("all_reduce(sum) of float32[2, 4]", "all_reduce(sum) of float32[2, 3]"),
        ("all_reduce(sum) of int64[9]", "all_reduce(sum) of int32[9]"),
        ("all_reduce(sum) of int32[9]", "all_reduce(max) of int32[9]"),
        ("broadcast from rank 0 of float64[9]", "broadcast from rank 1 of float64[9]"),
        ("all_gather of float64[*, 4]", "all_gather of float64[*, 3]"),
        ("all_reduce(sum) of float64[300000]", "all_reduce(sum) of float64[1]"),
        ("all_reduce(sum) of float64[9]", "all_gather of float64[*]"),
    ]
    for rank, failures in enumerate(per_rank):
        for failure, (first, other) in zip(failures, expected, strict=True):
            assert (failure.kind, failure.rank, failure.missing) == (
                FailureKind.DIFFERENT,
                rank,
                (),
            )
            text = failure.message
            assert text.startswith("nanotf collective: all ranks must call the same collective")
            assert f"Received: rank 0: {first}; rank {last}: {other} (key 1, call " in text
            assert text.endswith(
                "). Check that every rank runs the same model on batches of the same structure."
            )
    assert len({tuple(failure.text for failure in failures) for failures in per_rank}) == 1


@pytest.mark.parametrize("size", [2, 5])
def test_a_difference_between_many_tensors_is_named(size):
    with group(size) as owner:
        per_rank = values(run_ranks(owner, ranks.mismatches_of_many))
    reduce = "all_reduce(sum) of"
    expected = [
        (f"{reduce} 8 tensors, tensor 2: float32[3]", f"{reduce} 8 tensors, tensor 2: float32[4]"),
        (
            f"{reduce} 25 tensors, tensor 25: float32[3, 64, 64, 3]",
            f"{reduce} 25 tensors, tensor 25: float32[1, 2]",
        ),
        (f"{reduce} 6 tensors, tensor 1: int64[3]", f"{reduce} 6 tensors, tensor 1: int32[3]"),
        (f"{reduce} 8 tensors", f"{reduce} 9 tensors, tensor 9: float32[3]"),
        (f"{reduce} 2 tensors, tensor 2: float32[3]", f"{reduce} float32[3]"),
        (f"{reduce} 6 tensors", "all_reduce(max) of 6 tensors"),
        *(
            (
                f"{name} of 2 tensors, tensor 2: float32[3, 2]",
                f"{name} of 2 tensors, tensor 2: float32[2, 3]",
            )
            for name in ("reduce_scatter", "gather_parts")
        ),
        (
            f"{reduce} 3001 tensors, tensor 3001: float32[1]",
            f"{reduce} 3001 tensors, tensor 3001: float32[2]",
        ),
        (f"{reduce} 9000 tensors, tensor 2: float32[0]", f"{reduce} float32[0]"),
        (f"{reduce} 2 tensors", "reduce_scatter of 2 tensors"),
    ]
    for number, (first, other) in enumerate(expected, 1):
        (text,) = {texts[number - 1] for texts in per_rank}
        received = f"Received: rank 0: {first}; rank {size - 1}: {other} (key 1, call {number})."
        assert received in text


@pytest.mark.parametrize("how", ["kill", "stay"])
def test_a_rank_that_enters_another_call_and_stops(how, tmp_path):
    with create_group(3, deadline=2) as owner:
        *others, last = run_ranks(owner, ranks.differs_and_stops, tmp_path, how)
    assert last.returncode == (-signal.SIGKILL if how == "kill" else 0)
    call = (
        "all_reduce(sum) of float64[3], float64[3], float64[3], float64[3], ... (6 tensors) "
        "(key 42, call 1)"
    )
    for failure in values(others):
        assert failure.kind == (FailureKind.LOST if how == "kill" else FailureKind.EXPIRED)
        assert failure.missing == (2,)
        text = failure.text
        if how == "kill":
            assert ") ended while rank " in text and f" waited for it in {call}" in text
        else:
            assert text.endswith(f"waited 2 s in {call} for rank 2 (came, did not finish)")


@pytest.mark.parametrize("how", ["kill", "raise", "close"])
def test_a_rank_that_dies(how):
    size = 3
    with group(size) as owner:
        *others, last = run_ranks(owner, ranks.last_rank_dies, how)
    way = "left the group" if how == "close" else "ended"
    if how == "kill":
        assert last.returncode == -9
    for failures in values(others):
        for failure in failures:  # the second call fails for the reason of the first
            assert (failure.kind, failure.missing) == (FailureKind.LOST, (2,))
            assert failure.rank in (0, 1)
            assert failure.message.startswith("nanotf collective: rank 2 (process ")
            assert f") {way} while rank {failure.rank} waited" in failure.text


@pytest.mark.parametrize("size", [2, 4])
def test_the_parent_aborts(size, tmp_path):
    with group(size) as owner:

        def abort() -> None:
            wait_for(lambda: len(list(tmp_path.glob("entering-*"))) == size - 1)
            owner.abort("the user pressed Ctrl-C")
            owner.abort("a later reason does not count")
            (tmp_path / "aborted").touch()

        per_rank = values(run_ranks(owner, ranks.aborted, tmp_path, meanwhile=abort))
    expected = Failure(FailureKind.ABORTED, -1, "the user pressed Ctrl-C")
    assert {failure for failures in per_rank for failure in failures} == {expected}
    assert expected.message == "nanotf collective: the user pressed Ctrl-C"


def test_a_rank_aborts():
    with group(3) as owner:
        failures = values(run_ranks(owner, ranks.rank_aborts))
    assert set(failures) == {Failure(FailureKind.ABORTED, 0, "rank 0 had enough")}


def test_the_deadline_names_the_missing_rank(tmp_path):
    with create_group(3, deadline=3) as owner:
        failures = values(run_ranks(owner, ranks.absent, tmp_path, 2))
    for failure in failures:
        assert (failure.kind, failure.missing) == (FailureKind.EXPIRED, (2,))
        call = "all_reduce(sum) of float64[3] (key 42, call 1)"
        waited = f"rank {failure.rank} waited 3 s in {call} for rank 2 (did not come)"
        assert failure.text == waited
        assert failure.message.startswith(f"nanotf collective: {waited}. Ranks must")


@pytest.mark.parametrize("method", ["all_reduce", "all_gather"])
def test_the_deadline_blames_only_the_missing_rank(method, tmp_path):
    options = {"chunk_bytes": ranks.CHUNK, "deadline": 3}
    with create_group(4, **options) as owner:
        failures = values(run_ranks(owner, ranks.absent, tmp_path, 1, method))
    for failure in failures:
        assert failure.missing == (1,)
        assert failure.text.endswith("(key 42, call 1) for rank 1 (did not come)")


def test_the_deadline_names_the_rank_that_does_not_reduce(tmp_path):
    options = {"chunk_bytes": ranks.CHUNK, "symmetric_bytes": 64, "deadline": 2}
    with create_group(2, **options) as owner:
        failure, _ = values(run_ranks(owner, ranks.came_and_did_not_reduce, tmp_path))
    assert (failure.kind, failure.rank, failure.missing) == (FailureKind.EXPIRED, 0, (1,))
    assert failure.text.endswith("for rank 1 (came, did not finish)")


@pytest.mark.parametrize("method", ["barrier", "join"])
def test_the_deadline_does_not_count_while_all_are_frozen(method, tmp_path):
    """Freezes all ranks, as `docker pause` does."""
    deadline = 4.0

    def freeze() -> None:
        wait_for(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
        pids = [int(path.name.split("-")[2]) for path in sorted(tmp_path.glob("pid-*"))]
        time_passes(0.3)  # so that rank 0 waits
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            wait_for(lambda: all(map(stalls.is_stopped, pids)))
            time_passes(deadline + 0.5)
            os.kill(pids[0], signal.SIGCONT)
            time_passes(0.2)  # so that rank 0 looks before rank 1 comes
            (tmp_path / "go").touch()
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    with create_group(2, deadline=deadline) as owner:
        values(run_ranks(owner, ranks.frozen, tmp_path, method, meanwhile=freeze))


@pytest.mark.skipif(os.geteuid() != 0, reason="chroot is for root")
def test_a_rank_that_is_not_in_proc_is_alive(tmp_path):
    with group(2) as owner:
        values(run_ranks(owner, ranks.without_proc, tmp_path))


def test_the_deadline_names_the_rank_that_never_attached():
    with create_group(2, deadline=0.5) as owner:
        (failure,) = values(run_ranks(owner, ranks.never_attached, ranks=[0]))
    assert (failure.kind, failure.missing) == (FailureKind.EXPIRED, (1,))
    assert "for rank 1 (never attached)" in failure.text


def test_a_rank_attaches_once():
    with group(1) as owner:
        (text,) = values(run_ranks(owner, ranks.attach_twice))
    assert "a rank can be attached once. Received: rank=0, which process" in text


def test_a_wrong_descriptor_is_refused():
    with group(1) as owner:
        nonce = owner.spec.nonce ^ 1
        ((nonce_text, size_text),) = values(run_ranks(owner, ranks.wrong_descriptor, nonce))
    assert "belongs to another group" in nonce_text
    assert "must be the file of the group. Received: fd=" in size_text


def test_the_memory_is_private_and_has_no_name():
    with group(2) as owner:
        status = os.fstat(owner.fd)
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_size == owner.spec.layout.total_bytes
        if hasattr(os, "memfd_create"):
            assert Path(f"/proc/self/fd/{owner.fd}").readlink().name.endswith("(deleted)")
            with pytest.raises(OSError):
                os.ftruncate(owner.fd, 0)
    owner.close()
    owner.abort("nothing happens after close")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"size": 0}, "size must be 1 to 1024. Received: size=0"),
        ({"size": 2, "deadline": 0}, "deadline must be positive. Received: deadline=0"),
        ({"size": 2, "chunk_bytes": 100}, "multiple of 64, .*Received: chunk_bytes=100"),
    ],
)
def test_wrong_arguments(options, text):
    with pytest.raises(InvalidArgumentError, match=text):
        create_group(**options)


def test_outcomes_of_failed_ranks_are_seen():
    with pytest.raises(AssertionError, match="rank 0: trace"):
        values([Outcome(error="E", traceback="trace", returncode=0)])
    assert issubclass(CollectiveError, RuntimeError)


def test_rows_must_make_up_the_whole():
    """A part of rows of 3 is none of 10 elements, of which one would be lost."""
    check_parts(np.zeros((3, 2)), [np.zeros((5, 2))], 0, 2)
    with pytest.raises(InvalidArgumentError, match=r"float64\[2, 3\]"):
        check_parts(np.zeros((2, 3)), [np.zeros(10)], 0, 2)
