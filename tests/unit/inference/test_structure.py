"""`nanotf.inference.structure`: arrays in lists and dicts, by names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nanotf.errors import InvalidArgumentError, InvalidArgumentTypeError
from nanotf.inference import structure

A, B = np.zeros((2, 3)), np.ones((2, 1))


def _described(value: Any, own: tuple[str, ...] = ()) -> Any:
    names = iter(own)
    return structure.describe(value, lambda _: next(names, None), "output")[0]


@pytest.mark.parametrize(
    ("value", "own", "expected"),
    [
        (A, ("dense",), "dense"),
        (A, (), "output_0"),
        ([A, B], ("p", "q"), {"list": ["p", "q"]}),
        ((A, B), (), {"tuple": ["output_0", "output_1"]}),
        ([A, B], ("p", "p"), {"list": ["p", "p_1"]}),
        ({"z": A, "a": B}, ("p", "q"), {"dict": {"z": "z", "a": "a"}}),
        (
            {"u": A, "v": [B, {"w": A}]},
            (),
            {"dict": {"u": "u", "v": {"list": ["v_0", {"dict": {"w": "v_1_w"}}]}}},
        ),
    ],
)  # fmt: skip
def test_describe_and_build(value: Any, own: tuple[str, ...], expected: Any) -> None:
    names = iter(own)
    found, leaves = structure.describe(value, lambda _: next(names, None), "output")
    assert found == expected
    values = dict(zip(structure.names(found), leaves, strict=True))
    built = structure.build(found, values)
    assert type(built) is type(value)
    assert structure.describe(built, lambda _: None, "x")[1] == leaves


def test_keys_are_strings() -> None:
    with pytest.raises(InvalidArgumentTypeError, match="Received: the key 1"):
        _described({1: A})


@pytest.mark.parametrize(
    ("wanted", "value", "expected"),
    [
        ("x", A, {"x": A}),
        ("x", [A], {"x": A}),
        ("x", {"x": A}, {"x": A}),
        ("x", [[1, 2]], {"x": [[1, 2]]}),
        ({"list": ["a", "b"]}, [A, B], {"a": A, "b": B}),
        ({"list": ["a", "b"]}, {"b": B, "a": A}, {"a": A, "b": B}),
        ({"dict": {"k": "a", "l": "b"}}, {"l": B, "k": A}, {"a": A, "b": B}),
        ({"dict": {"k": "a", "l": "b"}}, (A, B), {"a": A, "b": B}),
        ({"dict": {"k": "a"}}, A, {"a": A}),
    ],
)
def test_flatten(wanted: Any, value: Any, expected: Any) -> None:
    found = structure.flatten(wanted, value)
    assert list(found) == list(expected)
    assert all(found[name] is expected[name] or found[name] == expected[name] for name in found)


@pytest.mark.parametrize(
    ("wanted", "value", "received"),
    [
        ("x", {"y": A}, "'y'"),
        ({"list": ["a", "b"]}, [A], "a list of 1"),
        ({"list": ["a", "b"]}, A, "ndarray"),
        ({"dict": {"a": "a"}}, {"a": A, "b": B}, "'a', 'b'"),
    ],
)
def test_other_structures(wanted: Any, value: Any, received: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"Received: {received}"):
        structure.flatten(wanted, value)
