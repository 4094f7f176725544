"""Operations of a step, in order: those that send tensors to other partitions, and receive them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.compat.step_errors import python_operation
from nanotf.errors import CollectiveError
from nanotf.sagemaker.smp import runtime
from nanotf.sagemaker.smp.times import Label, StepTimes

CHECKED_STEPS = 3  # data that differ between processes differ in the first steps
_NUMBER = tf.TensorSpec([], tf.int64)  # the result of a function without one


class Line:
    """The order in which a step's operations run in this process: one after the other.

    So as many activations exist at a time as the schedule says, and only one operation waits for
    another process at a time.

    Args:
        times: get those of the operations; None with one partition, which has no messages.
    """

    def __init__(self, times: StepTimes | None = None) -> None:
        self._times = times
        self._last: list[Any] = []  # the `tf.Operation`s that the next one waits for

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Makes operations of this context wait for those before it."""
        with tf.control_dependencies(self._last):
            yield

    def copies(self, values: Any) -> Any:
        """Copies the tensors in a nested structure, so that what needs them waits, too."""
        with self.following():
            return tf.nest.map_structure(
                lambda value: tf.identity(value) if isinstance(value, tf.Tensor) else value,
                values,
                expand_composites=True,
            )

    def ends_with(self, tensors: Any) -> None:
        """Makes the next operation wait for the tensors in a nested structure.

        TensorFlow may inline the call that computes a tensor. What depends on the call's operation
        then waits for its side effects alone; what depends on a copy of a result, for the result.
        """
        flat = tf.nest.flatten(tensors, expand_composites=True)
        self._last = [tf.identity(tensor).op for tensor in flat if tensor is not None]

    def begins_with(self, tensor: Any) -> None:
        """Makes the next operation wait for the one that gives a tensor."""
        self._last = [tensor]

    def send(self, partitions: Sequence[int], tag: str, tensors: Any, label: Label) -> None:
        """Makes an operation that sends tensors to other partitions of this copy of the model.

        It ends once the tensors are sent, received or not.

        Args:
            partitions: the receivers'.
            tag: the receiver names it, too.
            label: the operation's purpose.
        """
        mailbox, group = runtime.mailbox(), runtime.place().mp_group
        destinations = [group[partition] for partition in partitions]

        def put(*arrays: Any) -> Any:
            mailbox.send_to_all(destinations, tag, list(arrays))
            return np.int64(len(arrays))

        self._run(put, tensors, [_NUMBER], f"send_{tag}", label)

    def note(self, label: Label) -> None:
        """Makes an operation that only notes its times."""
        self._run(lambda: np.int64(0), [], [_NUMBER], "note_times", label)

    def receive(self, partition: int, tag: str, like: Sequence[Any], label: Label) -> list[Any]:
        """Makes an operation that waits for the tensors that another partition sends.

        Args:
            partition: the sender's.
            tag: the sender names it, too.
            like: have the dtypes and shapes of the tensors.
            label: as in `send`.
        """
        mailbox, source = runtime.mailbox(), runtime.place().mp_group[partition]

        return self._run(lambda: mailbox.receive(source, tag), [], like, f"receive_{tag}", label)

    def _run(
        self, function: Any, inputs: Sequence[Any], like: Sequence[Any], name: str, label: Label
    ) -> list[Any]:
        assert self._times is not None
        with self.following():
            found = python_operation(self._times.noting(label, function), inputs, like, name)
        self._last = [found[0].op]  # one operation gives them all
        return found


def known_everywhere(tag: str, value: int) -> list[int]:
    """Tells all partitions of this copy of the model a number, now; returns each one's."""
    return [int(found) for found in gather_now(tag, np.array(value))]


