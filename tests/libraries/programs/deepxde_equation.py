"""A differential equation, by a loop of the library's own: it runs in one process."""

import os

os.environ["DDE_BACKEND"] = "tensorflow"

import json

import deepxde as dde
import numpy as np

dde.config.set_random_seed(1)
line = dde.geometry.Interval(-1, 1)


def residual(x, y):
    return -dde.grad.hessian(y, x) - np.pi**2 * dde.backend.sin(np.pi * x)


ends = dde.icbc.DirichletBC(line, lambda x: 0.0, lambda _, on_boundary: on_boundary)
data = dde.data.PDE(line, residual, ends, 12, 2)
model = dde.Model(data, dde.nn.FNN([1, 10, 1], "tanh", "Glorot uniform"))
model.compile("adam", lr=0.01)
history, _ = model.train(iterations=20, verbose=0)
print(json.dumps(np.array(history.loss_train).tolist()))
