"""All kinds of models, trained by two processes and saved, load without nanotf.

One script, which cannot import nanotf, loads all of them and continues training. Its results must
equal those of a plain Keras model trained throughout in one process.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import pathlib
import pickle
import re
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_history, assert_same_state
from processes import last_json, run_script

import nanotf
from nanotf.compat.versions import is_keras_3
from nanotf.keras import Model, Sequential

pytestmark = pytest.mark.timeout(900)  # the first test waits for the data of all other tests

L = tf.keras.layers
KERAS_3 = is_keras_3()
X = np.random.default_rng(0).normal(size=(26, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
FIT: dict[str, Any] = {"batch_size": 8, "shuffle": False, "verbose": 0}


def subclass(base: Any) -> Any:
    """Returns the same class over plain Keras's model or nanotf's; in the script, over Keras's."""

    class Deep(base):  # type: ignore[misc]
        def __init__(self, width: int, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.width = width
            self.hidden = L.Dense(width, activation="tanh")
            self.out = L.Dense(1)

        def call(self, inputs: Any) -> Any:
            return self.out(self.hidden(inputs))

        def get_config(self) -> dict[str, Any]:
            return {"width": self.width, "name": self.name}

    return Deep


def functional(base: Any) -> Any:
    inputs = L.Input((4,))
    hidden = L.Dense(5, activation="tanh")(inputs)
    return base(inputs, L.Add()([L.Dense(1)(hidden), L.Dense(1)(inputs)]))


def layers() -> list[Any]:
    return [L.Dense(5, activation="tanh"), L.BatchNormalization(synchronized=True), L.Dense(1)]


K = tf.keras
KINDS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "functional": (lambda: functional(Model), lambda: functional(K.Model)),
    "sequential": (
        lambda: Sequential([L.Input((4,)), *layers()]),
        lambda: K.Sequential([L.Input((4,)), *layers()]),
    ),
    "built_by_fit": (lambda: Sequential(layers()), lambda: K.Sequential(layers())),
    "subclassed": (lambda: subclass(Model)(5), lambda: subclass(K.Model)(5)),
    "accelerated": (
        lambda: nanotf.accelerate(functional(K.Model)),
        lambda: functional(K.Model),
    ),
    "accelerated_subclass": (
        lambda: nanotf.accelerate(subclass(K.Model)(5)),
        lambda: subclass(K.Model)(5),
    ),
}
FORMATS = ("keras", "h5", "export") if KERAS_3 else ("keras", "h5", "tf", "export")
# Keras writes a model's graph into an .h5 file, and a subclassed model has none.
CASES = [
    (kind, form) for kind in KINDS for form in FORMATS if form != "h5" or "subclass" not in kind
]

# Keras 3 reads no slots from an .h5 file, and refuses to train with the optimizer; a SavedModel of
# Keras 2 begins with new slots.
LOSES_SLOTS = {f"{kind}-{form}" for kind, form in CASES if form == ("h5" if KERAS_3 else "tf")}


def _compiled(make: Callable[[], Any]) -> Any:
    tf.keras.utils.set_random_seed(7)
    model = make()
    model.compile(tf.keras.optimizers.Adam(0.01), tf.keras.losses.MeanSquaredError())
    return model


def _save(model: Any, form: str, path: pathlib.Path) -> str:
    path = path if form in ("export", "tf") else path.with_suffix(f".{form}")
    if form == "export":
        model.export(str(path))
    elif form == "tf":
        model.save(str(path), save_format="tf")
    else:
        model.save(str(path))
    return str(path)


LOAD = """
import json, sys
from typing import Any
import numpy as np
import tensorflow as tf

L = tf.keras.layers
{subclass}
known = {{"Deep": subclass(tf.keras.Model)}}
data = np.load("data.npz")
found = {{}}
for name, path in json.loads(open("paths.json").read()).items():
    if name.endswith("export"):
        again = tf.saved_model.load(path)
        found[name] = {{"predicted": np.asarray(again.serve(data["x"])).tolist()}}
        continue
    model = tf.keras.models.load_model(path, custom_objects=known)
    if name in {without_slots}:
        predicted = model.predict(data["x"], verbose=0).tolist()
        found[name] = {{"predicted": predicted}}
        continue
    steps = int(model.optimizer.iterations.numpy())
    predicted = model.predict(data["x"], verbose=0).tolist()
    history = model.fit(data["x"], data["y"], **json.loads(sys.argv[1]), epochs=2)
    found[name] = {{"steps": steps, "predicted": predicted, "losses": history.history["loss"]}}
assert not [name for name in sys.modules if name.startswith("nanotf.")]
print(json.dumps(found))
"""


class _Trained(dict[str, Any]):
    """Maps a kind to the model that two processes trained, and its losses."""

    def __missing__(self, kind: str) -> Any:
        model = _compiled(KINDS[kind][0])
        self[kind] = model, model.fit(X, Y, **FIT, num_processes=2).history["loss"]
        return self[kind]


@pytest.fixture(scope="module")
def trained() -> _Trained:
    return _Trained()


