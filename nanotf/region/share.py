"""A worker's part of a global batch, and what needs all of the batch at once.

A worker holds n_r of the n rows of a global batch: its share is n_r / n. See `losses` for what
follows it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from nanotf.compat.versions import require_tensorflow


class Share:
    """The part of the global batch that this worker's rows are, while a step is traced or run.

    Outside of a step it is None, and Keras's own rules hold.

    Attributes:
        current: scalar float tensor or None.
        of_compile: bool, whether the losses of `compile` are being computed.
        in_own_step: bool, whether a step of the user's runs: of such a function, or a model's own
            `train_step`.
        known_rows: int or None, how many rows this worker has in such a step, where tracing knows.
        applying: bool, whether an optimizer is updating where gradients follow the share.
        whole_results: bool, whether results of metrics, in a step, are those of all workers.
        has_results: bool, whether a step has asked for any.
        has_all_rows: bool, whether the code that runs sees the rows of all workers.
    """

    def __init__(self) -> None:
        self.current: Any = None
        self.of_compile = False
        self.in_own_step = False
        self.known_rows: int | None = None
        self.applying = False
        self.whole_results = False
        self.has_results = False
        self.has_all_rows = False
        self._remembered: dict[int, Any] = {}
        self._graph: Any = None  # that a step's own code is traced in; None for an eager step
        self._whole: dict[int, Any] = {}
        self.read: Callable[[Any], Any] | None = None  # what a step makes of elements it reads

    @contextlib.contextmanager
    def reading(self, read: Callable[[Any], Any]) -> Iterator[None]:
        """In this context iterators hand out what `read` makes of their elements."""
        before, self.read = self.read, read
        try:
            yield
        finally:
            self.read = before

    def begin_step(self) -> None:
        """A step of the user's begins."""
        self.in_own_step = True
        self._graph = _graph_here()

    def end_step(self) -> None:
        """It has ended; lets go of its gradients."""
        self.in_own_step = False
        self.known_rows = None
        self._graph = None
        self._whole.clear()

    def in_own_graph(self) -> bool:
        """Whether the code of such a step runs, and no branch or function inside of it."""
        return self.in_own_step and self.current is not None and self._graph is _graph_here()

    @property
    def weighs_gradients(self) -> bool:
        """Whether optimizers weigh gradients by the share: where the user's code makes them."""
        return self.current is not None and self.in_own_step

    def may_be_rows(self, value: Any) -> bool:
        """Whether, to this worker, a tensor seems to have one entry for each row of the batch.

        Another worker, which has more rows or fewer, or a graph for any number, may see it
        otherwise.
        """
        first, known = value.shape[0], self.known_rows
        return first is None or (known is not None and bool(first == max(known, 1)))

    def note_whole(self, gradient: Any) -> None:
        """Takes notice of a gradient that is that of the global batch."""
        self._whole[id(gradient)] = gradient

    def is_whole(self, gradient: Any) -> bool:
        """Whether a gradient is one of those."""
        return id(gradient) in self._whole

    def set(self, share: Any) -> Any:
        """Sets the share (a scalar float tensor or None) and returns the one before."""
        before, self.current = self.current, share
        return before

    @contextlib.contextmanager
    def of_all_rows(self) -> Iterator[None]:
        """Code that runs in this context sees the rows of all workers: its share is 1."""
        tf = require_tensorflow()
        before = self.set(tf.ones([], tf.float64))
        self.has_all_rows = True
        try:
            yield
        finally:
            self.has_all_rows = False
            self.set(before)

    def remember(self, variables: Any, values: Any) -> None:
        """Takes the values from before a step whose rows may stand in for none."""
        self._remembered = {id(v): value for v, value in zip(variables, values, strict=True)}

    def counted(self, variable: Any) -> Any:
        """The value of a variable of this rank, without what rows that stand in left in it."""
        tf = require_tensorflow()
        value = variable.read_value()
        before = self._remembered.get(id(variable))
        return value if before is None else tf.where(self.current > 0, value, before)

    def of(self, value: Any) -> Any:
        """`value * share`, and 0 where the share is 0, whatever the value."""
        tf = require_tensorflow()
        wide = widened(value)
        part = tf.cast(wide * tf.cast(self.current, wide.dtype), value.dtype)
        return tf.where(self.current > 0, part, tf.zeros_like(part))

    def undone(self, value: Any) -> Any:
        """`value / share`, and 0 where the share is 0."""
        tf = require_tensorflow()
        wide = widened(value)
        return tf.cast(tf.math.divide_no_nan(wide, tf.cast(self.current, wide.dtype)), value.dtype)

    def total(self, value: Any) -> Any:
        """The sum over workers of a scalar; those with share 0 count nothing."""
        tf = require_tensorflow()
        context = tf.distribute.get_replica_context()
        if self.has_all_rows:
            return tf.stop_gradient(value)
        present = tf.where(self.current > 0, value, tf.zeros_like(value))
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.stop_gradient(present))


