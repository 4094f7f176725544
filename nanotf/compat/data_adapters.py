"""Keras's own handling of what users give `fit`, so that nanotf takes what Keras takes.

What Keras makes of an argument (which kinds it takes, what it says to the others, how many
batches there are, when iterators and the hooks of a `PyDataset` are called) is in private
modules. They are used, in the parent, rather than imitated:

| name | generation, versions seen | why |
| --- | --- | --- |
| `trainers.epoch_iterator.EpochIterator`, its `_enumerate_iterator`, `_epoch_iterator`, `_get_iterator`, `_current_iterator`, `_interrupted_warning`, `catch_stop_iteration`, `reset` | 3; 3.10-3.15 | the loop over the batches of an epoch |
| `trainers.data_adapters.array_data_adapter.ArrayDataAdapter`, its `_inputs`, `_size`, `_batch_size` | 3 | arrays that were checked, and weighed by class |
| `trainers.data_adapters.tf_dataset_adapter.TFDatasetAdapter` | 3 | datasets, which are iterated as they are |
| `trainers.data_adapters.data_adapter.DataAdapter.get_numpy_iterator`, `get_tf_dataset`, `num_batches`; `PyDatasetAdapter.enqueuer` | 3 | everything else |
| `trainers.data_adapters.array_slicing.convert_to_sliceable`, `train_validation_split` | 3 | arrays as NumPy arrays; `validation_split` |
| `engine.data_adapter.DataHandler`, its `_adapter`, `_dataset`, `_insufficient_data` | 2; 2.15, tf_keras 2.15-2.21 | the loop over epochs and batches |
| `engine.data_adapter.select_data_adapter` and the adapters' `_handle_multiprocessing`, `_standardize_batch`, `_enqueuer` | 2 | which kind of input it is; its batches, before TensorFlow gets them |
| `engine.data_adapter.train_validation_split`, `_check_data_cardinality`, `_make_class_weight_map_fn`, `pack_x_y_sample_weight`, `_is_pandas_series` | 2 | arrays |
| `engine.training_utils.handle_partial_sample_weights` | 2 | same |
| `Model._assert_compile_called` / `Model._assert_compile_was_called` | 3 / 2 | says that `compile` was not called |
| `Model._should_eval` | 3, 2 | checks `validation_freq` |
| `Model._steps_per_execution` | 2 | batches that one call of a step function takes |
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from nanotf.compat import random_states
from nanotf.compat.keras_names import source_module
from nanotf.compat.versions import is_keras_3, require_tensorflow
from nanotf.console import logger
from nanotf.errors import ShippingError

UNKNOWN_CARDINALITY = -2  # tf.data's code


@dataclasses.dataclass(frozen=True)
class DataArguments:
    """The arguments of `fit` or `evaluate` about one set of data, with Keras's defaults.

    Args:
        x, y, sample_weight: as in `fit`.
        batch_size: int or None.
        steps: int or None, `steps_per_epoch` or `validation_steps`.
        shuffle: as in `fit`.
        class_weight: dict or None.
        epochs, initial_epoch: int, as in `fit`.
        workers, use_multiprocessing, max_queue_size: as in Keras 2's `fit`.
    """

    x: Any
    y: Any = None
    sample_weight: Any = None
    batch_size: int | None = None
    steps: int | None = None
    shuffle: Any = False
    class_weight: Any = None
    epochs: int = 1
    initial_epoch: int = 0
    workers: int = 1
    use_multiprocessing: bool = False
    max_queue_size: int = 10


@dataclasses.dataclass(frozen=True)
class Arrays:
    """Data that lie in memory, checked and converted as Keras does.

    Args:
        structure: nested structure of `numpy.ndarray` or None, as a batch of them is for a
            step: x, `(x,)`, `(x, y)` or `(x, y, sample_weight)`.
        batch_size: int.
        size: int, batches in one pass over the data.
    """

    structure: Any
    batch_size: int
    size: int


class Epochs:
    """Data that have to be read: Keras's loop over them, without the steps.

    Args:
        element_spec: nested structure of type specifications, of one batch.
        cardinality: int, what a worker's Keras is told, so that its own loop is the same.
        steps: int or None, batches of an epoch, where Keras knows them.
        dataset: `tf.data.Dataset` that is read, weights by class included, or None.

    Attributes:
        begun: tuple of int and `random_states.States`, or None: the number of the epoch of
            training that was begun last, counted from 0, and where the random numbers stood before
            its first batch was read.
    """

    _passed: int | None = None
    _states: random_states.States | None = None
    begun: tuple[int, random_states.States] | None = None

    def __init__(
        self, element_spec: Any, cardinality: int, steps: int | None, dataset: Any = None
    ) -> None:
        self.dataset = dataset
        self.element_spec = element_spec
        self.cardinality = cardinality
        self.steps = steps
        self._exhausted: Any = None

    def resume(self, passed: int, states: random_states.States | None) -> None:
        """Makes `training` go on in the middle.

        Args:
            passed: int, complete epochs, through which it has to go first: it makes the iterators
                that Keras made, and reads no more than it has to. 0 for what goes on where it is.
            states: where the random numbers stood when the next epoch was begun, or None.
        """
        self._passed, self._states = passed, states

    def training(self) -> Iterator[Iterator[tuple[Any, Any]]]:
        """Yields the epochs of training; each yields tuples of an iterator and its batch.

        Going on to the next epoch does what Keras does between two.
        """
        for number, epoch in enumerate(self._epochs()):
            yield self._noting_states(number, epoch)

    def _noting_states(
        self, number: int, epoch: Iterator[tuple[Any, Any]]
    ) -> Iterator[tuple[Any, Any]]:
        if self._states is not None:
            random_states.put(self._states)
            self._states = None
        self.begun = (number, random_states.take())
        yield from epoch

    def _epochs(self) -> Iterator[Iterator[tuple[Any, Any]]]:
        """As `training`."""
        raise NotImplementedError

    def evaluations(self) -> Iterator[Iterator[tuple[Any, Any]]]:
        """Same, for evaluations: each begins anew."""
        raise NotImplementedError

    def keeps(self, iterator: Any) -> bool:
        """Whether the next epoch of training goes on with the iterator of the last."""
        raise NotImplementedError

    def close(self) -> None:
        """Stops the threads and processes that Keras started to read a `PyDataset`."""
        enqueuer = self._enqueuer()
        if enqueuer is not None and enqueuer.is_running():
            try:
                enqueuer.stop()
            except Exception as error:  # of a batch that nobody asked for
                logger.info("Stopping to read a PyDataset: %s", error)

    def _enqueuer(self) -> Any:
        raise NotImplementedError

    def _next(self, iterator: Any) -> Any:
        try:
            return next(iterator)
        except StopIteration:
            self._exhausted = iterator
            raise


def check_compiled(model: Any, method: str) -> None:
    """Raises what Keras's `fit` or `evaluate` (`method`) raises for a model not compiled."""
    if is_keras_3():
        model._assert_compile_called(method)
    else:
        model._assert_compile_was_called()


