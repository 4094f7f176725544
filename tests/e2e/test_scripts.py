"""Programs in users' style: no main guard, everything in `__main__`."""

from __future__ import annotations

import json
import os
import pathlib
import shlex
import subprocess
import sys

import psutil
import pytest
from processes import ROOT, SECONDS, last_json, run_script

import nanotf

pytestmark = pytest.mark.own_pool

NO_GUARD = """
import json, pathlib, re
from sklearn.datasets import load_digits
import tensorflow as tf
import nanotf
from nanotf.keras import Sequential

x, y = load_digits(return_X_y=True)
model = Sequential([
    tf.keras.layers.Input((64,)),
    tf.keras.layers.Dense(32, activation="relu"),
    tf.keras.layers.Dense(10, activation="softmax"),
])
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
print("started before", nanotf.worker_pids())
history = model.fit(x / 16, y, epochs=2, num_processes=2)
pids = nanotf.worker_pids()
status = [pathlib.Path(f"/proc/{pid}/status").read_text() for pid in pids]
model.fit(x / 16, y, epochs=1, num_processes=2, verbose=0)
print()
print(json.dumps({
    "pids": pids,
    "pids_after_second_fit": nanotf.worker_pids(),
    "cores": [re.search(r"Cpus_allowed_list:\\s*(\\S+)", text)[1] for text in status],
    "epochs": history.epoch,
    "keys": list(history.history),
}))
"""


DAEMON = """
import json, pathlib, numpy as np, tensorflow as tf
from nanotf.keras import Sequential, nano

x = np.arange(40.0).reshape(20, 2) / 40
model = Sequential([tf.keras.layers.Input((2,)), tf.keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, x[:, :1], batch_size=10, verbose=0, num_processes=2)
before = model.get_weights()[0].tolist()

@nano(num_processes=2)
def loop(data, model):
    for batch in data:
        print("nobody reads this")
    return model.get_weights()[0].tolist()

data = tf.data.Dataset.from_tensor_slices(x).batch(10)
pathlib.Path("told").write_text(json.dumps([before, loop(data, model)]))
"""


@pytest.mark.thorough
def test_a_process_without_standard_streams(tmp_path: pathlib.Path) -> None:
    """The first files opened get the numbers 0, 1 and 2, like in some daemons."""
    (tmp_path / "daemon.py").write_text(DAEMON)
    command = f"{shlex.quote(sys.executable)} daemon.py <&- >&- 2>&-"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment, timeout=SECONDS, check=False
    )
    assert done.returncode == 0
    before, after = json.loads((tmp_path / "told").read_text())
    assert before == after


IN_A_SHARED_FOLDER = """
import json, os, sys
sys.path.append(os.environ["PACKAGES"])
import numpy as np, tensorflow as tf
import nanotf
from nanotf.keras import Sequential, nano
from nanotf.machine.tensorflow_build import read_build

x = np.arange(40.0).reshape(20, 2) / 40
model = Sequential([tf.keras.layers.Input((2,)), tf.keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, x[:, :1], batch_size=10, verbose=0, num_processes=2)

@nano(num_processes=2)
def paths():
    assert nanotf.rank() in (0, 1)
    return sys.path, os.environ.get("PYTHONPATH")

print(json.dumps({
    "build": read_build(os.environ).error,
    "same": paths() == (sys.path, os.environ.get("PYTHONPATH")),
}))
"""


@pytest.mark.thorough
def test_a_script_in_a_folder_with_other_modules(tmp_path: pathlib.Path) -> None:
    """Files in the folder or beside nanotf are imported only if the script imports them."""
    shared, packages = tmp_path / "shared", tmp_path / "packages"
    for folder in (shared, packages):
        folder.mkdir()
    for name in ("heapq", "queue", "pathlib", "tensorflow", "nanotf"):
        (shared / f"{name}.py").write_text("raise SystemExit('others run their code here')")
    (packages / "pathlib.py").write_text("raise SystemExit('the old pathlib')")
    (packages / "nanotf").symlink_to(ROOT / "nanotf")
    done = run_script(
        tmp_path, IN_A_SHARED_FOLDER, directory_at_start=shared, PACKAGES=str(packages)
    )
    assert last_json(done) == {"build": "", "same": True}


WITHOUT_SEMAPHORES = """
import nanotf, numpy as np, tensorflow as tf
from nanotf.keras import Sequential, nano
try:
    import multiprocessing
    multiprocessing.Lock()
except OSError:
    print("NO SEMAPHORES")
x = np.arange(40.0).reshape(20, 2) / 40
model = Sequential([tf.keras.layers.Input((2,)), tf.keras.layers.Dense(1)])
model.compile("sgd", "mse", metrics=["mae"])
options = {"verbose": 0, "num_processes": 2}
model.fit(x, x[:, :1], batch_size=10, validation_data=(x, x[:, :1]), **options)
model.evaluate(x, x[:, :1], **options)
model.predict(x, **options)

@nano(num_processes=2)
def total():
    strategy = nanotf.get_strategy()
    one = strategy.run(lambda: tf.constant(1.0))
    return float(strategy.reduce("SUM", one, axis=None))

print("TOTAL", total())
"""


