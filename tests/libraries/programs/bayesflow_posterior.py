"""An amortized posterior: a model with a `fit` of its own, whose arguments are others."""

import json

import bayesflow as bf
import numpy as np
import tensorflow as tf

tf.keras.utils.set_random_seed(1)
rows = np.random.default_rng(0)


def prior():
    return {"theta": rows.normal(size=2)}


def likelihood(theta):
    return {"x": theta + rows.normal(size=2) * 0.1}


workflow = bf.BasicWorkflow(
    simulator=bf.make_simulator([prior, likelihood]),
    inference_network=bf.networks.CouplingFlow(depth=2, subnet_kwargs={"widths": (8,)}),
    inference_variables=["theta"],
    inference_conditions=["x"],
)
data = workflow.simulate(96)
history = workflow.fit_offline(data, epochs=2, batch_size=32, verbose=0)
print(json.dumps(history.history))
