"""Rows of several requests, computed at once."""

import numpy as np
import pytest

from nanotf.serving.computing import batches
from nanotf.serving.interface import Decoded


def request(rows, width=3, signature="s", dtype=np.float32, start=0):
    x = np.arange(start, start + rows * width, dtype=dtype).reshape(rows, width)
    return Decoded(signature, {"x": x}, rows)


def compute(log):
    def run(inputs, signature):
        log.append(len(inputs["x"]))
        return {"y": inputs["x"] * 2, "z": inputs["x"].sum(axis=1)}

    return run


def grouped(*requests, apart=True):
    found = batches.groups(list(enumerate(requests)), lambda signature: apart)
    return [[place for place, _ in group] for group in found]


def test_rows_of_equal_kind_are_put_together():
    assert grouped(request(1), request(2), request(3)) == [[0, 1, 2]]


def test_other_lengths_types_and_signatures_are_not_mixed():
    found = grouped(
        request(1),
        request(1, width=4),
        request(1, dtype=np.float64),
        request(1, signature="t"),
        request(2),
    )
    assert found == [[0, 4], [1], [2], [3]]


def test_rows_that_depend_on_each_other_stay_with_their_request():
    assert grouped(request(1), request(2), apart=False) == [[0], [1]]


def test_a_request_without_rows_is_alone():
    without = Decoded("s", {"x": np.float32(3)}, None)
    assert grouped(request(1), without, request(0), request(2)) == [[0, 3], [1], [2]]


@pytest.mark.parametrize("sizes", [[1], [8], [4, 4], [1, 2, 3], [7, 9, 1], [20], [1] * 33])
@pytest.mark.parametrize("most", [1, 4, 8, 32])
def test_results_are_those_of_each_request_alone(sizes, most):
    log, several = [], [request(rows, start=100 * n) for n, rows in enumerate(sizes)]
    for asked, found in zip(several, batches.computed(several, most, compute(log)), strict=True):
        np.testing.assert_array_equal(found["y"], asked.inputs["x"] * 2)
        np.testing.assert_array_equal(found["z"], asked.inputs["x"].sum(axis=1))
    assert max(log) <= most
    assert len(log) == -(-sum(sizes) // most)


def test_outputs_without_the_rows_are_noticed():
    with pytest.raises(batches.RowsLost):
        batches.computed([request(1), request(2)], 8, lambda inputs, signature: {"y": np.zeros(5)})
    with pytest.raises(batches.RowsLost):
        batches.computed(
            [request(1), request(2)], 8, lambda inputs, signature: {"y": np.float32(5)}
        )
