"""Variables: the values, read and written by one operation each, and what else they consist of.

`tf.Variable.read_value` and `assign` open name scopes, copy handles and run further operations. For
the hundreds of variables of a large model, that takes longer than copying the values at an epoch's
end.

| private name | versions seen | why |
| --- | --- | --- |
| `resource_variable_ops.UninitializedVariable`, `BaseResourceVariable._handle`, its `_parent_trackable` | 2.14-2.21 | a variable without a value takes no memory |
| `DistributedVariable._values` | 2.14-2.21 | see `_is_of_replicas`; its one replica shares memory |
| the attributes in `_OF_PROCESS` | 2.14-2.21 | they are valid only in the process that made the variable |
| `ops.EagerTensor` | 2.14-2.21 | a tensor over an array's memory; `tf.constant` copies it |
"""

from __future__ import annotations

import contextlib
import enum
import functools
import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from nanotf.compat.keras_common import holds_numbers
from nanotf.compat.versions import require_tensorflow
from nanotf.wire import pages

# The value's place, the arguments of `without_value`, the strategy, which is the receiver's, and what
# TensorFlow keeps of graphs and reads.
_OF_PROCESS = frozenset(
    {
        "_cached_shape_as_list",
        "_cached_value",
        "_distribute_strategy",
        "_distributed_container",
        "_dtype",
        "_graph_element",
        "_graph_key",
        "_handle",
        "_initial_value",
        "_initializer_op",
        "_is_initialized_op",
        "_shape",
        "_variable_read",
    }
)


def behind(variable: Any) -> Any:
    """Returns the `tf.Variable` whose value a variable has: itself, or one that it wraps.

    Keras 2's casting variables, and the quantized variables of libraries, wrap others.
    """
    kind, seen = require_tensorflow().Variable, {id(variable)}
    while "_handle" not in vars(variable) and not _is_of_replicas(variable):
        inner = (v for v in vars(variable).values() if isinstance(v, kind) and id(v) not in seen)
        found = next(inner, None)
        if found is None:
            break
        variable = found
        seen.add(id(variable))
    return variable


def _is_of_replicas(variable: Any) -> bool:
    """Returns True for a strategy's variable, which has one for each replica."""
    return "_values" in vars(variable)


def kind_of(variable: Any) -> dict[str, Any]:
    """Returns the arguments of `tf.Variable` that make a variable of the same kind."""
    return {
        "trainable": bool(variable.trainable),
        "synchronization": variable.synchronization,
        "aggregation": variable.aggregation,
    }


def without_value(cls: Any, shape: Any, dtype: str, kind: Mapping[str, Any]) -> Any:
    """Returns a variable of a class, with a place for a value and no value.

    In the scope of a `tf.distribute.Strategy` it is the strategy's variable, with zeros.

    Args:
        cls: a class of variables.
        shape: `tf.TensorShape`.
        dtype: the name of a dtype.
        kind: the result of `kind_of`.
    """
    tf = require_tensorflow()
    if tf.distribute.has_strategy():
        zeros = tf.zeros([dimension or 0 for dimension in shape], dtype)
        return tf.Variable(zeros, shape=shape, **kind)
    variable = object.__new__(cls)  # `__init__` would need a value
    vars(variable).update(_usual(shape, dtype))
    variable.handle._parent_trackable = weakref.ref(variable)  # that of `_usual` is gone
    return variable


def set_attributes(variable: Any, found: Mapping[str, Any]) -> None:
    """Sets the `attributes` of another process's variable."""
    if _is_of_replicas(variable):
        for replica in variable._values:
            vars(replica).update(found)
    else:
        vars(variable).update(found)


def _usual(shape: Any, dtype: str) -> dict[str, Any]:
    """Returns the attributes of a new variable without a value."""
    return dict(vars(uninitialized(shape, dtype)))


