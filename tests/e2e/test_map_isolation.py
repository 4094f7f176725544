"""`nanotf.map`: each item finds what it would find if it were the only one."""

from __future__ import annotations

import collections
import functools
import importlib
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from sklearn.linear_model import SGDRegressor

import nanotf
from nanotf.machine import topology

pytestmark = pytest.mark.own_pool

ITEMS = 4
NUMBERS = range(1, min(3, topology.usable_count()) + 1)
COUNT = 0
NAMES: list[str] = []
TABLE: dict[str, list[int]] = {"numbers": [0]}

# A program: makes a function of one item, and what it shares.
Program = Callable[[], tuple[Callable[..., Any], dict[str, Any]]]
PROGRAMS: list[Program] = []


def program(make: Program) -> Program:
    PROGRAMS.append(make)
    return make


@program
def a_global_number() -> Any:
    global COUNT
    COUNT = 0

    def count(item: int) -> Any:
        global COUNT
        COUNT += item + 1
        return COUNT

    return count, {}


@program
def global_containers() -> Any:
    NAMES.clear()
    TABLE.clear()
    TABLE["numbers"] = [0]

    def append(item: int) -> Any:
        NAMES.append(f"item {item}")
        TABLE["numbers"].append(item)
        TABLE[f"{item}"] = []
        return list(NAMES), dict(TABLE)

    return append, {}


@program
def shared_containers() -> Any:
    def write(item: int, **shared: Any) -> Any:
        shared["table"]["row"]["sum"] += item + 1
        shared["names"].append(item)
        shared["known"].add(item)
        shared["last"].append(item)
        shared["raw"][0] += 1
        shared["counts"][item] += 1
        shared["pair"][1].append(item)
        found = {name: value for name, value in shared.items() if name not in ("raw", "counts")}
        return str(found), bytes(shared["raw"]), dict(shared["counts"])

    shared = {
        "table": {"row": {"sum": 0}},
        "names": [],
        "known": {99},
        "last": collections.deque([1, 2], maxlen=2),
        "raw": bytearray(b"\0\0"),
        "counts": collections.defaultdict(int),
        "pair": (1, []),
    }
    return write, shared


@program
def what_several_share() -> Any:
    """One list under two names is one list in each item, too."""

    def write(item: int, one: Any, other: Any) -> Any:
        one.append(item)
        return other

    both: list[int] = []
    return write, {"one": both, "other": both}


@program
def a_closure() -> Any:
    total, seen = 0.0, set[int]()

    def add(item: int) -> Any:
        nonlocal total
        total += item + 0.5
        seen.add(item)
        return total, sorted(seen)

    return add, {}


@program
def a_default() -> Any:
    def keep(item: int, kept: list[int] = [], *, more: dict[int, int] = {}) -> Any:  # noqa: B006
        kept.append(item)
        more[item] = len(kept)
        return list(kept), dict(more)

    return keep, {}


@program
def an_attribute_of_a_function() -> Any:
    def call(item: int) -> Any:
        call.calls = getattr(call, "calls", 0) + 1  # type: ignore[attr-defined]
        call.__defaults__ = (*(call.__defaults__ or ()), item)
        return call.calls, call.__defaults__  # type: ignore[attr-defined]

    return call, {}


@program
def a_class() -> Any:
    class Registry:
        known: list[int] = []  # noqa: RUF012
        count = 0

        @classmethod
        def add(cls, item: int) -> None:
            cls.count += 1
            cls.known.append(item)

    def add(item: int) -> Any:
        found = hasattr(Registry, "added")
        Registry.added = item  # type: ignore[attr-defined]
        Registry.add(item)
        return Registry.count, list(Registry.known), found

    return add, {}


class Slotted:
    __slots__ = ("value",)


class Plain:
    def __init__(self) -> None:
        self.calls, self.inner = 0, Slotted()
        self.inner.value = 1  # type: ignore[attr-defined]

    def __call__(self, item: int, factor: int = 1) -> Any:
        self.calls += 1
        self.inner.value *= 10 * factor  # type: ignore[attr-defined]
        return self.calls, self.inner.value  # type: ignore[attr-defined]


@program
def an_instance() -> Any:
    return Plain(), {}


@program
def a_method() -> Any:
    return Plain().__call__, {}


@program
def a_partial() -> Any:
    return functools.partial(Plain(), factor=3), {}


class Secretive:
    """Its contents are what its own methods say."""

    def __init__(self) -> None:
        self.number = 0

    def __getstate__(self) -> Any:
        return self.number

    def __setstate__(self, number: int) -> None:
        self.number = number


@program
def an_object_that_pickles_itself() -> Any:
    def call(item: int, kept: Secretive) -> Any:
        kept.number += 1
        return kept.number

    return call, {"kept": Secretive()}


