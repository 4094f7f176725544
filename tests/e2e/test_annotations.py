# No `from __future__ import annotations` here: Python evaluates the annotations of functions.
"""Functions that name something only in annotations reach the workers; AutoGraph converts them."""

from typing import Any, Optional

import numpy as np
import pytest
import tensorflow as tf

from nanotf import nano

Scalar = Optional[tf.Tensor]  # noqa: UP045


def total(x: tf.Tensor, times: "Scalar" = None) -> Scalar:
    found = tf.zeros((), x.dtype)
    for _ in tf.range(2 if times is None else times):
        found += tf.reduce_mean(x**2)
    return found


@pytest.mark.both_generations
def test_names_in_annotations() -> None:
    @nano(num_processes=2)
    def program(x: Any) -> Any:
        return tf.function(total)(tf.constant(x))

    x = np.arange(6.0)
    np.testing.assert_allclose(program(x), 2 * np.mean(x**2))
