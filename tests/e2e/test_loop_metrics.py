"""Metrics in a loop cover the rows of all workers."""

from __future__ import annotations

from typing import Any

import loops
import numpy as np
import pytest
import tensorflow as tf
import test_whole_batch_metrics as of_metrics
from compared_loops import OPTIMIZERS, assert_follows_one_process
from compared_loops import run_on as run_on
from loops import cross_entropy, dense, plain_step

from nanotf.keras import nano_multiprocessing


@pytest.mark.both_generations
def test_metrics_and_validation_steps(run_on: Any, float64: None) -> None:
    def both(run: Any) -> list[Any]:
        model, optimizer = dense(), tf.keras.optimizers.SGD(0.1)
        loss_object = cross_entropy()
        mean = tf.keras.metrics.Mean(name="loss")
        accuracy = tf.keras.metrics.SparseCategoricalAccuracy()
        auc = tf.keras.metrics.AUC(num_thresholds=7)

        @nano_multiprocessing
        @tf.function
        def train_step(x: Any, y: Any) -> None:
            loss = plain_step((x, y), model, loss_object, optimizer)
            mean.update_state(loss)
            accuracy.update_state(y, model(x))

        @nano_multiprocessing
        @tf.function
        def test_step(x: Any, y: Any) -> Any:
            outputs = model(x)
            auc.update_state(tf.cast(y > 0, outputs.dtype), tf.sigmoid(outputs[:, 0]))
            return loss_object(y, outputs), outputs

        @run
        def train(data: Any, validation: Any) -> list[Any]:
            numbers: list[Any] = []
            for _ in range(2):
                (mean.reset_state if hasattr(mean, "reset_state") else mean.reset_states)()
                for x, y in data:
                    train_step(x, y)
                numbers += [float(mean.result()), float(accuracy.result())]
                for x, y in validation:
                    loss, outputs = test_step(x, y)
                    numbers += [float(loss), outputs.numpy()]
                numbers.append(float(auc.result()))
            return numbers

        numbers = train(loops.dataset(53), loops.dataset(17, 8, seed=4))
        # The metrics here have the state of all workers, too.
        return [*numbers, float(accuracy.result()), float(auc.result()), float(mean.result())]

    for ours, theirs in zip(both(run_on()), both(lambda f: f), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9)


@pytest.mark.both_generations
def test_results_of_metrics_in_steps(run_on: Any, float64: None) -> None:
    """They cover all workers, including a worker without a row in the last batch."""

    def program(run: Any, share: Any) -> Any:
        model = dense()
        accuracy, mean = tf.keras.metrics.SparseCategoricalAccuracy(), tf.keras.metrics.Mean()
        largest = of_metrics.Largest()

        @share
        @tf.function
        def step(x: Any, y: Any) -> Any:
            outputs = model(x)
            accuracy.update_state(y, outputs)
            mean.update_state(outputs)
            largest.update_state(tf.one_hot(y, 3, dtype=outputs.dtype), outputs)
            in_branch = accuracy.result() if tf.reduce_sum(y) >= 0 else tf.zeros_like(outputs[0, 0])
            return accuracy.result(), mean.result(), largest.result(), in_branch

        @run
        def train(data: Any) -> Any:
            found = [step(x, y) for x, y in data]
            return found, accuracy.result(), mean.result(), largest.result()

        return train(loops.dataset(35, 17)), float(mean.result())

    assert_follows_one_process(run_on, program)


@pytest.mark.both_generations
def test_metrics_that_see_the_whole_batch(run_on: Any, float64: None) -> None:
    def both(run: Any) -> list[float]:
        model = dense()
        metrics = [of_metrics.Largest(), of_metrics.Remembering(), *of_metrics.over_rows()]

        @nano_multiprocessing
        @tf.function
        def test_step(x: Any, y: Any) -> None:
            outputs = model(x)
            for metric in metrics:
                metric.update_state(tf.one_hot(y, 3, dtype=outputs.dtype), outputs)

        @run
        def test(data: Any) -> list[float]:
            for x, y in data:
                test_step(x, y)
            return [float(metric.result()) for metric in metrics]

        # The last batch has one row. The second call continues from the state of the first.
        numbers = test(loops.dataset(41, 8)) + test(loops.dataset(17, 8, seed=4))
        return [*numbers, *(float(metric.result()) for metric in metrics)]

    for ours, theirs in zip(both(run_on()), both(lambda f: f), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9)


@pytest.mark.parametrize("fitted", [True, False])
@pytest.mark.both_generations
def test_compiled_metrics_are_sent_both_ways(run_on: Any, float64: None, fitted: bool) -> None:
    """An earlier `fit` or the loop builds them; the accuracy is the user's object."""

    def both(run: Any) -> list[Any]:
        model, given = dense(), tf.keras.metrics.SparseCategoricalAccuracy(name="given")
        model.compile(OPTIMIZERS["adam"](), cross_entropy(), metrics=["accuracy", given])
        x, y = loops.rows(30)
        if fitted:
            model.fit(x, y, shuffle=False, verbose=0)

        @nano_multiprocessing
        @tf.function
        def step(x: Any, y: Any) -> Any:
            outputs = model(x)
            model.compute_metrics(x, y, outputs, None)
            return plain_step((x, y), model, cross_entropy(), model.optimizer)

        @run
        def train(data: Any) -> list[float]:
            return [float(step(x, y)) for x, y in data]

        numbers = train(loops.dataset())
        metrics = [getattr(metric, "metrics", None) or [metric] for metric in model.metrics]
        assert any(metric is given for found in metrics for metric in found)
        found = [*numbers, float(given.result())]
        results = model.get_metrics_result()
        found += [float(results["accuracy"]), *model.evaluate(x, y, verbose=0)]
        return [*found, *train(loops.dataset()), float(given.result())]

    np.testing.assert_allclose(both(run_on()), both(lambda f: f), rtol=1e-9)
