"""TensorFlow's own random numbers in eager code (seen alike in 2.14 to 2.21).

| name | why |
| --- | --- |
| `tensorflow.python.eager.context.context()._seed`, `_rng`, `clear_kernel_cache` | the seed of `tf.random.set_seed`, and the generator of the seeds of eager operations; TensorFlow can set them anew, and cannot say where they stand |
| `record.record_operation`, `stop_recording`, `should_record_backprop` | what tapes record |
| `op_callbacks.add_op_callback` | which tensors eager operations use |
| `ops.tensor_id`, `ops.uid` | the order in which tensors were made |
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

from tensorflow.python.eager import context
from tensorflow.python.eager import record as recorder
from tensorflow.python.framework import op_callbacks, ops


def seeds() -> tuple[int, Any] | None:
    """What was given to `tf.random.set_seed`, and where the seeds of operations stand.

    None if nothing was given.
    """
    here = context.context()
    given, operations = here._seed, getattr(here, "_rng", None)
    return None if given is None or operations is None else (given, operations.getstate())


def restore_seeds(taken: tuple[int, Any] | None) -> None:
    """Sets what `seeds` returned.

    Where that is another state than the present one, prepared operations are forgotten, as by
    `tf.random.set_seed`: one that draws by the same seeds again would go on where it was.
    """
    if taken == seeds():
        return
    here = context.context()
    here._seed, here._rng = None, None
    if taken is not None:
        here._seed, here._rng = taken[0], random.Random()
        here._rng.setstate(taken[1])
    here.clear_kernel_cache()


def record(name: str, outputs: Any, inputs: Any, gradient: Any) -> None:
    """Tells the tapes that record that `outputs` follow from `inputs`.

    Args:
        name: str, of the operation.
        outputs, inputs: lists of tensors.
        gradient: function of the gradients of the outputs, that returns those of the inputs.
    """
    recorder.record_operation(name, outputs, inputs, gradient)


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """In this context no tape records."""
    with recorder.stop_recording():
        yield


def may_have_gradient(tensor: Any) -> bool:
    """Whether a gradient with respect to a tensor may be asked for.

    In a graph of every one that is no constant; of a tensor with a value where a tape watches it.
    """
    if isinstance(tensor, ops.EagerTensor):
        return bool(recorder.should_record_backprop([tensor]))
    return bool(tensor.op.type != "Const")


def key_of(tensor: Any) -> int:
    """A number that no other tensor of this process has; later tensors have greater ones."""
    return int(ops.tensor_id(tensor))


@contextlib.contextmanager
def earlier_inputs() -> Iterator[dict[int, Any]]:
    """Notes the floating tensors, made before, that eager operations in this context use.

    Yields:
        A dict of `key_of` to tensor, which fills.
    """
    now, used = ops.uid(), dict[int, Any]()

    def note(
        op_type: str,
        inputs: Any,
        attributes: Any,
        outputs: Any,
        name: Any = None,
        graph: Any = None,
    ) -> None:
        for tensor in inputs:
            is_value = isinstance(tensor, ops.EagerTensor) and tensor.dtype.is_floating
            if is_value and key_of(tensor) < now:
                used[key_of(tensor)] = tensor

    op_callbacks.add_op_callback(note)
    try:
        yield used
    finally:
        op_callbacks.remove_op_callback(note)
