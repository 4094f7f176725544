"""Bad input to `@nano` and failures inside it raise a clear error and never hang."""

from __future__ import annotations

import functools
import os
import pathlib
import re
import signal
import socket
from typing import Any

import loops
import numpy as np
import pytest
import tensorflow as tf
from loops import cross_entropy, dense, plain_step, plain_train

import nanotf
from nanotf import errors
from nanotf.keras import nano, nano_bf16, nano_multiprocessing, nano_multiprocessing_loss
from nanotf.pool import warm

pytestmark = pytest.mark.own_pool

two = functools.partial(nano, num_processes=2)
step = nano_multiprocessing(tf.function(plain_step))


def _arguments() -> tuple[Any, ...]:
    return dense(), loops.dataset(), cross_entropy(), tf.keras.optimizers.SGD(0.1)


def _works() -> None:
    """Asserts that the pool, or a new pool, runs the next job."""
    losses = two()(plain_train)(*_arguments(), step, epochs=1)
    assert len(losses) == 4


@pytest.fixture
def no_workers() -> Any:
    """Asserts that no worker was started."""
    warm.end_pool()
    yield
    assert nanotf.worker_pids() == ()


# ------------------------------------------------------------------------- before any process
def test_argument_that_cannot_be_sent(no_workers: None) -> None:
    @two()
    def train(model: Any, data: Any, guard: Any) -> None:
        pass

    with pytest.raises(errors.ShippingError, match=r"`guard` of .*train.*socket"):
        train(dense(), loops.dataset(), guard=socket.socket())


def test_captured_object_that_cannot_be_sent(no_workers: None) -> None:
    guard = socket.socket()

    @two()
    def train(model: Any, data: Any) -> None:
        guard.close()

    with pytest.raises(errors.ShippingError, match=r"function .*train.*socket"):
        train(dense(), loops.dataset())


def test_wrong_arguments(no_workers: None) -> None:
    @two()
    def train(model: Any, data: Any) -> None:
        pass

    with pytest.raises(TypeError, match="missing a required argument: 'data'"):
        train(dense())


DECORATORS = [
    *(nano_multiprocessing, nano_bf16, nano_multiprocessing_loss, nano_multiprocessing_loss()),
    two(),
]


@pytest.mark.parametrize("decorator", DECORATORS)
def test_decorating_something_else(decorator: Any) -> None:
    with pytest.raises(errors.InvalidArgumentTypeError, match=r"Received: an object of class int"):
        decorator(3)


def test_loss_with_arguments_that_tf_function_does_not_take() -> None:
    rule = r"takes the arguments of tf\.function\. Received: reduction='sum'\. .*reduction"
    with pytest.raises(errors.InvalidArgumentTypeError, match=rule):
        nano_multiprocessing_loss(reduction="sum")(len)


def test_nano_without_parentheses() -> None:
    with pytest.raises(errors.InvalidArgumentTypeError, match=r"@nano\(num_processes=2\)"):

        @nano
        def train() -> None:
            pass


def test_functions_that_yield_or_await(no_workers: None) -> None:
    def yields(data: Any) -> Any:
        yield from data

    async def awaits(data: Any) -> None:
        pass

    for function, what in ((yields, "generator function"), (awaits, "coroutine function")):
        with pytest.raises(errors.InvalidArgumentTypeError, match=f"Received: the {what}"):
            two()(function)
    assert list(nano()(yields)([1, 2])) == [1, 2]  # without workers nothing changes


@pytest.mark.parametrize("value", [0, -1, 1.5, "two"])
def test_num_processes(value: Any) -> None:
    with pytest.raises((errors.InvalidArgumentError, errors.InvalidArgumentTypeError)):
        nano(num_processes=value)


# ----------------------------------------------------------------------------------- inside
@pytest.mark.thorough
def test_result_that_cannot_be_sent_back() -> None:
    @two()
    def train(model: Any, data: Any) -> Any:
        return (number for number in range(3))

    with pytest.raises(
        errors.ShippingError, match=r"returns cannot be sent.*must be picklable.*generator"
    ):
        train(dense(), loops.dataset())
    _works()


def test_metric_made_by_the_function() -> None:
    @two()
    def train(model: Any, data: Any) -> Any:
        with nanotf.get_strategy().scope():
            return {"mean": tf.keras.metrics.Mean(name="mine")}

    with pytest.raises(errors.ShippingError, match=r"the metric 'mine'\. Return its result\(\)"):
        train(dense(), loops.dataset())


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_exception_on_one_rank(transport: str) -> None:
    @two(transport=transport)
    def train(model: Any, data: Any, loss_object: Any, optimizer: Any, step: Any) -> None:
        for number, inputs in enumerate(data):
            if number == 2 and nanotf.rank() == 1:
                raise ZeroDivisionError("in the third step")
            step(inputs, model, loss_object, optimizer)

    model, *rest = _arguments()
    before = model.get_weights()
    with pytest.raises(errors.WorkerError, match="in the third step") as caught:
        train(model, *rest, step)
    assert caught.value.rank == 1
    assert isinstance(caught.value.original, ZeroDivisionError)
    assert "number == 2 and nanotf.rank() == 1" in caught.value.remote_traceback or (
        'raise ZeroDivisionError("in the third step")' in caught.value.remote_traceback
    )
    loops.assert_same_variables(model.get_weights(), before)
    _works()


