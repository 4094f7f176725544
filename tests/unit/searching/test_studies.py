"""Studies and samplers of a search, without TensorFlow."""

from __future__ import annotations

import datetime
import logging
import os
import pathlib
import platform
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import optuna
import pytest

import nanotf
from nanotf.errors import InvalidArgumentError, UnavailableError
from nanotf.machine import process_identity
from nanotf.searching import auto_parallel, studies
from nanotf.searching.sampling import SeededSampler, default_sampler

STATE = optuna.trial.TrialState


@pytest.fixture
def study() -> Any:
    return optuna.create_study()


def _ended_process() -> list[Any]:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return [platform.node(), process.pid, 0.0]


def _running(study: Any, process: Any) -> int:
    trial = study.ask()
    trial.suggest_float("rate", 0, 1)
    trial.set_user_attr(studies.SUGGESTED, True)
    if process is not None:
        trial.set_user_attr(studies.PROCESS, process)
    return int(trial.number)


def test_trials_of_dead_processes_are_tried_again(study: Any) -> None:
    dead = _running(study, _ended_process())
    alive = [
        _running(study, studies.this_process()),
        _running(study, ["another host", 1, 0.0]),
        _running(study, None),  # not of nanotf
    ]
    assert studies.fail_dead_trials(study, 1) == []
    found = study.trials
    assert found[dead].state == STATE.FAIL
    assert [found[number].state for number in alive] == [STATE.RUNNING] * 3
    again = study.ask()
    assert again.suggest_float("rate", 0, 1) == found[dead].params["rate"]
    assert again.user_attrs[studies.RETRY_OF] == dead
    assert studies.training_seed(5, study, again) == studies.training_seed(5, study, found[dead])
    again.set_user_attr(studies.PROCESS, _ended_process())
    assert studies.fail_dead_trials(study, 1) == [again.number]
    assert not study.get_trials(states=(STATE.WAITING,))


def test_a_worker_dies_before_it_has_noted_anything_in_its_trial(
    study: Any, tmp_path: pathlib.Path
) -> None:
    """The trial that takes its place has its number's parameters."""
    study.sampler = SeededSampler(default_sampler, 3)
    lost = study.ask()  # by another program, which notes no process
    with studies.beginning(study, tmp_path / "lock", "a", 1) as begun:
        begun(study.ask())
    assert study.trials[lost.number].state == STATE.RUNNING
    [begins] = [name for name in study.user_attrs if name.startswith(studies.BEGINS)]
    study.set_user_attr(begins, [len(study.trials), _ended_process()])
    orphan = study.ask()
    expected = orphan.suggest_float("rate", 0, 1), orphan.suggest_float("other", 0, 1)
    partial = study.ask()
    partial.suggest_float("rate", 0, 1)  # and died then, without a process all the same
    with studies.beginning(study, tmp_path / "lock", "b", 1):
        assert [study.trials[t.number].state for t in (orphan, partial)] == [STATE.FAIL] * 2
        again = study.ask()
        assert again.user_attrs[studies.RETRY_OF] == orphan.number
        assert (again.suggest_float("rate", 0, 1), again.suggest_float("other", 0, 1)) == expected
        assert study.ask().user_attrs[studies.RETRY_OF] == partial.number
    assert study.trials[lost.number].state == STATE.RUNNING


def test_another_host_begins_a_trial_when_a_worker_has_died(
    study: Any, tmp_path: pathlib.Path
) -> None:
    """Its trial has no process yet, and may not be taken for that of the dead worker."""
    begins = f"{studies.BEGINS} {platform.node()}"
    elsewhere = f"{studies.BEGINS} another host"
    study.set_user_attr(begins, [0, _ended_process()])
    study.set_user_attr(elsewhere, [0, ["another host", 1, 0.0]])
    trial = study.ask()
    assert studies.fail_dead_trials(study) == []
    assert study.trials[trial.number].state == STATE.RUNNING
    study.set_user_attr(elsewhere, [0, None])  # and no process: the dead worker's after all
    assert studies.fail_dead_trials(study) == []
    assert study.trials[trial.number].state == STATE.FAIL


