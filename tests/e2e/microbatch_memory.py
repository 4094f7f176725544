"""Run by `test_smp_memory.py`: prints the memory that a step adds to this process, by microbatches.

Its activations are large, and its weights are small.
"""

from __future__ import annotations

import json
from typing import Any

import tensorflow as tf

from nanotf import smp
from nanotf.sagemaker.smp import memory

LAYERS, ROWS, COLUMNS = 8, 4096, 1024  # 16 MiB each


class Chain(smp.DistributedModel):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [tf.keras.layers.Dense(1) for _ in range(LAYERS)]

    def call(self, x: Any, training: bool | None = None) -> Any:
        for scale in self.scales:
            x = tf.tanh(x + scale(x))
        return x


def peak_after(microbatches: int, batch: Any) -> int:
    smp.init({"partitions": 1, "microbatches": microbatches})
    model = Chain()

    @smp.step
    def get_gradients(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True))
        return tape.gradient(loss, model.trainable_variables)

    for gradient in get_gradients(batch):
        gradient.accumulate()
    return memory.peak_bytes()


batch = tf.random.normal((ROWS, COLUMNS), seed=1)
tf.matmul(batch, tf.ones((COLUMNS, 1)))  # starts TensorFlow's threads
for number in (16, 1):  # tracing takes memory, too
    peak_after(number, batch[:16])
before = memory.peak_bytes()
# A process's peak never falls, so the steps that need more come later.
print(json.dumps({number: peak_after(number, batch) - before for number in (16, 1)}))
