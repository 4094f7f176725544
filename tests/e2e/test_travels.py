"""Models and all that they refer to arrive in workers as they were: class, attributes, identity."""

from __future__ import annotations

import importlib
import pathlib
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_history, assert_same_state, numbers
from travels import FIT, with_layer

from nanotf import nano
from nanotf.shipping.objects import heap, user_modules

pytestmark = pytest.mark.both_generations

L = tf.keras.layers


# ------------------------------------------------------------------------------- variables
class Rounded(tf.Variable):  # type: ignore[misc]
    """A variable around another, whose values it rounds, as quantized variables do."""

    def __init__(self, latent: Any, step: float) -> None:
        self.itself, self.latent, self.step = self, latent, step

    def value(self) -> Any:
        rounded = tf.round(self.latent / self.step) * self.step
        return self.latent + tf.stop_gradient(rounded - self.latent)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["latent"], name)

    handle = property(lambda self: self.latent.handle)
    shape = property(lambda self: self.latent.shape)
    dtype = property(lambda self: self.latent.dtype)
    name = property(lambda self: self.latent.name)
    trainable = property(lambda self: self.latent.trainable)
    _unique_id = property(lambda self: self.latent._unique_id)

    def __repr__(self) -> str:
        return f"Rounded({self.latent!r})"


class Special(type(tf.Variable(0.0))):  # type: ignore[misc]
    """A variable with an own read."""

    def read(self) -> Any:
        return tf.convert_to_tensor(self) * self.factor


