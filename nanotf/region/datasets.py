"""Datasets of a `@nano` function, of whose batches each worker gets its rows.

What a function derives from one inside of the loop (`map`, `shuffle`, `unbatch().batch(k)`) is
derived from the whole batches, as in one process, and divided afterwards: so `SharedDataset` has two
faces. TensorFlow reads the worker's rows; the methods that derive a dataset work on the whole. What
leaves batches as they are (`take`, `repeat`, `shuffle` ...) is done to both, so that a worker need
not read the others' rows.

| name (seen in 2.15 to 2.21) | why |
| --- | --- |
| `DatasetSpec._element_spec`, `_to_components`, `_from_components`, `_component_specs` | both faces enter a `tf.function` that gets the dataset as an argument |
| `Dataset._variant_tensor`, `Dataset._type_spec` | same |
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from nanotf.compat import pipelines
from nanotf.region.share import Worker

# Methods that leave the batches what they are, and may be called on each worker's rows of them.
_OF_BATCHES = (
    "cache",
    "concatenate",
    "enumerate",
    "prefetch",
    "repeat",
    "shard",
    "shuffle",
    "skip",
    "take",
    "with_options",
)
_OTHERS = (
    "batch",
    "bucket_by_sequence_length",
    "filter",
    "flat_map",
    "group_by_window",
    "ignore_errors",
    "interleave",
    "map",
    "padded_batch",
    "ragged_batch",
    "rebatch",
    "rejection_resample",
    "scan",
    "snapshot",
    "sparse_batch",
    "take_while",
    "unbatch",
    "unique",
    "window",
)
BATCHING = {name for name in _OTHERS if "batch" in name and name != "unbatch"} | {
    "bucket_by_sequence_length"
}
_UNBATCHING = {"unbatch", "window"}
_BY_SPEC = {"flat_map", "group_by_window", "interleave"}

_UNBATCHED = (
    "The workers of a @nano function share the rows of batches. Received: a dataset without "
    "batches, {spec}, that the function reads. Call .batch(batch_size) on it; of a single row, "
    ".batch(1)."
)
_NOT_DENSE = (
    "The workers of a @nano function share dense tensors. Received: a dataset made inside of it "
    "with elements of {spec}. Convert them with to_tensor() or tf.sparse.to_dense() in a map()."
)


class SharedDataset(pipelines.VariantOfAnother):  # type: ignore[misc]
    """A dataset of whole batches that yields this worker's rows of them.

    Args:
        rows: `tf.data.Dataset`, this worker's rows.
        whole: `tf.data.Dataset`, the same batches with all rows.
        is_batched: bool, whether its elements are batches.
        divide: callable of a dataset of whole batches, and of whether it has batches; returns the
            dataset of this worker's rows.
        seeds: callable of an operation's seed or None; returns the seed for it, and a context in
            which it is alike on all workers.
    """

    def __init__(self, rows: Any, whole: Any, is_batched: bool, divide: Any, seeds: Any) -> None:
        self.whole = whole
        self.is_batched = is_batched
        self.divide = divide
        self.seeds = seeds
        self._nanotf_rows = True
        super().__init__(rows, rows._variant_tensor)

    def with_faces(self, rows: Any, whole: Any, is_batched: bool) -> SharedDataset:
        """A dataset of the same function with other batches."""
        return SharedDataset(rows, whole, is_batched, self.divide, self.seeds)

    @property
    def _type_spec(self) -> Any:
        return _SharedSpec(self.element_spec, (), self)


class _SharedSpec(pipelines.DatasetSpec):  # type: ignore[misc]
    """Both faces of a `SharedDataset`, of which one `like` tells the rest."""

    __slots__ = ["_like"]

    def __init__(self, element_spec: Any, dataset_shape: Any, like: SharedDataset) -> None:
        super().__init__(element_spec, dataset_shape)
        self._like = like

    def _key(self) -> Any:
        return str(self._element_spec), str(self._like.whole.element_spec), self._like.is_batched

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SharedSpec) and self._key() == other._key()

    def is_subtype_of(self, other: Any) -> bool:
        return bool(self == other)

    def most_specific_common_supertype(self, others: Any) -> Any:
        return self if all(self == other for other in others) else None

    def _serialize(self) -> Any:
        return (self._element_spec, self._dataset_shape, self._like)

    @property
    def _component_specs(self) -> Any:
        return (super()._component_specs, super()._component_specs)

    def _to_components(self, value: Any) -> Any:
        return (value._variant_tensor, value.whole._variant_tensor)

    def _from_components(self, components: Any) -> Any:
        rows, whole = components
        return self._like.with_faces(
            pipelines.VariantDataset(rows, self._element_spec),
            pipelines.VariantDataset(whole, self._like.whole.element_spec),
            self._like.is_batched,
        )

    def _to_tensor_list(self, value: Any) -> Any:
        raise TypeError("A dataset of a @nano function cannot be an element of another dataset.")


def _deriving(name: str) -> Callable[..., Any]:
    stock = getattr(tf.data.Dataset, name)

    @functools.wraps(stock)
    def derive(self: SharedDataset, *args: Any, **kwargs: Any) -> Any:
        others = [a for a in (*args, *kwargs.values()) if isinstance(a, tf.data.Dataset)]
        if any(not isinstance(other, SharedDataset) for other in others):
            return stock(self, *args, **kwargs)  # with one that each worker has as a whole
        if name == "shuffle":
            seed = kwargs.pop("seed", args[1] if len(args) > 1 else None)
            args = (*args[:1], None, *args[2:]) if len(args) > 1 else args
            seed, alike = self.seeds(seed)
            if len(args) > 1:
                args = (args[0], seed, *args[2:])
            else:
                kwargs["seed"] = seed
        else:
            alike = self.seeds(0)[1]
        is_batched = self.is_batched and all(other.is_batched for other in others)
        with alike():
            whole = stock(self.whole, *map(_whole_of, args), **_all_whole(kwargs))
            if name in _OF_BATCHES and is_batched:
                return self.with_faces(stock(self, *args, **kwargs), whole, is_batched)
        if name in BATCHING or name in _UNBATCHING:
            is_batched = name in BATCHING
        elif name in _BY_SPEC:
            is_batched = has_free_rows(whole.element_spec)
        return self.with_faces(self.divide(whole, is_batched), whole, is_batched)

    return derive


def sample_alike(static: Any, worker: Worker) -> Any:
    """Makes `sample_from_datasets` pick the same on all workers of a `@nano` function.

    With picks of their own they would wait for each other's steps for ever. See `overrides`.
    """
    stock = static.__func__

    @functools.wraps(stock)
    def sample(
        datasets: Any, weights: Any = None, seed: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        shared = [each for each in datasets if isinstance(each, SharedDataset)]
        if not shared:
            return stock(datasets, weights, seed, *args, **kwargs)
        weights = _whole_of(weights)
        seed, alike = shared[0].seeds(seed)
        with alike():
            rows = stock(datasets, weights, seed, *args, **kwargs)
            if len(shared) < len(datasets):
                return rows  # with one that each worker has as a whole
            whole = stock([each.whole for each in shared], weights, seed, *args, **kwargs)
        is_batched = all(each.is_batched for each in shared)
        if not is_batched:
            rows = shared[0].divide(whole, False)
        return shared[0].with_faces(rows, whole, is_batched)

    return staticmethod(sample)


def _whole_of(value: Any) -> Any:
    return value.whole if isinstance(value, SharedDataset) else value


def _all_whole(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: _whole_of(value) for key, value in kwargs.items()}


for _name in (*_OF_BATCHES, *_OTHERS):
    if hasattr(tf.data.Dataset, _name):
        setattr(SharedDataset, _name, _deriving(_name))


def has_free_rows(element_spec: Any) -> bool:
    """Whether the number of rows of elements is open, as it is after `batch`."""
    shapes = [getattr(spec, "shape", None) for spec in tf.nest.flatten(element_spec)]
    of_rows = [s for s in shapes if s is not None and s.rank != 0]
    return bool(of_rows) and all(s.rank is None or s[0] is None for s in of_rows)


def divided(dataset: Any, is_batched: bool, part: Callable[[Any], tuple[Any, Any]]) -> Any:
    """The rows of one worker.

    Args:
        dataset: `tf.data.Dataset` of whole batches.
        is_batched: bool; reading a dataset without batches fails, and says what to do.
        part: callable of the number of rows of a batch, the first that is this worker's and the
            one after the last.
    """
    spec = dataset.element_spec
    is_dense = all(isinstance(leaf, tf.TensorSpec) for leaf in tf.nest.flatten(spec))

    @tf.autograph.experimental.do_not_convert
    def of_worker(*elements: Any) -> Any:
        element = elements if isinstance(spec, tuple) else elements[0]
        if not is_batched or not is_dense:
            text = (_UNBATCHED if is_dense else _NOT_DENSE).format(spec=spec)
            with tf.control_dependencies([tf.debugging.Assert(False, [text])]):
                return tf.nest.map_structure(tf.identity, element, expand_composites=True)
        leaves = [leaf for leaf in tf.nest.flatten(element) if leaf.shape.rank != 0]
        if not leaves:
            return element
        rows = tf.shape(leaves[0], tf.int64)[0]
        first, end = part(rows)

        def rows_of(leaf: Any) -> Any:
            if leaf.shape.rank == 0:
                return leaf
            own = tf.shape(leaf, tf.int64)[0]
            fits = tf.equal(own, rows)  # what has another length is not the rows'
            return leaf[tf.where(fits, first, 0) : tf.where(fits, end, own)]

        return tf.nest.map_structure(rows_of, element)

    return dataset.map(of_worker)