@pytest.mark.parametrize(("transport", "rank"), [("shm", 0), ("shm", 1), ("grpc", 0)])
def test_a_rank_that_returns_early(transport: str, rank: int) -> None:
    @two(transport=transport)
    def train(model: Any, data: Any, loss_object: Any, optimizer: Any, step: Any) -> None:
        for number, inputs in enumerate(data):
            if number == 2 and nanotf.rank() == rank:
                break
            step(inputs, model, loss_object, optimizer)

    rule = rf"rank {rank} has finished.*collective: all_"
    with pytest.raises(errors.CollectiveError, match=rule):
        train(*_arguments(), step)
    _works()


@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.thorough
def test_a_rank_that_leaves_a_graph_early(transport: str) -> None:
    @tf.function
    def steps(data: Any, count: Any, *rest: Any) -> None:
        done = 0
        for inputs in data:
            if done == count:
                break
            step(inputs, *rest)
            done += 1  # noqa: SIM113 - a tensor, in the graph's loop

    @two(transport=transport)
    def train(model: Any, data: Any, loss_object: Any, optimizer: Any) -> None:
        step(next(iter(data)), model, loss_object, optimizer)
        steps(data, tf.constant(1 + nanotf.rank()), model, loss_object, optimizer)

    with pytest.raises(errors.CollectiveError, match=r"rank 0 has finished.*rank 1 waits.*all_"):
        train(*_arguments())


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_ranks_that_run_different_steps(transport: str) -> None:
    smaller = tf.keras.Sequential([tf.keras.layers.Input((8,)), tf.keras.layers.Dense(2)])
    other = nano_multiprocessing(tf.function(lambda x: tf.reduce_mean(smaller(x))))

    @two(transport=transport)
    def train(model: Any, data: Any, loss_object: Any, optimizer: Any, step: Any) -> None:
        for inputs in data:
            if nanotf.rank() == 0:
                step(inputs, model, loss_object, optimizer)
            else:
                other(inputs[0])

    how = {
        "shm": r"rank 0 waits for \[1\] in a collective.*rank 1 waits for \[0\] in a collective",
        "grpc": r"the collectives that the ranks have begun differ.*in the step plain_step",
    }
    with pytest.raises(errors.CollectiveError, match=rf"same steps.*{how[transport]}"):
        train(*_arguments(), step)
    if transport == "shm":
        _works()


@pytest.mark.thorough
def test_different_steps_that_meet_by_accident() -> None:
    """TensorFlow's collectives do not notice it, but the steps' results differ."""
    models = dense(), dense(seed=2)

    @nano_multiprocessing
    def mean(x: Any) -> Any:
        return tf.reduce_mean(models[0](x))

    @nano_multiprocessing
    def norm(x: Any) -> Any:
        return tf.norm(models[1](x))

    @two(transport="grpc")
    def train(model: Any, data: Any) -> None:
        for x, _ in data:
            (norm if nanotf.rank() else mean)(x)

    with pytest.raises(
        errors.DivergedError, match=r"after step 1, (mean|norm), the workers differ"
    ):
        train(dense(), loops.dataset())


OF_A_COLLECTIVE = (
    "nanotf collective: rank 0 waited 8 s in all_reduce(sum) of float32[3] (key 3, call 1) for "
    "rank 1 (did not come). Ranks must call the same collectives; if one is only slow, raise the "
    "deadline."
)
OF_TENSORFLOW = "not available outside the replica context or a `tf.distribute` call"


@pytest.mark.parametrize("text", [OF_A_COLLECTIVE, OF_TENSORFLOW])
def test_a_users_exception_is_not_classified_by_its_text(text: str) -> None:
    @two()
    def train(model: Any, data: Any, text: str) -> None:
        raise ValueError(text)

    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        train(dense(), loops.dataset(), text)
    assert isinstance(caught.value, errors.WorkerError)
    assert not isinstance(caught.value, errors.WorkerStuck)
    assert isinstance(caught.value.original, ValueError)
    assert "@nano_multiprocessing" not in str(caught.value)


OWN_LOOPS = ["fit", "train_on_batch", "evaluate", "predict", "test_on_batch", "predict_on_batch"]


def test_keras_own_loops_under_the_strategy() -> None:
    @two()
    def train(data: Any) -> list[str]:
        with nanotf.get_strategy().scope():
            model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        found = []
        for name in OWN_LOOPS:
            try:
                getattr(model, name)(np.ones((8, 2)))
            except errors.NanoError as error:
                found.append(str(error))
        return found

    said = train(loops.dataset())
    assert len(said) == len(OWN_LOOPS)
    for name, text in zip(OWN_LOOPS, said, strict=True):
        assert f"Received: a call of {name}() of the model" in text
        assert "without `with strategy.scope()`" in text
    _works()


