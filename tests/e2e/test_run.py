"""`nanotf run`: unchanged scripts, from the command line."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest
from processes import ROOT, SECONDS, last_json

from nanotf.compat.versions import keras_module_name

pytestmark = pytest.mark.own_pool
KERAS = keras_module_name()


def _run(
    directory: pathlib.Path,
    source: str | None,
    options: tuple[str, ...] = ("-n", "2"),
    arguments: tuple[str, ...] = (),
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Writes a script, and starts `nanotf run OPTIONS sub/script.py ARGUMENTS`."""
    folder = directory / "sub"
    folder.mkdir(exist_ok=True)
    if source is not None:
        (folder / "script.py").write_text(textwrap.dedent(source))
    variables = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, "-m", "nanotf", "run", *options, "sub/script.py", *arguments],
        cwd=directory,
        env=variables,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


UNCHANGED = """
import atexit, json, os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
import numpy as np
import tensorflow as tf
import beside

def own_loss(y_true, y_pred):  # of __main__: sent by value
    return tf.reduce_mean(tf.square(y_true - y_pred) * SCALE, axis=-1)

SCALE = 2.0
sizes = []

class Note(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        import nanotf
        sizes.append(len(nanotf.worker_pids()))
        inner = tf.keras.Sequential([tf.keras.layers.Input((1,)), tf.keras.layers.Dense(1)])
        inner.compile("sgd", "mse")
        inner.fit(x[:8, :1], y[:8], verbose=0)  # a nested fit

def train(**arguments):
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", own_loss)
    fit = dict(epochs=2, batch_size=20, shuffle=False, verbose=0)
    return model.fit(x, y, **fit, **arguments).history["loss"]

x = np.random.default_rng(0).normal(size=(101, 4)).astype("float32")
y = x.sum(1, keepdims=True)
found = train(callbacks=[Note()])
kind = type(tf.keras.applications.MobileNetV2(weights=None, input_shape=(32, 32, 3), alpha=0.35))
told = {
    "single": train(num_processes=1),  # an explicit argument wins
    "argv": sys.argv,
    "path": sys.path[0],
    "file": __file__,
    "name": __name__,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "sizes": sizes,
    "loss": found,
    "accelerated": hasattr(kind, "_nanotf_original"),
    "beside": beside.NAME,
}
atexit.register(lambda: print(json.dumps(told)))  # runs at the end of the script
"""


def test_an_unchanged_script_uses_workers(tmp_path: pathlib.Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "beside.py").write_text("NAME = 'beside'\n")
    done = _run(tmp_path, UNCHANGED, arguments=("-n", "7", "--", "a b"))
    assert done.returncode == 0, done.stderr
    told = last_json(done)
    assert told["argv"] == [str(tmp_path / "sub" / "script.py"), "-n", "7", "--", "a b"]
    assert told["path"] == str((tmp_path / "sub").resolve())
    assert told["file"] == str(tmp_path / "sub" / "script.py")
    assert told["name"] == "__main__"
    assert told["main"] is True
    assert told["sizes"] == [2, 2]
    assert told["accelerated"] is True
    assert told["loss"] == pytest.approx(told["single"], rel=1e-4)
    # The output may mention another pool on this machine, but has no note of `nanotf run`.
    assert "never called" not in done.stderr
    assert "Traceback" not in done.stderr


MODULE = """
import atexit, json, pickle, sys
import numpy as np
import tensorflow as tf
from . import beside
from .beside import SCALE

@tf.keras.utils.register_keras_serializable()
class Scaled(tf.keras.layers.Layer):  # of __main__: sent by value
    def call(self, inputs):
        from .beside import SCALE  # in the worker
        return inputs * SCALE

def own_loss(y_true, y_pred):
    return tf.reduce_mean(tf.square(y_true - y_pred) * SCALE * beside.SCALE, axis=-1)

def train(**arguments):
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([tf.keras.layers.Input((4,)), Scaled(), tf.keras.layers.Dense(1)])
    model.compile("sgd", own_loss)
    x = np.random.default_rng(0).normal(size=(41, 4)).astype("float32")
    fit = dict(epochs=1, batch_size=20, shuffle=False, verbose=0)
    return model.fit(x, x.sum(1, keepdims=True), **fit, **arguments)

history = train()
main = sys.modules["__main__"]
told = {
    "single": train(num_processes=1).history["loss"],
    "loss": history.history["loss"],
    "size": history.nanotf.size,
    "main": vars(main) is globals() and pickle.loads(pickle.dumps(train)) is train,
}
atexit.register(lambda: print(json.dumps(told)))
"""


