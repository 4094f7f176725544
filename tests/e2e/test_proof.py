"""A layer is divided because its graph says that its rows are apart; else it runs whole."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

import coupled_layers
import numpy as np
import parity
import pytest
import tensorflow as tf
from processes import ROOT, SECONDS

from nanotf.keras import Model

L = tf.keras.layers
pytestmark = pytest.mark.both_generations


@pytest.mark.thorough
def test_verdicts() -> None:
    """Every layer is decided as it is, with the operation and the line that couple rows."""
    script = pathlib.Path(coupled_layers.__file__)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    said = subprocess.check_output(command, env=environment, text=True, timeout=SECONDS)
    verdicts = dict(line.split(": ", 1) for line in said.splitlines() if ": " in line)
    assert {name for name in coupled_layers.APART if verdicts[name] != "apart"} == set()
    assert {name for name in coupled_layers.COUPLED if verdicts[name] == "apart"} == set()
    lines = [verdicts[name] for name in ("capacity", "centred", "clipped gradient")]
    assert all(f"{script.name}, line " in line for line in lines)


def branched(names: list[str]) -> Any:
    """Returns a model with an output for each layer, after and before trained layers."""
    tf.keras.utils.set_random_seed(3)
    table = {**coupled_layers.APART, **coupled_layers.COUPLED}
    inputs, outputs = [], []
    for place, name in enumerate(names):
        x = L.Input(coupled_layers.shape_of(name), dtype=coupled_layers.dtype_of(name))
        hidden = x if name == "embedding" else L.Dense(x.shape[-1], "tanh")(x)
        inputs.append(x)
        outputs.append(L.Dense(2, name=f"end_{place}")(L.Flatten()(table[name]()(hidden))))
    model = Model(inputs, outputs)
    model.compile(tf.keras.optimizers.SGD(0.05), "mse")
    return model


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("kind", "rows", "batch_size", "every"),
    [
        ("COUPLED", 24, 8, 4),
        pytest.param("APART", 22, 9, 1, marks=pytest.mark.thorough),
        pytest.param("APART", 24, 8, 1, marks=pytest.mark.thorough),
        pytest.param("COUPLED", 22, 9, 1, marks=pytest.mark.thorough),
    ],
)
def test_values(float64: None, kind: str, rows: int, batch_size: int, every: int) -> None:
    """Layers in one model, the coupled ones whole and the rest divided: one process's numbers.

    The layers beside a coupled one are divided: the model is not whole because of it.
    """
    random = np.random.default_rng(5)
    names = list(getattr(coupled_layers, kind))[::every]
    if not hasattr(tf.keras, "version") and "loss per row" in names:
        names.remove("loss per row")  # Keras 2 does not take it beside others
    x = [
        random.integers(0, 10, (rows, *coupled_layers.shape_of(name)))
        if name == "embedding"
        else random.normal(size=(rows, *coupled_layers.shape_of(name)))
        for name in names
    ]
    y = [random.normal(size=(rows, 2)) for _ in names]
    results = []
    for options in ({}, {"num_processes": 2}):
        model = branched(names)
        tf.keras.utils.set_random_seed(4)
        history = model.fit(
            x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0, **options
        )
        weights = model.get_weights()
        evaluated = model.evaluate(x, y, batch_size=batch_size, verbose=0, **options)
        predicted = model.predict(x, batch_size=batch_size, verbose=0, **options)
        results.append((history.history, weights, evaluated, predicted))
    (theirs, weights, evaluated, predicted), (ours, found, now_evaluated, now_predicted) = results
    parity.assert_same_history(ours, theirs)
    for one, other in zip(found, weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(now_evaluated, evaluated, rtol=1e-9)
    for one, other in zip(now_predicted, predicted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10)