def uninitialized(
    shape: Any, dtype: Any, arguments: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """Makes a `tf.Variable` that has no value, and so no memory, until one is assigned.

    Args:
        arguments: those that a variable creator gets.
    """
    from tensorflow.python.ops import resource_variable_ops

    names = ("trainable", "name", "synchronization", "aggregation", "constraint")
    kept = {name: arguments[name] for name in names if arguments.get(name) is not None}
    return resource_variable_ops.UninitializedVariable(shape=shape, dtype=dtype, **kept)


def class_of(variable: Any) -> Any:
    """Returns the class of a variable, or of its replicas, made under a strategy."""
    return type(variable._values[0] if _is_of_replicas(variable) else variable)


def attributes(variable: Any) -> dict[str, Any]:
    """Returns a variable's attributes without those that are valid only in this process."""
    if _is_of_replicas(variable):
        variable = variable._values[0]
    left_out, usual = _OF_PROCESS, _usual_plain()
    found = vars(variable).items()
    # `left_out` stands for no usual value: None may be one.
    return {n: v for n, v in found if n not in left_out and usual.get(n, left_out) is not v}


def kept_inside(variable: Any) -> Any:
    """Returns the value of a variable that holds no numbers of a known shape; None for all others.

    Such a value, a text or an array that grows, is sent with the attributes.
    """
    tf = require_tensorflow()
    is_plain = "_handle" in vars(variable) and variable.dtype not in (tf.resource, tf.variant)
    if not is_plain or holds_numbers(variable) or not variable.is_initialized():
        return None
    return read(variable).numpy()


@functools.cache
def _usual_plain() -> dict[str, Any]:
    """Returns the attributes with the same value in every new variable, by name."""
    plain = (bool, int, enum.Enum, type(None))
    return {name: v for name, v in _usual([1], "int8").items() if isinstance(v, plain)}


def read(variable: Any) -> Any:
    """Returns the value of a `tf.Variable` as an eager tensor, which shares the variable's memory."""
    tf = require_tensorflow()
    if isinstance(variable, tf.distribute.DistributedValues):  # has a handle only in replicas
        return variable.read_value()
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


def array_of(variable: Any) -> np.ndarray[Any, Any]:
    """Returns a variable's value as a read-only array that shares the variable's memory.

    TensorFlow changes a value in place only while nothing else refers to it. So the array keeps the
    value, and the variable gets other memory with its next one.
    """
    tensor = read(variable)
    dtype = tensor.dtype.as_numpy_dtype
    if tensor.shape.num_elements() == 0:
        return np.empty(tensor.shape, dtype)
    array = np.frombuffer(tensor, np.uint8).view(dtype)
    shaped: np.ndarray[Any, Any] = array.reshape(tensor.shape)
    return shaped


def write(variable: Any, value: Any) -> None:
    """Sets a `tf.Variable` to a copy of an array of its shape and dtype."""
    tf = require_tensorflow()
    if isinstance(variable, tf.distribute.DistributedValues):
        variable.assign(value)
        return
    value = tf.constant(value, variable.dtype)
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


def share(variable: Any, array: Any) -> None:
    """Sets a `tf.Variable` to a read-only array, whose memory it has until its next value.

    TensorFlow changes no memory in place that it has not allocated.

    Args:
        array: one that nothing changes any more; of another kind the variable gets a copy.
    """
    tf = require_tensorflow()
    of_replicas = variable._values if _is_of_replicas(variable) else (variable,)
    if len(of_replicas) > 1 or not isinstance(array, np.ndarray) or array.flags.writeable:
        write(variable, array)
        return
    value = _sharing(array, variable.dtype)
    tf.raw_ops.AssignVariableOp(resource=of_replicas[0].handle, value=value)


_PIECE = 1 << 22  # bytes


def return_freed(nbytes: int) -> None:
    """Returns memory that tensors have freed to the system.

    TensorFlow's allocator with oneDNN keeps such memory, and gives it to the next tensors. So this
    makes some without values, and drops their pages. Without oneDNN, glibc's keeps it.

    Args:
        nbytes: at most; more than was freed takes addresses, as far as there are some, and no
            memory.
    """
    if not pages.can_drop(_PIECE):
        return
    tf = require_tensorflow()
    made: list[Any] = []
    with contextlib.suppress(tf.errors.ResourceExhaustedError):  # no more addresses (ulimit -v)
        for _ in range(nbytes // _PIECE):
            made.append(tf.raw_ops.Empty(shape=[_PIECE], dtype=tf.uint8))
    for piece in made:
        pages.drop(_address_of(np.frombuffer(piece, np.uint8)), _PIECE)
    made.clear()
    pages.return_unused()


def _address_of(array: np.ndarray[Any, Any]) -> int:
    found: int = array.__array_interface__["data"][0]
    return found


def _sharing(array: np.ndarray[Any, Any], dtype: Any) -> Any:
    """Returns an eager tensor that shares an array's memory, which never changes."""
    from tensorflow.python.eager import context
    from tensorflow.python.framework import ops

    device = context.context().device_name
    return ops.EagerTensor(array, device, dtype.as_datatype_enum)


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