@pytest.mark.thorough
def test_a_module_with_relative_imports_uses_workers(tmp_path: pathlib.Path) -> None:
    _package(tmp_path, MODULE)
    done = _run_module(tmp_path, "package.module", ("-n", "2"))
    assert done.returncode == 0, done.stderr
    told = last_json(done)
    assert (told["size"], told["main"]) == (2, True)
    assert told["loss"] == pytest.approx(told["single"], rel=1e-4)


SEEN = """
import json, sys
print(json.dumps([sys.argv, sys.path[0], __name__, __package__, __spec__.name, __file__]))
print(sys.modules["__main__"].__dict__ is globals(), __cached__, __doc__)
"""
FAILS = "def fails():\n    raise ValueError('of its own')\n\nfails()\n"
MODULES = {
    "package_in_package": ("package.inner", ""),
    "exception": ("package.module", FAILS),
    "import_of_package": ("package.lacks.module", ""),
}


def _package(directory: pathlib.Path, source: str) -> None:
    """Writes packages with a module `package.module`."""
    files = {
        "package/__init__.py": "import sys\nprint(sys.argv)\n",
        "package/module.py": source,
        "package/beside.py": "SCALE = 2.0\n",
        "package/inner/__init__.py": "",
        "package/inner/__main__.py": SEEN + "from .. import beside",
        "package/lacks/__init__.py": "import no_such_module",
        "package/empty/__init__.py": "",
    }
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(textwrap.dedent(text))


def _run_module(
    directory: pathlib.Path,
    name: str,
    options: tuple[str, ...] = (),
    nanotf_run: tuple[str, ...] = ("-m", "nanotf", "run"),
) -> subprocess.CompletedProcess[str]:
    """Runs `nanotf run OPTIONS -m NAME`, or `python -m NAME`, with arguments like options."""
    return subprocess.run(
        [sys.executable, *nanotf_run, *options, "-m", name, "-n", "7", "-m", "--", "a b"],
        cwd=directory,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def _assert_told(done: subprocess.CompletedProcess[str], expected: list[str]) -> None:
    """Asserts the last lines of standard error; TensorFlow may write others on import."""
    told = [line for line in done.stderr.splitlines() if "never called fit" not in line]
    assert told[len(told) - len(expected) :] == expected
    assert "".join(told).count("Traceback") == "".join(expected).count("Traceback")


@pytest.mark.parametrize("name", MODULES)
def test_a_module_runs_as_by_python(tmp_path: pathlib.Path, name: str) -> None:
    module, source = MODULES[name]
    _package(tmp_path, source)
    plain = _run_module(tmp_path, module, nanotf_run=())
    done = _run_module(tmp_path, module)
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout)
    # Python shows the frames that led to the module, one line each.
    _assert_told(done, [x for x in plain.stderr.splitlines() if "<frozen runpy>" not in x])


@pytest.mark.thorough
@pytest.mark.every_case
@pytest.mark.parametrize("name", ["no_such", "package.empty"])
def test_a_module_that_cannot_be_run(tmp_path: pathlib.Path, name: str) -> None:
    _package(tmp_path, "")
    done = _run_module(tmp_path, name, ("-n", "2"))
    assert done.returncode == 2
    told = done.stderr.splitlines()[-1]
    assert told.startswith("nanotf: `nanotf run -m` takes the name of a module")
    assert f"Received: -m {name} (" in told
    assert "Traceback" not in done.stderr


AUTO = """
import json
import numpy as np
import tensorflow as tf
from nanotf.parent.auto import first_epochs, rule, timed_fits

# Whatever this machine measures, and however short the fit is.
timed_fits.measure = lambda trial, number, *rest: timed_fits.Measured(number, 1e-9)
rule.SHARE, first_epochs.MEASURED_STEPS = 1e9, 1

class Inner(tf.keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        train(epochs=1, verbose=0)  # a nested fit measures nothing

def train(**arguments):
    model = tf.keras.Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model.fit(np.ones((40, 4)), np.ones((40, 1)), **arguments)

found = train(callbacks=[Inner()], epochs=2, verbose=2).nanotf
alone = train(num_processes=1, verbose=0).nanotf
print(json.dumps({"size": found.size, "alone": alone.size}))
"""