def check_validation(model: Any, validation_data: Any, validation_freq: Any) -> None:
    """Raises what Keras's `fit` raises at the end of the first epoch, when it is to validate."""
    if is_keras_3() or validation_data:
        model._should_eval(0, validation_freq)


def split_for_validation(data: tuple[Any, Any, Any], fraction: float) -> tuple[Any, Any]:
    """Keras's `validation_split`: both parts as `(x, y, sample_weight)`."""
    path = "trainers.data_adapters.array_slicing" if is_keras_3() else "engine.data_adapter"
    train, validation = source_module(path).train_validation_split(data, validation_split=fraction)
    return train, validation


def unpack(data: Any) -> tuple[Any, Any, Any]:
    """`validation_data` as `(x, y, sample_weight)`, or what Keras raises."""
    x, y, weights = require_tensorflow().keras.utils.unpack_x_y_sample_weight(data)
    return x, y, weights


def open_data(model: Any, arguments: DataArguments) -> Arrays | Epochs:
    """Makes of an argument what Keras makes of it.

    A generator is asked for the batches that Keras looks at: two (Keras 3) or one (Keras 2).

    Args:
        model: the user's model.
        arguments: `DataArguments`.

    Raises:
        ShippingError: Keras takes sparse or ragged arrays, and workers cannot get them.
        Exception: What Keras raises.
    """
    if is_keras_3():
        return _open_in_keras_3(model, arguments)
    return _open_in_keras_2(model, arguments)


def iterators_per_epoch(cardinality: int) -> int:
    """How many iterators Keras's loop makes of a dataset in an epoch that begins a new one.

    Keras 3 makes another, which it never reads, at the end of an epoch whose length it knows.

    Args:
        cardinality: int, batches of the dataset, or TensorFlow's code for unknown.
    """
    return 2 if is_keras_3() and cardinality > 0 else 1