def test_clear_session_inside() -> None:
    @two()
    def train(model: Any, data: Any, clear: Any) -> int:
        for x, _ in data:
            clear()
            model(x)
        return nanotf.size()

    for clear in (tf.keras.backend.clear_session, lambda: tf.keras.backend.clear_session()):
        assert train(dense(), loops.dataset(), clear) == 2
    _works()


@pytest.mark.parametrize("method", ["fit", "evaluate"])
@pytest.mark.thorough
def test_workers_inside(method: str) -> None:
    @two()
    def train(model: Any, data: Any) -> None:
        model.compile("sgd", "mse")
        getattr(model, method)(data, verbose=0, num_processes=2)

    with pytest.raises(errors.WorkerError, match="A worker cannot start workers of its own"):
        train(dense(), loops.dataset())
    _works()


def test_weights_that_drift_apart() -> None:
    @two()
    def train(model: Any, data: Any) -> None:
        for variable in model.trainable_variables:
            variable.assign(tf.ones_like(variable) * (1.0 + nanotf.rank()))

    with pytest.raises(errors.DivergedError, match="they differ in the variable"):
        train(dense(), loops.dataset())
    _works()


@pytest.mark.thorough
def test_a_generator_that_raises() -> None:
    def generator() -> Any:
        yield loops.rows(4)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        two()(plain_train)(
            dense(), generator(), cross_entropy(), tf.keras.optimizers.SGD(), step, epochs=1
        )
    _works()


def test_a_worker_that_dies() -> None:
    @two()
    def train(model: Any, data: Any, loss_object: Any, optimizer: Any, step: Any) -> None:
        for number, inputs in enumerate(data):
            if number == 2 and nanotf.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            step(inputs, model, loss_object, optimizer)

    with pytest.raises(errors.WorkerDied, match="SIGKILL") as caught:
        train(*_arguments(), step)
    assert caught.value.rank == 1
    _works()


@pytest.mark.parametrize(("moment", "left"), [("step", 6), ("before_save", 6), ("saved", 3)])
def test_restart_from_the_last_checkpoint(
    float64: None, tmp_path: pathlib.Path, moment: str, left: int
) -> None:
    """A loop killed in the third epoch, or around its save, ends like an undisturbed loop."""

    def both(directory: pathlib.Path, run: Any, kill: bool) -> Any:
        model, optimizer = dense(), tf.keras.optimizers.Adam(0.01)
        loss_object = cross_entropy()
        data = tf.data.Dataset.from_tensor_slices(loops.rows(40)).shuffle(40, seed=5).batch(16)
        epoch = tf.Variable(0)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, epoch=epoch)
        manager = nanotf.CheckpointManager(checkpoint, directory, max_to_keep=2)
        killed = directory / "killed"

        def die(*_: Any) -> None:
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

        @run
        def train(data: Any, step: Any) -> list[float]:
            manager.restore_or_initialize()
            losses = []
            for number in range(int(epoch.numpy()), 4):
                for inputs in data:
                    losses.append(float(step(inputs, model, loss_object, optimizer)))
                    dies = kill and number == 2 and not killed.exists()
                    if dies and moment == "step" and nanotf.rank() == 1:
                        die()
                if dies and nanotf.rank() == 0:  # before the parent learns of it
                    setattr(nanotf.region.context.current, moment, die)
                epoch.assign(number + 1)
                manager.save()
            return losses

        fresh = nano_multiprocessing(tf.function(plain_step))  # of one optimizer
        return train(data, fresh), model.get_weights(), loops.variables_of(optimizer)

    directories = [tmp_path / name for name in ("alone", "killed")]
    for directory in directories:
        directory.mkdir()
    expected = both(directories[0], lambda f: f, False)
    found = both(directories[1], two(max_restarts=1), True)
    assert (directories[1] / "killed").exists()
    assert len(found[0]) == left, "the epochs after the restart"
    np.testing.assert_allclose(found[0], expected[0][-left:], rtol=1e-10)
    loops.assert_same_variables(found[1], expected[1])
    loops.assert_same_variables(found[2], expected[2])


def test_restarts_need_rereadable_data(no_workers: None) -> None:
    train = two(max_restarts=1)(plain_train)
    with pytest.raises(errors.InvalidArgumentError, match=r"max_restarts=1.*kind 'iterator'"):
        train(dense(), iter(loops.dataset()), cross_entropy(), tf.keras.optimizers.SGD(), step)
    with pytest.raises(errors.InvalidArgumentError, match="`max_restarts`"):
        two(max_restarts=-1)


@pytest.mark.thorough
def test_nested_nano_just_runs() -> None:
    @two()
    def inner(x: Any) -> Any:
        return x + nanotf.size()

    @two()
    def outer(model: Any, data: Any) -> Any:
        return inner(1)

    assert outer(dense(), loops.dataset()) == 3
