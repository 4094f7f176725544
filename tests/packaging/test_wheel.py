"""The wheel installs what the README promises."""

from __future__ import annotations

import json
import os
import pathlib
import sysconfig

import pytest
from release import Installation, run

pytestmark = pytest.mark.xdist_group("distributions")
SCRIPTS = ("nanotf", "nanotf-init", "nanotf-unset")

TRAINING = """
import json
import numpy as np
import nanotf
import tensorflow as tf

model = nanotf.Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
history = model.fit(x, x.sum(1), epochs=3, num_processes=2, verbose=0)
print(json.dumps([nanotf.__file__, nanotf.worker_pids(), history.history["loss"]]))
"""


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_is_on_the_path(
    installed: Installation, script: str, tmp_path: pathlib.Path
) -> None:
    found = run("bash", "-c", f"command -v {script}", env=installed.environment, cwd=tmp_path)
    assert found.strip() == str(installed.python.with_name(script))
    assert os.access(found.strip(), os.X_OK)


def test_command_runs_without_tensorflow(installed: Installation, tmp_path: pathlib.Path) -> None:
    run("nanotf", "--help", env=installed.environment, cwd=tmp_path)


def test_keras_says_which_extra_to_install(installed: Installation, tmp_path: pathlib.Path) -> None:
    code = "import nanotf\ntry:\n    import nanotf.keras\nexcept ImportError as e:\n    print(e)"
    said = run(installed.python, "-c", code, cwd=tmp_path, env=installed.environment)
    assert "nanotf[cpu]" in said
    assert "Received: no module" in said


def test_native_library_is_installed_without_a_compiler(
    installed: Installation, tmp_path: pathlib.Path
) -> None:
    code = (
        "from nanotf.collectives.native_library import native_status\n"
        "import json\nprint(json.dumps(native_status()))"
    )
    said = run(installed.python, "-c", code, cwd=tmp_path, env=installed.environment)
    usable, why = json.loads(said)
    assert usable, why


@pytest.mark.thorough
def test_two_workers_train_with_the_wheel(installed: Installation, tmp_path: pathlib.Path) -> None:
    """With this environment's TensorFlow, and the wheel's nanotf before the one installed here."""
    (packages,) = (installed.python.parents[1] / "lib").glob("python*/site-packages")
    borrowed = packages / "borrowed.pth"
    borrowed.write_text(f"{sysconfig.get_path('purelib')}\n")
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    try:
        said = run(installed.python, script, cwd=tmp_path, env=installed.environment)
    finally:
        borrowed.unlink()
    where, pids, losses = json.loads(said.splitlines()[-1])
    assert pathlib.Path(where).is_relative_to(packages)
    assert len(set(pids)) == 2
    assert losses[-1] < losses[0]
