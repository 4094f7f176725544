"""Mistakes that users make: each error says its reason and the user's lines first.

`MISTAKES` has one row for each. The comment "here" marks the line that the error must name.
"""

from __future__ import annotations

import linecache
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import nanotf
from nanotf import tracebacks

pytestmark = pytest.mark.both_generations

L = tf.keras.layers
LINES = 30  # of what Python prints for an error that nobody catches
X, Y = np.ones((40, 4), "float32"), np.zeros(40, "int64")
BAD = np.where(np.arange(40) == 30, 7, Y)  # a label that is out of range
CROSSENTROPY = "sparse_categorical_crossentropy"
GENERATOR = (each for each in "ab")
IN_WORKER = "NANOTF_RANK"  # among the environment variables


def _model(*layers: Any, loss: Any = CROSSENTROPY, shape: Any = (4,), **more: Any) -> Any:
    model = nanotf.keras.Sequential([L.Input(shape), *layers, L.Dense(3)])
    model.compile("sgd", loss, **more)
    return model


def _fit(model: Any, x: Any = X, y: Any = Y, **more: Any) -> None:
    given = (x,) if y is None else (x, y)
    model.fit(*given, **{"batch_size": 20, "verbose": 0, "num_processes": 2, **more})


# ------------------------------------------------------------------------- arguments
def _one_cpu() -> None:
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(usable)[:1])
    try:
        _fit(_model())  # here
    finally:
        os.sched_setaffinity(0, usable)


def _typo() -> None:
    _model().fit(X, Y, num_process=2, verbose=0)  # here


def _word() -> None:
    _model().fit(X, Y, num_processes="two", verbose=0)  # here


def _none() -> None:
    _model().fit(X, Y, num_processes=0, verbose=0)  # here


def _half() -> None:
    _model().fit(X, Y, num_processes=1.5, verbose=0)  # here


def _many() -> None:
    _model().fit(X, Y, num_processes=10**6, verbose=0)  # here


def _transport() -> None:
    _model().fit(X, Y, num_processes=2, transport="tcp", verbose=0)  # here


def _uncompiled() -> None:
    nanotf.keras.Sequential([L.Input((4,)), L.Dense(3)]).fit(X, Y, num_processes=2)  # here


def _unknown_loss() -> None:
    _fit(_model(loss="no_such_loss"))  # here


def _wrong_shape() -> None:
    _fit(_model(), np.ones((40, 8), "float32"))  # here


def _lengths() -> None:
    _fit(_model(), y=Y[:30])  # here


def _scalars() -> None:
    _fit(_model(), tf.data.Dataset.from_tensor_slices((X[:, 0], Y)), None, batch_size=None)  # here


def _ragged() -> None:
    rows = tf.ragged.constant([[1.0, 2.0], [3.0]] * 10)
    _fit(_model(), tf.data.Dataset.from_tensor_slices((rows, Y[:20])).batch(4), None)  # here


def _without_parentheses() -> None:
    nanotf.nano(_typo)  # here


