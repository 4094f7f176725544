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


def _assert_flat(footprints: Sequence[Footprint]) -> None:
    """Of memory, which the system moves about, the most in rounds 8 to 10 and the least in the last
    five count; of descriptors, which wait for Python's garbage collector, the most in the first ten
    rounds and the least in the last ten."""
    before = [max(sizes) for sizes in zip(*(f.memory for f in footprints[7:10]), strict=True)]
    after = [min(sizes) for sizes in zip(*(f.memory for f in footprints[-5:]), strict=True)]
    for then, now in zip(before, after, strict=True):
        assert now <= GROWTH * then, f"memory grew from {before} to {after} bytes"
    most = [max(counts) for counts in zip(*(f.descriptors for f in footprints[:10]), strict=True)]
    least = [min(counts) for counts in zip(*(f.descriptors for f in footprints[-10:]), strict=True)]
    for then, now in zip(most, least, strict=True):
        assert now <= then, f"descriptors grew from at most {most} to at least {least}"


def _assert_as_promised(outcomes: Sequence[Outcome]) -> None:
    wrong = [outcome for outcome in outcomes if not outcome.is_as_promised]
    assert not wrong, "\n".join(map(str, wrong))
    assert any(outcome.result in ("raised", "restarted") for outcome in outcomes)


def test_a_few_warm_jobs() -> None:
    _assert_flat(warm_jobs(25))


def test_a_few_kills() -> None:
    _assert_as_promised(kills(3, seed=1, phases=("training", "transfer", "validation")))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_warm_jobs() -> None:
    footprints = warm_jobs(200)
    for rounds in (1, 10, 100, 200):
        print(f"\nafter {rounds} rounds: {footprints[rounds - 1]}")
    _assert_flat(footprints)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_hundred_kills() -> None:
    seed = seed_of_today()
    outcomes = kills(100, seed)
    print(f"\nNANOTF_SOAK_SEED={seed}\n{table(outcomes)}")
    _assert_as_promised(outcomes)
