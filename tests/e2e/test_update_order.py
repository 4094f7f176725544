"""`keras_optimizers.updating_in_order`: temporary values of one update exist at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from nanotf.compat import keras_optimizers
from nanotf.compat.keras_common import tf_variable

pytestmark = pytest.mark.both_generations


def _ancestors(operation: Any) -> set[str]:
    found, left = set(), [operation]
    while left:
        op = left.pop()
        before = [*op.control_inputs, *(tensor.op for tensor in op.inputs)]
        left += [each for each in before if each.name not in found]
        found |= {each.name for each in before}
    return found


def test_large_variables_are_updated_one_after_the_other() -> None:
    """The second update computes nothing from its gradient before the first one has ended."""
    numbers = np.random.default_rng(0).normal(size=(2, 256, 256)).astype("float32")
    results = []
    for in_order in (False, True):
        variables = [tf.Variable(each) for each in numbers]
        optimizer = tf.keras.optimizers.Adam(0.1)
        optimizer.build(variables)

        @tf.function
        def update(first: Any, second: Any) -> None:
            pairs = zip((first, second), variables, strict=True)  # noqa: B023 - called here
            if in_order:  # noqa: B023
                with keras_optimizers.updating_in_order(optimizer):  # noqa: B023
                    optimizer.apply_gradients(pairs)  # noqa: B023
            else:
                optimizer.apply_gradients(pairs)  # noqa: B023

        traced = update.get_concrete_function(*numbers)
        operations = traced.graph.get_operations()
        end, _ = (op for op in operations if op.type == "AssignSubVariableOp")
        _, square = (op for op in operations if op.type == "Square")  # of the second gradient
        assert (end.name in _ancestors(square)) == in_order
        assert "update_step" not in vars(optimizer)
        for _ in range(2):
            update(*numbers)
        results.append([tf_variable(each).numpy() for each in variables])
    np.testing.assert_array_equal(*results)
