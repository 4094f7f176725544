"""A worker's own rows of a batch, and the operators to and from the whole batch.

    outside regions                 inside
    whole: equal on all workers     own rows: this worker's

| operator | forward | its gradient |
| --- | --- | --- |
| `take` | whole -> own rows | `join` |
| `join` | own rows -> whole | `cut` |
| `cut` | whole -> own rows, zeros where the worker has none | `join` |
| `spread` | whole -> the same tensor, used by each worker for its rows | `add` |
| `add` | a part of a sum -> the sum over workers | `spread` |

These are the conjugate operators of Megatron-LM (Shoeybi et al., 2019, section 3), for rows
instead of columns. The gradient of each is another of them, so gradients of any order are correct.

A joined tensor remembers the rows that it was joined from (`rows_of`): another region uses those
directly. A sum remembers this worker's part (`part_of`). A graph exchanges both only if something
reads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf


class Exchange(Protocol):
    """The exchange between workers; see `strategy.WorkerStrategy`."""

    rank: int
    size: int
    feeds_branches: bool  # whether functions that exchange may be called in a branch of a graph

    def sum_dense(self, tensors: Sequence[Any]) -> list[Any]:
        """Sums tensors of one or several dtypes over workers; in a graph, if read."""

    def gather_rows(self, rows: Any, if_read: bool = False) -> Any:
        """Gathers the rows of all workers, in the order of ranks.

        Args:
            rows: tensor of at least one dimension; the first may differ between workers.
            if_read: whether a graph gathers them only if something reads the result.
        """


def with_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Applies `tf.custom_gradient` to an operator."""
    found: Callable[..., Any] = tf.custom_gradient(function)
    return found


@dataclasses.dataclass(frozen=True)
class Rows:
    """The own rows that a whole tensor was joined from."""

    division: Division
    own: Any  # a tensor
    factor: int = 1  # the number of its rows per row of the batch


def rows_of(value: Any) -> Rows | None:
    """Returns the own rows of a joined tensor, None for any other value."""
    return getattr(value, "_nanotf_rows", None)


