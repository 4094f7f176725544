"""`nanotf.search` on real workers."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
from typing import Any

import numpy as np
import optuna
import pytest
import tensorflow as tf
from processes import run_script

import nanotf
from nanotf.errors import InvalidArgumentError, InvalidArgumentTypeError

pytestmark = pytest.mark.own_pool

keras = tf.keras
X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
STATE = optuna.trial.TrialState


def build(units: int, scale: float = 1.0) -> Any:
    model = keras.Sequential([keras.layers.Dense(units), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse", loss_weights=[scale])
    return model


def _states(result: Any) -> list[str]:
    return [row["state"] for row in result.table]


def test_a_study_survives_dead_workers_and_continues(tmp_path: pathlib.Path) -> None:
    """One of two workers dies, trials with a large loss are pruned, and a second call continues."""
    marker = tmp_path / "died"

    def mortal(units: int, scale: float) -> Any:
        with contextlib.suppress(FileExistsError):
            marker.touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
        return build(units, scale)

    def call(trials: int) -> Any:
        return nanotf.search(
            mortal,
            {"units": (2, 8), "scale": [1e-3, 1e6]},
            (X, Y),
            "loss",
            trials,
            2,
            pruner=optuna.pruners.ThresholdPruner(upper=10.0),
            storage=f"sqlite:///{tmp_path}/study.db",
            study_name="a",
            seed=1,
            epochs=2,
            verbose=0,
        )

    first = call(6)
    assert sorted(_states(first)).count("fail") == 1  # of the worker that died
    ends = {row["state"]: set() for row in first.table}
    for row in first.table:
        ends[row["state"]].add((row["params"].get("scale"), row["epochs"]))
    assert ends["complete"] == {(1e-3, 2)}
    assert ends["pruned"] == {(1e6, 1)}
    assert len(first.table) == 7
    lost = next(trial for trial in first.study.trials if trial.state == STATE.FAIL)
    [retry] = [t for t in first.study.trials if t.user_attrs.get("nanotf_retry_of") == lost.number]
    assert retry.params == lost.params
    # The best model is the trained one.
    scale = first.best_params["scale"]
    history = first.best_model.fit(X, Y, epochs=1, verbose=0).history  # continues
    assert history["loss"][0] < first.best_value
    assert first.best_model.layers[0].units == first.best_params["units"]
    assert scale == 1e-3

    again = call(6)
    assert len(again.study.trials) == 7 and again.parallel == 0
    assert again.best_value == first.best_value
    model = again.best_model  # trained again
    expected = model.evaluate(X, Y, verbose=0)
    assert expected < again.best_value
    assert len(call(7).table) == 8


class _Deadly:
    """Kills the first process that pickles it."""

    def __init__(self, marker: pathlib.Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        if not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return _Deadly, (self.marker,)


@pytest.mark.parametrize("trials", [4, 1])  # one: the model that is lost is the best
def test_a_worker_dies_between_the_end_of_its_trial_and_its_result(
    trials: int, tmp_path: pathlib.Path
) -> None:
    """The trial counts, and is not run again; its model is trained again."""

    def deadly(units: int) -> Any:
        model = build(units)
        model.note = _Deadly(tmp_path / "died")
        return model

    space = {"units": (2, 8)}
    options = {"seed": 1, "epochs": 1, "verbose": 0}
    plain = nanotf.search(build, space, (X, Y), "loss", trials, 2, **options)
    found = nanotf.search(deadly, space, (X, Y), "loss", trials, 2, **options)
    assert (tmp_path / "died").exists()
    assert _states(found) == ["complete"] * trials

    def rows(result: Any) -> Any:
        return sorted((row["number"], row["params"]["units"]) for row in result.table)

    assert rows(found) == rows(plain)
    np.testing.assert_allclose(found.best_value, plain.best_value, rtol=1e-5)
    pairs = zip(found.best_model.get_weights(), plain.best_model.get_weights(), strict=True)
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_exceptions_of_trials() -> None:
    def fails(units: int) -> Any:
        if units < 6:
            raise ZeroDivisionError(f"{units} units")
        return build(units)

    def call(**options: Any) -> Any:
        return nanotf.search(
            fails, {"units": (2, 8)}, (X, Y), "loss", 5, 2, seed=0, verbose=0, **options
        )

    with pytest.raises(ZeroDivisionError, match="units"):
        call()
    result = call(catch=ZeroDivisionError)
    errors = {row["error"] for row in result.table if row["params"]["units"] < 6}
    assert errors == {
        f"ZeroDivisionError: {row['params']['units']} units"
        for row in result.table
        if row["state"] == "fail"
    }
    assert len(result.table) == 5
    with pytest.raises(InvalidArgumentError, match=r"the logs have \['loss'\]"):
        nanotf.search(
            build, {"units": (2, 8)}, (X, Y), "acc", 1, 1, direction="maximize", verbose=0
        )


def test_what_the_user_sees(capfd: pytest.CaptureFixture[str]) -> None:
    """A bar with the best value, and prints with the trial's number, also of a continued study."""

    def speak(units: int) -> Any:
        print("units", units)
        return build(units)

    def call(**options: Any) -> tuple[Any, list[str], list[str]]:
        result = nanotf.search(
            speak, {"units": (2, 8)}, (X, Y), "loss", 3, 2, seed=0, epochs=2, **options
        )
        said = capfd.readouterr()
        return result, said.out.splitlines(), said.err.splitlines()

    result, printed, shown = call()
    expected = [f"[{row['number']}] units {row['params']['units']}" for row in result.table]
    assert sorted(printed) == expected  # Keras's bars are quiet
    best = f"best loss {result.best_value:.4g} (trial {result.best_trial.number})"
    assert shown[0].startswith("nanotf: search 0/3") and shown[-1].startswith("nanotf: search 3/3")
    assert shown[-1].endswith(best)
    _, printed, shown = call(output="drop", verbose=0)
    assert (printed, shown) == ([], [])