def test_a_worker_notes_itself_while_others_look(
    study: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    study.set_user_attr(f"{studies.BEGINS} {platform.node()}", [0, _ended_process()])
    trial = study.ask()
    read = study.get_trials(states=(STATE.RUNNING,))
    trial.set_user_attr(studies.PROCESS, studies.this_process())
    now = study.get_trials
    monkeypatch.setattr(
        study, "get_trials", lambda **how: read if how.get("states") else now(**how)
    )
    assert studies.fail_dead_trials(study) == []
    assert study.trials[trial.number].state == STATE.RUNNING


def test_a_trial_that_is_tried_again_shifts_no_other(study: Any) -> None:
    study.sampler = SeededSampler(default_sampler, 3)
    undisturbed = optuna.create_study(sampler=SeededSampler(default_sampler, 3))
    expected = [undisturbed.ask().suggest_float("rate", 0, 1) for _ in range(3)]
    dead = study.ask()
    found = [dead.suggest_float("rate", 0, 1)]
    dead.set_user_attr(studies.PROCESS, _ended_process())
    studies.fail_dead_trials(study, 1)
    trials = []
    for _ in range(3):
        trials.append(study.ask())
        found.append(trials[-1].suggest_float("rate", 0, 1))
    assert found[:1] + expected == found
    seeds = [studies.training_seed(5, study, trial) for trial in trials]
    assert seeds == [studies.training_seed(5, undisturbed, t) for t in undisturbed.trials]


def test_an_item_has_one_trial(study: Any, tmp_path: pathlib.Path) -> None:
    with studies.beginning(study, tmp_path / "lock", "a", 1) as begun:
        trial = study.ask()
        begun(trial)
    assert studies.ended_for(study, "a") is None
    study.tell(trial, 1.0)
    assert studies.ended_for(study, "a") == trial.number
    assert studies.ended_for(study, "b") is None


def test_an_interrupted_program_does_not_use_up_the_restarts(study: Any) -> None:
    for _ in range(3):
        trial = study.ask()
        trial.set_user_attr(studies.PROCESS, _ended_process())
        assert studies.fail_dead_trials(study) == []
    assert len(study.get_trials(states=(STATE.WAITING,))) == 1


def test_trials_that_count(study: Any) -> None:
    study.tell(study.ask(), 1.0)
    study.tell(study.ask(), state=STATE.PRUNED)
    study.tell(study.ask(), state=STATE.FAIL)  # an exception that ended the search
    caught = study.ask()
    caught.set_user_attr(studies.ERROR, "ValueError: too wide")
    study.tell(caught, state=STATE.FAIL)
    study.enqueue_trial({})
    assert studies.ended(study) == 3


def test_a_study_keeps_its_direction_and_metric(tmp_path: pathlib.Path) -> None:
    address = f"sqlite:///{tmp_path}/study.db"
    with studies.storage_for(address) as storage:
        first = studies.open_study(storage, "a", "minimize", "loss", None)
        seed = studies.seed_for(first, None)
    with studies.storage_for(address) as storage:
        again = studies.open_study(storage, "a", "minimize", "loss", None)
        assert studies.seed_for(again, None) == seed
        with pytest.raises(InvalidArgumentError, match="direction='minimize'"):
            studies.open_study(storage, "a", "maximize", "loss", None)
        with pytest.raises(InvalidArgumentError, match="metric='loss'"):
            studies.open_study(storage, "a", "minimize", "mae", None)


@pytest.mark.parametrize(
    "storage",
    ["sqlite://", "sqlite:///:memory:", "study.db", "nodatabase://a", "sqlite:////no/folder/a.db"],
)
def test_storages_that_workers_cannot_open(storage: str) -> None:
    with (
        pytest.raises(InvalidArgumentError, match="address of a database"),
        studies.storage_for(storage),
    ):
        pass


def test_a_storage_in_memory_is_refused() -> None:
    memory = optuna.storages.InMemoryStorage()
    with pytest.raises(InvalidArgumentError, match="other processes"), studies.storage_for(memory):
        pass


@pytest.mark.parametrize("make", [default_sampler, optuna.samplers.RandomSampler])
def test_first_parameters_follow_from_the_seed_and_the_number(make: Any) -> None:
    """Several processes draw what one draws, whichever of them asks."""
    alone = optuna.create_study(sampler=SeededSampler(make, 3))
    drawn = [alone.ask().suggest_float("rate", 0, 1) for _ in range(4)]
    shared = optuna.create_study()
    samplers = [SeededSampler(make, 3), SeededSampler(make, 3)]
    again = []
    for number in range(4):
        shared.sampler = samplers[number % 3 % 2]
        again.append(shared.ask().suggest_float("rate", 0, 1))
    assert again == drawn
    assert len(set(drawn)) == 4


def test_the_number_of_workers_that_ends_first() -> None:
    assert auto_parallel.decide({1: 1.0, 2: 1.5, 4: 2.5}, 8) == 4  # 8, 6, 5 steps
    assert auto_parallel.decide({1: 1.0, 2: 1.5, 4: 2.5}, 2) == 2  # 2, 1.5, 2.5
    assert auto_parallel.decide({1: 1.0, 8: 2.0, 16: 2.1}, 8) == 8
    assert auto_parallel.decide({1: 1.0, 2: 2.0}, 8) == 1  # workers hinder each other


@pytest.mark.parametrize(
    ("seconds", "trials", "may"),
    [(1.0, 8, False), (10.0, 100, False), (10.0, 200, True), (1000.0, 8, False)],
)
def test_measuring_costs_a_tenth_of_what_it_can_save(
    seconds: float, trials: int, may: bool
) -> None:
    # On two cores: 2 starts and 2 trials, at most, for a tenth of half of the time that is left.
    assert auto_parallel.may_measure(seconds, trials, [1, 2], start_up=5.0) == may


def test_the_first_trials_are_timed_and_count(monkeypatch: pytest.MonkeyPatch) -> None:
    request: Any = SimpleNamespace(cores_per_process=None, cores=None)
    measured: list[Any] = []

    def measure(request: Any, numbers: list[int]) -> dict[str, float]:
        measured.append(numbers)
        return {"1": 1.0, "2": 1.5, "4": 4.0}

    monkeypatch.setattr(auto_parallel.candidates, "numbers", lambda *_: [1, 2, 4])
    monkeypatch.setattr(auto_parallel, "_measure", measure)
    study = optuna.create_study()
    assert auto_parallel.choose(request, study, 400, 0) == (4, 4)
    now = datetime.datetime.now()
    ended = now + datetime.timedelta(seconds=20)
    state = optuna.trial.TrialState.COMPLETE
    study.add_trial(
        optuna.trial.FrozenTrial(0, state, 1.0, now, ended, {}, {}, {}, {}, {}, trial_id=0)
    )
    assert auto_parallel.choose(request, study, 8, 0) == (4, 8)
    assert measured == []
    assert auto_parallel.choose(request, study, 400, 0) == (2, 400)
    assert auto_parallel.choose(request, study, 4, 0) == (2, 4), "the study remembers"
    assert measured == [[1, 2, 4]]


def test_without_optuna_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UnavailableError, match=r"pip install 'nanotf\[search\]'"):
        nanotf.search(None, {}, None, "loss", 1)


