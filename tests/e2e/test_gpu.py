"""The fallback for GPUs, with two logical CPU devices in a separate process."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from processes import SECONDS

pytestmark = pytest.mark.own_pool

SCRIPT = """
import json
import random
import tempfile
import numpy as np
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import nanotf
from nanotf.parent import defaults, gpu
from nanotf.keras import Sequential

gpu.devices = lambda: ["/cpu:0", "/cpu:1"]
rng = np.random.default_rng(0)
x, y = rng.random((200, 8), dtype="float32"), rng.random((200, 2), dtype="float32")


def model():
    tf.keras.utils.set_random_seed(1)
    made = Sequential([tf.keras.layers.Input((8,)), tf.keras.layers.Dense(2)])
    made.compile(tf.keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return made


seen = []
note = tf.keras.callbacks.LambdaCallback(
    on_epoch_end=lambda epoch, logs: seen.append([epoch, float(ours.get_weights()[0].sum())])
)
folder = tempfile.TemporaryDirectory()


def saving(name):  # at steps 3 and 6 of 8: the second within an epoch
    path = f"{folder.name}/{name}.weights.h5"
    return tf.keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=3)


defaults.current = defaults.RunDefault(2)  # as under `nanotf run -n 2`
one, ours = model(), model()
common = dict(batch_size=50, epochs=2, shuffle=False)
expected = one.fit(
    x, y, **common, verbose=0, callbacks=[saving("one")], num_processes=1
).history
before = random.getstate(), np.random.get_state()[1:3]
got = ours.fit(
    x, y, **common, verbose=2, callbacks=[note, saving("ours")], num_processes=2
).history
after = random.getstate(), np.random.get_state()[1:3]
drawn = before[0] != after[0] or (before[1][0] != after[1][0]).any() or before[1][1] != after[1][1]
loss = ours.evaluate(x, y, verbose=0, num_processes=2)
assert loss == ours.evaluate(x, y, verbose=0), loss
assert (ours.predict(x, num_processes=2, verbose=0) == ours.predict(x, verbose=0)).all()
saved = []
for name in ("one", "ours"):
    copy = model()
    copy.load_weights(f"{folder.name}/{name}.weights.h5")
    saved.append(copy.get_weights())
folder.cleanup()
assert all(np.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(*saved)), saved
print("RESULT " + json.dumps({
    "expected": expected,
    "got": got,
    "seen": seen,
    "steps": int(ours.optimizer.iterations.numpy()),
    "difference": max(
        float(np.abs(a - b).max()) for a, b in zip(one.get_weights(), ours.get_weights())
    ),
    "final": float(ours.get_weights()[0].sum()),
    "drawn": bool(drawn),
    "pids": nanotf.worker_pids(),
}))
"""


@pytest.mark.both_generations
def test_falls_back_to_mirrored_strategy_in_this_process() -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    lines = run.stdout.splitlines()
    notes = [line for line in lines if line.startswith("nanotf: TensorFlow sees 2 GPU(s)")]
    assert len(notes) == 3
    for note, text in zip(notes, ("MirroredStrategy", "evaluate(", "predict("), strict=True):
        assert text in note
    result = json.loads(next(line for line in lines if line.startswith("RESULT "))[7:])
    assert result["got"].keys() == result["expected"].keys()
    for name, values in result["expected"].items():
        np.testing.assert_allclose(result["got"][name], values, rtol=1e-4)
    assert result["difference"] < 1e-5
    assert result["steps"] == 8
    assert not result["drawn"], "the user's random numbers were used up"
    assert result["pids"] == [], "no worker was started"
    assert [epoch for epoch, _ in result["seen"]] == [0, 1]
    assert result["seen"][-1][1] == result["final"], "the callback saw the user's model"


MIXED = """
import numpy as np
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from nanotf.parent import gpu
from nanotf.keras import Sequential

gpu.devices = lambda: ["/cpu:0", "/cpu:1"]
tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
L = tf.keras.layers
x = np.random.default_rng(0).random((200, 8)).astype("float32")
losses = []
for more in ({}, {"num_processes": 2}):
    tf.keras.utils.set_random_seed(1)
    model = Sequential([L.Input((8,)), L.Dense(4), L.Dense(2, dtype="float32")])
    model.compile("adam", "mse")
    history = model.fit(x, x[:, :2], epochs=2, shuffle=False, verbose=0, **more).history
    losses.append(history["loss"])
np.testing.assert_allclose(*losses, rtol=1e-2)
"""


@pytest.mark.both_generations
def test_mixed_precision_under_a_mirrored_strategy() -> None:
    """Keras 2's variables that cast others are of another class there."""
    command = [sys.executable, "-c", MIXED]
    run = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