@pytest.mark.thorough
def test_without_dev_shm(tmp_path: pathlib.Path) -> None:
    """The case of AWS Lambda."""
    bare = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs -o ro none /dev/shm && exec "$@"',
        "-",
    ]
    try:
        subprocess.run([*bare, "true"], capture_output=True, check=True, timeout=60)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no mount namespace of its own for a test: {error}")
    lines = run_script(tmp_path, WITHOUT_SEMAPHORES, command=bare).stdout.splitlines()
    assert lines == ["NO SEMAPHORES", "TOTAL 2.0"]


def _cores_of_list(text: str) -> list[int]:
    """Parses the kernel's list format: "0-2,5" is [0, 1, 2, 5]."""
    cores: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return cores


def test_script_without_main_guard(tmp_path: pathlib.Path) -> None:
    done = run_script(tmp_path, NO_GUARD)
    told = last_json(done)
    assert done.stdout.count("started before ()") == 1, "the script ran once, in one process"
    assert told["epochs"] == [0, 1]
    assert told["keys"] == ["accuracy", "loss"] or told["keys"] == ["loss", "accuracy"]
    for mask, placement in zip(told["cores"], nanotf.plan(2).placements, strict=True):
        if placement.pin:
            assert _cores_of_list(mask) == sorted(placement.cores)
    assert told["pids_after_second_fit"] == told["pids"], "the warm pool is used again"
    for pid in told["pids"]:
        assert not psutil.pid_exists(pid), f"worker {pid} outlived its parent"


OBJECTS_OF_MAIN = """
import numpy as np
import tensorflow as tf
from nanotf.keras import Model, Sequential
import nanotf

SCALE = 2.0

def helper(x):
    return x * SCALE

class Doubled(tf.keras.layers.Layer):
    def __init__(self, factor=1.0, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor
    def call(self, inputs):
        return helper(inputs) * self.factor
    def get_config(self):
        return {**super().get_config(), "factor": self.factor}

class Off(tf.keras.metrics.Metric):
    def __init__(self, name="off", **kwargs):
        super().__init__(name=name, **kwargs)
        self.worst = self.add_weight(name="worst", initializer="zeros")
    def update_state(self, y_true, y_pred, sample_weight=None):
        self.worst.assign_add(tf.reduce_sum(tf.abs(y_true - y_pred)))
    def result(self):
        return self.worst + 0.0

def own_loss(y_true, y_pred):
    return tf.reduce_mean(tf.square(helper(y_true) - helper(y_pred)), axis=-1)

class OwnLoss(tf.keras.losses.Loss):
    def call(self, y_true, y_pred):
        return own_loss(y_true, y_pred)

def within(y_true, y_pred):
    return tf.cast(tf.abs(y_true - y_pred) < 0.5, "float32")

class OwnModel(Model):
    def __init__(self, width):
        super().__init__()
        self.a = tf.keras.layers.Dense(width, activation=lambda v: tf.nn.relu(v) * SCALE)
        self.b = Doubled(0.5)
        self.c = tf.keras.layers.Dense(1)
    def call(self, inputs):
        return self.c(self.b(self.a(inputs)))

x = np.random.default_rng(0).normal(size=(101, 4)).astype("float32")
y = x.sum(1, keepdims=True)

def sequential():
    tf.keras.utils.set_random_seed(1)
    return Sequential([
        tf.keras.layers.Input((4,)), tf.keras.layers.Dense(8), Doubled(0.25),
        tf.keras.layers.Dense(1),
    ])

def own():
    tf.keras.utils.set_random_seed(1)
    model = OwnModel(8)
    model(x[:1])
    return model

for make, loss in ((sequential, own_loss), (own, OwnLoss())):
    histories = []
    for processes in (None, 2):
        model = make()
        model.compile("sgd", loss, metrics=[Off(), within])
        fit = dict(batch_size=20, epochs=2, shuffle=False, verbose=0)
        histories.append(model.fit(x, y, **fit, num_processes=processes).history)
    for key in histories[0]:
        np.testing.assert_allclose(histories[1][key], histories[0][key], rtol=1e-4, err_msg=key)
print("all agree")
"""


def test_objects_defined_in_main_are_sent_by_value(tmp_path: pathlib.Path) -> None:
    done = run_script(tmp_path, OBJECTS_OF_MAIN)
    assert done.stdout.strip().endswith("all agree")
