"""Trains in microbatches with `nanotf.smp`: the shape of SageMaker's model-parallel scripts.

    python examples/model_parallel.py

In two processes, each with a part of the model:

    SM_HP_MP_PARAMETERS='{"partitions": 2, "microbatches": 4}' nanotf run examples/model_parallel.py

Under `nanotf run` a script may import smp by its original name,
`smdistributed.modelparallel.tensorflow`.
"""

import os

import tensorflow as tf
from sklearn.datasets import load_digits

from nanotf import smp

configured = "SM_HP_MP_PARAMETERS" in os.environ
smp.init(None if configured else {"partitions": 1, "microbatches": 4})
tf.keras.utils.set_random_seed(smp.dp_rank())
x, y = load_digits(return_X_y=True)
batches = (
    tf.data.Dataset.from_tensor_slices(((x / 16).astype("float32"), y))
    .shuffle(2000, seed=smp.dp_rank())
    .batch(64, drop_remainder=True)
)


class Digits(smp.DistributedModel):
    def __init__(self):
        super().__init__()
        self.hidden = tf.keras.layers.Dense(256, activation="relu")
        self.out = tf.keras.layers.Dense(10)

    def call(self, x, training=None):
        return self.out(self.hidden(x))


model = Digits()
loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.keras.optimizers.Adam(0.003)
accuracy = tf.keras.metrics.SparseCategoricalAccuracy()


@smp.step
def get_gradients(x, y):
    predictions = model(x, training=True)
    loss = loss_object(y, predictions)
    return smp.gradients(loss, model.trainable_variables), loss, predictions


@tf.function
def train_step(x, y):
    gradients, loss, predictions = get_gradients(x, y)
    averaged = [gradient.accumulate() for gradient in gradients]
    optimizer.apply_gradients(zip(averaged, model.trainable_variables, strict=True))
    accuracy.update_state(y, predictions.merge())
    return loss.reduce_mean()


for epoch in range(5):
    accuracy.reset_state()
    for images, labels in batches:
        loss = train_step(images, labels)
    if smp.rank() == 0:
        print(f"epoch {epoch}: loss {float(loss):.3f}, accuracy {float(accuracy.result()):.3f}")