@pytest.mark.thorough
def test_the_number_of_workers_changes_no_trial() -> None:
    def data(batch_size: int) -> Any:
        return tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch_size)

    def call(parallel: Any, **options: Any) -> Any:
        space = {"units": (2, 8), "batch_size": [8, 16]}
        return nanotf.search(
            build, space, data, "loss", 4, parallel, seed=4, verbose=0, epochs=2, **options
        )

    one, two, auto = call(1), call(2, sampler=None), call("auto")
    for other in (two, auto):
        assert [row["params"] for row in other.table] == [row["params"] for row in one.table]
        np.testing.assert_allclose(
            [row["value"] for row in other.table], [row["value"] for row in one.table], rtol=1e-4
        )
    other = call(2, sampler=optuna.samplers.RandomSampler())
    assert len({row["params"]["units"] for row in other.table}) > 1


KILLED = """
import os, pathlib, signal
import nanotf
import numpy as np

PROGRAM = os.getpid()


def build(units):
    import tensorflow as tf

    began = pathlib.Path(f"began-{os.getpid()}-{units}")
    if not pathlib.Path("again").exists() and len(list(pathlib.Path(".").glob("began-*"))) >= 3:
        os.kill(PROGRAM, signal.SIGKILL)
    began.touch()
    model = tf.keras.Sequential([tf.keras.layers.Dense(units), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


x = np.ones((32, 4), "float32")
result = nanotf.search(
    build, {"units": (2, 64)}, (x, x[:, :1]), "loss", 5, 2,
    storage="sqlite:///study.db", study_name="a", verbose=0,
)
print(" ".join(row["state"] for row in result.table))
"""


@pytest.mark.thorough
def test_the_program_is_killed(tmp_path: pathlib.Path) -> None:
    """The same script then completes the study; trials that ran are tried again."""
    killed = run_script(tmp_path, KILLED, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (tmp_path / "again").touch()
    states = run_script(tmp_path, KILLED).stdout.split()
    assert states.count("complete") == 5
    assert set(states) == {"complete", "fail"}


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"build": build(2)}, InvalidArgumentTypeError, "`build`"),
        ({"build": lambda other: None}, InvalidArgumentTypeError, "Add other to `space`"),
        ({"build": lambda: None}, InvalidArgumentTypeError, "units, which neither takes"),
        ({"space": {"units": 3}}, InvalidArgumentTypeError, "units"),
        ({"data": (X, Y, Y, Y)}, InvalidArgumentError, "a tuple of 4"),
        ({"data": [X, Y]}, InvalidArgumentTypeError, "a tuple such as"),
        ({"data": tf.data.Dataset.range(3)}, InvalidArgumentTypeError, "Pass a function"),
        ({"data": {"x": X, "z": Y}}, InvalidArgumentTypeError, "fit. Received: z"),
        ({"epoch": 3}, InvalidArgumentTypeError, "fit. Received: epoch"),
        ({"x": X}, InvalidArgumentError, "once. Received: x"),
        ({"metric": None}, InvalidArgumentTypeError, "`metric`"),
        ({"metric": "val_accuracy"}, InvalidArgumentError, "`direction` must be given"),
        ({"direction": "max"}, InvalidArgumentError, "`direction`"),
        ({"trials": 0}, InvalidArgumentError, "`trials`"),
        ({"trials": 2.0}, InvalidArgumentTypeError, "`trials`"),
        ({"parallel": 0}, InvalidArgumentError, "`parallel`"),
        ({"parallel": "all"}, InvalidArgumentError, "'auto'"),
        ({"parallel": 10_000, "trials": 10_000}, InvalidArgumentError, "10000"),
        ({"sampler": 3}, InvalidArgumentTypeError, "`sampler`"),
        ({"sampler": lambda seed: seed}, InvalidArgumentTypeError, "returns int"),
        ({"sampler": lambda: None}, InvalidArgumentTypeError, "called with a seed"),
        ({"pruner": "median"}, InvalidArgumentTypeError, "`pruner`"),
        ({"storage": 3}, InvalidArgumentTypeError, "`storage`"),
        ({"storage": "sqlite:///a.db"}, InvalidArgumentError, "belong together"),
        ({"seed": -1}, InvalidArgumentError, "`seed`"),
        ({"catch": "ValueError"}, InvalidArgumentTypeError, "`catch`"),
        ({"max_restarts": -1}, InvalidArgumentError, "`max_restarts`"),
        ({"verbose": 3}, InvalidArgumentError, "`verbose`"),
        ({"output": "show"}, InvalidArgumentError, "`output`"),
    ],
)
def test_bad_input(change: dict[str, Any], kind: type[Exception], text: str) -> None:
    given = {
        "build": build,
        "space": {"units": (2, 8)},
        "data": {"x": X, "y": Y},
        "metric": "loss",
        "trials": 1,
        "parallel": 1,
        "verbose": 0,
    }
    before = nanotf.worker_pids()
    with pytest.raises(kind, match=text):
        nanotf.search(**{**given, **change})
    assert nanotf.worker_pids() == before
