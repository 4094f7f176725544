"""Load and faults. The quick tests run in `make test`, the tests marked slow in `make soak`."""

from __future__ import annotations

import logging
import os
import pathlib
import signal
from collections.abc import Sequence

import anything
import fuzz
import numpy as np
import pytest
from faults import PROMISED_SECONDS, Outcome, kills, seed_of_today, table
from load import Footprint, new_models, warm_jobs
from preempted_job import Job, assert_same_results, place

import nanotf

GROWTH = 1.05  # of a worker's memory


@pytest.fixture(autouse=True)
def _two_cores() -> None:
    try:
        nanotf.plan(2)
    except nanotf.errors.PlacementError as error:
        pytest.skip(f"two workers need two cores: {error}")


def _assert_flat(footprints: Sequence[Footprint]) -> None:
    """Asserts that memory and descriptors did not grow.

    Memory varies, so this compares the maximum of rounds 8 to 10 with the minimum of the last five.
    Descriptors wait for Python's garbage collector, so this compares the maximum of the first ten
    rounds with the minimum of the last ten.
    """
    before = [max(sizes) for sizes in zip(*(f.memory for f in footprints[7:10]), strict=True)]
    after = [min(sizes) for sizes in zip(*(f.memory for f in footprints[-5:]), strict=True)]
    for then, now in zip(before, after, strict=True):
        assert now <= GROWTH * then, f"memory grew from {before} to {after} bytes"
    most = [max(counts) for counts in zip(*(f.descriptors for f in footprints[:10]), strict=True)]
    least = [min(counts) for counts in zip(*(f.descriptors for f in footprints[-10:]), strict=True)]
    for then, now in zip(most, least, strict=True):
        assert now <= then, f"descriptors grew from at most {most} to at least {least}"


def _assert_as_promised(outcomes: Sequence[Outcome], seconds: float | None = None) -> None:
    wrong = [outcome for outcome in outcomes if not outcome.is_as_promised(seconds)]
    assert not wrong, "\n".join(map(str, wrong))
    assert any(outcome.result in ("raised", "restarted") for outcome in outcomes)


def _number(name: str, default: int) -> int:
    """Returns a count from the environment; lower it on a busy machine."""
    return int(os.environ.get(name, default))


@pytest.mark.thorough
def test_a_few_warm_jobs() -> None:
    _assert_flat(warm_jobs(25))


@pytest.mark.thorough
def test_a_few_kills() -> None:
    phases = ("training", "transfer", "validation", "training of @nano", "predict")
    _assert_as_promised(kills(5, seed=1, phases=phases))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_warm_jobs() -> None:
    footprints = warm_jobs(_number("NANOTF_SOAK_ROUNDS", 200))
    for rounds in sorted({1, 10, 100, len(footprints)}):
        if rounds <= len(footprints):
            print(f"\nafter {rounds} rounds: {footprints[rounds - 1]}")
    _assert_flat(footprints)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_new_models_leave_nothing() -> None:
    footprints = new_models(_number("NANOTF_SOAK_MODELS", 500))
    for rounds in (10, 100, len(footprints)):
        print(f"\nafter {rounds} models: {footprints[rounds - 1].memory}")
    _assert_flat(footprints)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_hundred_kills() -> None:
    """Errors arrive within the promised time; NANOTF_SOAK_SLACK extends it on a busy machine."""
    seed = seed_of_today()
    seconds = PROMISED_SECONDS * float(os.environ.get("NANOTF_SOAK_SLACK", "1"))
    outcomes = kills(_number("NANOTF_SOAK_KILLS", 100), seed)
    print(f"\nNANOTF_SOAK_SEED={seed}, at most {seconds:g} s\n{table(outcomes, seconds)}")
    _assert_as_promised(outcomes, seconds)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_sigterm_at_random_moments(tmp_path: pathlib.Path) -> None:
    """Twenty of them, with one process and with two in turn."""
    undisturbed, job = Job(tmp_path, "undisturbed", 120), Job(tmp_path, "parts", 120)
    assert undisturbed.run(1) == 0
    seed = seed_of_today()
    random = np.random.default_rng(seed)
    places = []
    for number in range(20):
        assert job.end_at_random(1 + number % 2, random) == -signal.SIGTERM
        places.append(place(job.folder))
    print(f"\nNANOTF_SOAK_SEED={seed}, stopped at (epoch, step): {places}")
    assert places == sorted(places)
    assert any(step for _, step in places)
    assert job.run(2) == 0
    assert_same_results(job, undisturbed)


def _fuzz(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, count: int, seed: int) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "home"))
    logging.getLogger("nanotf").setLevel(logging.ERROR)
    try:
        for reader in fuzz.readers(folder):
            fuzz.run(reader, count, seed)
    finally:
        logging.getLogger("nanotf").setLevel(logging.NOTSET)


def test_a_few_damaged_files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fuzz(tmp_path, monkeypatch, 100, 0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_damaged_files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fuzz(tmp_path, monkeypatch, _number("SOAK_INPUTS", 10_000), seed_of_today())


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_kills_of_any_process() -> None:
    seed = seed_of_today()
    found = anything.kills(_number("NANOTF_SOAK_KILLS", 100), seed)
    print(f"\nNANOTF_SOAK_SEED={seed}\n{anything.table(found)}")
    assert any(each.killed for each in found)
    wrong = [each for each in found if not each.is_as_documented]
    assert not wrong, "\n".join(map(str, wrong))
