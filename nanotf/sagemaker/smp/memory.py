"""Memory of this process: its peak, what it has now, and what its variables take."""

from __future__ import annotations

import gc
import mmap
import pathlib
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from nanotf.compat.keras_common import tf_variable


def peak_bytes() -> int:
    """Returns the largest resident memory that this process has had so far.

    It is VmHWM of `/proc/self/status`. The ru_maxrss of getrusage may be that of the process which
    forked this one. Counts libraries, and pages of memory that processes share, in each process
    that uses them.
    """
    status = pathlib.Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])  # in kB, see `man 5 proc_pid_status`


def private_bytes() -> int:
    """Returns the bytes of this process's resident memory that no file has."""
    _, resident, shared, *_ = map(int, pathlib.Path("/proc/self/statm").read_text().split())
    return mmap.PAGESIZE * (resident - shared)


def variable_bytes(weights: Iterable[Any]) -> tuple[int, int]:
    """Returns the bytes that the values of TensorFlow's variables take in this process.

    Args:
        weights: of either generation of Keras.

    Returns:
        The bytes of those, and of all other variables that exist: slots, counters, metrics.
    """
    handles = {id(v.handle): v for v in map(tf_variable, weights)}
    others: dict[int, Any] = {}  # by the id of the handle, which several objects may share
    # TensorFlow lists no variables, and optimizers may be anywhere in the script.
    for each in gc.get_objects():
        # `isinstance` would run code of proxies.
        if not issubclass(type(each), tf.Variable) or tf.is_symbolic_tensor(each.handle):
            continue
        if id(each.handle) not in handles:
            others[id(each.handle)] = each
    return sum(map(_bytes, handles.values())), sum(map(_bytes, others.values()))


def _bytes(variable: Any) -> int:
    """Returns the bytes of a variable's value; 0 if another partition's process has it."""
    if not tf.raw_ops.VarIsInitializedOp(resource=variable.handle):
        return 0
    value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
    return int(tf.size(value, tf.int64)) * int(variable.dtype.size)
