"""Attributes that would not arrive in workers as they were are refused by name."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import numbers
from travels import FIT, with_layer

from nanotf.errors import ShippingError
from nanotf.shipping.objects import heap, outlines

pytestmark = pytest.mark.both_generations

L = tf.keras.layers


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
