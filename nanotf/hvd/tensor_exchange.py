"""Collectives on tensors, eagerly and in `tf.function`, as Horovod has them.

Tensors of one dtype move in one exchange. With one rank nothing moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from nanotf.errors import InvalidArgumentError
from nanotf.hvd import rank_facts
from nanotf.hvd.reductions import Average, Compression, Max, Min, Reduction, chosen
from nanotf.ranks import this_rank

Tensor = Any
# The group reduces these in place of the narrower ones. None is wider than uint64, see `_turned`.
_WIDENED = dict.fromkeys(("int8", "uint8", "int16", "uint16"), "int32") | {"uint32": "int64"}

# AutoGraph would translate the code below where a user's `tf.function` calls it.
# Its branches and loops are over Python's values alone.
_unconverted = tf.autograph.experimental.do_not_convert


def _turned(tensor: Tensor, dtype: Any, collective: str) -> Tensor:
    """Turns uint64 into int64, or back: numbers that sum, or compare, as those given do."""
    # Sums of the same bits have the same bits. An order needs the half above 2**63 to stay above.
    if collective != "sum":
        tensor = tf.bitwise.bitwise_xor(
            tensor, tf.bitcast(tf.constant(-(2**63), tf.int64), tensor.dtype)
        )
    return tf.bitcast(tensor, dtype)


def fused(tensors: Sequence[Tensor], collective: str) -> list[Tensor]:
    """Reduces tensors of any shapes and dtypes: one exchange for each dtype.

    Args:
        collective: "sum", "min" or "max".
    """
    found = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if rank_facts.size() == 1:
        return [tf.identity(tensor) for tensor in found]  # new tensors, as from an exchange
    own = [tensor.dtype for tensor in found]
    found = [_turned(t, tf.int64, collective) if t.dtype == tf.uint64 else t for t in found]
    # In the order of the tensors, which all ranks share: they match exchanges by their order.
    for dtype in dict.fromkeys(tensor.dtype for tensor in found):
        places = [place for place, tensor in enumerate(found) if tensor.dtype == dtype]
        key = this_rank.keys().next()
        reduced = this_rank.group().all_reduce_many([found[p] for p in places], key, collective)
        for place, tensor in zip(places, reduced, strict=True):
            found[place] = tensor
    return [
        _turned(tensor, dtype, collective) if dtype == tf.uint64 else tensor
        for tensor, dtype in zip(found, own, strict=True)
    ]


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    if factor == 1.0:
        return tensor
    # A factor of 0.5 would become 0 as an integer.
    if tensor.dtype.is_integer:
        return tf.cast(tf.cast(tensor, tf.float64) * factor, tensor.dtype)
    return tensor * tf.cast(factor, tensor.dtype)


def _reduce_dense(
    tensors: Sequence[Tensor],
    op: Reduction,
    compression: Any,
    before: float,
    after: float,
    has_gradient: bool,
) -> list[Tensor]:

    def reduce(*given: Tensor) -> list[Tensor]:
        # Wide until the end: a type may hold the average, but not the sum.
        wide = [tf.cast(t, _WIDENED.get(t.dtype.name, t.dtype)) for t in given]
        # Before it is rounded to float16, whose largest number is 65504.
        sent = [_scaled(tensor, before) for tensor in wide]
        if compression.dtype is not None:
            sent = [tf.cast(t, compression.dtype) if t.dtype.is_floating else t for t in sent]
        assert op.collective is not None
        got = fused(sent, op.collective)
        got = [tf.cast(t, own.dtype) for t, own in zip(got, wide, strict=True)]
        # Of all ranks, also of those that have joined and gave zeros, as in Horovod.
        factor = after / rank_facts.size() if op is Average else after
        # A result that the narrow type cannot hold wraps, as in that type.
        return [tf.cast(_scaled(t, factor), own.dtype) for t, own in zip(got, given, strict=True)]

    if not has_gradient or op in (Min, Max):  # theirs would go to one rank alone: there is none
        return reduce(*tensors)

    @tf.custom_gradient
    def with_gradient(*given: Tensor) -> Any:
        # Each rank's loss depends on all ranks' tensors: the gradient is reduced in the same way.
        return reduce(*given), lambda *grads: reduce(*grads)

    found = with_gradient(*tensors)
    return list(found) if isinstance(found, (list, tuple)) else [found]


def _reduce_sparse(slices: Any, op: Reduction) -> Any:
    """Joins the rows of all ranks: an optimizer adds rows of one index."""
    if op in (Min, Max):
        raise InvalidArgumentError(
            f"Sparse tensors are summed or averaged. Received: op={op!r}, a tf.IndexedSlices."
        )
    # As in Horovod: two gathers, and no factors or compression. Ranks may have different rows.
    values = gather_rows(slices.values)
    factor = 1 / rank_facts.size() if op is Average else 1.0
    return tf.IndexedSlices(
        _scaled(values, factor), gather_rows(slices.indices), slices.dense_shape
    )


@_unconverted
def reduce_all(
    tensors: Sequence[Any],
    op: Reduction,
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    before: float = 1.0,
    after: float = 1.0,
    has_gradient: bool = False,
) -> list[Any]:
    """Reduces tensors over ranks; None stays None.

    Args:
        tensors: dense tensors, `tf.IndexedSlices`, or None.
        compression: an attribute of `Compression`.
        sparse_as_dense: True sums `tf.IndexedSlices` as dense tensors.
        before: factor of this rank's values.
        after: factor of the result.
        has_gradient: whether the results of dense tensors can be differentiated.
    """
    found = list(tensors)
    is_sparse = [isinstance(t, tf.IndexedSlices) and not sparse_as_dense for t in found]
    dense = [i for i, t in enumerate(found) if t is not None and not is_sparse[i]]
    # Sparse ones first, one by one, on every rank: the order of exchanges is what ranks match.
    for place, sparse in enumerate(is_sparse):
        if sparse:
            found[place] = _reduce_sparse(found[place], op)
    if dense:
        # This adds up the slices of one index, for `sparse_as_dense`.
        given = [tf.convert_to_tensor(found[place]) for place in dense]
        reduced = _reduce_dense(given, op, compression, before, after, has_gradient)
        for place, tensor in zip(dense, reduced, strict=True):
            found[place] = tensor
    return found


def gather_rows(tensor: Tensor) -> Tensor:
    """Joins the rows of all ranks, in the order of ranks; their numbers may differ."""
    tensor = tf.convert_to_tensor(tensor)
    if rank_facts.size() == 1:
        return tf.identity(tensor)
    return this_rank.group().all_gather(tensor, this_rank.keys().next())


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: Any = None,
) -> Any:
    """Reduces a tensor over all ranks.

    Args:
        tensor: of the same shape on all ranks, or a `tf.IndexedSlices`.
        average: bool or None; the older form of `op`.
        device_dense, device_sparse, name: ignored.
        compression: an attribute of `Compression`, default `none`.
        op: `Average`, the default, `Sum`, `Min` or `Max`.
        prescale_factor, postscale_factor: float, default 1.0, factors before and after.
        process_set: None or `global_process_set`.

    Returns:
        A tensor like `tensor`.

    Raises:
        CollectiveError: Ranks make different collectives, or one has ended.
    """
    rank_facts.check_process_set(process_set)
    scale: Any = {"before": prescale_factor, "after": postscale_factor, "has_gradient": True}
    return reduce_all([tensor], chosen(op, average), compression, **scale)[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> list[Any]:
    """Reduces several tensors over all ranks, in one exchange for each dtype.

    Args:
        tensors: as `tensor` of `allreduce`.
        average, device_dense, device_sparse, compression, op, prescale_factor, postscale_factor,
            process_set: as in `allreduce`.
    """
    rank_facts.check_process_set(process_set)
    scale: Any = {"before": prescale_factor, "after": postscale_factor, "has_gradient": True}
    found: list[Any] = reduce_all(tensors, chosen(op, average), compression, **scale)
    return found


@_unconverted
def allgather(tensor: Any, name: str | None = None, process_set: Any = None) -> Tensor:
    """Joins tensors of all ranks along their first axis, in the order of ranks.

    Args:
        tensor: of at least one dimension; only the first may differ between ranks.
        name: ignored.
        process_set: None or `global_process_set`.
    """
    rank_facts.check_process_set(process_set)
    tensor = tf.convert_to_tensor(tensor)

    @tf.custom_gradient
    def with_gradient(rows: Tensor) -> Any:
        def gradient(grads: Tensor) -> Tensor:
            total = fused([grads], "sum")[0]
            begin, end = _own_rows(tf.shape(rows)[0])
            return total[begin:end]

        return gather_rows(rows), gradient

    # Integers have no gradient.
    return with_gradient(tensor) if tensor.dtype.is_floating else gather_rows(tensor)


def _own_rows(count: Tensor) -> tuple[Tensor, Tensor]:
    # With the ranks: those that have joined are not among the rows.
    found = gather_rows([[rank_facts.rank(), count]])
    end = tf.reduce_sum(tf.where(found[:, 0] <= rank_facts.rank(), found[:, 1], 0))
    return end - count, end


@_unconverted
def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: Any = None
) -> Tensor:
    """Returns the root's tensor.

    Args:
        tensor: of the same shape and dtype on all ranks.
        root_rank: int, the rank whose value all get.
        name: ignored.
        process_set: None or `global_process_set`.
    """
    rank_facts.check_process_set(process_set)
    root, tensor = rank_facts.check_root(root_rank), tf.convert_to_tensor(tensor)

    @tf.custom_gradient
    def with_gradient(value: Tensor) -> Any:
        def gradient(grads: Tensor) -> Tensor:
            total = fused([grads], "sum")[0]
            # All results are the root's value: other ranks' own values have no effect.
            return total if rank_facts.rank() == root else tf.zeros_like(total)

        return from_root(value, root), gradient

    return with_gradient(tensor) if tensor.dtype.is_floating else from_root(tensor, root)


def from_root(tensor: Tensor, root: int) -> Tensor:
    """Returns the root's tensor, without a gradient."""
    if rank_facts.size() == 1:
        return tf.identity(tensor)
    return this_rank.group().broadcast(tensor, this_rank.keys().next(), root)


