"""`SparseAdam` computes its formula on sparse gradients, and Adam's on dense ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_state
from sparse_models import OPTIONS, O, data, model_of

from nanotf.compat import keras_common, versions
from nanotf.compat.generation import generation
from nanotf.errors import InvalidArgumentError
from nanotf.keras.optimizers import SparseAdam

IS_KERAS_3 = versions.is_keras_3()


def _reference(
    table: np.ndarray, gradients: Any, steps: int, *, amsgrad: bool, rate: float = 0.1
) -> np.ndarray:
    """Computes the docstring's formulas, row by row."""
    table, m, v, largest = table.copy(), *(np.zeros_like(table) for _ in range(3))
    for step in range(1, steps + 1):
        indices, values = gradients[step - 1]
        for i in set(indices.tolist()):
            g = values[indices == i].sum(axis=0)
            m[i] = 0.9 * m[i] + (1 - 0.9) * g
            v[i] = 0.999 * v[i] + (1 - 0.999) * g**2
            largest[i] = np.maximum(largest[i], v[i])
            scale = rate * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
            table[i] -= scale * m[i] / (np.sqrt(largest[i] if amsgrad else v[i]) + 1e-7)
    return table


def _variable(value: Any) -> Any:
    return generation().make_variable(value, "table")


def _steps(steps: int = 6) -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(1)
    return [(random.integers(0, 8, 9), random.normal(size=(9, 3))) for _ in range(steps)]


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.both_generations
def test_the_formula_with_duplicates(float64: None, jit_compile: bool, amsgrad: bool) -> None:
    gradients = _steps()
    start = np.random.default_rng(2).normal(size=(11, 3))
    optimizer, table = SparseAdam(0.1, amsgrad=amsgrad), _variable(start)
    optimizer.build([table])

    @tf.function(reduce_retracing=True, jit_compile=jit_compile)
    def step(values: Any, indices: Any) -> None:
        optimizer.apply_gradients([(tf.IndexedSlices(values, indices, [11, 3]), table)])

    for indices, values in gradients:
        step(tf.constant(values), tf.constant(indices))
    expected = _reference(start, gradients, 6, amsgrad=amsgrad)
    # Keras 2 keeps its learning rate in float32 if floatx was float32 on import.
    np.testing.assert_allclose(keras_common.tf_variable(table), expected, rtol=1e-10)
    assert np.array_equal(keras_common.tf_variable(table)[8:], start[8:])


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.both_generations
def test_dense_gradients_are_adams(float64: None, name: str) -> None:
    tables = []
    for make in (SparseAdam, O.Adam):
        optimizer, table = make(0.1, **OPTIONS[name]), _variable(np.ones((11, 3)))
        for indices, values in _steps():
            dense = tf.convert_to_tensor(tf.IndexedSlices(values, indices, [11, 3]))
            optimizer.apply_gradients([(dense, table)])
        tables.append(keras_common.tf_variable(table).numpy())
    np.testing.assert_array_equal(*tables)


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("name", ["clipnorm", "global_clipnorm", "clipvalue"])
@pytest.mark.both_generations
def test_clipping_sees_the_sum_of_a_row(float64: None, name: str, jit_compile: bool) -> None:
    """In a first step that touches all rows, Adam computes the same."""
    if jit_compile and versions.keras_version() < (2, 16):
        pytest.skip("XLA of TensorFlow 2.15 must prove the number of unique rows")
    values = tf.constant(np.random.default_rng(0).normal(size=(6, 3)))
    gradient = tf.IndexedSlices(values, tf.constant([0, 1, 1, 2, 2, 2]), tf.constant([3, 3]))
    options = {"epsilon": 0.1, **OPTIONS[name]}
    found = _after_a_step(SparseAdam(0.1, **options), gradient, jit_compile)
    expected = _after_a_step(O.Adam(0.1, **options), tf.convert_to_tensor(gradient))
    # Keras's Adam rounds its betas to float32 for the bias correction.
    np.testing.assert_allclose(found, expected, rtol=1e-8)


def _after_a_step(optimizer: Any, gradient: Any, jit_compile: bool = False) -> np.ndarray:
    table = _variable(np.ones((3, 3)))
    optimizer.build([table])

    @tf.function(jit_compile=jit_compile)
    def step(gradient: Any) -> None:
        optimizer.apply_gradients([(gradient, table)])

    step(gradient)
    return np.asarray(keras_common.tf_variable(table).numpy())


@pytest.mark.thorough
def test_a_model_compiled_by_xla(float64: None) -> None:
    x, y = data(48)
    models = []
    for jit_compile in (True, False):
        model = model_of(SparseAdam(0.01, clipnorm=0.01), jit_compile=jit_compile)
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
        models.append(model)
    assert_same_state(*models)


REFUSED = {"gradient_accumulation_steps": 2, "loss_scale_factor": 4.0}


@pytest.mark.skipif(not IS_KERAS_3, reason="options of Keras 3")
@pytest.mark.parametrize("name", REFUSED)
def test_options_that_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"Received: {name}={REFUSED[name]}"):
        SparseAdam(**{name: REFUSED[name]})