def gather_now(tag: str, array: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Sends an array to all partitions of this copy of the model, now; returns each one's."""
    return [found for (found,) in runtime.gather(runtime.get_mp_group(), tag, [array])]


_SAMPLE = 1024  # elements of a tensor that are compared


def compare(tag: str, tensors: Mapping[str, Sequence[Any]]) -> Any:
    """Makes an operation that fails if what the partitions compute by themselves differs.

    It compares samples, in the first steps.

    Args:
        tag: the same in all partitions, and of no other messages.
        tensors: by a name for messages; equal in all processes of this copy of the model. Some
            processes may lack the last ones.

    Returns:
        The operation's result.
    """
    samples = {name: [_sample(t) for t in each if _is_real(t)] for name, each in tensors.items()}
    names = [name for name, each in samples.items() for _ in each]
    places = [tensor for each in tensors.values() for tensor in each if _is_real(tensor)]
    # Half of a dtype's digits: kernels may add up in another order in each process.
    exact = [float(np.sqrt(precision(tensor.dtype))) for tensor in places]

    def compare_samples(*arrays: Any) -> None:
        # NumPy cannot concatenate no arrays at all, so an empty one comes first.
        own = np.concatenate([np.zeros(0), *(np.ravel(array) for array in arrays)])
        found = gather_now(tag, own)
        bounds = np.cumsum([0, *(array.size for array in arrays)])
        for name, begin, end, tolerance in zip(names, bounds, bounds[1:], exact, strict=False):
            parts = [part for each in found if (part := each[begin:end]).size]  # some lack it
            scale = max((np.max(np.abs(part), initial=0.0) for part in parts), default=0.0)
            equal = [
                part.shape == parts[0].shape
                and np.allclose(part, parts[0], tolerance, tolerance * scale, equal_nan=True)
                for part in parts
            ]
            if not all(equal):
                raise CollectiveError(
                    "All processes of one copy of a model must compute the same around the "
                    f"model's call. Received: {name}, which differ between partitions "
                    f"{[*range(len(found))]}. Seed all ranks of a copy alike, by "
                    "tf.keras.utils.set_random_seed(smp.dp_rank()), and use tf.random for "
                    "random numbers; or put what draws them into the model's call."
                )

    return check(compare_samples, [sample for each in samples.values() for sample in each])


def _is_real(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool)


def precision(dtype: Any) -> float:
    """Returns the distance of the numbers of a dtype around 1; 0 if it has integers."""
    digits = {2: 7, 4: 23, 8: 52}  # by bytes; of the 16-bit floats, bfloat16 has fewer
    return 2.0 ** -digits[dtype.size] if dtype.is_floating else 0.0


def _sample(tensor: Any) -> Any:
    flat = tf.reshape(tensor, [-1])
    # An odd distance meets all columns of a matrix with a power of 2 of them.
    every = tf.size(flat) // _SAMPLE
    every += 1 - every % 2
    return tf.cast(flat[::every], tf.float64)


def begin(tag: str, tensors: Sequence[Any], begins: Callable[[], None]) -> Any:
    """Makes a step's first operation, which fails if the partitions get different data.

    It compares the data of the first steps.

    Args:
        tag: the same in all partitions, and of no other messages.
        tensors: of numbers, equal in all processes of this copy of the model.
        begins: called in each execution once the data are compared.

    Returns:
        The operation's result.
    """

    def compare_sums(*arrays: Any) -> None:
        # A checksum, so 8 bytes travel, and not the batch.
        total = functools.reduce(lambda sum_, a: zlib.crc32(a.tobytes(), sum_), arrays, 0)
        found = known_everywhere(tag, total)
        if len(set(found)) > 1:
            raise CollectiveError(
                "All processes of one copy of a model must read the same data. Received: "
                f"batches that differ between partitions {[*range(len(found))]}. Use smp.dp_rank() "
                "as the seed of a shuffle, and to choose files; not smp.rank()."
            )

    return check(compare_sums, tensors, begins)


def check(
    compare: Callable[..., None], tensors: Sequence[Any], always: Callable[[], None] = lambda: None
) -> Any:
    """Makes an operation that calls a function with arrays in the first steps; returns its result.

    Args:
        always: called after that, in all steps.
    """
    steps = itertools.count()

    def checked(*arrays: Any) -> Any:
        if next(steps) < CHECKED_STEPS:
            compare(*arrays)
        always()
        return np.int64(0)

    return python_operation(checked, tensors, [_NUMBER], "check")[0]
