"""Callbacks and `History` run once, in the parent, as in Keras."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from callback_parts import FIT, Watch, losing, run_both, three_digits
from parity import assert_same_history, assert_same_state, digits, small_cnn

import nanotf

# Errors that the program keeps, with the frames of the calls that raised them. `conftest` checks
# that no shared memory of these calls stays open.
KEPT: list[BaseException] = []


@pytest.mark.both_generations
def test_history_is_that_of_the_model() -> None:
    x, y = digits(200)
    model = small_cnn()
    history = model.fit(x, y, **FIT, initial_epoch=2, epochs=4, verbose=0, num_processes=2)
    assert history is model.history
    assert isinstance(history, tf.keras.callbacks.History)
    assert history.model is model
    assert history.epoch == [2, 3]
    for values in history.history.values():
        assert all(isinstance(value, float) for value in values)


def test_lambda_callback_appends_to_the_users_list() -> None:
    x, y = digits(100)
    seen: list[int] = []
    callback = tf.keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(epoch)
    )
    small_cnn().fit(x, y, **FIT, epochs=3, verbose=0, callbacks=[callback], num_processes=2)
    assert seen == [0, 1, 2]


def test_callback_that_sets_weights(float64: None) -> None:
    x, y = digits(100)

    class Halve(tf.keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.set_weights([w / 2 for w in self.model.get_weights()])

    models = []
    for processes in (None, 2):
        model = small_cnn()
        model.fit(x, y, **FIT, epochs=2, verbose=0, callbacks=[Halve()], num_processes=processes)
        models.append(model)
    assert_same_state(models[1], models[0])


def test_callback_that_predicts_and_evaluates() -> None:
    x, y = digits(100)
    seen = []

    def look(epoch: int, logs: Any) -> None:
        loss, _ = model.evaluate(x, y, verbose=0)
        seen.append((loss, model.predict(x[:5], verbose=0).shape))

    model = small_cnn()
    callback = tf.keras.callbacks.LambdaCallback(on_epoch_end=look)
    model.fit(x, y, **FIT, epochs=2, verbose=0, callbacks=[callback], num_processes=2)
    assert [shape for _, shape in seen] == [(5, 10)] * 2
    assert seen[1][0] < seen[0][0]


def metric_values(model: Any) -> list[np.ndarray]:
    return [np.asarray(v) for metric in model.metrics for v in metric.variables]


@pytest.mark.both_generations
def test_batch_hooks_see_the_state_and_the_logs_of_all_workers(float64: None) -> None:
    x, y = three_digits(50)

    def make() -> Any:
        return losing("accuracy", tf.keras.metrics.MeanIoU(3, name="iou", sparse_y_pred=False))

    (plain, (theirs,)), (model, (ours,)) = run_both(
        make, lambda: [Watch()], validation_data=(x, y), validation_batch_size=20
    )
    assert [sorted(logs) for logs in ours.logs] == [sorted(logs) for logs in theirs.logs]
    assert len(ours.logs) == 2 * (6 + 3)
    for mine, other in zip(ours.logs, theirs.logs, strict=True):
        for name, value in other.items():
            assert isinstance(mine[name], float)
            np.testing.assert_allclose(mine[name], value, rtol=1e-10, err_msg=name)
    np.testing.assert_allclose(ours.state, theirs.state, rtol=1e-10, atol=1e-10)
    # After fit: the metrics of the last validation.
    for mine, other in zip(metric_values(model), metric_values(plain), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-10)


@pytest.mark.thorough
def test_metrics_after_fit_are_those_of_plain_fit(float64: None) -> None:
    def make() -> Any:
        return losing("accuracy", tf.keras.metrics.MeanIoU(3, name="iou", sparse_y_pred=False))

    (plain, _), (model, _) = run_both(make, lambda: None)
    assert len(metric_values(model)) == len(metric_values(plain)) > 3
    for mine, other in zip(metric_values(model), metric_values(plain), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-10)
    for metric, other in zip(model.metrics, plain.metrics, strict=True):
        np.testing.assert_allclose(np.asarray(_result(metric)), np.asarray(_result(other)))


def _result(metric: Any) -> Any:
    result = metric.result()
    return list(result.values()) if isinstance(result, dict) else result


class ChangeAtBatch(tf.keras.callbacks.Callback):
    """Halves the weights, then lowers the rate, then stops, in three separate batches."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        steps = int(self.model.optimizer.iterations.numpy())
        if steps == 2:
            self.model.set_weights([w / 2 for w in self.model.get_weights()])
        if steps == 4:
            self.model.optimizer.learning_rate = 0.001
        if steps == 9:
            self.model.stop_training = True


