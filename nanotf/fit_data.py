"""The arguments of one `fit`, checked, and its data, laid out for the workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from nanotf.compat.versions import require_tensorflow
from nanotf.errors import InvalidArgumentError, InvalidArgumentTypeError, ShippingError
from nanotf.shipping import inputs, streams
from nanotf.shipping.arrays import Packing
from nanotf.shipping.blocks import Block

DEFAULT_BATCH_SIZE = 32  # Keras's

# Arguments of Keras 2 that do nothing for arrays and datasets.
_INERT = {
    "max_queue_size": (10,),
    "workers": (1,),
    "use_multiprocessing": (False,),
}


@dataclasses.dataclass(frozen=True)
class FitArguments:
    """The arguments of Keras's `fit` that workers know, with Keras's defaults."""

    x: Any = None
    y: Any = None
    batch_size: int | None = None
    epochs: int = 1
    verbose: Any = "auto"
    callbacks: Any = None
    validation_split: float = 0.0
    validation_data: Any = None
    shuffle: Any = True
    sample_weight: Any = None
    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    validation_steps: int | None = None
    validation_batch_size: int | None = None
    validation_freq: Any = 1

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> FitArguments:
        """Picks them out of the arguments of a call.

        Args:
            given: mapping of str to object, the arguments of Keras's `fit` that were given.

        Raises:
            InvalidArgumentError: One that is not supported with workers.
        """
        fields = {field.name for field in dataclasses.fields(cls)}
        for name in given.keys() - fields:
            if given[name] not in _INERT.get(name, (None,)):
                raise InvalidArgumentError(
                    f"fit(num_processes=...) does not support `{name}` yet. Received: "
                    f"{name}={_short(given[name])}. Leave it out, or train with one process."
                )
        return cls(**{name: given[name] for name in given.keys() & fields})


class FitData:
    """The training and validation data of one `fit`.

    Args:
        arguments: `FitArguments`.
        seed: int, of the order of shuffled arrays.
        first_block: int, the number of the first of the job's blocks that is for arrays.

    Attributes:
        train: `ArrayInput` or `StreamInput`.
        validation: same, or None.
        datasets: list of the datasets that the parent reads, by stream number.
        specs: nested structure of `tf.TensorSpec`, of one batch of `train`.

    Raises:
        InvalidArgumentError, InvalidArgumentTypeError, ShippingError: Something given cannot be
            used.
    """

    def __init__(self, arguments: FitArguments, seed: int, first_block: int) -> None:
        self.datasets: list[Any] = []
        self._packings: list[Packing] = []
        self._first_block = first_block
        self._seed = seed
        train, validation = _train_and_validation(arguments)
        batch_size = arguments.batch_size
        self.train = self._input("x", train, batch_size, _shuffles(arguments.shuffle))
        self.validation = None
        if validation is not None:
            batch_size = arguments.validation_batch_size or batch_size
            self.validation = self._input("validation_data", validation, batch_size, False)
        self.specs = self._specs(train)

    def _input(self, what: str, data: Any, batch_size: int | None, shuffle: bool) -> Any:
        if _is_dataset(data):
            cardinality = int(data.cardinality())
            if cardinality == 0:
                raise InvalidArgumentError(
                    f"{what} must have at least one batch. Received: an empty dataset."
                )
            self.datasets.append(data)
            stream = len(self.datasets) - 1
            return streams.StreamInput(stream, streams.signature_of(data, what), cardinality)
        block = self._first_block + len(self._packings)
        size = _batch_size(batch_size)
        result, packing = inputs.pack_arrays(data, block, size, shuffle, self._seed)
        self._packings.append(packing)
        return result

    def _specs(self, train: Any) -> Any:
        if _is_dataset(train):
            return self.train.signature
        tf = require_tensorflow()
        return tf.nest.map_structure(
            lambda array: tf.TensorSpec([None, *array.shape[1:]], array.dtype), train
        )

    def blocks(self) -> list[Block]:
        """Copies the arrays into shared blocks; can be called once."""
        blocks = []
        for packing in self._packings:
            block = Block(packing.nbytes)
            packing.write(block)
            blocks.append(block)
        self._packings = []  # nothing refers to the user's arrays beyond this point
        return blocks


def _train_and_validation(a: FitArguments) -> tuple[Any, Any]:
    """Both as a dataset or a tuple of structures of NumPy arrays; validation may be None."""
    if _is_dataset(a.x):
        _check_dataset_is_alone(a)
        train: Any = a.x
    else:
        train = _arrays((a.x, a.y, a.sample_weight), ("x", "y", "sample_weight"))
    validation = a.validation_data
    if validation is None:
        return _split(train, a.validation_split) if a.validation_split else (train, None)
    if _is_dataset(validation):
        return train, validation
    if not isinstance(validation, (tuple, list)) or not 1 <= len(validation) <= 3:
        raise InvalidArgumentError(
            "`validation_data` must be a dataset or a tuple (x, y) or (x, y, sample_weight). "
            f"Received: {_short(validation)}."
        )
    names = ("validation x", "validation y", "validation sample_weight")
    return train, _arrays(tuple(validation), names)


def _check_dataset_is_alone(a: FitArguments) -> None:
    for name in ("y", "sample_weight", "batch_size"):
        if getattr(a, name) is not None:
            raise InvalidArgumentError(
                f"A dataset brings `{name}` itself. Received: a tf.data.Dataset as `x` and "
                f"{name}={_short(getattr(a, name))}. Leave `{name}` out."
            )
    if a.validation_split:
        raise InvalidArgumentError(
            "`validation_split` needs arrays. Received: a tf.data.Dataset as `x` and "
            f"validation_split={a.validation_split}. Use dataset.take() and skip()."
        )


def _batch_size(value: Any) -> int:
    size = DEFAULT_BATCH_SIZE if value is None else value
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
        raise InvalidArgumentError(
            f"`batch_size` must be an int above 0. Received: batch_size={size!r}."
        )
    return int(size)


def _is_dataset(value: Any) -> bool:
    return isinstance(value, require_tensorflow().data.Dataset)


def _shuffles(shuffle: Any) -> bool:
    if not isinstance(shuffle, (bool, np.bool_)):
        raise InvalidArgumentTypeError(
            f"`shuffle` must be a bool under `num_processes`. Received: shuffle={shuffle!r}."
        )
    return bool(shuffle)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."


def _arrays(data: tuple[Any, ...], names: tuple[str, ...]) -> tuple[Any, ...]:
    """`(x, y, sample_weight)` as NumPy arrays, without trailing Nones."""
    tf = require_tensorflow()
    if data[0] is None:
        raise InvalidArgumentError(f"`{names[0]}` must be given. Received: {names[0]}=None.")
    while data and data[-1] is None:
        data = data[:-1]
    result = []
    for value, name in zip(data, names, strict=False):
        if value is None:
            raise InvalidArgumentError(
                f"`{name}` must be given before what follows it. Received: {name}=None."
            )
        if hasattr(value, "__next__") or not _is_structure_of_arrays(value):
            raise ShippingError(
                f"`{name}` must be arrays, tensors or a tf.data.Dataset. "
                f"Received: {name} of type {type(value).__name__}."
            )
        result.append(tf.nest.map_structure(lambda v, n=name: inputs.to_numpy(v, n), value))
    return tuple(result)


def _is_structure_of_arrays(value: Any) -> bool:
    return all(hasattr(leaf, "__array__") for leaf in require_tensorflow().nest.flatten(value))


def _split(data: tuple[Any, ...], fraction: float) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Keras's rule for `validation_split`: the last samples, before any shuffling."""
    tf = require_tensorflow()
    rows = len(tf.nest.flatten(data)[0])
    if not 0 < fraction < 1 or int(rows * (1 - fraction)) in (0, rows):
        raise InvalidArgumentError(
            "`validation_split` must leave samples on both sides. "
            f"Received: validation_split={fraction!r} of {rows} samples."
        )
    at = int(np.floor(rows * (1.0 - fraction)))
    train = tf.nest.map_structure(lambda array: array[:at], data)
    return train, tf.nest.map_structure(lambda array: array[at:], data)