@_unconverted
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Any = None,
    name: str | None = None,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduces a tensor over all ranks; each rank gets its part of the first axis.

    Args:
        tensor: of the same shape on all ranks, of at least one dimension. The first ranks get one
            row more if the rows are not divisible.
        device_dense, compression, op, name, process_set, prescale_factor, postscale_factor: as in
            `allreduce`.
    """
    rank_facts.check_process_set(process_set)
    scale: Any = {"before": prescale_factor, "after": postscale_factor, "has_gradient": True}
    # Every rank reduces all of it: `reduce_scatter` of the group divides elements, not rows.
    whole = reduce_all([tensor], chosen(op), compression, **scale)[0]
    rows, size, rank = tf.shape(whole)[0], rank_facts.size(), rank_facts.rank()
    each, more = rows // size, rows % size
    # The ranks before this one have one row more, the first `more` of them.
    begin = rank * each + tf.minimum(rank, more)
    return whole[begin : begin + each + tf.cast(rank < more, tf.int32)]


@_unconverted
def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: Any = None
) -> Any:
    """Sends a part of the first axis to each rank; returns the parts that all have sent here.

    Args:
        tensor: of at least one dimension; only the first may differ between ranks.
        splits: integers, the number of rows for each rank; None divides the rows equally.
        name: ignored.
        process_set: None or `global_process_set`.

    Returns:
        The rows, in the order of ranks; with `splits` also the number of rows from each rank.
    """
    rank_facts.check_process_set(process_set)
    tensor, size, rank = tf.convert_to_tensor(tensor), rank_facts.size(), rank_facts.rank()
    if splits is None:
        # A remainder fails the check of the sum below.
        own = tf.fill([size], tf.shape(tensor)[0] // size)
    else:
        own = tf.cast(tf.convert_to_tensor(splits), tf.int32)
        tf.debugging.assert_equal(
            tf.shape(own), [size], "hvd.alltoall needs as many splits as there are ranks."
        )
    tf.debugging.assert_equal(
        tf.reduce_sum(own),
        tf.shape(tensor)[0],
        "hvd.alltoall divides all rows of the first axis. Pass splits whose sum is their number.",
    )
    table = gather_rows(own)
    # A rank that has joined gives no rows: its row of the table is missing.
    tf.debugging.assert_equal(
        tf.size(table), size * size, "hvd.alltoall needs all ranks. One has called hvd.join()."
    )
    table = tf.reshape(table, [size, size])  # by sender and receiver
    # All rows go to all ranks, which cut out theirs: the group has no such collective.
    rows = gather_rows(tensor)
    # The gathered rows lie by sender, and those of a sender by receiver.
    ends = tf.reshape(tf.cumsum(tf.reshape(table, [-1])), [size, size])
    parts = [rows[ends[s, rank] - table[s, rank] : ends[s, rank]] for s in range(size)]
    found = tf.concat(parts, axis=0)
    return found if splits is None else (found, table[:, rank])


def each(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Returns the grouped form of a collective: for a list of tensors."""

    def grouped(tensors: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Makes the collective for each tensor; returns a list."""
        return [function(tensor, *args, **kwargs) for tensor in tensors]

    return grouped


grouped_allgather, grouped_reducescatter = each(allgather), each(reducescatter)


@_unconverted
def barrier(process_set: Any = None) -> Any:
    """Waits until all ranks have called it."""
    rank_facts.check_process_set(process_set)
    return None if rank_facts.size() == 1 else this_rank.group().barrier(this_rank.keys().next())


def size_op(process_set_id: int = 0, name: str | None = None) -> Tensor:
    """Returns the number of ranks as a tensor."""
    # Constants, since the ranks of a script never change; they are operations in elastic Horovod.
    return tf.constant(rank_facts.size(), name=name)


def rank_op(name: str | None = None) -> Tensor:
    """Returns this process's rank as a tensor."""
    return tf.constant(rank_facts.rank(), name=name)


def local_rank_op(name: str | None = None) -> Tensor:
    """Returns this process's rank among those of its host as a tensor."""
    return tf.constant(rank_facts.local_rank(), name=name)


def local_size_op(name: str | None = None) -> Tensor:
    """Returns the number of ranks of this host as a tensor."""
    return tf.constant(rank_facts.local_size(), name=name)
