"""Warnings that Keras gives when it traces a step arrive, once, when workers trace it."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import nanotf

pytestmark = pytest.mark.both_generations


class Stopping(tf.keras.layers.Layer):
    def call(self, x: Any) -> Any:
        warnings.warn("a layer stops gradients", stacklevel=1)
        return tf.stop_gradient(x)


@pytest.mark.parametrize("workers", [None, 2])
def test_gradients_that_do_not_exist(workers: int | None, caplog: pytest.LogCaptureFixture) -> None:
    layers = tf.keras.layers
    model = nanotf.keras.Sequential(
        [layers.Input((4,)), layers.Dense(3), Stopping(), layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    tensorflows = logging.getLogger("tensorflow")
    tensorflows.addHandler(caplog.handler)
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(2):
                model.fit(np.ones((5, 4)), np.ones((5, 1)), verbose=0, num_processes=workers)
    finally:
        tensorflows.removeHandler(caplog.handler)
    texts = [str(each.message) for each in found] + [r.getMessage() for r in caplog.records]
    assert any("Gradients do not exist for variables" in text for text in texts)
    assert "a layer stops gradients" in texts