def warn_that_data_ran_out(batches: int) -> None:
    """Says what Keras says when an epoch is cut short.

    Args:
        batches: int, how many are needed for all epochs.
    """
    if is_keras_3():
        source_module("trainers.epoch_iterator").EpochIterator._interrupted_warning(None)
        return
    require_tensorflow().get_logger().warning(
        "Your input ran out of data; interrupting training. Make sure that your dataset or "
        "generator can generate at least `steps_per_epoch * epochs` batches (in this case, "
        f"{batches} batches). You may need to use the repeat() function when building your "
        "dataset."
    )


def _refuse_what_is_not_dense(value: Any) -> None:
    tf = require_tensorflow()
    composite = isinstance(value, (tf.SparseTensor, tf.RaggedTensor))
    if composite or type(value).__module__.startswith("scipy.sparse"):
        raise ShippingError(
            "Arrays must be dense to be shared between workers. Received: an object of class "
            f"{type(value).__name__}. Convert it with to_tensor(), tf.sparse.to_dense() or "
            "toarray()."
        )


# ---------------------------------------------------------------------------- Keras 3
def _open_in_keras_3(model: Any, a: DataArguments) -> Arrays | Epochs:
    adapters = source_module("trainers.data_adapters")
    range(a.initial_epoch, a.epochs)  # for what Keras's loops raise, as the next one
    loop = _loop_class()(
        x=a.x,
        y=a.y,
        sample_weight=a.sample_weight,
        batch_size=a.batch_size,
        steps_per_epoch=a.steps,
        shuffle=a.shuffle,
        class_weight=a.class_weight,
        steps_per_execution=model.steps_per_execution,
    )
    range(a.steps or 0)
    adapter = loop.data_adapter
    if not isinstance(adapter, adapters.ArrayDataAdapter):
        return _Keras3Epochs(loop)
    tf = require_tensorflow()
    for leaf in tf.nest.flatten(adapter._inputs, expand_composites=False):
        _refuse_what_is_not_dense(leaf)
    if not _is_size(adapter._batch_size):
        next(iter(adapter.get_tf_dataset()))  # raises what TensorFlow says to it
    sliceables = source_module("trainers.data_adapters.array_slicing").convert_to_sliceable(
        adapter._inputs, target_backend="numpy"
    )
    structure = tf.nest.map_structure(
        lambda s: None if s is None else np.asarray(s.convert_to_numpy(s.array)), sliceables
    )
    return Arrays(structure, adapter._batch_size, adapter._size)