class Reads(L.Layer):
    """Has an attribute that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = GENERATOR

    def call(self, x: Any) -> Any:
        return x


def _generator_in_a_layer() -> None:
    _fit(_model(Reads()))  # here


def _generator_in_a_closure() -> None:
    nanotf.map(lambda item: next(GENERATOR), range(2), 2, verbose=0)  # here


def _smp_in_one_process() -> None:
    nanotf.smp.init({"partitions": 2})  # here


# ----------------------------------------------------------------------------- steps
def _label() -> None:
    _fit(_model(), y=BAD)  # here


def _label_of_evaluate() -> None:
    _model().evaluate(X, BAD, num_processes=2, verbose=0)  # here


def _gather(y_true: Any, y_pred: Any) -> Any:
    rows = tf.gather(tf.range(3), tf.cast(y_true, "int32") + 1000)  # here
    return y_pred[:, 0] * tf.cast(tf.reshape(rows, [-1]), y_pred.dtype)


def _in_an_own_loss() -> None:
    _fit(_model(loss=_gather))


def _in_a_metric() -> None:
    _fit(_model(metrics=[_gather]))


def _five(y_true: Any, y_pred: Any) -> Any:
    return tf.reduce_mean(y_pred - tf.zeros([5]), -1)  # here


def _breakpoint() -> None:
    def stopping(target: Any, output: Any) -> Any:
        if IN_WORKER in os.environ:  # not where this process traces the model
            breakpoint()  # here
        return tf.reduce_mean(output)

    _fit(_model(loss=stopping))


def _loss_of_a_wrong_shape() -> None:
    _fit(_model(loss=_five))


class Adds(L.Layer):
    """Raises while it is traced for training, in a worker."""

    def call(self, x: Any, training: Any = None) -> Any:
        return self.add(x) if training else x

    def add(self, x: Any) -> Any:
        return x + tf.zeros([3, 5])  # here


def _while_a_layer_is_traced() -> None:
    _fit(_model(Adds()))


def _scale(x: Any) -> Any:
    if IN_WORKER in os.environ:
        raise ValueError("a bad scale")  # here
    return x


def _in_a_lambda_layer() -> None:
    _fit(_model(L.Lambda(_scale)))


def _log(x: Any) -> Any:
    return tf.debugging.check_numerics(tf.math.log(x - 2.0), "the logarithm")  # here


def _nan() -> None:
    _fit(_model(L.Lambda(_log)))


class OwnStep(nanotf.keras.Model):  # type: ignore[misc]
    """Checks its data in its step."""

    def __init__(self) -> None:
        super().__init__()
        self.out = L.Dense(3)

    def call(self, x: Any) -> Any:
        return self.out(x)

    def train_step(self, data: Any) -> Any:
        tf.debugging.assert_less(tf.reduce_max(data[0]), 0.5, "too large")  # here
        return super().train_step(data)


def _in_an_own_step() -> None:
    model = OwnStep()
    model.compile("sgd", CROSSENTROPY)
    _fit(model)


# AutoGraph, which Keras 2 uses for losses, keeps the lines of no error but `Exception`s.
@tf.autograph.experimental.do_not_convert
def _exit(y_true: Any, y_pred: Any) -> Any:
    if IN_WORKER in os.environ:
        sys.exit(3)  # here
    return tf.reduce_mean(y_pred, -1)


class CallsWrongly(OwnStep):
    """Its step cannot be traced. The parent traces it: it builds the model."""

    def train_step(self, data: Any) -> Any:
        return {"loss": tf.reduce_mean(self.out(data[0], unexpected=True))}  # here


def _own_step_that_cannot_be_traced() -> None:
    model = CallsWrongly()
    model.compile("sgd", CROSSENTROPY)
    _fit(model)


def _exit_in_a_loss() -> None:
    _fit(_model(loss=_exit))


def _kill(y_true: Any, y_pred: Any) -> Any:
    def kill(value: Any) -> Any:
        if os.environ.get(IN_WORKER) == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    killed = tf.numpy_function(kill, [y_pred], y_pred.dtype)
    killed.set_shape(y_pred.shape)
    return tf.reduce_mean(y_pred + 0.0 * killed, -1)


def _out_of_memory() -> None:
    _fit(_model(loss=_kill))  # here


class Looks(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["no such number"]  # here


def _in_a_callback() -> None:
    _fit(_model(), callbacks=[Looks()])


class Exits(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        sys.exit(3)  # here


def _exit_in_a_callback() -> None:
    _fit(_model(), callbacks=[Exits()])


class Presses(tf.keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        os.kill(os.getpid(), signal.SIGINT)


def _interrupt() -> None:
    _fit(_model(), callbacks=[Presses()])  # here


class Nested(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        _model().fit(X, Y, num_processes=2, verbose=0)  # here


def _workers_in_a_callback() -> None:
    _fit(_model(), callbacks=[Nested()])


# ------------------------------------------------------------------------------ data
def _broken() -> Iterator[Any]:
    yield X[:20], Y[:20]
    raise ValueError("row 20 is broken")  # here


def _generator() -> None:
    _fit(_model(), _broken(), None, batch_size=None, steps_per_epoch=4)


def _from_generator() -> None:
    spec = tf.TensorSpec((None, 4), "float32"), tf.TensorSpec((None,), "int64")
    _fit(_model(), tf.data.Dataset.from_generator(_broken, output_signature=spec), None)


def _parse(x: Any, y: Any) -> Any:
    return tf.strings.to_number(tf.strings.join(["no number", tf.as_string(x)])), y


def _in_a_dataset() -> None:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(20).map(_parse)
    _fit(_model(), data, None)  # here: TensorFlow does not know the line in `_parse`


class Rows(tf.keras.utils.Sequence):  # type: ignore[misc]
    """A dataset whose second batch raises."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        if index:
            raise ValueError("row 20 is broken")  # here
        return X[:20], Y[:20]


