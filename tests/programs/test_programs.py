"""Programs in the style of tutorials: each returns the same with two workers as in one process.

Only the two decorators are written for nanotf. The programs compute in float64, so rounding cannot
hide errors: the bound is 1e-9, relative.
"""

from __future__ import annotations

import importlib
import pathlib
from typing import Any

import catalogue
import numpy as np
import pytest
import tensorflow as tf

import nanotf

HERE = pathlib.Path(__file__).parent
TOPICS = sorted({path.stem for path in HERE.glob("*.py")} - {"catalogue", "test_programs"})
for topic in TOPICS:
    importlib.import_module(topic)

pytestmark = pytest.mark.both_generations
BOUND = 1e-9


@pytest.mark.parametrize("name", catalogue.PROGRAMS)
def test_program(name: str, float64: None) -> None:
    program = catalogue.PROGRAMS[name]
    expected = _numbers(program, lambda function: function, lambda function: function)
    found = _numbers(program, nanotf.nano(num_processes=2), nanotf.nano_multiprocessing)
    assert len(found) == len(expected)
    for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_allclose(ours, theirs, rtol=BOUND, atol=BOUND, err_msg=f"value {place}")


def _numbers(program: Any, nano: Any, step: Any) -> list[Any]:
    tf.keras.backend.clear_session()
    tf.keras.utils.set_random_seed(3)
    return [np.asarray(value) for value in tf.nest.flatten(program(nano, step))]
