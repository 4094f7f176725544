"""A user's program, for type checkers: test_types.py runs them over it.

They must find a mistake in each line with a comment "wrong: ...", and in no other line.
"""

import numpy as np
import tensorflow as tf
from typing_extensions import assert_type

import nanotf
from nanotf import Model, Sequential, nano, nano_multiprocessing
from nanotf.errors import WorkerError
from nanotf.report.call_report import Report

x, y = np.zeros((8, 4)), np.zeros((8, 1))


class Regression(Model):
    def __init__(self, units: int) -> None:
        super().__init__(name="regression")
        self.dense = tf.keras.layers.Dense(units)

    def call(self, rows: tf.Tensor, training: bool = False) -> tf.Tensor:
        return self.dense(rows)

    def train_step(self, batch: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
        return {"rows": tf.size(batch[0])}


def parameters(model: tf.keras.Model) -> int:
    return int(model.count_params())


def keras_fit() -> None:
    model = Sequential([tf.keras.layers.Dense(1)], name="small")
    model.compile("sgd", loss="mse", metrics=["mae"], jit_compile=False)
    history = model.fit(x, y, 4, epochs=2, num_processes=2, max_restarts=1, cores=[0, 1])
    assert_type(model, Sequential)
    assert_type(history.nanotf, Report)
    assert_type(history.nanotf.total, float)
    print(history.history["loss"][-1], model.summary(), parameters(model))
    model.fit(x, y, num_processes="auto", transport="shm", sharding="data", backend="local")
    model.evaluate(x, y, verbose=0, return_dict=True, num_processes=2)
    model.predict(x, num_processes=2, cores_per_process=1)
    model.fit(x, y, num_proceses=2)  # wrong: misspelt
    model.fit(x, y, num_processes="all")  # wrong: "auto" is the only word
    model.fit(x, y, num_processes=2, transport="tcp")  # wrong: no such transport
    model.fit(x, y, epoch=2)  # wrong: an argument of Keras, misspelt
    model.evaluate(x, y, num_process=2)  # wrong: misspelt
    model.predict(x, num_processes="auto")  # wrong: only `fit` takes it
    model.compile("sgd", los="mse")  # wrong: misspelt
    print(history.nanotf.totl)  # wrong: misspelt


def models() -> None:
    inputs = tf.keras.Input((4,))
    functional = Model(inputs, tf.keras.layers.Dense(1)(inputs), name="functional")
    assert_type(functional, Model)
    Model(inputs=inputs, output=inputs)  # wrong: `outputs`
    regression = Regression(1)
    assert_type(regression.fit(x, y, num_processes=2).nanotf, Report)
    regression.fit(x, y, cores_per_proces=1)  # wrong: misspelt
    ready = nanotf.accelerate(tf.keras.applications.MobileNetV2())
    ready.fit(x, y, num_processes=2, backend="slurm")  # wrong: no such back end
    nanotf.patch_tensorflow(precision="mixed_bfloat16", sparse=True)
    nanotf.patch_tensorflow(precision="bfloat16")  # wrong: no such precision
    nanotf.optimizers.SparseAdam(1e-3, clipnorm=1.0)
    nanotf.keras.layers.Embedding(10, 2, embeddings_regularizer="l2", name="table")
    nanotf.keras.layers.Embedding(output_dim=2)  # wrong: without `input_dim`


@nano(num_processes=2, max_restarts=1)
def train(model: Model, epochs: int) -> float:
    return float(epochs)


@nano(num_proceses=2)  # wrong: misspelt
def train_two(model: Model) -> None: ...


@nano_multiprocessing
def step(batch: int, scale: float = 1.0) -> float:
    return scale * batch


@nanotf.nano_multiprocessing_loss()
def loss(y_true: float, y_pred: float) -> float:
    return y_true - y_pred


def loops(model: Model) -> None:
    assert_type(nanotf.whole(model), Model)
    assert_type(train(model, epochs=3), float)
    assert_type(step(4, scale=2.0), float)
    loss(1.0, y_pred=2.0)
    train(model, epoch=3)  # wrong: misspelt
    step("4")  # wrong: not an int
    loss(1.0, prediction=2.0)  # wrong: no such argument


def workers() -> None:
    nanotf.warm_up(2, cores_per_process=1)
    nanotf.warm_up(num_proceses=2)  # wrong: misspelt
    nanotf.warm_up(2, backend="slurm")  # wrong: no such back end
    assert_type(nanotf.worker_pids(), tuple[int, ...])
    assert_type(nanotf.rank(), int)
    assert_type(nanotf.last_report(), Report | None)
    assert_type(nanotf.plan(2).placements[0].cores, tuple[int, ...])
    try:
        nanotf.shutdown()
    except WorkerError as error:
        assert_type(error.exit_code, int | None)
    nanotf.shut_down()  # wrong: misspelt