@pytest.mark.parametrize("where", ["here", "elsewhere", "ended"])
def test_one_search_at_a_time(where: str) -> None:
    """Processes of other machines may share a study: nobody can tell whether they live."""
    study = optuna.create_study(study_name="a")
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as other:
        began = process_identity.start_of(other.pid)
        host = "another" if where == "elsewhere" else platform.node()
        study.set_user_attr(studies.SEARCH, [host, other.pid, began])
        if where == "here":
            with (
                pytest.raises(InvalidArgumentError, match=f"process {other.pid} searches"),
                studies.sole_search(study),
            ):
                pass
        if where == "ended":
            other.communicate()
        if where != "here":
            with studies.sole_search(study), studies.sole_search(study):
                assert study.user_attrs[studies.SEARCH] == studies.this_process()
            assert study.user_attrs[studies.SEARCH] is None


def test_a_storage_that_does_not_take_the_end_loses_no_result(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = optuna.create_study(study_name="a")

    def fail(*_: object) -> None:
        raise RuntimeError("database or disk is full")

    with (
        caplog.at_level(logging.WARNING, "nanotf"),
        monkeypatch.context() as patches,
        studies.sole_search(study),
    ):
        patches.setattr(optuna.Study, "set_user_attr", fail)
    assert caplog.text.count("does not take its end: RuntimeError: database or disk is full") == 1
    with studies.sole_search(study):  # it names this process still
        pass


def test_a_killed_worker_releases_the_journal(tmp_path: pathlib.Path) -> None:
    lock = studies.JournalLock(tmp_path / "lock")
    child = os.fork()
    if child == 0:
        try:
            lock.acquire()
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    assert lock.acquire()  # Optuna's own lock is released 30 s later
    assert lock.acquire()  # Ctrl-C between this and Optuna's `try`: nobody has released it
    lock.release()
