"""A Q network's agent is trained on steps that were recorded: a loop of the library's own."""

import json

import numpy as np
import tensorflow as tf
from tf_agents.agents.dqn import dqn_agent
from tf_agents.networks import sequential
from tf_agents.specs import array_spec, tensor_spec
from tf_agents.trajectories import time_step as ts
from tf_agents.trajectories import trajectory

tf.keras.utils.set_random_seed(1)
seen = tensor_spec.from_spec(array_spec.ArraySpec((4,), np.float32))
acted = tensor_spec.from_spec(array_spec.BoundedArraySpec((), np.int32, 0, 1))
layers = [tf.keras.layers.Dense(8, activation="relu"), tf.keras.layers.Dense(2)]
agent = dqn_agent.DqnAgent(
    ts.time_step_spec(seen),
    acted,
    q_network=sequential.Sequential(layers),
    optimizer=tf.keras.optimizers.Adam(0.01),
)
agent.initialize()
rows = np.random.default_rng(0)
losses = []
for _ in range(5):
    middle = tf.ones((8, 2), tf.int32)
    steps = trajectory.Trajectory(
        middle,
        tf.constant(rows.normal(size=(8, 2, 4)), tf.float32),
        tf.constant(rows.integers(0, 2, (8, 2)), tf.int32),
        (),
        middle,
        tf.constant(rows.normal(size=(8, 2)), tf.float32),
        tf.ones((8, 2)),
    )
    losses.append(float(agent.train(steps).loss))
print(json.dumps(losses))
