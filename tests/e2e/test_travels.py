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

import nanotf
from nanotf import nano
from nanotf.errors import ShippingError
from nanotf.keras import Model
from nanotf.shipping.objects import heap, outlines, user_modules

pytestmark = pytest.mark.both_generations

L = tf.keras.layers
FIT = {"batch_size": 10, "epochs": 2, "verbose": 0}


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


def with_layer(make: Callable[[], Any], optimizer: Any = None) -> Any:
    tf.keras.utils.set_random_seed(1)
    inputs = L.Input((3,))
    model = Model(inputs, L.Dense(1)(make()(inputs)))
    model.compile(optimizer or tf.keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


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


# ------------------------------------------------------------------------------------ datasets
class Retrieving(Model):  # type: ignore[misc]
    """Compares its rows with those of a dataset, which it embeds by its own weights."""

    def __init__(self, candidates: Any) -> None:
        super().__init__()
        self.embed = L.Dense(2)
        self.out = L.Dense(1)
        self.embed.build((None, 3))
        rows = candidates.batch(4).map(lambda x: tf.tanh(tf.matmul(x, self.embed.kernel)))
        self.candidates = rows.map(lambda x: x * 1.5)
        self.adapted = L.Normalization()
        self.adapted.adapt(candidates.batch(4))
        self.read_by_python = candidates.map(lambda x: tf.numpy_function(lambda v: v, [x], x.dtype))

    def call(self, x: Any) -> Any:
        own = tf.tanh(self.embed(self.adapted(x)))
        start = tf.zeros_like(own[:, :1])
        found = self.candidates.reduce(
            start, lambda most, rows: tf.maximum(most, tf.reduce_max(own @ tf.transpose(rows)))
        )
        return self.out(own) + found


def test_datasets_of_a_model(float64: None) -> None:
    x, y = numbers()
    models, histories = [], []
    for more in ({}, {"num_processes": 2}):
        tf.keras.utils.set_random_seed(1)
        model = Retrieving(tf.data.Dataset.from_tensor_slices(x[:7]))
        model.compile(tf.keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        model.fit(x, y, **FIT, **more)
        histories.append(model.fit(x, y, **FIT, **more).history)
        models.append(model)
    assert_same_history(histories[1], histories[0])
    assert_same_state(models[1], models[0])


class Growing(L.Layer):  # type: ignore[misc]
    """A layer with a text and an array of any length in variables."""

    def __init__(self) -> None:
        super().__init__()
        self.text = tf.Variable("a", trainable=False)
        self.grown = tf.Variable([0.0], shape=[None], trainable=False, validate_shape=False)
        self.text.assign("abc")
        self.grown.assign([1.0, 2.0, 3.0])

    def call(self, x: Any) -> Any:
        length = tf.strings.length(self.text.read_value())
        total = tf.reduce_sum(self.grown.read_value())
        return x * tf.cast(length, x.dtype) + tf.cast(total, x.dtype)


def test_values_of_variables_without_numbers_or_shape(float64: None) -> None:
    x, y = numbers()
    histories = []
    for more in ({}, {"num_processes": 2}):
        histories.append(with_layer(Growing).fit(x, y, **FIT, **more).history)
    assert_same_history(histories[1], histories[0])


def test_such_values_that_a_loop_changes() -> None:
    growing = Growing()

    @nano(num_processes=2)
    def change() -> tuple[Any, Any]:
        growing.text.assign("abcd")
        growing.grown.assign(tf.concat([growing.grown.read_value(), [4.0]], 0))
        return growing.text.numpy(), growing.grown.numpy().tolist()

    for length in (4, 5):
        text, grown = change()
        assert text == growing.text.numpy() == b"abcd"
        assert grown == growing.grown.numpy().tolist()
        assert len(grown) == length


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_a_model_made_under_a_strategy(policy: str) -> None:
    x, y = numbers()
    histories = []
    tf.keras.mixed_precision.set_global_policy(policy)
    try:
        for more in ({}, {"num_processes": 2}):
            with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
                model = with_layer(lambda: L.Dense(2))
            histories.append(model.fit(x, y, **FIT, **more).history["loss"])
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    np.testing.assert_allclose(*histories, rtol=2e-2 if policy != "float32" else 1e-5)


def test_an_optimizer_that_new_workers_get(float64: None) -> None:
    """The workers of the call that built it have ended."""
    x, y = numbers()
    losses: list[list[float]] = []
    for size in (None, 2):
        tf.keras.utils.set_random_seed(1)
        dense, optimizer = L.Dense(1), tf.keras.optimizers.Adam(0.05)
        dense.build((None, 3))
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(10)

        def train(batches: Any, dense: Any, optimizer: Any) -> list[float]:
            found = []
            for rows, targets in batches:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((dense(rows) - targets) ** 2)
                gradients = tape.gradient(loss, dense.trainable_variables)
                optimizer.apply_gradients(zip(gradients, dense.trainable_variables, strict=True))
                found.append(float(loss))
            return found

        run = train if size is None else nano(num_processes=size)(train)
        first = run(batches, dense, optimizer)
        if size is not None:
            nanotf.shutdown()
        losses.append([*first, *run(batches, dense, optimizer), *run(batches, dense, optimizer)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-9)


class ReadsVariables(L.Layer):  # type: ignore[misc]
    """Reads a dataset of its variables: one is empty, one has no number, two are alike."""

    def __init__(self) -> None:
        super().__init__()
        floatx = tf.keras.backend.floatx()
        values = [[], [float("nan")], [1.0], [1.0]]
        self.read = [tf.Variable(tf.constant(v, floatx), trainable=False) for v in values]
        empty, nan, one, other = self.read

        def row(number: Any) -> Any:
            known = tf.where(tf.math.is_nan(nan), tf.zeros_like(nan), nan)
            return tf.reduce_sum(empty) + known[0] + one[0] + other[0] * 2.0 + one[0] * 0.0

        self.rows = tf.data.Dataset.range(3).map(row)
        other.assign([5.0])

    def call(self, x: Any) -> Any:
        start = tf.zeros([], x.dtype)
        return x * self.rows.reduce(start, lambda total, row: total + row)


def test_a_dataset_of_unusual_variables(float64: None) -> None:
    x, y = numbers()
    histories = []
    for more in ({}, {"num_processes": 2}):
        histories.append(with_layer(ReadsVariables).fit(x, y, **FIT, **more).history)
    assert_same_history(histories[1], histories[0])


# ------------------------------------------------------------------ what does not arrive as it was
def test_what_arrives_otherwise_is_refused_by_name(float64: None) -> None:
    x, y = numbers()
    model = with_layer(lambda: L.Dense(2, name="first"))
    model.layers[1].place = tf.Variable(1.0).handle
    weights = model.get_weights()
    with pytest.raises(ShippingError, match=r"'place' of Dense 'first', which is a tensor of res"):
        model.fit(x, y, **FIT, num_processes=2)
    for before, after in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(after, before)
    del model.layers[1].place
    model.fit(x, y, **FIT, num_processes=2)


def test_outlines_of_unlike_objects() -> None:
    model = with_layer(lambda: L.Dense(2, name="first"))
    layer = model.layers[1]

    numbered: list[Any] = []

    def outline(held: Any) -> str:
        vars(layer)["held"] = held  # not tracked by Keras, whose own lists would change, too
        nonlocal numbered
        _, pickler = heap.dump({"The model": model}, heap.HeapPickler)
        numbered = pickler.numbered
        text: str = pickler.outline()
        return text

    ours = outline([{"factor": (1.0, layer.bias)}])
    outlines.check(ours, outline([{"factor": (1.0, layer.bias)}]), numbered)
    what = "'held' of Dense 'first', which is .*"
    for other, words in (
        ([{"factor": (1.0, layer.kernel)}], "bias.*kernel"),
        ([{"factor": (1.5, layer.bias)}], "1.0 .*1.5"),
        ([{"factor": (1.0,)}], "tuple of 2 .*tuple of 1"),
        ([{"factor": "long" * 1000}], "tuple of 2 .*'longlong"),
        (10**10_000, "list.* of 1 .*33220 bits"),
    ):
        with pytest.raises(ShippingError, match=what + words):
            outlines.check(ours, outline(other), numbered)
    outlines.check(outline("a" * 10**7), outline("a" * 10**7), numbered)


class Endless:
    """An object whose pickle refers to itself before it is made."""

    def __reduce__(self) -> Any:
        return Endless, (self,)


def refers_to(value: Any) -> Callable[[], Any]:
    return lambda: value


@pytest.mark.parametrize(
    ("held", "named"),
    [
        (
            {"log": [1, {"of": (number for number in ())}]},
            r"`held\.log\[1\]\.of` of Dense 'first', .*generator",
        ),
        (
            refers_to([(number for number in ())]),
            r"`held\.value\[0\]` of Dense 'first', an object of class builtins.generator",
        ),
        (types.SimpleNamespace(endless=Endless()), r"`held\.endless` of Dense 'first', .*Endless"),
        (
            {"a b": (number for number in range(3))},
            r"`held\['a b'\]` of Dense 'first', .*generator",
        ),
    ],
    ids=lambda value: value[7:16] if isinstance(value, str) else "",
)
@pytest.mark.every_case
def test_what_cannot_travel_is_named(held: Any, named: str) -> None:
    x, y = numbers()
    model = with_layer(lambda: L.Dense(2, name="first"))
    vars(model.layers[1])["held"] = held
    with pytest.raises(ShippingError, match=named) as caught:
        model.fit(x, y, **FIT, num_processes=2)
    assert len(str(caught.value)) < 1000


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
