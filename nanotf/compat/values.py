"""Values of variables, read and written by one operation each.

`tf.Variable.read_value` and `assign` open name scopes, copy handles and run further operations. For
the hundreds of variables of a large model, that takes longer than copying the values at an epoch's
end.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from nanotf.compat.versions import require_tensorflow


def read(variable: Any) -> Any:
    """Returns the value of a `tf.Variable` as an eager tensor, which shares the variable's memory."""
    tf = require_tensorflow()
    if isinstance(variable, tf.distribute.DistributedValues):  # has a handle only in replicas
        return variable.read_value()
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


def write(variable: Any, value: Any) -> None:
    """Sets a `tf.Variable` to a copy of an array of its shape and dtype."""
    tf = require_tensorflow()
    if isinstance(variable, tf.distribute.DistributedValues):
        variable.assign(value)
        return
    value = tf.constant(value, variable.dtype)
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


def plain_logs(logs: Any) -> dict[str, Any] | None:
    """Returns logs with plain numbers for tensors and arrays."""
    if not logs:
        return None
    plain = {}
    for name, value in logs.items():
        with contextlib.suppress(AttributeError):
            value = value.numpy()
        plain[name] = (
            value.item()
            if isinstance(value, (np.ndarray, np.generic)) and np.ndim(value) == 0
            else value
        )
    return plain