def _is_size(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and bool(value > 0)


def _loop_class() -> Any:
    """Keras's `EpochIterator`, which hands out iterators over what its adapter reads.

    Generators and `PyDataset`s are not read through a `tf.data.Dataset`, so that what they
    raise stays what it is, and nothing is read before it is needed.
    """
    base = source_module("trainers.epoch_iterator").EpochIterator
    datasets = source_module("trainers.data_adapters").TFDatasetAdapter

    class Loop(base):  # type: ignore[misc, valid-type]
        def _get_iterator(self) -> Any:
            if isinstance(self.data_adapter, datasets):
                return self.data_adapter.get_tf_dataset()
            return self.data_adapter.get_numpy_iterator()

        def __next__(self) -> Any:  # as in the TensorFlow backend's
            return next(self._epoch_iterator)

    return Loop


class _Keras3Epochs(Epochs):
    def __init__(self, loop: Any) -> None:
        self._loop = loop
        batches = loop.data_adapter.num_batches
        dataset = loop.data_adapter.get_tf_dataset()
        datasets = source_module("trainers.data_adapters").TFDatasetAdapter
        super().__init__(
            dataset.element_spec,
            UNKNOWN_CARDINALITY if batches is None else batches,
            loop.num_batches,
            dataset if isinstance(loop.data_adapter, datasets) else None,
        )

    def _epochs(self) -> Iterator[Iterator[tuple[Any, Any]]]:
        if self._passed is None:  # otherwise a `PyDataset` has heard of the begin
            self._loop.reset()
        for _ in range(self._passed or 0):
            self._pass_by()
        while True:
            yield self._epoch()

    def evaluations(self) -> Iterator[Iterator[tuple[Any, Any]]]:
        while True:
            self._loop.reset()
            yield self._epoch()

    def _epoch(self) -> Iterator[tuple[Any, Any]]:
        with self._loop.catch_stop_iteration():
            for *_, iterator in self._loop:  # (step, iterator) up to 3.10, three from 3.11 on
                for _ in range(self._loop.steps_per_execution):
                    yield iterator, self._next(iterator)

    def _pass_by(self) -> None:
        loop = self._loop
        if loop.steps_per_epoch is None:
            # Each epoch has an iterator of its own, and their number is all that counts.
            for _ in range(iterators_per_epoch(self.cardinality)):
                iter(loop._get_iterator())
            return
        with loop.catch_stop_iteration():
            for *_, iterator in loop:
                for _ in range(loop.steps_per_execution):
                    self._next(iterator)

    def keeps(self, iterator: Any) -> bool:
        loop = self._loop
        return loop.steps_per_epoch is not None and loop._current_iterator is iterator

    def _enqueuer(self) -> Any:
        return getattr(self._loop.data_adapter, "enqueuer", None)


# ---------------------------------------------------------------------------- Keras 2
def _open_in_keras_2(model: Any, a: DataArguments) -> Arrays | Epochs:
    keras = source_module("engine.data_adapter")
    kind = keras.select_data_adapter(a.x, a.y)
    if kind is keras.CompositeTensorDataAdapter:
        for leaf in require_tensorflow().nest.flatten((a.x, a.y)):
            _refuse_what_is_not_dense(leaf)
    if issubclass(kind, (keras.TensorLikeDataAdapter, keras.ListsOfScalarsDataAdapter)):
        return _arrays_in_keras_2(keras, kind, model, a)
    x = a.x
    if kind is keras.GeneratorDataAdapter:
        x = _Remembering(x)
    handler = _handler(keras, model, a, x, a.y, a.sample_weight)
    return _Keras2Epochs(keras, handler, x, a)


def _handler(keras: Any, model: Any, a: DataArguments, x: Any, y: Any, weights: Any) -> Any:
    at_once = getattr(model, "_steps_per_execution", None)
    return keras.DataHandler(
        x=x,
        y=y,
        sample_weight=weights,
        batch_size=a.batch_size,
        steps_per_epoch=a.steps,
        epochs=a.epochs,
        initial_epoch=a.initial_epoch,
        shuffle=a.shuffle,
        class_weight=a.class_weight,
        max_queue_size=a.max_queue_size,
        workers=a.workers,
        use_multiprocessing=a.use_multiprocessing,
        model=model,
        # A variable of its own: the handler sets it.
        steps_per_execution=require_tensorflow().Variable(
            1 if at_once is None else int(at_once.numpy()), dtype="int64"
        ),
    )


def _arrays_in_keras_2(keras: Any, kind: Any, model: Any, a: DataArguments) -> Arrays:
    """Lets Keras check the first row of each array, and does for all what it would do.

    Keras's own adapter copies all arrays as a whole into tensors.
    """
    tf = require_tensorflow()
    data: tuple[Any, ...] = (a.x, a.y, a.sample_weight)
    if kind is keras.ListsOfScalarsDataAdapter:
        data = tuple(None if value is None else np.asarray(value) for value in data)
    looked_at = data
    if a.batch_size is None or _is_size(a.batch_size):  # otherwise TensorFlow's words name the rows
        looked_at = tuple(
            tf.nest.map_structure(lambda v: v[:1] if getattr(v, "shape", ()) else v, value)
            for value in data
        )
    _handler(keras, model, a, *looked_at)
    x, y, weights = (
        tf.nest.map_structure(lambda v: _as_keras_2_converts(keras, v), value) for value in data
    )
    weights, _, _ = source_module("engine.training_utils").handle_partial_sample_weights(
        y, weights, None, check_all_flat=True
    )
    inputs = keras.pack_x_y_sample_weight(x, y, weights)
    keras._check_data_cardinality(inputs)
    if a.class_weight:
        weigh = keras._make_class_weight_map_fn(a.class_weight)
        _, _, weights = weigh((), tf.convert_to_tensor(y), weights)
        inputs = keras.pack_x_y_sample_weight(x, y, weights.numpy())
    rows = int(next(v for v in tf.nest.flatten(inputs) if v is not None).shape[0])
    batch_size = a.batch_size or (math.ceil(rows / a.steps) if a.steps else 32)
    return Arrays(inputs, batch_size, math.ceil(rows / batch_size))


def _as_keras_2_converts(keras: Any, value: Any) -> Any:
    """An array as `_process_tensorlike` would make it a tensor."""
    if value is None:
        return None
    if keras._is_pandas_series(value):
        value = np.expand_dims(value.to_numpy(), axis=-1)
    if isinstance(value, np.ndarray):
        floating = issubclass(value.dtype.type, np.floating)
        floatx = require_tensorflow().keras.backend.floatx()
        return value.astype(floatx, copy=False) if floating else value
    return value.numpy() if hasattr(value, "numpy") else np.asarray(value)


class _Remembering:
    """An iterator that remembers its first element, at which Keras 2 looks."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self.first: list[Any] = []

    def __iter__(self) -> _Remembering:
        return self

    def __next__(self) -> Any:
        element = next(self._iterator)
        if not self.first:
            self.first.append(element)
        return element

    def from_the_first(self) -> Iterator[Any]:
        """All elements, those included that Keras has seen."""
        return itertools.chain(self.first, self._iterator)


class _Raw:
    """What a generator or `Sequence` yields, as Keras 2 hands it to TensorFlow."""

    def __init__(self, start: Callable[[], Any], finish: Callable[[Any], Any]) -> None:
        self._start = start
        self._finish = finish

    def __iter__(self) -> Iterator[Any]:
        # Nothing starts before the first batch is asked for, as in a tf.data.Dataset.
        for batch in self._start():
            yield self._finish(batch)


class _Keras2Epochs(Epochs):
    def __init__(self, keras: Any, handler: Any, x: Any, a: DataArguments) -> None:
        self._handler = handler
        adapter = handler._adapter
        spec = handler._dataset.element_spec
        cardinality, dataset = UNKNOWN_CARDINALITY, None
        if isinstance(adapter, keras.DatasetAdapter):
            dataset = handler._dataset
            cardinality = int(handler._dataset.cardinality())
        elif isinstance(adapter, keras.KerasSequenceAdapter):
            # A worker's Keras makes a new iterator each epoch where the two numbers are equal.
            cardinality = adapter.get_size() if a.steps is None else a.steps
        if isinstance(adapter, keras.GeneratorDataAdapter):  # a Sequence's is one of these
            elements = x.from_the_first() if isinstance(x, _Remembering) else x
            start = adapter._handle_multiprocessing(
                elements, a.workers, a.use_multiprocessing, a.max_queue_size
            )
            handler._dataset = _Raw(start, _finishing(keras, adapter, a.class_weight))
        super().__init__(spec, cardinality, handler.inferred_steps, dataset)

    def _epochs(self) -> Iterator[Iterator[tuple[Any, Any]]]:
        for number, (_, iterator) in enumerate(self._handler.enumerate_epochs()):
            if number >= (self._passed or 0):
                yield self._epoch(iterator)
            elif self.keeps(iterator) or self._handler.inferred_steps is None:
                for _ in self._epoch(iterator):
                    pass

    def evaluations(self) -> Iterator[Iterator[tuple[Any, Any]]]:
        while True:
            yield itertools.chain.from_iterable(self._epochs())

    def _epoch(self, iterator: Any) -> Iterator[tuple[Any, Any]]:
        handler = self._handler
        with handler.catch_stop_iteration():
            for _ in handler.steps():
                for _ in range(handler.step_increment + 1):
                    yield iterator, self._next(iterator)

    def keeps(self, iterator: Any) -> bool:
        kept = not self._handler._adapter.should_recreate_iterator()
        return kept and self._exhausted is not iterator

    def _enqueuer(self) -> Any:
        return getattr(self._handler._adapter, "_enqueuer", None)


def _finishing(keras: Any, adapter: Any, class_weight: Any) -> Callable[[Any], Any]:
    """What Keras 2 does with a batch of a generator or `Sequence`."""
    if not class_weight:
        finish: Callable[[Any], Any] = adapter._standardize_batch
        return finish
    tf = require_tensorflow()
    weigh = keras._make_class_weight_map_fn(class_weight)

    def weighed(batch: Any) -> Any:
        standard = adapter._standardize_batch(batch)
        x, *rest = standard if isinstance(standard, tuple) else (standard,)
        return weigh(x, *tf.nest.map_structure(tf.convert_to_tensor, rest))

    return weighed
