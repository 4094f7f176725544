"""Losses that fail in workers, and a check that the next `fit` works."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import tensorflow as tf
from parity import digits, small_cnn

import nanotf

FIT = {"batch_size": 50, "verbose": 0, "num_processes": 2}


def assert_next_fit_works(pids: tuple[int, ...]) -> None:
    for pid in pids:
        assert not psutil.pid_exists(pid), f"worker {pid} stayed behind"
    x, y = digits(100)
    history = small_cnn().fit(x, y, **FIT)
    assert np.isfinite(history.history["loss"][0])
    assert len(nanotf.worker_pids()) == 2


def failing_loss(action: Callable[[], Any]) -> Any:
    """Returns a loss that fails only in workers, while a step runs."""

    def loss(y_true: Any, y_pred: Any) -> Any:
        def fail(value: Any) -> Any:
            if "NANOTF_RANK" in os.environ:
                action()
            return value

        checked = tf.numpy_function(fail, [y_pred], y_pred.dtype)
        checked.set_shape(y_pred.shape)
        return tf.reduce_mean(checked, axis=-1)

    return loss
