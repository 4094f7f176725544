"""`nanotf serve` under load, with faults. The tests marked slow run in `make soak`."""

from __future__ import annotations

import os
import pathlib

import pytest

pytest.importorskip("httptools")

import server_faults
from faults import seed_of_today
from server_faults import Outcome

import nanotf

MIB = 1 << 20
# Python's and TensorFlow's allocators take memory in steps of this size at any time.
FRONT_GROWTH, WORKER_GROWTH = 16 * MIB, 48 * MIB


@pytest.fixture(autouse=True)
def _two_cores() -> None:
    try:
        nanotf.plan(2)
    except nanotf.errors.PlacementError as error:
        pytest.skip(f"two workers need two cores: {error}")


def _number(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


def _assert_as_promised(outcome: Outcome) -> None:
    seen = outcome.seen
    assert not seen.wrong, "\n".join(seen.wrong[:20])
    assert not outcome.lost, "\n".join(outcome.lost[:20])
    assert outcome.exit_code == 0
    assert set(seen.answers) >= {1, outcome.reloads + 1}
    assert outcome.after.resident - outcome.before.resident < FRONT_GROWTH, outcome.text()
    # The connections of the moment vary.
    assert outcome.after.descriptors - outcome.before.descriptors < 16, outcome.text()
    # The front's pool for calls that wait has up to a handful of threads, once they are needed.
    assert outcome.after.threads - outcome.before.threads < 6, outcome.text()


def test_a_few_faults_of_a_server(tmp_path: pathlib.Path) -> None:
    _assert_as_promised(server_faults.run(tmp_path, kills=6, reloads=2, seed=1))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_faults_of_a_server(tmp_path: pathlib.Path) -> None:
    """Kills workers and adds versions, as many as the environment asks for."""
    seed = seed_of_today()
    kills, reloads = _number("NANOTF_SOAK_KILLS", 100), _number("NANOTF_SOAK_RELOADS", 20)
    outcome = server_faults.run(tmp_path, kills, reloads, seed)
    print(f"\nNANOTF_SOAK_SEED={seed}\n{outcome.text()}")
    _assert_as_promised(outcome)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_memory_of_a_busy_server(tmp_path: pathlib.Path) -> None:
    """Measures after a fifth of the time, and at the end."""
    seconds = _number("NANOTF_SOAK_SECONDS", 600)
    found, seen = server_faults.growths(tmp_path, seconds / 5, seconds, seed_of_today())
    print(f"\n{sum(seen.answers.values())} answers in {seconds} s")
    print("\n".join(map(str, found)))
    assert not seen.wrong, "\n".join(seen.wrong[:20])
    for each in found:
        most = WORKER_GROWTH if each.name == "worker" else FRONT_GROWTH
        assert each.now.resident - each.then.resident < most, str(each)
        assert each.now.descriptors <= each.then.descriptors + 4, str(each)