class Unlike:
    """It does not let itself be compared."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise TypeError("no")


@program
def what_cannot_be_compared() -> Any:
    def write(item: int, held: Any) -> Any:
        held["other"] = held["one"]
        held["count"] += 1
        return held["count"], len(held)

    return write, {"held": {"one": Unlike(), "count": 0}}


@program
def generators_of_random_numbers() -> Any:
    def draw(item: int, one: Any, other: Any) -> Any:
        return float(one.random()), float(other.normal())

    return draw, {"one": np.random.default_rng(1), "other": np.random.RandomState(2)}


@program
def an_array_of_objects() -> Any:
    def write(item: int, objects: Any) -> Any:
        objects[0].append(item)
        objects[1] = item
        return str(list(objects))

    return write, {"objects": np.array([[0], None], dtype=object)}


@program
def a_model() -> Any:
    tf.keras.utils.set_random_seed(0)
    layers = [tf.keras.Input((2,)), tf.keras.layers.Dense(1)]
    model = nanotf.keras.Sequential(layers)
    model.compile(tf.keras.optimizers.SGD(0.5), "mse")

    def train(item: int, model: Any) -> Any:
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
        return [weight.tolist() for weight in model.get_weights()]

    return train, {"model": model}


@program
def a_variable() -> Any:
    variable = tf.Variable(1.0)

    def add(item: int) -> Any:
        return float(variable.assign_add(item + 1.0))

    return add, {}


@program
def an_estimator() -> Any:
    def train(item: int, estimator: Any) -> Any:
        estimator.partial_fit([[0.0], [1.0]], [0.0, 1.0])
        return estimator.t_, estimator.intercept_.tolist()

    return train, {"estimator": SGDRegressor(random_state=0)}


ARRAYS = {
    "small": np.ones(3),
    "large": np.ones(1 << 17),
    "transposed": np.ones((3, 2)).T,
    "every second": np.ones(6)[::2],
    "one number": np.array(1.0),
    "records": np.zeros(2, [("a", "i4"), ("b", "f8")]),
    "bfloat16": np.ones(3, ml_dtypes.bfloat16),
    "dates": np.array(["2020-01-01"], "datetime64[D]"),
    "texts": np.array(["a", "b"]),
    "in a tuple": (np.ones(2),),
}


@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_items_are_alone(make: Program) -> None:
    expected = []
    for item in range(ITEMS):
        function, shared = make()
        expected.append(function(item, **shared))
    for number in NUMBERS:
        function, shared = make()
        found = nanotf.map(function, range(ITEMS), number, shared=shared)
        assert found == expected, f"{number} workers"


def test_arrays_are_read_only() -> None:
    """No item finds in one what another has written, whatever its size, type and layout."""
    in_closure, in_global = np.ones(2), {"array": np.ones(2)}

    def write(item: str, **arrays: Any) -> Any:
        found = {**arrays, "closure": in_closure, "inside": in_global["array"]}[item]
        array = found[0] if isinstance(found, tuple) else found
        try:
            array[...] = array
        except ValueError as error:
            return str(error), array.dtype.str, array.shape, array.tobytes()
        return "it can be written to"

    names = [*ARRAYS, "closure", "inside"]
    for name, found in zip(names, nanotf.map(write, names, 2, shared=ARRAYS), strict=True):
        given = {**ARRAYS, "closure": in_closure, "inside": in_closure}[name]
        given = given[0] if isinstance(given, tuple) else given
        expected = given.dtype.str, given.shape, given.tobytes()
        assert found == ("assignment destination is read-only", *expected), name


HELPER = """
import numpy as np

count, table, array = 0, {"calls": []}, np.ones(2)

class Registry:
    names = []

def call(item):
    global count
    count += 1
    table["calls"].append(item)
    Registry.names.append(item)
    array[0] += 1
    call.calls = getattr(call, "calls", 0) + 1
    return count, list(table["calls"]), list(Registry.names), call.calls, array.tolist()
"""


@pytest.mark.parametrize("place", ["global", "inside", "item"])
def test_modules_of_the_user(
    place: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script imports them, a function does, or an item that has their class."""
    name = f"helper_of_{place}"
    (tmp_path / f"{name}.py").write_text(HELPER)
    monkeypatch.syspath_prepend(str(tmp_path))
    helper = importlib.import_module(name)

    def through_global(item: Any) -> Any:
        return helper.call(item)

    def inside(item: Any) -> Any:
        return importlib.import_module(name).call(item)

    def through_item(item: Any) -> Any:
        sys.modules[type(item).__module__].table["calls"].append(1)
        return len(sys.modules[type(item).__module__].table["calls"])

    if place == "item":
        items = [helper.Registry() for _ in range(ITEMS)]
        expected: Any = [1] * ITEMS
    else:
        items = list(range(ITEMS))
        expected = [(1, [item], [item], 1, [2.0, 1.0]) for item in items]
    function = {"global": through_global, "inside": inside, "item": through_item}[place]
    for number in NUMBERS:
        assert nanotf.map(function, items, number) == expected
        assert nanotf.map(function, items, number) == expected, "a second call"


def test_what_cannot_be_written_to_stays() -> None:
    """It is the same object for all items: keeping them apart costs nothing."""
    rows, name, pair = np.ones((4, 3)), "a name", (1, ("b", 2.0))

    def identity(item: int, rows: Any) -> Any:
        return id(rows), id(identity), id(pair), name

    found = nanotf.map(identity, range(ITEMS), 1, shared={"rows": rows})
    assert len(set(found)) == 1
