"""Operations that send tensors to other partitions, and receive them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.smp import runtime


def send(partition: int, tag: str, tensors: Sequence[Any]) -> Any:
    """Makes an operation that sends tensors to another partition of this copy of the model.

    Args:
        partition: int, the receiver's.
        tag: str, which the receiver names, too.
        tensors: sequence of tensors.

    Returns:
        The `tf.Operation`; it ends once the tensors are sent, received or not.
    """
    mailbox, destination = runtime.mailbox(), runtime.place().mp_group[partition]

    def put(*arrays: Any) -> Any:
        mailbox.send(destination, tag, list(arrays))
        return np.int64(len(arrays))

    return tf.numpy_function(put, list(tensors), tf.int64, name=f"send_{tag}").op


def receive(partition: int, tag: str, specs: Sequence[Any]) -> list[Any]:
    """Makes an operation that waits for the tensors that another partition sends.

    Args:
        partition: int, the sender's.
        tag: str, which the sender names, too.
        specs: sequence of `tf.TensorSpec`.

    Returns:
        list of tensors.
    """
    mailbox, source = runtime.mailbox(), runtime.place().mp_group[partition]

    def take() -> list[Any]:
        return list(mailbox.receive(source, tag))

    dtypes = [spec.dtype for spec in specs]
    found = tf.numpy_function(take, [], dtypes, name=f"receive_{tag}")
    for tensor, spec in zip(found, specs, strict=True):
        tensor.set_shape(spec.shape)
    return list(found)


def same_everywhere(tag: str, value: Any) -> dict[int, Any]:
    """Tells all partitions of this copy of the model a number, now.

    Args:
        tag: str.
        value: int.

    Returns:
        dict from a partition to its number.
    """
    mailbox, place = runtime.mailbox(), runtime.place()
    others = [n for n, rank in enumerate(place.mp_group) if rank != place.rank]
    for other in others:
        mailbox.send(place.mp_group[other], tag, [np.array(value)])
    heard = {n: int(mailbox.receive(place.mp_group[n], tag)[0]) for n in others}
    return {place.mp_rank: value, **heard}