@pytest.mark.both_generations
def test_changes_by_a_batch_hook_hold_from_the_next_step(float64: None) -> None:
    (plain, _), (model, _) = run_both(
        lambda: losing("accuracy"), lambda: [ChangeAtBatch()], epochs=5
    )
    assert int(model.optimizer.iterations.numpy()) == 9
    assert_same_state(model, plain)
    assert_same_history(model.history.history, plain.history.history)
    assert float(model.optimizer.learning_rate.numpy()) == pytest.approx(0.001)


@pytest.mark.both_generations
def test_evaluating_in_a_batch_hook_affects_metrics_as_in_keras(
    float64: None,
) -> None:
    x, y = three_digits(30)

    class Evaluate(Watch):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            super().on_train_batch_end(batch, logs)
            if batch == 1:
                self.model.evaluate(x, y, verbose=0)
                self.seen = self.model.predict(x[:3], verbose=0)

    (_, (theirs,)), (_, (ours,)) = run_both(lambda: losing("accuracy"), lambda: [Evaluate()])
    for mine, other in zip(ours.logs, theirs.logs, strict=True):
        np.testing.assert_allclose(list(mine.values()), list(other.values()), rtol=1e-10)
    np.testing.assert_allclose(ours.seen, theirs.seen, rtol=1e-9)


@pytest.mark.thorough
def test_lambda_callback_at_batches(float64: None) -> None:
    seen: dict[int, list[tuple[int, float]]] = {}

    def callbacks() -> Any:
        mine = seen.setdefault(len(seen), [])
        return [
            tf.keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: mine.append((batch, logs["loss"]))
            )
        ]

    run_both(lambda: losing(), callbacks)
    np.testing.assert_allclose(seen[1], seen[0], rtol=1e-10)
    assert len(seen[1]) == 12


# ------------------------------------------------------------------------- order of the hooks
class Recorder(tf.keras.callbacks.Callback):
    """Records every hook, its index, and the names in its logs."""

    def __init__(self, stop_at: tuple[str, int] | None = None) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any, tuple[str, ...]]] = []
        self.pids: set[int] = set()
        self.stop_at = stop_at


def _recording(name: str, takes_index: bool) -> Any:
    def call(self: Recorder, *arguments: Any, logs: Any = None) -> None:
        self.pids.add(os.getpid())
        values = list(arguments)
        index = values.pop(0) if takes_index else None
        logs = values[0] if values else logs
        self.calls.append((name, index, tuple(sorted(logs or {}))))
        if (name, index) == self.stop_at:
            self.model.stop_training = True

    return call


for _when in ("begin", "end"):
    for _what in ("train", "test", "epoch", "train_batch", "test_batch"):
        _hook = f"on_{_what}_{_when}"
        setattr(Recorder, _hook, _recording(_hook, _what not in ("train", "test")))


