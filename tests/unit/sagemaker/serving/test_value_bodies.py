"""Bodies without a signature: arrays that user code may write to, CSV without rows."""

from __future__ import annotations

import numpy as np
import pytest

from nanotf.sagemaker.serving import csv_bodies, numpy_bodies, value_bodies

ROWS = np.arange(6.0).reshape(2, 3)


def test_arrays_for_user_code_can_be_written_to() -> None:
    found = value_bodies.read(numpy_bodies.write_npy(ROWS), "application/x-npy", 1 << 20)
    found += 1
    np.testing.assert_array_equal(found, ROWS + 1)
    body = numpy_bodies.write_npz({"a": ROWS, "b": ROWS[:0]})
    found = value_bodies.read(body, "application/x-npz", 1 << 20)
    found["a"] *= 2
    np.testing.assert_array_equal(found["a"], ROWS * 2)
    assert found["b"].shape == (0, 3)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (0, 2, 3)])
def test_csv_of_no_rows(shape: tuple[int, ...]) -> None:
    assert csv_bodies.write_csv(np.zeros(shape)) == b""


def test_csv_of_rows_without_values() -> None:
    assert csv_bodies.write_csv(np.zeros((2, 0))) == b"\n\n"