def _in_a_reader() -> None:
    _fit(_model(), Rows(), None, batch_size=None, read_processes=1)


# ----------------------------------------------------------------------------- items
def _divide(item: int) -> float:
    return 1 / (item - 2)  # here


def _in_an_item() -> None:
    nanotf.map(_divide, range(4), 2, verbose=0)


def _train(item: int) -> None:
    _model().fit(X, BAD, verbose=0)  # here


def _training_in_an_item() -> None:
    list(nanotf.imap(_train, range(2), 2))


def _exit_in_an_item() -> None:
    nanotf.map(lambda item: sys.exit(3), range(2), 2, verbose=0)  # here


def _killed_item() -> None:
    nanotf.map(lambda item: os.kill(os.getpid(), 9), range(2), 2, verbose=0)  # here


def _generator_from_an_item() -> None:
    nanotf.map(lambda item: (each for each in "ab"), range(2), 2, verbose=0)  # here


def _workers_in_an_item() -> None:
    nanotf.map(lambda item: _fit(_model()), range(2), 2, verbose=0)  # here


def _unhashable() -> None:
    nanotf.map(lambda item: {[item]: 1}, range(2), 2, verbose=0)  # here


def _build(units: int) -> Any:
    raise ValueError("bad units")  # here


def _search(build: Any, y: Any = Y, metric: str = "loss") -> None:
    pytest.importorskip("optuna")
    space = {"units": (2, 8)}
    nanotf.search(build, space, (X, y), metric, 2, 2, direction="minimize", verbose=0)  # here


def _build_of_a_search() -> None:
    _search(_build)


def _fit_of_a_search() -> None:
    _search(lambda units: _model(L.Dense(units)), BAD)


def _metric_of_a_search() -> None:
    _search(lambda units: _model(L.Dense(units)), metric="val_acc")


# ----------------------------------------------------------------------------- @nano
@nanotf.nano(num_processes=2)
def _loop(model: Any) -> None:
    raise RuntimeError("after the last step")  # here


def _in_a_loop() -> None:
    _loop(tf.keras.Sequential([L.Input((4,)), L.Dense(3)]))


@nanotf.nano(num_processes=2)
def _labels(model: Any) -> None:
    loss = tf.keras.losses.SparseCategoricalCrossentropy()

    @tf.function
    def step(x: Any, y: Any) -> Any:
        return loss(y, model(x))  # here

    step(tf.constant(X), tf.constant(BAD))


def _in_a_step_of_a_loop() -> None:
    _labels(tf.keras.Sequential([L.Input((4,)), L.Dense(3)]))


@nanotf.nano(num_processes=2)
def _returns(model: Any) -> Any:
    return (each for each in "ab")