@pytest.mark.parametrize(
    ("arguments", "stop_at"),
    [
        ({"epochs": 2, "validation_split": 0.3}, None),
        ({"epochs": 4, "initial_epoch": 1, "validation_split": 0.3, "validation_freq": 2}, None),
        ({"epochs": 4, "validation_split": 0.3, "validation_freq": [1, 3]}, None),
        ({"epochs": 3, "initial_epoch": 3}, None),
        ({"epochs": 3}, ("on_train_begin", None)),
        ({"epochs": 3}, ("on_epoch_begin", 1)),
        ({"epochs": 3}, ("on_train_batch_begin", 1)),
        ({"epochs": 3, "validation_split": 0.3}, ("on_train_batch_end", 0)),
        ({"epochs": 3, "validation_split": 0.3}, ("on_test_batch_end", 0)),
        ({"epochs": 3}, ("on_epoch_end", 1)),
    ],
)
@pytest.mark.both_generations
def test_hooks_are_called_here_in_keras_own_order(
    arguments: dict[str, Any], stop_at: tuple[str, int] | None
) -> None:
    """Checks Keras's order, indices and log names, for every hook."""
    (_, (theirs,)), (_, (ours,)) = run_both(
        lambda: losing("accuracy"), lambda: [Recorder(stop_at)], rows=90, **arguments
    )
    assert ours.calls == theirs.calls
    assert ours.pids == {os.getpid()}


def test_end_of_a_separate_evaluation() -> None:
    """Keras 3 counts the pairs of begin and end, also of hooks without code."""

    class Ends(tf.keras.callbacks.Callback):
        def on_test_end(self, logs: Any = None) -> None:
            ends.append(sorted(logs))

    ends: list[Any] = []
    run_both(lambda: losing("accuracy"), lambda: [Ends()], rows=60, epochs=2, validation_split=0.5)
    assert len(ends) == 4
    assert ends[:2] == ends[2:]


@pytest.mark.thorough
def test_callback_list_object() -> None:
    def callbacks() -> Any:
        recorder = Recorder()
        made = tf.keras.callbacks.CallbackList([recorder], add_history=True, model=model)
        return made, recorder

    x, y = three_digits(60)
    calls = []
    for processes in (None, 2):
        model = losing("accuracy")
        made, recorder = callbacks()
        model.fit(x, y, **FIT, epochs=2, callbacks=made, num_processes=processes)
        calls.append(recorder.calls)
        assert list(model.history.history) == list(made.callbacks[-1].history)
    assert calls[1] == calls[0]


# --------------------------------------------------------------- callbacks that raise
@pytest.mark.parametrize(
    "hook", ["on_train_begin", "on_epoch_begin", "on_train_batch_begin", "on_train_batch_end",
             "on_test_batch_end", "on_epoch_end", "on_train_end"]
)  # fmt: skip
def test_exception_arrives_unchanged_with_the_model_as_the_callback_left_it(hook: str) -> None:
    x, y = three_digits(60)
    error = KeyError("from the callback", {"a": 1})
    KEPT.append(error)

    def fail(self: Any, *_: Any, **__: Any) -> None:
        self.model.set_weights([np.full_like(w, 7) for w in self.model.get_weights()])
        raise error

    callback = type("Failing", (tf.keras.callbacks.Callback,), {hook: fail})()
    model = losing("accuracy")
    with pytest.raises(KeyError) as caught:
        model.fit(
            x, y, **FIT, epochs=2, verbose=0, validation_split=0.2, callbacks=[callback],
            num_processes=2,
        )  # fmt: skip
    assert caught.value is error
    assert all((w == 7).all() for w in model.get_weights())
    if hook == "on_epoch_end":  # once is enough: it costs new workers
        model.fit(x, y, **FIT, epochs=1, verbose=0, num_processes=2)
        assert len(nanotf.worker_pids()) == 2


def test_two_threads_wait_for_each_other() -> None:
    x, y = three_digits(60)
    recorders = [Recorder(), Recorder()]
    order: list[Recorder] = []

    class Order(tf.keras.callbacks.Callback):
        def __init__(self, recorder: Recorder) -> None:
            super().__init__()
            self.recorder = recorder

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            order.append(self.recorder)

    def train(recorder: Recorder) -> None:
        model = losing("accuracy")
        model.fit(
            x, y, **FIT, epochs=2, verbose=0, callbacks=[recorder, Order(recorder)],
            num_processes=2,
        )  # fmt: skip

    threads = [threading.Thread(target=train, args=(r,)) for r in recorders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(order) == 4
    assert order[0] is order[1]
    assert order[2] is order[3]
    assert recorders[0].calls == recorders[1].calls
