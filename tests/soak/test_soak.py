"""Load and faults. The quick tests run in `make test`, those marked slow in `make soak`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from faults import Footprint, Outcome, kills, seed_of_today, table, warm_jobs

import nanotf

GROWTH = 1.05  # of a worker's memory


@pytest.fixture(autouse=True)
def _two_cores() -> None:
    try:
        nanotf.plan(2)
    except nanotf.errors.PlacementError as error:
        pytest.skip(f"two workers need two cores: {error}")


def _assert_flat(before: Footprint, after: Footprint) -> None:
    for then, now in zip(before.memory, after.memory, strict=True):
        assert now <= GROWTH * then, f"memory grew from {before.memory} to {after.memory} bytes"
    for then, now in zip(before.descriptors, after.descriptors, strict=True):
        assert now <= then, f"descriptors: {before.descriptors}, then {after.descriptors}"


def _assert_as_promised(outcomes: Sequence[Outcome]) -> None:
    wrong = [outcome for outcome in outcomes if not outcome.is_as_promised]
    assert not wrong, "\n".join(map(str, wrong))
    assert any(outcome.result in ("raised", "restarted") for outcome in outcomes)


def test_a_few_warm_jobs() -> None:
    _assert_flat(*warm_jobs(15))


def test_a_few_kills() -> None:
    _assert_as_promised(kills(3, seed=1, phases=("training", "transfer", "validation")))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_warm_jobs() -> None:
    before, after = warm_jobs(200)
    print(f"\nafter 10 jobs:  {before}\nafter 200 jobs: {after}")
    _assert_flat(before, after)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_hundred_kills() -> None:
    seed = seed_of_today()
    outcomes = kills(100, seed)
    print(f"\nNANOTF_SOAK_SEED={seed}\n{table(outcomes)}")
    _assert_as_promised(outcomes)