def _generator_from_a_loop() -> None:
    _returns(tf.keras.Sequential([L.Input((4,)), L.Dense(3)]))  # here


# The reason, a regular expression, of each mistake.
MISTAKES: dict[Callable[[], None], str] = {
    _one_cpu: "num_processes=2",
    _typo: "num_process",
    _word: "num_processes='two'",
    _none: "num_processes=0",
    _half: r"num_processes=1\.5",
    _many: "1000000",
    _transport: "'tcp'",
    _uncompiled: "compile",
    _unknown_loss: "no_such_loss",
    _wrong_shape: "shape",
    _lengths: "cardinality",
    _scalars: "batch",
    _ragged: "dense",
    _without_parentheses: "parentheses",
    _generator_in_a_layer: "generator",
    _generator_in_a_closure: "generator",
    _smp_in_one_process: "partitions=2",
    _label: "label value of 7",
    _label_of_evaluate: "label value of 7",
    _in_an_own_loss: "1000 is not in",
    _in_a_metric: "1000 is not in",
    _breakpoint: "needs a terminal",
    _loss_of_a_wrong_shape: "Dimensions must be equal",
    _while_a_layer_is_traced: "Dimensions must be equal",
    _in_a_lambda_layer: "a bad scale",
    _nan: "the logarithm",
    _in_an_own_step: "too large",
    _own_step_that_cannot_be_traced: "unexpected",
    _exit_in_a_loss: "SystemExit: 3",
    _out_of_memory: "SIGKILL",
    _in_a_callback: "no such number",
    _exit_in_a_callback: "SystemExit: 3",
    _interrupt: "KeyboardInterrupt",
    _workers_in_a_callback: "wait for this callback",
    _generator: "row 20",
    _from_generator: "row 20",
    _in_a_dataset: "no number",
    _in_a_reader: "row 20",
    _in_an_item: "division by zero",
    _training_in_an_item: "label value of 7",
    _exit_in_an_item: "SystemExit: 3",
    _killed_item: "SIGKILL",
    _generator_from_an_item: "generator",
    _workers_in_an_item: "workers",
    _unhashable: "unhashable",
    _build_of_a_search: "bad units",
    _fit_of_a_search: "label value of 7",
    _metric_of_a_search: "val_acc",
    _in_a_loop: "after the last step",
    _in_a_step_of_a_loop: "label value of 7",
    _generator_from_a_loop: "generator",
}


def _printed(mistake: Callable[[], None]) -> tuple[BaseException, str]:
    with pytest.raises(BaseException) as caught:
        mistake()
    error = caught.value
    return error, "".join(traceback.format_exception(type(error), error, error.__traceback__))


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda each: each.__name__.strip("_"))
@pytest.mark.every_case
def test_reason_and_line(mistake: Callable[[], None]) -> None:
    error, text = _printed(mistake)
    own = "".join(traceback.format_exception_only(type(error), error))
    assert re.search(MISTAKES[mistake], "\n".join(own.splitlines()[:3])), text
    named = re.findall(rf'"{re.escape(__file__)}", line (\d+)', text)
    marked = [linecache.getline(__file__, int(line)).partition("  # ")[2] for line in named]
    assert any(comment.startswith("here") for comment in marked), text
    lines = text.splitlines()
    assert len(lines) <= LINES, text
    files = [line.split('"')[1] for line in lines if line.startswith('  File "')]
    ours = [file for file in files if tracebacks.is_nanotfs(file)]
    assert len(ours) <= (sys.version_info < (3, 11)), text
    if isinstance(error, nanotf.errors.WorkerError):
        assert not error.remote_traceback or error.log_tail not in str(error) or not error.log_tail


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
    error, text = _printed(_in_an_own_loss)
    assert isinstance(error, nanotf.errors.WorkerError)
    assert error.remote_traceback.strip() in str(error)
    assert len(text.splitlines()) > LINES
