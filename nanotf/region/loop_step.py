"""One step of a custom training loop, on one worker.

    strategy.run
      rows of this worker / rows of all  -> share
      the user's function                   losses, metrics and optimizers follow the share
      what it returns                    -> what a single process would return

See `losses` for what follows the share, and `steps.nano_multiprocessing` for what
is made of the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.errors import NanoError
from nanotf.region.share import Share, rows_of_all

_SEVERAL = (
    "A step that the workers share reads one batch, or several of which each worker has the same "
    "part. Received: a second batch with another number of rows. Call the step once for each batch."
)
_COUNTED = (tf.int32, tf.int64)


def body_of(
    function: Callable[..., Any],
    strategy: Any,
    share: Share,
    local_variables: Callable[[], Sequence[Any]],
) -> Callable[..., Any]:
    """The step as the worker runs it, in cross-replica context.

    Args:
        function: the user's; of a `tf.function` the Python function.
        strategy: `strategy.WorkerStrategy`.
        share: `Share`, installed in this process.
        local_variables: callable, the variables that differ between ranks until they are read;
            a worker without rows leaves them as they are.

    Returns:
        A function of the same arguments.
    """

    def replica_step(*args: Any, **kwargs: Any) -> Any:
        before = share.set(None)
        batch = _Batch(share, local_variables)
        share.whole_results = True
        try:
            args, kwargs = batch.begin((args, kwargs))
            with share.reading(batch.read):
                result = function(*args, **kwargs)
            batch.leave_no_trace()
            return _of_whole_batch(result, batch.rows, share)
        finally:
            share.whole_results = False
            share.remember([], [])
            share.end_step()
            share.set(before)

    def body(*args: Any, **kwargs: Any) -> Any:
        results = strategy.run(replica_step, args, kwargs)
        return tf.nest.map_structure(lambda v: strategy.experimental_local_results(v)[0], results)

    return body


class _Batch:
    """The rows that one worker has in a step.

    They are those of the step's arguments or, where there are none, of what it reads first.

    Attributes:
        rows: scalar int64 tensor, how many.
    """

    def __init__(self, share: Share, local_variables: Callable[[], Sequence[Any]]) -> None:
        self._share = share
        self._local_variables = local_variables
        self._values: list[tuple[Any, Any]] = []  # from before the step, of a worker without rows
        self._is_there = self._was_read = False

    def begin(self, arguments: Any) -> Any:
        """Begins a step; returns its arguments, in which a row stands in where there is none."""
        self._share.begin_step()
        found = _tensors(arguments)
        self._is_there = bool(found)
        if found:
            return self._take(found[0], arguments)
        self._weigh(tf.ones([], tf.int64), 1)
        return arguments

    def read(self, element: Any) -> Any:
        """Takes an element that the step has read from an iterator; returns it, or a stand-in."""
        found = _tensors(element)
        if self._was_read and found and self._share.in_own_graph():
            tf.debugging.assert_near(_share_of(found[0]), self._share.current, message=_SEVERAL)
        if self._is_there or not found:
            return element
        if not self._share.in_own_graph():
            raise NanoError(
                "A step that the workers share gets its batch as an argument, or reads one itself, "
                "outside of loops and functions. Received: next(iterator) in a loop, a branch or "
                "a tf.function inside of a step. Call the step in the loop: "
                "step(next(iterator), ...)."
            )
        self._is_there = self._was_read = True
        return self._take(found[0], element)

    def _take(self, batch: Any, structure: Any) -> Any:
        self._weigh(_rows_of(batch), batch.shape[0])
        if self._share.known_rows:
            return structure
        self._values = [(v, v.read_value()) for v in self._local_variables()]
        variables, values = [v for v, _ in self._values], [value for _, value in self._values]
        self._share.remember(variables, values)
        return tf.nest.map_structure(self._filled, structure)

    def _weigh(self, rows: Any, known: int | None) -> None:
        self.rows, self._share.known_rows = rows, known
        self._share.set(_share_of_rows(rows))

    def _filled(self, leaf: Any) -> Any:
        """A leaf of a batch; where it has no rows, one of zeros stands in."""
        if not _is_data(leaf) or len(leaf.shape) == 0 or leaf.shape[0]:
            return leaf
        tensor = tf.convert_to_tensor(leaf)
        missing = tf.maximum(self.rows, 1) - tf.shape(tensor, tf.int64)[0]
        zeros = tf.zeros(tf.concat([[missing], tf.shape(tensor, tf.int64)[1:]], 0), tensor.dtype)
        return tf.concat([tensor, zeros], axis=0)

    def leave_no_trace(self) -> None:
        """Ends a step: rows that stood in for none have changed nothing."""
        for variable, value in self._values:
            variable.assign(tf.where(self.rows > 0, variable.read_value(), value))


def _rows_of(batch: Any) -> Any:
    return tf.shape(tf.convert_to_tensor(batch), tf.int64)[0]


def _share_of_rows(rows: Any) -> Any:
    rows = tf.cast(rows, tf.float64)
    return tf.math.divide_no_nan(rows, _sum([rows])[0])


def _share_of(batch: Any) -> Any:
    return _share_of_rows(_rows_of(batch))


def _tensors(structure: Any) -> list[Any]:
    """The dense tensors and arrays with at least one dimension, in order."""
    return [leaf for leaf in tf.nest.flatten(structure) if _is_data(leaf) and len(leaf.shape) > 0]


def _is_data(leaf: Any) -> bool:
    if isinstance(leaf, tf.Variable) or hasattr(leaf, "assign"):
        return False
    is_array = hasattr(leaf, "__array_interface__")
    return (is_array or isinstance(leaf, tf.Tensor)) and leaf.shape is not None and _ranked(leaf)


def _ranked(leaf: Any) -> bool:
    return getattr(leaf.shape, "rank", 0) is not None


def _sum(tensors: Sequence[Any]) -> list[Any]:
    """Sums tensors of one dtype over the workers."""
    context = tf.distribute.get_replica_context()
    summed: list[Any] = context.all_reduce(tf.distribute.ReduceOp.SUM, list(tensors))
    return summed


def _of_whole_batch(result: Any, rows: Any, share: Share) -> Any:
    """What a single process would return."""
    leaves = tf.nest.flatten(result)
    kinds = [_eager_kind(leaf) for leaf in leaves]
    leaves = [
        tf.convert_to_tensor(v, tf.float64 if k is float else None) if k else v
        for v, k in zip(leaves, kinds, strict=True)
    ]
    means: dict[Any, list[int]] = {}
    counts: dict[Any, list[int]] = {}
    of_rows: list[int] = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, tf.Variable) or not isinstance(leaf, tf.Tensor):
            continue
        if share.is_whole(leaf):  # a gradient, which may happen to be as long as the rows
            continue
        if leaf.shape.rank == 0 and leaf.dtype.is_floating:
            means.setdefault(leaf.dtype, []).append(place)
        elif leaf.shape.rank == 0 and leaf.dtype in _COUNTED:
            counts.setdefault(leaf.dtype, []).append(place)
        elif leaf.shape.rank:
            of_rows.append(place)
    for places in means.values():
        for place, value in zip(places, _sum([share.of(leaves[i]) for i in places]), strict=True):
            leaves[place] = value
    for places in counts.values():
        present = [tf.where(rows > 0, leaves[i], tf.zeros_like(leaves[i])) for i in places]
        for place, value in zip(places, _sum(present), strict=True):
            leaves[place] = value
    for place, value in zip(
        of_rows, _rows_or_mean([leaves[i] for i in of_rows], share), strict=True
    ):
        leaves[place] = value
    leaves = [k(v.numpy()) if k else v for v, k in zip(leaves, kinds, strict=True)]
    return tf.nest.pack_sequence_as(result, leaves)


def _eager_kind(leaf: Any) -> Callable[[Any], Any] | None:
    """What makes of NumPy's value what a step without a graph has returned; None for a tensor.

    Integers of Python are the worker's own: most are no counts.
    """
    if not tf.executing_eagerly():
        return None
    if isinstance(leaf, np.ndarray):
        return np.asarray
    is_number = type(leaf) is float or isinstance(leaf, (np.floating, np.integer))
    return type(leaf) if is_number else None


def _rows_or_mean(values: Sequence[Any], share: Share) -> list[Any]:
    """The rows of all workers, of values that have this worker's; a mean of the others.

    A value has rows if that is what it seems to all workers. They say so when the step runs, since
    each has traced it for rows of its own. TensorFlow allows no collective in a branch of a step,
    so that the means are made of what all workers have, too.
    """
    if not values:
        return []
    seems = [share.may_be_rows(value) for value in values]
    against = _sum([tf.constant([not fits for fits in seems], tf.float64)])[0]
    return [
        _one_of_whole_batch(value, fits, against[place] > 0, share)
        for place, (value, fits) in enumerate(zip(values, seems, strict=True))
    ]


def _one_of_whole_batch(value: Any, fits: bool, is_mean: Any, share: Share) -> Any:
    """One of the values; `fits` is what it seems here, `is_mean` a tensor, what it is."""
    is_floating = value.dtype.is_floating
    if not fits and (value.dtype == tf.string or value.shape.num_elements() == 0):
        return value  # strings cannot be gathered; TensorFlow crashes where all gather nothing
    part = share.of(value) if is_floating else value
    gathered = rows_of_all(tf.cond(is_mean, lambda: part, lambda: value), share)

    def mean() -> Any:
        if not is_floating:
            return value
        shape = tf.concat([[-1], tf.shape(value)], axis=0)
        return tf.ensure_shape(tf.reduce_sum(tf.reshape(gathered, shape), axis=0), value.shape)

    return tf.cond(is_mean, mean, lambda: gathered) if fits else mean()
