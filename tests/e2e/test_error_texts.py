"""Texts of errors of a step, an item or a function: the reason, and the user's lines."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import nanotf
from nanotf import tracebacks

pytestmark = pytest.mark.both_generations

L = tf.keras.layers
LINES = 30
X, Y = np.ones((20, 4), "float32"), np.zeros(20, "int64")


def _fit(
    *layers: Any, loss: Any = "sparse_categorical_crossentropy", y: Any = Y, **more: Any
) -> None:
    model = nanotf.keras.Sequential([L.Input((4,)), *layers, L.Dense(3)])
    model.compile("sgd", loss)
    model.fit(X, y, verbose=0, num_processes=2, **more)


def _label_out_of_range() -> None:
    y = Y.copy()
    y[12] = 7
    _fit(y=y)


def _gather(y_true: Any, y_pred: Any) -> Any:
    return tf.gather(y_pred[:, 0], tf.cast(y_true, "int32") + 1000)  # no such row


def _in_an_own_loss() -> None:
    _fit(loss=_gather)


class Adds(tf.keras.layers.Layer):
    """Raises while it is traced for training, in a worker."""

    def call(self, x: Any, training: Any = None) -> Any:
        return self.add(x) if training else x

    def add(self, x: Any) -> Any:
        return x + tf.zeros([3, 5])  # four columns and five


def _while_a_layer_is_traced() -> None:
    _fit(Adds())


class Looks(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["no such number"]  # of the user's


def _in_a_callback() -> None:
    _fit(callbacks=[Looks()])


def _divide(item: int) -> float:
    return 1 / (item - 2)  # the third item


def _in_an_item() -> None:
    nanotf.map(_divide, range(4), 2, verbose=0)


@nanotf.nano(num_processes=2)
def _loop(model: Any) -> None:
    raise RuntimeError("after the last step")  # of a loop


def _in_a_loop() -> None:
    _loop(tf.keras.Sequential([L.Input((4,)), L.Dense(3)]))


# What fails; its reason; a piece of the user's line beneath the call, if there is one.
CASES: dict[str, tuple[Callable[[], None], str, str]] = {
    "label": (_label_out_of_range, "label value of 7", "_fit(y=y)"),
    "loss": (_in_an_own_loss, "1000 is not in", "# no such row"),
    "layer": (_while_a_layer_is_traced, "Dimensions must be equal", "# four columns and five"),
    "callback": (_in_a_callback, "no such number", "# of the user's"),
    "item": (_in_an_item, "division by zero", "# the third item"),
    "loop": (_in_a_loop, "after the last step", "# of a loop"),
}


def _printed(name: str) -> tuple[Exception, str]:
    with pytest.raises(Exception) as caught:
        CASES[name][0]()
    error = caught.value
    return error, "".join(traceback.format_exception(type(error), error, error.__traceback__))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.every_case
def test_reason_and_line(name: str) -> None:
    error, text = _printed(name)
    _, reason, line = CASES[name]
    assert reason in "\n".join(str(error).splitlines()[:3])
    assert line in text
    assert text.count(__file__) >= 2
    lines = text.splitlines()
    assert len(lines) <= LINES, text
    ours = [
        each for each in lines if each.startswith("  File") and tracebacks.is_nanotfs(_file(each))
    ]
    assert len(ours) <= 1, text
    if name != "callback":  # which this process has called
        assert isinstance(error, nanotf.errors.WorkerError)
        assert reason in error.remote_traceback
        assert error.log_tail not in str(error) or not error.log_tail


def _file(line: str) -> str:
    return line.split('"')[1]


def _raise_bare(item: int) -> None:
    raise ValueError


def test_an_error_without_a_reason() -> None:
    with pytest.raises(ValueError, match=r"^Item 0 of _raise_bare .* raised ValueError in:\n"):
        nanotf.map(_raise_bare, range(1), 1, verbose=0)


class Odd(Exception):
    """Cannot be described."""

    @property
    def message(self) -> Any:
        return self.args[0]

    def __str__(self) -> str:
        return str(self.args[0])


def _raise_odd(item: int) -> None:
    raise Odd


def test_an_error_that_cannot_be_described() -> None:
    with pytest.raises(Odd) as caught:
        nanotf.map(_raise_odd, range(1), 1, verbose=0)
    assert isinstance(caught.value, nanotf.errors.WorkerError)
    assert "_raise_odd" in caught.value.remote_traceback


def test_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tracebacks.VARIABLE, "full")
    error, text = _printed("loss")
    assert isinstance(error, nanotf.errors.WorkerError)
    assert error.remote_traceback.strip() in str(error)
    assert len(text.splitlines()) > LINES
