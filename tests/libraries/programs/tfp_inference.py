"""Variational inference and a Markov chain: loops without a model, which run in one process."""

import json

import tensorflow as tf
import tensorflow_probability as tfp

tf.keras.utils.set_random_seed(1)
target = tfp.distributions.Normal(2.0, 0.5)
place, scale = tf.Variable(0.0), tfp.util.TransformedVariable(1.0, tfp.bijectors.Softplus())
losses = tfp.vi.fit_surrogate_posterior(
    target.log_prob,
    tfp.distributions.Normal(place, scale),
    optimizer=tf.keras.optimizers.legacy.Adam(0.1),
    num_steps=20,
    seed=3,
)
kernel = tfp.mcmc.HamiltonianMonteCarlo(target.log_prob, step_size=0.3, num_leapfrog_steps=3)
chain = tfp.mcmc.sample_chain(20, 2.0, kernel=kernel, trace_fn=None, seed=3)
print(json.dumps([losses.numpy().tolist(), chain.numpy().tolist()]))
