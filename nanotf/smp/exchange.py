"""Operations that send tensors to other partitions, and receive them."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.errors import CollectiveError
from nanotf.smp import runtime

CHECKED_STEPS = 3  # data that differ between processes differ in the first steps


def send(partitions: Sequence[int], tag: str, tensors: Sequence[Any]) -> Any:
    """Makes an operation that sends tensors to other partitions of this copy of the model.

    Args:
        partitions: sequence of int, the receivers'.
        tag: str, which the receiver names, too.
        tensors: sequence of tensors.

    Returns:
        The `tf.Operation`; it ends once the tensors are sent, received or not.
    """
    mailbox, group = runtime.mailbox(), runtime.place().mp_group
    destinations = [group[partition] for partition in partitions]

    def put(*arrays: Any) -> Any:
        mailbox.send_to_all(destinations, tag, list(arrays))
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


def known_everywhere(tag: str, value: int) -> dict[int, int]:
    """Tells all partitions of this copy of the model a number, now.

    Args:
        tag: str.
        value: int.

    Returns:
        dict from a partition to its number.
    """
    mailbox, place = runtime.mailbox(), runtime.place()
    others = [n for n in range(place.mp_size) if n != place.mp_rank]
    mailbox.send_to_all([place.mp_group[n] for n in others], tag, [np.array(value)])
    heard = {n: int(mailbox.receive(place.mp_group[n], tag)[0]) for n in others}
    return {place.mp_rank: value, **heard}


def same_data(tag: str, tensors: Sequence[Any]) -> Any:
    """Makes an operation that fails if the partitions get different data in the first steps.

    Args:
        tag: str.
        tensors: sequence of tensors of numbers, equal in all processes of this copy of the model.

    Returns:
        The `tf.Operation`.
    """
    steps = itertools.count()

    def compare(*arrays: Any) -> Any:
        if next(steps) < CHECKED_STEPS:
            total = functools.reduce(lambda sum_, a: zlib.crc32(a.tobytes(), sum_), arrays, 0)
            found = known_everywhere(tag, total)
            if len(set(found.values())) > 1:
                raise CollectiveError(
                    "All processes of one copy of a model must read the same data. Received: "
                    f"batches that differ between partitions {sorted(found)}. Use smp.dp_rank() "
                    "as the seed of a shuffle, and to choose files; not smp.rank()."
                )
        return np.int64(0)

    return tf.numpy_function(compare, list(tensors), tf.int64, name="same_data").op