class Division:
    """The rows of an n-row batch that are this worker's: parts as equal as possible, in order.

    A worker without rows computes a padding row, a copy of a row whose results are dropped.

    Args:
        n: int, or scalar int32 tensor where tracing does not know it.

    Attributes:
        count: int or scalar tensor, the worker's rows.
        length: like `count`, the rows that it computes: at least 1.
        start: like `count`, the index of the first of these rows.
    """

    def __init__(self, exchange: Exchange, n: Any) -> None:
        self.exchange = exchange
        self.n = n
        self.is_known = isinstance(n, int)
        self._first = n * exchange.rank // exchange.size
        self._end = n * (exchange.rank + 1) // exchange.size
        self.count = self._end - self._first
        least, most = (min, max) if self.is_known else (tf.minimum, tf.maximum)
        self.length: Any = most(self.count, 1)
        self.start = least(self._first, n - 1)

    @classmethod
    def of(cls, exchange: Exchange, like: Any) -> Division:
        """Makes the division of a batch with as many rows as a dense, nonempty tensor."""
        n = like.shape[0]
        return cls(exchange, tf.shape(like)[0] if n is None else int(n))

    @property
    def is_full(self) -> bool:
        """Returns True if all workers are known to have rows.

        Not this worker alone: all make the same operations, since a tape orders gradients, and with
        them their exchanges, by the operations that were made.
        """
        return self.is_known and self.n >= self.exchange.size

    @property
    def lengths(self) -> tuple[int, ...]:
        """The numbers of rows that code sees, of the batch and on workers; empty if unknown."""
        if not self.is_known:
            return ()
        least = self.n // self.exchange.size
        most = -(-self.n // self.exchange.size)
        return tuple(sorted({self.n, max(1, least), most}))

    def agrees_with(self, other: Division) -> bool:
        """Returns True if both are known to divide a batch equally."""
        return self is other or (self.is_known and other.is_known and self.n == other.n)

    def fits(self, rows: int | None) -> bool:
        """Returns True if a first dimension equals this batch's, as far as tracing knows."""
        return rows == (self.n if self.is_known else None)

    def has_rows(self, leaf: Any) -> bool:
        """Returns True if a tensor's or array's first dimension is this batch's rows."""
        joined = rows_of(leaf)
        if joined is not None and joined.factor == 1 and self.agrees_with(joined.division):
            return True
        # Two unknown lengths look alike, and those of two batches may differ.
        return (joined is None or self.is_known) and self.fits(leaf.shape[0])

    @property
    def share(self) -> Any:
        """The worker's fraction of the batch, a float64 scalar."""
        return tf.cast(self.count, tf.float64) / tf.cast(self.n, tf.float64)

    def own(self, whole: Any) -> Any:
        """Returns the own rows of any tensor, dense or ragged, without a gradient."""
        return _slice(whole, self.start, self.start + self.length)

    def take(self, whole: Any) -> Any:
        """Returns the own rows of a whole tensor; for a joined one, the rows it was joined from."""
        rows = rows_of(whole)
        if rows is not None and rows.factor == 1 and self.agrees_with(rows.division):
            return rows.own
        if not whole.dtype.is_floating and not whole.dtype.is_complex:
            return self.own(whole)  # has no gradient
        if isinstance(whole, tf.RaggedTensor):
            values = spread(self.exchange, [whole.flat_values])[0]
            return self.own(whole.with_flat_values(values))
        if isinstance(whole, tf.SparseTensor):
            values = spread(self.exchange, [whole.values])[0]
            return self.own(tf.SparseTensor(whole.indices, values, whole.dense_shape))

        @with_gradient
        def take(whole: Any) -> Any:
            return self.own(whole), lambda d: self.join(dense(d))

        return take(whole)

    def cut(self, whole: Any, factor: int = 1) -> Any:
        """Takes the own rows like `take`, with zeros where the worker has no rows."""
        rows = rows_of(whole)
        if rows is not None and rows.factor == factor and self.agrees_with(rows.division):
            return rows.own if self.is_full else self._without_rest(rows.own, factor)

        @with_gradient
        def cut(whole: Any) -> Any:
            own = whole[factor * self._first : factor * self._end]
            if not self.is_full:
                own = self._filled(own, factor)
            return own, lambda d: self.join(dense(d), factor)

        return cut(whole)

    def own_of(self, whole: Any) -> Any:
        """Returns this worker's part of a tensor of any kind: joined, the parts are the tensor.

        A joined tensor's part is the own rows, without padding. Any other tensor is cut along its
        first dimension, which need not be the batch's. Each worker has the whole of a scalar.
        """
        rows = rows_of(whole)
        if rows is not None and self.agrees_with(rows.division):
            own, end = rows.own, rows.factor * self.count
            return own if self.is_full else _slice(own, 0, end)
        length = length_of(whole)
        if length is None:
            return whole
        length, exchange = tf.cast(length, tf.int64), self.exchange
        first, end = (length * rank // exchange.size for rank in (exchange.rank, exchange.rank + 1))
        return _slice(whole, first, end)

    def join(self, own: Any, factor: int = 1) -> Any:
        """Joins all workers' own rows to the whole tensor."""

        @with_gradient
        def join(own: Any) -> Any:
            whole = self.gathered(own, factor)
            return whole, lambda d: self.cut(dense(d), factor)

        has_gradient = own.dtype.is_floating or own.dtype.is_complex
        whole = join(own) if has_gradient else self.gathered(own, factor)
        whole._nanotf_rows = Rows(self, own, factor)
        return whole

    def gathered(self, own: Any, factor: int) -> Any:
        """Does `join` without a gradient, for tensors of any dtype."""
        counted = own if self.is_full else own[: factor * self.count]
        whole = self.exchange.gather_rows(counted, if_read=True)
        if not tf.executing_eagerly() and own.shape.rank is not None:
            whole.set_shape([factor * self.n if self.is_known else None, *own.shape[1:]])
        return whole

    def mean(self, value: Any) -> Any:
        """Turns a mean over the worker's rows into a mean over the batch."""
        return add(self.exchange, [value * tf.cast(self.share, value.dtype)])[0]

    def sum(self, value: Any) -> Any:
        """Turns a sum over the worker's rows into a sum over the batch."""
        # A padding row adds nothing.
        present = tf.cast(self.count > 0, value.dtype) if not self.is_full else 1
        return add(self.exchange, [value * present])[0]

    def alike(self, value: Any) -> Any:
        """Passes on a value equal on all workers; each worker takes its part of the gradient."""
        exchange = self.exchange

        @with_gradient
        def alike(value: Any) -> Any:
            share = tf.cast(self.share, value.dtype)
            return tf.identity(value), lambda d: spread(exchange, [dense(d)])[0] * share

        return alike(value)

    def _filled(self, own: Any, factor: int) -> Any:
        missing = factor * (self.length - self.count)
        zeros = tf.zeros(tf.concat([[missing], tf.shape(own)[1:]], 0), own.dtype)
        return tf.concat([own, zeros], 0)

    def _without_rest(self, own: Any, factor: int) -> Any:
        return self._filled(own[: factor * self.count], factor)


def dense(gradient: Any) -> Any:
    """Returns a gradient as a tensor; that of a `tf.gather` arrives as `tf.IndexedSlices`."""
    return tf.convert_to_tensor(gradient)


def length_of(value: Any) -> Any:
    """Returns the length of the first dimension as a scalar tensor, None for a scalar."""
    if isinstance(value, tf.RaggedTensor):
        return value.nrows()
    shape = value.dense_shape if isinstance(value, tf.SparseTensor) else tf.shape(value)
    return shape[0] if value.shape.rank != 0 else None


def _slice(value: Any, first: Any, end: Any) -> Any:
    if not isinstance(value, tf.SparseTensor):
        return value[first:end]
    shape = value.dense_shape
    begin, size = (
        tf.tensor_scatter_nd_update(of, [[0]], [tf.cast(row, tf.int64)])
        for of, row in ((tf.zeros_like(shape), first), (shape, end - first))
    )
    return tf.sparse.slice(value, begin, size)


def add(exchange: Exchange, parts: Sequence[Any], of_whole: bool = False) -> list[Any]:
    """Sums tensors over workers; for sparse gradients, joins the rows of all.

    Args:
        parts: tensors and `tf.IndexedSlices`.
        of_whole: whether the indices of the sparse gradients are equal on all workers.
    """
    parts = list(parts)
    sparse = [i for i, part in enumerate(parts) if isinstance(part, tf.IndexedSlices)]
    dense = [i for i in range(len(parts)) if i not in sparse]
    for i in sparse:
        parts[i] = _add_slices(exchange, parts[i], of_whole)

    @with_gradient
    def add(*own: Any) -> Any:
        return exchange.sum_dense(own), lambda *d: spread(exchange, d)

    for i, total in zip(dense, add(*[parts[i] for i in dense]) if dense else (), strict=True):
        total._nanotf_part = parts[i]
        parts[i] = total
    return parts


def part_of(total: Any) -> Any:
    """Returns this worker's part of a sum over workers, None if the tensor is no such sum."""
    return getattr(total, "_nanotf_part", None)


def _add_slices(exchange: Exchange, part: Any, of_whole: bool) -> Any:
    """Sums sparse gradients over workers.

    One process looks up the rows of the whole batch, so their values follow each other. It looks up
    whole indices, such as the positions of a sequence, once; then each worker has a part of the sum.
    """
    if of_whole:
        values = exchange.sum_dense([part.values])[0]
        return tf.IndexedSlices(values, part.indices, part.dense_shape)
    total = joined_slices(exchange, part)
    total._nanotf_part = part
    return total


def joined_slices(exchange: Exchange, part: Any) -> Any:
    """Concatenates the rows of all workers' sparse gradients."""
    values, indices = (exchange.gather_rows(v, if_read=True) for v in (part.values, part.indices))
    return tf.IndexedSlices(values, indices, part.dense_shape)


def spread(exchange: Exchange, whole: Sequence[Any], of_whole: bool = False) -> list[Any]:
    """Makes whole tensors usable on own rows; one exchange sums their gradients; see `add`.

    A tensor without a gradient keeps none. TensorFlow fills missing gradients with zeros, so each
    result records if a gradient was requested.
    """
    asked: set[int] = set()

    @with_gradient
    def spread(*whole: Any) -> Any:
        def gradient(*d: Any) -> Any:
            # Sorted: all workers must sum them in one order.
            places = sorted(asked) or range(len(d))
            found: list[Any] = [None] * len(d)
            totals = add(exchange, [d[i] for i in places], of_whole)
            for place, total in zip(places, totals, strict=True):
                found[place] = total
            asked.clear()  # a persistent tape may ask again, for others
            return found

        return [tf.identity(tensor) for tensor in whole], gradient

    out = spread(*[tf.convert_to_tensor(tensor) for tensor in whole])
    out = out if isinstance(out, (list, tuple)) else [out]
    return [_noting(tensor, place, asked) for place, tensor in enumerate(out)]


def _noting(tensor: Any, place: int, asked: set[int]) -> Any:
    @with_gradient
    def noting(tensor: Any) -> Any:
        def gradient(d: Any) -> Any:
            asked.add(place)
            return d

        return tf.identity(tensor), gradient

    return noting(tensor)