@dataclasses.dataclass(frozen=True)
class Worker:
    """What replacements of Keras's functions are made for, see `overrides`.

    Args:
        share: `Share`.
        strategy: `strategy.WorkerStrategy`.
    """

    share: Share
    strategy: Any


def _graph_here() -> Any:
    tf = require_tensorflow()
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def widened(value: Any) -> Any:
    """A 16-bit float as float32, anything else as it is.

    A share that is rounded to the 8 bits of bfloat16 is off by up to 0.2 %, and with it whatever
    it weighs, in every step.
    """
    tf = require_tensorflow()
    return tf.cast(value, tf.float32) if value.dtype in (tf.bfloat16, tf.float16) else value


def over_whole_batch(
    function: Callable[..., Any], share: Share, with_gradient: bool
) -> Callable[..., Any]:
    """Makes a function of rows that returns a scalar see those of all workers.

    The scalar may be anything, a ratio of sums among them, which is not to be had of the
    scalars of the parts. A function that returns a value for each row is left alone. Whether
    `tf.py_function` returns a scalar only the step itself finds out.

    Args:
        function: of targets and predictions, or of other tensors. Those with as many rows as the
            first are rows of the batch.
        share: `Share`.
        with_gradient: bool, whether the scalar is a loss.
    """
    tf = require_tensorflow()

    def call(*args: Any, **kwargs: Any) -> Any:
        values = function(*args, **kwargs)
        rank = getattr(values, "shape", tf.TensorShape([])).rank
        # One of these functions may call another, which then sees all rows already.
        if share.current is None or share.has_all_rows or rank not in (0, None):
            return values
        given = tf.nest.flatten((args, kwargs))
        rows = [_rows(leaf) for leaf in given]
        if not any(rows):
            return values
        first = next(filter(None, rows))
        whole_batch = [
            rows_of_all(tf.convert_to_tensor(leaf), share) if found == first else leaf
            for leaf, found in zip(given, rows)  # noqa: B905 - AutoGraph lacks `strict`
        ]
        whole_args, whole_kwargs = tf.nest.pack_sequence_as((args, kwargs), whole_batch)
        with share.of_all_rows():
            whole = function(*whole_args, **whole_kwargs)
        if with_gradient:
            # Every worker has the whole loss, but the gradient of its own rows only, which must
            # come out whole when it is multiplied by the share.
            gradient = whole - tf.stop_gradient(whole)
            whole = tf.stop_gradient(whole) + share.undone(gradient)
        if rank is None:
            return tf.cond(tf.equal(tf.rank(values), 0), lambda: whole, lambda: values)
        return whole

    return call


def _rows(leaf: Any) -> tuple[Any, ...]:
    """How many rows a tensor or array has, as a tuple: None where tracing does not know it.

    Empty for what has none.
    """
    tf = require_tensorflow()
    is_array = isinstance(leaf, tf.Tensor) or hasattr(leaf, "__array_interface__")
    if not is_array or getattr(leaf.shape, "rank", 0) is None:
        return ()
    return tuple(leaf.shape[:1])


def rows_of_all(value: Any, share: Share) -> Any:
    """The rows of all workers in their order; a gradient reaches the worker's own alone."""
    tf = require_tensorflow()
    context = tf.distribute.get_replica_context()
    own = tf.cond(share.current > 0, lambda: value, lambda: value[:0])
    if own.dtype == tf.string:
        whole = _strings_of_all(own, context)
        whole.set_shape([None, *value.shape[1:]])
        return whole
    sent = tf.stop_gradient(tf.cast(own, tf.int32) if own.dtype == tf.bool else own)
    rows = tf.cast(context.all_gather(sent, axis=0), own.dtype)
    counts = context.all_gather(tf.shape(own)[:1], axis=0)
    rank = context.replica_id_in_sync_group
    first = tf.reduce_sum(counts[:rank])
    whole = tf.concat([rows[:first], own, rows[first + counts[rank] :]], axis=0)
    whole.set_shape([None, *value.shape[1:]])
    return whole


def _strings_of_all(own: Any, context: Any) -> Any:
    """The rows of all workers of a tensor of strings: they are sent as bytes, and their lengths.

    Each goes with a byte before it, since TensorFlow gathers no tensor that is empty everywhere.
    """
    tf = require_tensorflow()
    texts = tf.strings.join([" ", tf.reshape(own, [-1])])
    codes = tf.io.decode_raw(tf.strings.reduce_join(texts), tf.uint8)
    lengths = context.all_gather(tf.strings.length(texts), axis=0)
    codes = context.all_gather(tf.cast(codes, tf.int32), axis=0)
    characters = tf.gather(tf.constant([bytes([code]) for code in range(256)]), codes)
    ragged = tf.RaggedTensor.from_row_lengths(characters, lengths, validate=False)
    joined = tf.strings.reduce_join(ragged, axis=-1)
    whole = tf.strings.substr(joined, tf.ones_like(lengths), lengths - 1)
    return tf.reshape(whole, tf.concat([[-1], tf.shape(own)[1:]], axis=0))
