"""Trains under `MultiWorkerMirroredStrategy`, in a custom loop: a script of `tf.distribute`.

The stock contestant's strategy is TensorFlow's. Under `nanotf run --ranks`, it is nanotf's.

Keras 3's own `fit` fails under that strategy. The loop has no callbacks and no metrics. Its data
come from memory, unshuffled. It does less than `fit` would.

Environment variables: `TF_CONFIG` is set by `contestants` or `nanotf run`, and read by TensorFlow.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.clock import own_processor
from benchmarks.models import Model, share


class ByStrategy:
    """One rank of the contestants "stock" and "ranks". Takes the arguments of `by_fit.ByFit`."""

    def __init__(self, role: str, spec: Model, rank: int, size: int) -> None:
        import tensorflow as tf

        self.tf = tf
        self.spec = spec
        self.rank = rank
        self.batch_size = share(self.spec.batch_size, rank, size)
        # Connects to the other ranks, so it must precede all other TensorFlow calls.
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy()
        with self.strategy.scope():
            self.model = self.spec.compiled(tf.keras, tf.keras.Model)
            self.optimizer = self.spec.made_optimizer(tf.keras)
            self.optimizer.build(self.model.trainable_variables)
        self.step = self._step_function()

    def _step_function(self) -> Any:
        tf, model, optimizer = self.tf, self.model, self.optimizer
        loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
        rows = self.spec.batch_size

        def in_replica(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x, training=True)) / rows
            variables = model.trainable_variables
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables))  # noqa: B905 - Python 3.8
            return loss

        @tf.function
        def step(iterator: Any) -> Any:
            return self.strategy.run(in_replica, args=next(iterator))

        return step

    def prepare(self, steps: int) -> None:
        """Makes the data of `steps` steps, and an endless iterator over them."""
        tf, size = self.tf, self.batch_size
        x, y = (tf.constant(a) for a in self.spec.data(steps * size, self.rank))
        dataset = tf.data.Dataset.range(steps).repeat()

        def batch(step: Any) -> Any:
            return tuple(a[step * size : (step + 1) * size] for a in (x, y))

        dataset = dataset.map(batch)
        options = tf.data.Options()
        options.autotune.enabled = False
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        self.iterator = iter(
            self.strategy.distribute_datasets_from_function(
                lambda _: dataset.prefetch(2).with_options(options)
            )
        )

    def run(self, steps: int, epochs: int) -> dict:  # type: ignore[type-arg]
        """Trains, and returns timestamped events for `timeline.read`."""
        processor = own_processor()
        call = time.monotonic()
        ends, times = [], []
        for epoch in range(epochs):
            for step in range(steps):
                self.step(self.iterator)
                times.append([epoch, step, time.monotonic(), processor.seconds()])
            ends.append(time.monotonic())
        return {"call": call, "ends": ends, "steps": times, "done": time.monotonic()}