@pytest.fixture(scope="module")
def loaded(
    trained: _Trained, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """Maps kind and format to the results of a script that cannot import nanotf.

    One script loads all that the selected tests need.
    """
    wanted = {
        (item.callspec.params["kind"], item.callspec.params["form"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == "test_loads_without_nanotf"
    }
    directory = tmp_path_factory.mktemp("saved")
    np.savez(directory / "data.npz", x=X, y=Y)
    paths = {
        f"{kind}-{form}": _save(trained[kind][0], form, directory / f"{kind}_{form}")
        for kind, form in CASES
        if (kind, form) in wanted
    }
    (directory / "paths.json").write_text(json.dumps(paths))
    source = textwrap.dedent(inspect.getsource(subclass))
    script = LOAD.format(without_slots=LOSES_SLOTS, subclass=source)
    return last_json(run_script(directory, script, json.dumps(FIT), with_nanotf=False))


@pytest.fixture(scope="module")
def expected() -> Callable[[str], tuple[list[float], list[float]]]:
    """Gives plain Keras's losses in the first epoch, and in a second fit's two epochs, by kind."""

    @functools.cache
    def losses(kind: str) -> tuple[list[float], list[float]]:
        model = _compiled(KINDS[kind][1])
        first = model.fit(X, Y, **FIT).history["loss"]
        return first, model.fit(X, Y, **FIT, epochs=2).history["loss"]

    return losses


@pytest.mark.parametrize(("kind", "form"), CASES)
@pytest.mark.both_generations
def test_loads_without_nanotf(
    trained: _Trained, loaded: Any, expected: Any, kind: str, form: str
) -> None:
    (model, losses), found = trained[kind], loaded[f"{kind}-{form}"]
    predicted = model.predict(X, verbose=0)
    np.testing.assert_allclose(found["predicted"], predicted, rtol=1e-5, atol=1e-6)
    first, more = expected(kind)
    np.testing.assert_allclose(losses, first, rtol=1e-4)
    if "losses" in found:
        assert found["steps"] == 4
        np.testing.assert_allclose(found["losses"], more, rtol=1e-4)


_NOT_YET = pytest.mark.xfail(
    not KERAS_3,
    raises=nanotf.errors.ShippingError,
    strict=True,
    reason="a bug: the model holds the functions of its SavedModel, which cannot be pickled",
)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=_NOT_YET) if form == "tf" else form
        for form in FORMATS
        if form != "export"
    ],
)
@pytest.mark.both_generations
def test_a_loaded_model_continues_with_two_processes(
    float64: None, tmp_path: pathlib.Path, form: str
) -> None:
    """Plain Keras trained and saved the model, including slots and step count."""
    x, y = X.astype("float64"), Y.astype("float64")
    plain = _compiled(lambda: functional(K.Model))
    plain.fit(x, y, **FIT)
    path = _save(plain, form, tmp_path / "model")
    expected, model = (tf.keras.models.load_model(path) for _ in range(2))
    nanotf.accelerate(model)
    if form == "h5" and KERAS_3:  # see LOSES_SLOTS
        messages = []
        for one, processes in ((expected, {}), (model, {"num_processes": 2})):
            with pytest.raises(ValueError, match="Unknown variable") as caught:
                one.fit(x, y, **FIT, **processes)
            messages.append(re.sub(r"path=\w+", "", str(caught.value)))
        assert messages[0] == messages[1]
        return
    ours = model.fit(x, y, **FIT, epochs=2, num_processes=2)
    assert_same_history(ours.history, expected.fit(x, y, **FIT, epochs=2).history)
    assert_same_state(model, expected)


def test_weights_alone(float64: None, tmp_path: pathlib.Path) -> None:
    model, other = (_compiled(lambda: functional(Model)) for _ in range(2))
    model.fit(X, Y, **FIT, num_processes=2)
    path = str(tmp_path / "saved.weights.h5")
    model.save_weights(path)
    other.load_weights(path)
    for ours, theirs in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    plain = _compiled(lambda: functional(K.Model))
    plain.load_weights(path)
    np.testing.assert_array_equal(plain.predict(X, verbose=0), model.predict(X, verbose=0))


COPIES = {"pickle": lambda model: pickle.loads(pickle.dumps(model)), "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("how", COPIES)
def test_copies_take_num_processes(trained: _Trained, how: str) -> None:
    for kind in ("functional", "sequential", "accelerated"):
        model, _ = trained[kind]
        made = COPIES[how](model)
        ours = made.predict(X, verbose=0, num_processes=2)
        np.testing.assert_allclose(ours, model.predict(X, verbose=0), rtol=1e-5, atol=1e-6)


@pytest.mark.both_generations
def test_clones_and_configurations_are_plain_keras(trained: _Trained) -> None:
    for kind in ("functional", "sequential", "accelerated"):
        model, _ = trained[kind]
        assert "nanotf" not in json.dumps(model.get_config(), default=str), kind
        assert "nanotf" not in model.to_json(), kind
        clone = tf.keras.models.clone_model(model)
        clone.set_weights(model.get_weights())
        np.testing.assert_allclose(
            clone.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-6
        )
