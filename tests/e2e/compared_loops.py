"""A loop in one process and with two workers, compared, for the tests of `@nano`."""

from __future__ import annotations

import functools
from typing import Any

import loops
import numpy as np
import pytest
import tensorflow as tf
from loops import cross_entropy, dense, plain_step, plain_train

from nanotf.keras import nano, nano_multiprocessing

OPTIMIZERS = {
    "sgd": lambda: tf.keras.optimizers.SGD(0.1),
    "momentum": lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: tf.keras.optimizers.Adam(0.01),
    "clipped": lambda: tf.keras.optimizers.Adam(0.01, global_clipnorm=0.1),
}


@pytest.fixture(
    scope="module",
    params=["shm", "grpc"],
)
def run_on(request: pytest.FixtureRequest) -> Any:
    """Returns `nano` for two workers on one of the transports."""
    return functools.partial(nano, num_processes=2, transport=request.param)


def train_both(
    run_on: Any,
    optimizer: Any = OPTIMIZERS["sgd"],
    loss: Any = cross_entropy,
    step: Any = plain_step,
    model: Any = dense,
    data: Any = loops.dataset,
    graph: bool = True,
) -> tuple[Any, Any]:
    """Trains two equal models, in one process and with two workers; they must agree."""
    found, expected = (model(), optimizer()), (model(), optimizer())
    plain = tf.function(step) if graph else step
    theirs = plain_train(expected[0], data(), loss(), expected[1], plain)
    shared = nano_multiprocessing(tf.function(step) if graph else step)
    ours = run_on()(plain_train)(found[0], data(), loss(), found[1], shared)
    np.testing.assert_allclose(ours, theirs, rtol=loops.tolerance())
    loops.assert_same_variables(found[0].variables, expected[0].variables)
    mine, other = loops.variables_of(found[1]), loops.variables_of(expected[1])
    loops.assert_same_variables(mine, other)
    return found, expected


def assert_follows_one_process(run_on: Any, program: Any) -> None:
    """Asserts that a program does the same with two workers; it takes both decorators."""
    found = tf.nest.flatten(program(run_on(), nano_multiprocessing))
    expected = tf.nest.flatten(program(lambda f: f, lambda f: f))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)
