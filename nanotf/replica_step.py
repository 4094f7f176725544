"""One step of a custom training loop, on one worker.

    strategy.run
      rows of this worker / rows of all  -> share
      the user's function                   losses, metrics and optimizers follow the share
      what it returns                    -> what a single process would return

See `compat.keras_share` for what follows the share, and `steps.nano_multiprocessing` for what
is made of the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from nanotf.compat import keras_share

_COUNTED = (tf.int32, tf.int64)


def body_of(
    function: Callable[..., Any],
    strategy: Any,
    share: keras_share.Share,
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
        batch = _batch_of(args, kwargs)
        rows = tf.ones([], tf.int64) if batch is None else tf.shape(batch, tf.int64)[0]
        total = _sum([tf.cast(rows, tf.float64)])[0]
        known = 1 if batch is None else batch.shape[0]
        before = share.set(tf.math.divide_no_nan(tf.cast(rows, tf.float64), total))
        try:
            if known:
                result = function(*args, **kwargs)
            else:
                result = _without_trace(function, args, kwargs, rows, local_variables())
            return _of_whole_batch(result, rows, known, share)
        finally:
            share.set(before)

    def body(*args: Any, **kwargs: Any) -> Any:
        results = strategy.run(replica_step, args, kwargs)
        return tf.nest.map_structure(lambda v: strategy.experimental_local_results(v)[0], results)

    return body


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


def _batch_of(args: Any, kwargs: Any) -> Any:
    """The first of them, whose rows are those of the batch; None where there is none."""
    found = _tensors((args, kwargs))
    return tf.convert_to_tensor(found[0]) if found else None


def _sum(tensors: Sequence[Any]) -> list[Any]:
    """Sums tensors of one dtype over the workers."""
    context = tf.distribute.get_replica_context()
    summed: list[Any] = context.all_reduce(tf.distribute.ReduceOp.SUM, list(tensors))
    return summed


def _without_trace(
    function: Callable[..., Any], args: Any, kwargs: Any, rows: Any, variables: Sequence[Any]
) -> Any:
    """Runs a step that may have no rows: one of zeros stands in, and leaves no trace."""
    stand_in = tf.maximum(rows, 1)

    def filled(leaf: Any) -> Any:
        if not _is_data(leaf) or len(leaf.shape) == 0 or leaf.shape[0]:
            return leaf
        tensor = tf.convert_to_tensor(leaf)
        missing = stand_in - tf.shape(tensor, tf.int64)[0]
        zeros = tf.zeros(tf.concat([[missing], tf.shape(tensor, tf.int64)[1:]], 0), tensor.dtype)
        return tf.concat([tensor, zeros], axis=0)

    values = [variable.read_value() for variable in variables]
    args, kwargs = tf.nest.map_structure(filled, (args, kwargs))
    result = function(*args, **kwargs)
    for variable, value in zip(variables, values):  # noqa: B905 - AutoGraph lacks `strict`
        variable.assign(tf.where(rows > 0, variable.read_value(), value))
    return result


def _of_whole_batch(result: Any, rows: Any, known: int | None, share: keras_share.Share) -> Any:
    """What a single process would return; `known` is `rows` where it is known in tracing."""
    leaves = tf.nest.flatten(result)
    means: dict[Any, list[int]] = {}
    counts: dict[Any, list[int]] = {}
    of_rows: list[int] = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, tf.Variable) or not isinstance(leaf, tf.Tensor):
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
        of_rows, _rows_or_mean([leaves[i] for i in of_rows], known, share), strict=True
    ):
        leaves[place] = value
    return tf.nest.pack_sequence_as(result, leaves)


def _may_be_rows(value: Any, known: int | None) -> bool:
    """Whether, to this worker, a value seems to have one entry for each row of the batch.

    Another worker, which has more rows or fewer, or a graph for any number, may see it otherwise.
    """
    first = value.shape[0]
    return first is None or (known is not None and first == max(known, 1))


def _rows_or_mean(values: Sequence[Any], known: int | None, share: keras_share.Share) -> list[Any]:
    """The rows of all workers, of values that have this worker's; a mean of the others.

    A value has rows if that is what it seems to all workers. They say so when the step runs, since
    each has traced it for rows of its own. TensorFlow allows no collective in a branch of a step,
    so that the means are made of what all workers have, too.
    """
    if not values:
        return []
    seems = [_may_be_rows(value, known) for value in values]
    against = _sum([tf.constant([not fits for fits in seems], tf.float64)])[0]
    return [
        _one_of_whole_batch(value, fits, against[place] > 0, share)
        for place, (value, fits) in enumerate(zip(values, seems, strict=True))
    ]


def _one_of_whole_batch(value: Any, fits: bool, is_mean: Any, share: keras_share.Share) -> Any:
    """One of the values; `fits` is what it seems here, `is_mean` a tensor, what it is."""
    is_floating = value.dtype.is_floating
    if not fits and (value.dtype == tf.string or value.shape.num_elements() == 0):
        return value  # strings cannot be gathered; TensorFlow crashes where all gather nothing
    part = share.of(value) if is_floating else value
    gathered = keras_share.rows_of_all(tf.cond(is_mean, lambda: part, lambda: value), share)

    def mean() -> Any:
        if not is_floating:
            return value
        shape = tf.concat([[-1], tf.shape(value)], axis=0)
        return tf.ensure_shape(tf.reduce_sum(tf.reshape(gathered, shape), axis=0), value.shape)

    return tf.cond(is_mean, mean, lambda: gathered) if fits else mean()
