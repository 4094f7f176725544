"""`nanotf.inference.row_ranges` and `row_padding`: rows in ranges, batches and padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from nanotf.inference import row_ranges
from nanotf.inference.engines import row_padding
from nanotf.inference.engines.row_padding import PaddedRows
from nanotf.inference.signature import DEFAULT, Signature, TensorSpec


class Doubles:
    """Doubles its input, and notes the numbers of rows."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def run(self, inputs: Mapping[str, Any], signature: str = DEFAULT) -> dict[str, Any]:
        self.rows.append(len(inputs["x"]))
        return {"y": inputs["x"] + inputs["x"]}


@pytest.mark.parametrize(
    ("rows", "size", "parts"), [(100, 32, 4), (7, 32, 4), (64, 1, 3), (96, 32, 2)]
)
def test_ranges_are_whole_batches(rows: int, size: int, parts: int) -> None:
    found = row_ranges.divide(rows, size, parts)
    assert [row for each in found for row in each] == list(range(rows))
    assert len(found) == min(parts, -(-rows // size))
    assert all(each.start % size == 0 for each in found)
    batches = [-(-len(each) // size) for each in found]
    assert max(batches) - min(batches) <= 1


@pytest.mark.parametrize(("rows", "sizes"), [(0, [0]), (1, [1]), (7, [3, 3, 1]), (6, [3, 3])])
def test_batches(rows: int, sizes: list[int]) -> None:
    program, x = Doubles(), np.arange(20.0).reshape(10, 2)
    found = row_ranges.in_batches(program, {"x": x}, range(2, 2 + rows), 3)
    assert program.rows == sizes
    np.testing.assert_array_equal(found["y"], 2 * x[2 : 2 + rows])


def test_a_process_keeps_the_latest_program() -> None:
    made: list[str] = []

    def make(name: str) -> Doubles:
        made.append(name)
        return Doubles()

    first = row_ranges.opened((make, ("a",)))
    assert row_ranges.opened((make, ("a",))) is first
    row_ranges.opened((make, ("b",)))
    assert row_ranges.opened((make, ("a",))) is not first
    assert made == ["a", "b", "a"]


def _signature(*rows: int | None) -> Signature:
    specs = [TensorSpec(name, "float32", (n, 2)) for name, n in zip("xy", rows, strict=True)]
    return Signature((specs[0],), (specs[1],))


@pytest.mark.parametrize(("rows", "padded"), [(0, 1), (1, 1), (3, 4), (4, 4), (5, 8), (33, 64)])
def test_padding_to_a_power_of_two(rows: int, padded: int) -> None:
    runner, x = Doubles(), np.random.default_rng(0).normal(size=(rows, 2))
    found = PaddedRows(runner, {DEFAULT: _signature(None, None)}, row_padding.power_of_two)
    np.testing.assert_array_equal(found.run({"x": x}, DEFAULT)["y"], 2 * x)
    assert runner.rows == [padded]


def test_padding_of_texts() -> None:
    runner = Doubles()
    found = PaddedRows(runner, {DEFAULT: _signature(None, None)}, row_padding.at_least_one)
    x = np.empty((0, 2), object)
    assert found.run({"x": x}, DEFAULT)["y"].shape == (0, 2)
    assert runner.rows == [1]


@pytest.mark.parametrize("rows", [(3, None), (None, 3)])
def test_signatures_without_rows_are_not_padded(rows: tuple[int | None, ...]) -> None:
    runner, x = Doubles(), np.ones((3, 2))
    found = PaddedRows(runner, {DEFAULT: _signature(*rows)}, row_padding.power_of_two)
    assert found.run({"x": x}, DEFAULT)["y"].shape == (3, 2)
    assert runner.rows == [3]


def test_signatures_that_are_not_named_are_not_padded() -> None:
    runner, x = Doubles(), np.ones((3, 2))
    found = PaddedRows(runner, {}, row_padding.power_of_two)
    assert found.run({"x": x}, DEFAULT)["y"].shape == (3, 2)
    assert runner.rows == [3]