def test_auto_measures_for_every_fit(tmp_path: pathlib.Path) -> None:
    done = _run(tmp_path, AUTO, ("-n", "auto"), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert last_json(done) == {"size": 2, "alone": 1}
    assert done.stdout.count('nanotf: num_processes="auto": 2 workers: ') == 1


@pytest.mark.thorough
def test_auto_without_effect_is_reported(tmp_path: pathlib.Path) -> None:
    done = _run(tmp_path, "pass", ("-n", "auto"))
    assert "so -n auto did nothing" in done.stderr


@pytest.mark.thorough
def test_keras_is_patched_under_all_its_names(tmp_path: pathlib.Path) -> None:
    source = f"""
    from tensorflow.keras.models import Sequential
    import {KERAS}, nanotf, tensorflow as tf
    print({KERAS}.Sequential is Sequential is nanotf.keras.Sequential is tf.keras.Sequential)
    """
    done = _run(tmp_path, source, options=())
    assert done.stdout.split() == ["True"], done.stderr


FITS = """
import os
os.environ.update(CHANGES)
import tensorflow as tf
model = tf.keras.Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(1)])
model.compile("sgd", "mse")
for _ in range(2):
    model.fit(tf.ones((4, 4)), tf.ones((4, 1)), verbose=0)
print("continued")
"""


@pytest.mark.thorough
def test_another_keras_cannot_be_chosen_by_the_script(tmp_path: pathlib.Path) -> None:
    other = "0" if os.environ.get("TF_USE_LEGACY_KERAS") == "1" else "1"
    changes = {"TF_USE_LEGACY_KERAS": other}
    done = _run(tmp_path, FITS.replace("CHANGES", repr(changes)), options=())
    assert (done.returncode, done.stdout) == (1, "")
    assert "InvalidArgumentError: `nanotf run` imports TensorFlow before" in done.stderr
    assert f"Received: TF_USE_LEGACY_KERAS='{other}', set by sub/script.py" in done.stderr
    assert f"`TF_USE_LEGACY_KERAS={other} nanotf run ...`" in done.stderr


@pytest.mark.thorough
def test_variables_set_too_late_are_named_once(tmp_path: pathlib.Path) -> None:
    changes = {"TF_ENABLE_ONEDNN_OPTS": "0", "KERAS_BACKEND": "tensorflow", "OTHER": "1"}
    done = _run(tmp_path, FITS.replace("CHANGES", repr(changes)), options=())
    assert done.stdout.split() == ["continued"], done.stderr
    assert done.stderr.count("nanotf: warning: `nanotf run` imports TensorFlow before") == 1
    assert "Received: TF_ENABLE_ONEDNN_OPTS='0', set by sub/script.py." in done.stderr


@pytest.mark.parametrize("sparse", [True, False])
def test_sparse(tmp_path: pathlib.Path, sparse: bool) -> None:
    source = """
    import tensorflow as tf
    from nanotf.optimizers import SparseAdam
    print("sparse" if isinstance(tf.keras.optimizers.Adam(), SparseAdam) else "dense")
    """
    done = _run(tmp_path, source, ("--sparse",) if sparse else ())
    assert done.stdout.split()[0] == ("sparse" if sparse else "dense"), done.stderr


@pytest.mark.thorough
def test_precision(tmp_path: pathlib.Path) -> None:
    source = """
    import tensorflow as tf
    print(tf.keras.mixed_precision.global_policy().name)
    """
    done = _run(tmp_path, source, ("--precision", "mixed_bfloat16"))
    assert done.stdout.split() == ["mixed_bfloat16"], done.stderr


@pytest.mark.thorough
def test_a_script_that_never_calls_fit_gets_a_note(tmp_path: pathlib.Path) -> None:
    done = _run(tmp_path, "import os; os.environ['TF_LATE'] = '1'; raise SystemExit")
    assert done.returncode == 0
    late, note = (line for line in done.stderr.splitlines() if line.startswith("nanotf: "))
    assert "Received: TF_LATE='1', set by sub/script.py." in late
    assert note == (
        "nanotf: sub/script.py never called fit() of a tf.keras model in this process, so -n 2 did "
        "nothing. Custom loops run in one process: to divide one, put it into a function under "
        "`@nanotf.nano(num_processes=2)`. Processes that the script or a library starts, such as "
        "joblib's, train as they do without nanotf."
    )


def test_a_script_that_exits_with_an_error_gets_no_note(tmp_path: pathlib.Path) -> None:
    """It may have failed before its first `fit`, like one that argparse ends."""
    done = _run(tmp_path, "import os; os.environ['TF_LATE'] = '1'; raise SystemExit(5)")
    assert done.returncode == 5
    (late,) = (line for line in done.stderr.splitlines() if line.startswith("nanotf: "))
    assert "Received: TF_LATE='1', set by sub/script.py." in late


@pytest.mark.thorough
def test_a_script_whose_loop_ran_on_workers_gets_no_note(tmp_path: pathlib.Path) -> None:
    source = """
        import nanotf
        from nanotf import nano

        @nano(num_processes=2)
        def loop():
            return 1

        print(loop())
        """
    done = _run(tmp_path, textwrap.dedent(source))
    assert done.stdout.split() == ["1"], done.stderr
    assert "never called fit" not in done.stderr


LATE = {
    "a thread": "threading.Thread(target=late).start()",
    "an exit handler": "atexit.register(late)",
    "neither": "if os.fork(): os.wait()",  # the note comes from one process
}


@pytest.mark.thorough
@pytest.mark.parametrize("how", LATE)
def test_a_note_is_decided_at_the_very_end(tmp_path: pathlib.Path, how: str) -> None:
    source = """
        import atexit, os, threading
        from nanotf.parent import defaults

        def late():
            if threading.current_thread() is not threading.main_thread():
                threading.main_thread().join()
            defaults.num_processes(None)  # the first query of `fit`
        """
    done = _run(tmp_path, textwrap.dedent(source) + LATE[how])
    assert done.returncode == 0
    assert done.stderr.count("never called fit") == (how == "neither")


FAILING = """
def fails():
    raise ValueError("of the script's own")

fails()
"""


def _plain(directory: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """Returns the output of `python sub/script.py`."""
    return subprocess.run(
        [sys.executable, "sub/script.py"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


SCRIPTS = {
    "an exception": FAILING,
    "a syntax error": "x = 1\nif x\n    y = 2\n",
    "a hook of its own": """
import sys, traceback
def hook(kind, error, tb):
    print("hook", kind.__name__, [f.name for f in traceback.extract_tb(tb)], file=sys.stderr)
sys.excepthook = hook
raise KeyError("k")
""",
    "an interrupt": f"import os\nos.kill(os.getpid(), {int(signal.SIGINT)})\n",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_exit_code_and_traceback_are_the_scripts_own(tmp_path: pathlib.Path, name: str) -> None:
    done = _run(tmp_path, SCRIPTS[name])
    expected = _plain(tmp_path)
    assert done.returncode == expected.returncode != 0
    _assert_told(done, expected.stderr.splitlines())


CLI: list[tuple[tuple[str, ...], str]] = [
    (("-n", "0"), "must be at least 1. Received: num_processes=0"),
    (("-n", "10000"), "Received: num_processes=10000"),
    (("-n", "two"), "must be a whole number, or 'auto'. Received: 'two'"),
    (("-n", "Auto"), "must be a whole number, or 'auto'. Received: 'Auto'"),
    (("--precision", "float16"), "invalid choice: 'float16'"),
]


@pytest.mark.parametrize(("options", "text"), CLI)
def test_wrong_options(tmp_path: pathlib.Path, options: tuple[str, ...], text: str) -> None:
    done = _run(tmp_path, "print('ran')", options)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("nanotf: ")
    assert text in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_missing_script(tmp_path: pathlib.Path) -> None:
    done = _run(tmp_path, None)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "nanotf: The script must be a Python file. Received: sub/script.py (no such file).\n"
    )
    (tmp_path / "sub" / "script.py").mkdir()
    assert "sub/script.py (a directory)" in _run(tmp_path, None).stderr


@pytest.mark.thorough
def test_an_error_in_training_is_shown_with_the_scripts_traceback(tmp_path: pathlib.Path) -> None:
    source = """
    import numpy as np
    import tensorflow as tf
    model = tf.keras.Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.ones((10, 4)), np.ones(7), verbose=0)
    """
    done = _run(tmp_path, source)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    first = lines.index("Traceback (most recent call last):")
    assert f'"{tmp_path / "sub" / "script.py"}", line 6' in lines[first + 1]
    assert "ValueError" in done.stderr
    assert "run_script" not in done.stderr


@pytest.mark.thorough
def test_a_script_with_a_strategy_of_tensorflow_runs_unchanged(tmp_path: pathlib.Path) -> None:
    done = _run(
        tmp_path,
        """
        import json
        import numpy as np
        import tensorflow as tf
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        with strategy.scope():
            model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
            model.compile(tf.keras.optimizers.Adam(), "mse", metrics=["mae"])
        x = np.ones((16, 3), np.float32)
        history = model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0)
        print(json.dumps([history.nanotf.size, int(model.optimizer.iterations.numpy())]))
        """,
    )
    assert done.returncode == 0, done.stderr
    assert last_json(done) == [2, 4]