class OfVariables(L.Layer):  # type: ignore[misc]
    """A layer with variables of its own classes, and with attributes of variables."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 2), name="kernel", initializer="ones")
        start = tf.constant([[0.31], [0.77]], self.kernel.dtype)
        latent = tf.Variable(start, name="latent")
        self.latent = latent
        self.rounded = types.SimpleNamespace(of_latent=Rounded(latent, 0.25))
        self.special = Special(start, name="special")
        self.special.factor = 3.0
        self.kernel.factor = 0.5
        super().build(shape)

    def call(self, x: Any) -> Any:
        hidden = tf.tanh(x @ tf.convert_to_tensor(self.kernel) * self.kernel.factor)
        return hidden @ (self.rounded.of_latent.value() + self.special.read())


# ------------------------------------------------------------------------------ attributes
class Scale(tf.Module):  # type: ignore[misc]
    """A module that cannot be made without arguments."""

    def __new__(cls, factor: float) -> Any:
        return super().__new__(cls)

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = tf.Variable(tf.constant(factor, tf.keras.backend.floatx()))


class Choosy:
    """An object that cannot be made without arguments."""

    def __new__(cls, factor: float) -> Any:
        made = super().__new__(cls)
        made.factor = factor
        return made


class Numbers(dict):  # type: ignore[type-arg]
    """A dict that cannot be made without arguments."""

    def __new__(cls, first: float) -> Any:
        return super().__new__(cls)

    def __init__(self, first: float) -> None:
        super().__init__(first=first)


class OfChoosyObjects(L.Layer):  # type: ignore[misc]
    """A layer, itself not made without arguments, that holds such objects."""

    def __new__(cls, factor: float) -> Any:
        return super().__new__(cls)

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.scale, self.choosy, self.numbers = Scale(factor), Choosy(factor), [Numbers(factor)]

    def call(self, x: Any) -> Any:
        return x * self.scale.factor + self.choosy.factor * self.numbers[0]["first"]


class RemembersTensors(L.Layer):  # type: ignore[misc]
    """A layer that keeps tensors of its last call, and a method of one."""

    last: Any = None

    def call(self, x: Any) -> Any:
        if self.last is not None:
            assert self.last.shape.rank == len(self.rank()) == 2
            assert self.last.dtype == x.dtype
        self.last, self.rank = x, x.get_shape
        self.ragged = tf.RaggedTensor.from_tensor(x)
        self.sparse = tf.sparse.from_dense(x)
        return x * 2.0


class OwnWrapper(L.Layer):  # type: ignore[misc]
    """A layer whose methods are attributes, a lock and a thread-local among others."""

    def __init__(self) -> None:
        super().__init__()
        self.out = L.Dense(2)
        self.apply_to = self.out.__call__
        self.lock = threading.RLock()

    def call(self, x: Any) -> Any:
        with self.lock:
            return self.apply_to(x)


LAYERS = {
    cls.__name__: make
    for cls, make in {
        OfVariables: OfVariables,
        OfChoosyObjects: lambda: OfChoosyObjects(2.0),
        RemembersTensors: RemembersTensors,
        OwnWrapper: OwnWrapper,
    }.items()
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.every_case
def test_layers(name: str, float64: None) -> None:
    x, y = numbers()
    models, histories = [], []
    for more in ({}, {"num_processes": 2}):
        model = with_layer(LAYERS[name])
        model.fit(x, y, **FIT, **more)
        histories.append(model.fit(x, y, **FIT, **more).history)
        models.append(model)
    assert_same_history(histories[1], histories[0])
    assert_same_state(models[1], models[0])


def test_attributes_that_a_thread_changes(float64: None) -> None:
    x, y = numbers()
    histories = []
    for more in ({}, {"num_processes": 2}):
        model = with_layer(lambda: L.Dense(2))
        layer, ended = vars(model.layers[1]), threading.Event()

        def change(layer: Any = layer, ended: Any = ended) -> None:
            layer["seen"], place = 0, 0
            while not ended.wait(0.0001):
                layer["seen"], place = layer["seen"] + 1, place + 1
                layer[f"more{place % 100}"] = place
                layer.pop(f"more{(place + 50) % 100}", None)

        thread = threading.Thread(target=change)
        thread.start()
        try:
            histories.append(model.fit(x, y, **FIT, **more).history)
        finally:
            ended.set()
            thread.join()
    assert_same_history(histories[1], histories[0])


@pytest.mark.thorough
def test_ten_thousand_layers(float64: None) -> None:
    model = with_layer(lambda: L.Dense(2))
    model.more = [L.Dense(2) for _ in range(10_000)]
    data, ours = heap.dump_model(model)
    copy, theirs = heap.load_model(data)
    assert len(copy.more) == 10_000
    assert len(theirs) == len(ours) > 10_000


# ------------------------------------------------------------------------------ optimizers
def key_of(variable: Any) -> str:
    key: str = getattr(variable, "_value", variable)._unique_id
    return key


class OnlyKnown(tf.keras.optimizers.SGD):  # type: ignore[misc]
    """Trains the variables whose identities it was given."""

    def __init__(self, known: Any = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.known = frozenset(known)

    def update_step(self, gradient: Any, variable: Any, *args: Any) -> None:
        if key_of(variable) in self.known:
            super().update_step(gradient, variable, *args)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "known": sorted(self.known)}


class RefusesItsConfiguration(tf.keras.optimizers.SGD):  # type: ignore[misc]
    """Returns a configuration that it does not take."""

    def __init__(self, rate: float, **kwargs: Any) -> None:
        if not isinstance(rate, float):
            raise TypeError(f"rate must be a float, received {rate!r}")
        super().__init__(rate, **kwargs)
        self.factor = 0.5

    def update_step(self, gradient: Any, variable: Any, *args: Any) -> None:
        super().update_step(self.factor * gradient, variable, *args)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "rate": "none"}


def only_known() -> Any:
    model = with_layer(lambda: L.Dense(2))
    known = [key_of(variable) for variable in model.layers[-1].trainable_variables]
    model.compile(OnlyKnown(known, learning_rate=0.01), "mse", metrics=["mae"])
    return model


def refusing() -> Any:
    return with_layer(lambda: L.Dense(2), RefusesItsConfiguration(0.02))


@pytest.mark.parametrize("make", [only_known, refusing], ids=lambda make: make.__name__)
@pytest.mark.every_case
def test_optimizers(make: Callable[[], Any], float64: None) -> None:
    x, y = numbers()
    models, histories = [], []
    for more in ({}, {"num_processes": 2}):
        model = make()
        model.fit(x, y, **FIT, **more)
        histories.append(model.fit(x, y, **FIT, **more).history)
        models.append(model)
    assert_same_history(histories[1], histories[0])
    assert_same_state(models[1], models[0])
    assert histories[0]["loss"][1] < histories[0]["loss"][0]


# ------------------------------------------------------------------------- `@nano` functions
@pytest.mark.parametrize("count", [1, 2])
def test_choosy_objects_in_a_loop(count: int, float64: None) -> None:
    scale, choosy = Scale(2.0), Choosy(3.0)

    def train() -> float:
        for _ in range(3):
            scale.factor.assign_add(tf.cast(choosy.factor, scale.factor.dtype))
        choosy.factor += 1.0
        return float(scale.factor)

    result = nano(num_processes=count)(train)() if count > 1 else train()
    assert result == float(scale.factor) == 11.0
    assert choosy.factor == 4.0


def test_variables_in_a_loop(float64: None) -> None:
    special = Special(tf.constant([1.0, 2.0]), name="special")
    special.factor = 3.0
    latent = tf.Variable([0.3, 0.6])
    rounded = Rounded(latent, 0.5)

    @nano(num_processes=2)
    def look() -> tuple[Any, ...]:
        special.assign_add([1.0, 1.0])
        kinds = type(special).__name__, type(rounded).__name__, rounded.latent is latent
        return *kinds, special._unique_id, special.read().numpy(), rounded.value().numpy()

    *kinds, identity, read, value = look()
    assert kinds == ["Special", "Rounded", True]
    assert identity == special._unique_id
    np.testing.assert_array_equal(read, [6.0, 9.0])
    np.testing.assert_array_equal(value, [0.5, 0.5])
    np.testing.assert_array_equal(special.numpy(), [2.0, 3.0])


# -------------------------------------------------------------------- code of installed packages
LIBRARY = '''
import tensorflow as tf

class Info:
    """What its functions return."""

SHARED = tf.Variable(3.0, trainable=False)

def make_info():
    class Own(Info):
        pass
    return Own()

@tf.function
def doubled(info: Info, x):
    assert isinstance(info, Info)
    return 2.0 * x

def adding(number):
    def add(x):
        return make_info() and x + number
    return add

class OfLibrary(tf.keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.info, self.add = Info(), adding(0.5)
    def call(self, x):
        import nanotf_test_library as here
        assert type(self) is here.OfLibrary and isinstance(make_info(), here.Info)
        return doubled(self.info, self.add(x))
'''


@pytest.fixture
def library(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package that is installed."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "nanotf_test_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("nanotf_test_library")
    del sys.modules["nanotf_test_library"]


def test_classes_of_installed_packages_are_the_package_s(library: Any, float64: None) -> None:
    x, y = numbers()
    histories = []
    for more in ({}, {"num_processes": 2}):
        histories.append(with_layer(library.OfLibrary).fit(x, y, **FIT, **more).history)
    assert_same_history(histories[1], histories[0])


def test_functions_of_installed_packages_in_a_loop(library: Any, float64: None) -> None:
    info, add = library.Info(), library.adding(0.5)

    @nano(num_processes=2)
    def look() -> tuple[Any, ...]:
        here = importlib.import_module("nanotf_test_library")
        kept = isinstance(info, here.Info), add.__globals__ is vars(here)
        return *kept, float(library.doubled(info, add(tf.constant(1.0))))

    assert look() == (True, True, 3.0)


def test_a_loss_whose_module_leads_to_a_model(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, float64: None
) -> None:
    """Two modules import each other; only one that both lead to holds the model."""
    sources = {
        "one": "import nanotf_test_other",
        "other": "import nanotf_test_one\nfrom nanotf_test_teacher import TEACHER",
        "teacher": "import tensorflow as tf\nTEACHER = tf.keras.layers.Dense(1)",
        "loss": "import tensorflow as tf\nimport nanotf_test_one\n"
        "from nanotf_test_other import TEACHER\n"
        "def loss(y, out):\n    return tf.reduce_mean((TEACHER(y) - out) ** 2, -1)",
    }
    for name, source in sources.items():
        (tmp_path / f"nanotf_test_{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    tf.keras.utils.set_random_seed(5)
    module = importlib.import_module("nanotf_test_loss")
    module.TEACHER.build((None, 1))
    x, y = numbers()
    histories = []
    for more in ({}, {"num_processes": 2}):
        model = with_layer(lambda: L.Dense(2))
        model.compile("sgd", module.loss)
        histories.append(model.fit(x, y, **FIT, **more).history)
    assert_same_history(histories[1], histories[0])
    modules = user_modules.ModulesByValue()
    found = {name: modules.root_of(sys.modules[f"nanotf_test_{name}"]) for name in sources}
    for name in sources:
        del sys.modules[f"nanotf_test_{name}"]
    assert found["teacher"] == "nanotf_test_teacher.TEACHER"
    assert all(found.values())
