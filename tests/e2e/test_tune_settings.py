"""`fit(num_processes="auto", tune=...)`: settings that are measured beside the number."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import nanotf
from nanotf.cli import main
from nanotf.compat.versions import keras_version
from nanotf.machine import neighbours
from nanotf.parent.auto import choice_cache, first_epochs, rule, timed_fits
from nanotf.parent.auto.timed_fits import Measured

PASS = "auto_mixed_precision_onednn_bfloat16"
X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without XDG_CACHE_HOME: another environment needs another import of TensorFlow for workers.
    monkeypatch.setattr(choice_cache, "path", lambda: tmp_path / "tuning.json")
    # What is measured is remembered for the cores, which pools of other runs would change.
    monkeypatch.setattr(neighbours, "taken_cores", dict)


def _model(dtype: str = "float32", jit_compile: bool = False) -> Any:
    tf.keras.utils.set_random_seed(3)
    layers = [
        tf.keras.layers.Input((4,)),
        tf.keras.layers.Dense(8, "tanh", dtype=dtype),
        tf.keras.layers.Dense(1, dtype=dtype),
    ]
    model = nanotf.Sequential(layers)
    model.compile("sgd", "mse", jit_compile=jit_compile)
    return model


def _fit(model: Any, **arguments: Any) -> Any:
    return model.fit(X, X[:, :1], batch_size=16, epochs=2, shuffle=False, verbose=0, **arguments)


def _with_times(monkeypatch: pytest.MonkeyPatch, times: dict[Any, float]) -> list[Any]:
    """Replaces the measuring: a step takes `times` by compilation and type. Returns the trials."""
    tried: list[Any] = []

    def measure(trial: Any, number: int, *_: Any) -> Measured:
        of_graphs = tf.config.optimizer.get_experimental_options().get(PASS)
        dtype = "graphs" if of_graphs else trial.model.layers[-1].compute_dtype
        setting = bool(trial.model.jit_compile), dtype
        tried.append((number, *setting))
        return Measured(number, times[setting] * number)

    monkeypatch.setattr(timed_fits, "measure", measure)
    # Any fit is worth measuring, however short it is.
    monkeypatch.setattr(rule, "SHARE", 1e9)
    monkeypatch.setattr(first_epochs, "MEASURED_STEPS", 1)
    return tried


@pytest.mark.skipif(keras_version() < (3,), reason="bf16 is not tried with Keras 2")
def test_what_is_faster_is_used_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fast = (False, "float32"), (True, "bfloat16")
    times = {plain: 100.0, (True, "float32"): 90.0, fast: 50.0, (True, "graphs"): 51.0}
    tried = _with_times(monkeypatch, times)
    model = _model()
    history = _fit(model, num_processes="auto", tune=("jit_compile", "bf16"))
    assert tried[-4:] == [(1, *setting) for setting in times]
    assert history.nanotf.tuned == ("jit_compile", "bf16")
    assert str(history.nanotf).startswith("fit in one process, tuned: jit_compile, bf16")
    assert history.epoch == [0, 1], "one training, of which the second epoch was tuned"
    assert not model.jit_compile
    assert {layer.compute_dtype for layer in (model, *model.layers)} == {"float32"}
    assert model.predict(X, verbose=0).dtype == np.float32
    # The second call knows.
    tried.clear()
    losses = history.nanotf.tuned_losses
    _check_losses(history, *losses)
    history = _fit(_model(), num_processes="auto", tune=("jit_compile", "bf16"))
    assert history.nanotf.tuned == ("jit_compile", "bf16")
    assert list(map(list, history.nanotf.tuned_losses)) == list(map(list, losses))
    assert tried == []
    expected = _fit(_model("mixed_bfloat16", jit_compile=True)).history["loss"]
    np.testing.assert_allclose(history.history["loss"], expected, rtol=1e-6)
    settings = [m["setting"] for e in choice_cache.entries().values() for m in e["measured"]]
    assert "jit_compile=True, bf16" in settings


def _check_losses(history: Any, plain: Any, tuned: Any) -> None:
    """Checks losses of the same steps, in float32 and in bfloat16."""
    assert plain[0] > plain[-1], "the copy was trained"
    np.testing.assert_allclose(tuned, plain, rtol=0.05)
    text = str(history.nanotf)
    assert f"Losses of the same steps: {plain[0]:.4g} " in text
    assert f"; tuned: {tuned[0]:.4g} " in text


def test_what_is_slower_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {(False, "float32"): 100.0, (True, "float32"): 200.0, (False, "bfloat16"): 98.0}
    tried = _with_times(monkeypatch, times)
    history = _fit(_model(), num_processes="auto", tune=("jit_compile", "bf16"))
    times[False, "graphs"] = 98.0
    settings = [s for s in times if keras_version() >= (3,) or s[1] != "bfloat16"]
    assert tried[-len(settings) :] == [(1, *setting) for setting in settings]
    assert history.nanotf.tuned == ()
    np.testing.assert_allclose(history.history["loss"], _fit(_model()).history["loss"], rtol=1e-5)


def test_graphs_in_bfloat16_are_used_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {(False, "float32"): 100.0, (False, "bfloat16"): 60.0, (False, "graphs"): 50.0}
    _with_times(monkeypatch, times)
    before = tf.config.optimizer.get_experimental_options()
    history = _fit(_model(), num_processes="auto", tune=("bf16",))
    assert history.nanotf.tuned == ("bf16 of graphs",)
    plain, tuned = history.nanotf.tuned_losses
    assert len(plain) == timed_fits.LOSS_ROUNDS
    _check_losses(history, plain, tuned)
    assert tf.config.optimizer.get_experimental_options() == before
    np.testing.assert_allclose(history.history["loss"], _fit(_model()).history["loss"], rtol=1e-2)


def test_a_compiled_step_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_times(monkeypatch, {(False, "float32"): 100.0, (True, "float32"): 50.0})
    _fit(_model(), num_processes="auto", tune=("jit_compile",))
    model = _model()
    history = _fit(model, num_processes="auto", tune=("jit_compile",))
    assert history.nanotf.tuned == ("jit_compile",)
    expected = _fit(_model(jit_compile=True)).history["loss"]
    np.testing.assert_allclose(history.history["loss"], expected, rtol=1e-6)
    assert not model.jit_compile


def test_settings_of_a_short_fit_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = _with_times(monkeypatch, {})
    monkeypatch.setattr(rule, "SHARE", 1e-9)
    assert _fit(_model(), num_processes="auto", tune=("jit_compile", "bf16")).nanotf.tuned == ()
    assert tried == []
    assert choice_cache.entries() == {}


def test_nothing_is_tried_that_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = _with_times(monkeypatch, {(False, "float32"): 100.0})
    _fit(_model(), num_processes="auto")
    assert tried
    assert {tuple(setting) for _, *setting in tried} == {(False, "float32")}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"tune": ("fp8",), "num_processes": "auto"}, "Received: 'fp8' in tune=('fp8',)"),
        ({"tune": "bf16", "num_processes": "auto"}, "Received: tune='bf16'"),
        ({"tune": 3, "num_processes": "auto"}, "Received: tune=3"),
        ({"tune": ("bf16",), "num_processes": 2}, "and num_processes=2"),
        ({"tune": ("bf16",)}, "and num_processes=None"),
    ],
)
def test_refused(arguments: Any, text: str) -> None:
    with pytest.raises(nanotf.errors.NanoError, match=re.escape(text)):
        _fit(_model(), **arguments)


@pytest.mark.parametrize(
    ("options", "text"),
    [(("-n", "auto", "--tune", "bf16,fp8"), "'fp8'"), (("-n", "2", "--tune", "bf16"), "auto")],
)
def test_the_command_refuses(capsys: pytest.CaptureFixture[str], options: Any, text: str) -> None:
    assert main(["run", *options, "no_such.py"]) == 2
    assert text in capsys.readouterr().err
