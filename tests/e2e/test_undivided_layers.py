"""Layers whose rows depend on each other run undivided, and nanotf says so."""

from __future__ import annotations

from typing import Any

import loops
import numpy as np
import pytest
import tensorflow as tf
from loops import dense

import nanotf
from nanotf import errors
from nanotf.keras import nano

two = nano(num_processes=2)


class Centred(tf.keras.layers.Layer):  # type: ignore[misc]
    """A layer whose rows depend on each other."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x: Any) -> Any:
        return self.scale * (x - tf.reduce_mean(x, axis=0))


def test_layers_whose_rows_depend_on_each_other(
    float64: None, capfd: pytest.CaptureFixture[str]
) -> None:
    def program(run: Any) -> Any:
        layer, marked = Centred(), nanotf.whole(Centred())

        @run
        def outputs(x: Any) -> Any:
            return layer(x), marked(x)

        x = loops.rows(7)[0]
        layer(x), marked(x)
        return outputs(x)

    for ours, theirs in zip(program(two), program(lambda f: f), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_fit_says_that_a_layer_runs_undivided(capfd: pytest.CaptureFixture[str]) -> None:
    layers = [tf.keras.layers.Input((loops.rows(7)[0].shape[-1],)), Centred()]
    model = nanotf.accelerate(tf.keras.Sequential(layers))
    x = loops.rows(7)[0]
    expected = model.predict(x, batch_size=7, verbose=0)
    found = model.predict(x, batch_size=7, verbose=0, num_processes=2)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    said = [line for line in capfd.readouterr().err.splitlines() if "undivided" in line]
    assert len(said) == 1
    assert said[0].startswith("nanotf: ")


class MoreInGraphs(tf.keras.layers.Layer):  # type: ignore[misc]
    """A layer that returns one tensor outside a tf.function, and two inside."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x: Any) -> Any:
        scaled = self.scale * x
        return [scaled] if tf.executing_eagerly() else [scaled, 2.0 * scaled]


def test_a_layer_with_more_outputs_in_a_graph(
    float64: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each graph has its own proof, and eager code another."""
    layer, x = MoreInGraphs(), loops.rows(7)[0]
    layer(x)
    traced = [tf.function(lambda x: layer(x)), tf.function(lambda x: layer(x + 0.0))]
    for one, double in two(lambda x: [function(x) for function in traced])(x):
        np.testing.assert_allclose(one, x)
        np.testing.assert_allclose(double, 2.0 * x)
    assert "undivided" not in capfd.readouterr().err


def test_whole_takes_layers() -> None:
    with pytest.raises(errors.InvalidArgumentTypeError, match=r"whole\(\) takes a layer"):
        nanotf.whole(3)


def test_a_function_that_calls_no_layer(caplog: pytest.LogCaptureFixture) -> None:
    two(lambda: 3)()
    assert "called no layer that could be divided" in caplog.text
    caplog.clear()
    model = dense()
    two(lambda x: model(x))(loops.rows(4)[0])
    assert "no layer" not in caplog.text
