"""A worker's side of a group: collectives on tensors, eagerly and in `tf.function`."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from nanotf.collectives import lazy
from nanotf.collectives.engine import (
    Engine,
    RankTimes,
    check_key,
    check_reducible,
    check_reduction,
    check_rows,
    part_of,
)
from nanotf.collectives.hosts_engine import HostsEngine
from nanotf.collectives.native_engine import NativeEngine
from nanotf.collectives.native_library import OPS_LIBRARY
from nanotf.collectives.spec import GroupSpec, HostsSpec
from nanotf.console import logger
from nanotf.errors import CollectiveError, InvalidArgumentError, InvalidArgumentTypeError
from nanotf.wire.failures import Failure

Tensor = Any  # tf.Tensor; TensorFlow ships no usable types


@functools.cache  # the warning comes once per process, not with every group
def load_ops() -> Any:
    """Loads the native ops.

    Returns:
        TensorFlow's wrappers; None, after a warning, if this TensorFlow cannot load them.
    """
    try:
        ops = tf.load_op_library(os.fspath(OPS_LIBRARY))
        if hasattr(ops, "nanotf_all_reduce"):
            return ops
        # The library has logged the function that it did not find.
        why = f"{OPS_LIBRARY.name} does not support TensorFlow {tf.__version__}'s C API"
    except (tf.errors.OpError, OSError) as error:
        text = getattr(error, "message", None) or str(error)
        why = f"TensorFlow cannot load {OPS_LIBRARY.name}: {text}"
    logger.warning("Steps call the collectives through Python, which is slower: %s.", why)
    return None


class Group:
    """One rank of a group, on tensors. Made by `Group.attach`, once per process and group.

    Attributes:
        spec: `GroupSpec`.
        rank, size: int. If the group spans hosts, these and `spec.size` count all their ranks.

    Every collective takes a `key`: int, 0 to 2**32 - 1. The n-th call with a key on one rank
    meets the n-th call with that key on the others, whatever the order in which a rank runs
    different keys. A rank may have one call per key and 16 calls in total in flight; the next
    one waits. A call blocks its thread until all ranks have arrived.

    On failure all ranks raise: `CollectiveError` eagerly, `tf.errors.OpError` with the same text
    from a `tf.function` (`failures` has the details). Calls fail when ranks call different
    collectives, when a rank exits, leaves or aborts, and when the group's deadline passes. Only
    after the first of these is the group still usable.

    In a `tf.function` collectives are stateful ops: each runs once, in the order of tracing, and is
    never optimized away. The function belongs to this group; for another group, trace it again.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._handle = engine, engine.handle
        self.spec = engine.spec
        self.rank = engine.rank
        self.size = engine.size

    @classmethod
    def attach(
        cls,
        spec: GroupSpec,
        rank: int,
        fd: int,
        hosts: HostsSpec | None = None,
        connections: Sequence[int] = (),
    ) -> Group:
        """Maps the memory of a group.

        Args:
            spec: from the parent.
            rank: this process's rank; each rank attaches once.
            fd: the descriptor sent with the specification. The caller keeps it and may close it
                afterwards.
            hosts: None if the group does not span hosts. With it, `spec` describes the group of
                this host, and `rank` counts the ranks of all hosts.
            connections: descriptors of the leader's connections, see `Peers`; empty on other ranks.

        Raises:
            CollectiveError: if the descriptor does not belong to the specification, or the rank
                is taken.
        """
        # The shared memory has regions for the ranks of this host alone.
        local = rank if hosts is None else rank - hosts.ranks(hosts.index)[0]
        engine = NativeEngine(spec, local, fd)
        return cls(engine if hosts is None else HostsEngine(engine, hosts, connections, fd))

    def all_reduce(self, tensor: Tensor, key: int, op: str = "sum") -> Tensor:
        """Reduces a tensor over all ranks, in the order of ranks, to identical bits on all.

        Args:
            tensor: float16, bfloat16 (both summed in float32 and rounded once), float32,
                float64, int32 or int64, of the same shape on all ranks.
            key: see the class.
            op: "sum", "min" or "max"; a NaN on any rank gives a NaN.

        Returns:
            Tensor of the same dtype and shape.
        """
        return self.all_reduce_many([tensor], key, op)[0]

    def all_reduce_many(
        self, tensors: Sequence[Tensor], key: int, op: str = "sum", if_read: bool = False
    ) -> list[Tensor]:
        """Does `all_reduce` for tensors of one dtype in one call, without packing them first.

        Args:
            tensors, key, op: as in `all_reduce`.
            if_read: as in `all_gather`.
        """
        key, op = check_key(key), check_reduction(op)
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        check_reducible([tensor.dtype.name for tensor in tensors])
        if self._ops is not None:
            with self._translated():
                run = self._ops.nanotf_sum if if_read else self._ops.nanotf_all_reduce
                guard = lazy.guard(if_read)
                found = run(tensors=tensors, group=self._handle, key=key, reduction=op, **guard)
                return [lazy.noted(result, if_read) for result in found]
        results = self._in_python(
            lambda *arrays: self._engine.all_reduce(arrays, key, op),
            tensors,
            [tensor.dtype for tensor in tensors],
            if_read,
        )
        return _with_shapes(results, [tensor.shape for tensor in tensors])

    def reduce_scatter(self, tensors: Sequence[Tensor], key: int) -> Tensor:
        """Sums tensors over all ranks; each rank gets its part of the sum.

        Args:
            tensors: of one dtype (see `all_reduce`) and the same shapes on all ranks, known at
                trace time. They are treated as one vector, flattened in order.
            key: see the class.

        Returns:
            One-dimensional tensor, the elements of this rank (`engine.part_of`).
        """
        key = check_key(key)
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        check_reducible([tensor.dtype.name for tensor in tensors])
        begin, end = part_of(
            self.rank, self.size, sum(tensor.shape.num_elements() for tensor in tensors)
        )
        if self._ops is not None:
            with self._translated():
                part = self._ops.nanotf_reduce_scatter(
                    tensors=tensors, group=self._handle, key=key, length=end - begin
                )
                return tf.ensure_shape(part, [end - begin])  # the op infers a vector of any length
        results = self._in_python(
            lambda *arrays: [self._engine.reduce_scatter(arrays, key)],
            tensors,
            [tensors[0].dtype],
        )
        return _with_shapes(results, [tf.TensorShape([end - begin])])[0]

    def gather_parts(
        self, part: Tensor, likes: Sequence[Tensor], key: int, place: int = 0
    ) -> list[Tensor]:
        """Reverses `reduce_scatter`: every rank gives its part and gets all parts.

        Args:
            part: one-dimensional tensor of elements; or rows, as many as if they were elements.
            likes: tensors that give the shapes; their memory may be reused.
            key: see the class.
            place: the number, equal on all ranks, of memory that they share, so that each copies
                only its part; it has room for two results, of the same `likes`. A third is
                copied while one is in use. 0: every rank gets a copy. `drop_values` frees it.
        """
        key = check_key(key)
        part = tf.convert_to_tensor(part)
        likes = [tf.convert_to_tensor(tensor) for tensor in likes]
        if self._ops is not None:
            with self._translated():
                return list(
                    self._ops.nanotf_gather_parts(
                        part=part, like=likes, group=self._handle, key=key, place=place
                    )
                )
        results = self._in_python(
            lambda array, *arrays: self._engine.gather_parts(array, arrays, key),
            [part, *likes],
            [tensor.dtype for tensor in likes],
        )
        return _with_shapes(results, [tensor.shape for tensor in likes])

    @property
    def shares_values(self) -> bool:
        """Returns True if a `place` can be memory that all ranks map."""
        return self._ops is not None and self._engine.spec.nodes == 1

    def update_rows(
        self, table: Tensor, indices: Tensor, values: Tensor, key: int, place: int = 0
    ) -> Tensor:
        """Replaces rows of a table that all ranks have: each replaces some of its part's rows.

        Only where `shares_values`.

        Args:
            table: tensor of at least one dimension, equal on all ranks.
            indices: int64 vector, rows of the table in this rank's part (`engine.part_of`), as many
                as it likes.
            values: their new values, one for each index; equal ones for equal indices.
            key: see the class.
            place: as in `gather_parts`. Of its part of the table, a rank then copies only the rows
                that have changed since the memory was written. 0: every rank gets a copy.
        """
        assert self._ops is not None, "`shares_values` tells"
        with self._translated():
            return self._ops.nanotf_update_rows(
                table=table,
                indices=indices,
                values=values,
                group=self._handle,
                key=check_key(key),
                place=place,
            )

    def drop_values(self, place: int) -> None:
        """Frees the memory of a `place` of `gather_parts` and `update_rows` once it is unused."""
        self._engine.drop_values(place)

    def all_gather(self, tensor: Tensor, key: int, if_read: bool = False) -> Tensor:
        """Concatenates the ranks' tensors along axis 0, in the order of ranks.

        Args:
            tensor: number or bool, shape `(rows, d1, ...)`; `rows` may differ between ranks.
            key: see the class.
            if_read: whether a `tf.function` omits the op if nothing reads the result. Then all
                ranks' functions must read it, or none. See `lazy`.

        Returns:
            Tensor of shape `(all rows, d1, ...)`; at trace time `(None, d1, ...)`.
        """
        key = check_key(key)
        tensor = _movable(tf.convert_to_tensor(tensor), "all_gather")
        if tensor.shape.rank is not None:  # otherwise the op rejects a scalar when it runs
            check_rows(tensor.shape.rank)
        if self._ops is not None:
            with self._translated():
                op = self._ops.nanotf_join if if_read else self._ops.nanotf_all_gather
                found = op(tensor=tensor, group=self._handle, key=key, **lazy.guard(if_read))
                return lazy.noted(found, if_read)
        results = self._in_python(
            lambda array: [self._engine.all_gather(array, key)],
            [tensor],
            [tensor.dtype],
            if_read,
        )
        known = tensor.shape.rank is not None
        shape = tf.TensorShape([None, *tensor.shape[1:]]) if known else tensor.shape
        return _with_shapes(results, [shape])[0]

    def broadcast(self, tensor: Tensor, key: int, root: int = 0) -> Tensor:
        """Gives every rank the root's tensor.

        Args:
            tensor: number or bool; on ranks other than the root it gives dtype and shape.
            key: see the class.
            root: the rank whose value all ranks get.
        """
        key = check_key(key)
        if not 0 <= root < self.size:
            raise InvalidArgumentError(
                f"root must be a rank, 0 to {self.size - 1}. Received: root={root}."
            )
        tensor = _movable(tf.convert_to_tensor(tensor), "broadcast")
        if self._ops is not None:
            with self._translated():
                return self._ops.nanotf_broadcast(
                    tensor=tensor, group=self._handle, key=key, root=root
                )
        results = self._in_python(
            lambda array: [self._engine.broadcast(array, key, root)], [tensor], [tensor.dtype]
        )
        return _with_shapes(results, [tensor.shape])[0]

    def barrier(self, key: int) -> Any:
        """Waits until every rank has arrived. In a `tf.function` returns the op."""
        key = check_key(key)
        if tf.executing_eagerly():
            return self._engine.barrier(key)  # moves no tensor, so it needs no op
        if self._ops is not None:
            return self._ops.nanotf_barrier(group=self._handle, key=key)

        def run() -> list[Any]:
            self._engine.barrier(key)
            return []

        return self._in_python(run, [], [])

    def join(self, key: int) -> int:
        """Waits until all ranks have joined; until then gives the others' collectives no data.

        A sum gets zeros from this rank, a minimum or maximum nothing, a gather no rows. A broadcast
        is refused. Only outside a `tf.function`.

        Args:
            key: of joining alone.

        Returns:
            The rank that has joined last.
        """
        if not tf.executing_eagerly():
            raise InvalidArgumentError(
                "join waits once, and in no tf.function. Received: a call in the function "
                f"{tf.compat.v1.get_default_graph().name}. Call it after the steps."
            )
        return self._engine.join(check_key(key))

    def times(self, steps_begin: bool = False) -> RankTimes:
        """Returns this rank's times since it attached. Takes about 1 us.

        Args:
            steps_begin: whether an execution of steps begins now, for `stamp`.
        """
        return self._engine.times(steps_begin)

    def calls(self) -> int:
        """Returns the number of collectives this rank has completed; any thread may call it."""
        return self._engine.calls()

    @property
    def stamps(self) -> bool:
        """True if `stamp` can measure how long steps wait for their data."""
        return self._ops is not None

    def stamp(self, tensor: Tensor) -> Any:
        """Marks the moment when a step's data have arrived.

        Args:
            tensor: number or bool, one of the data.

        Returns:
            In a `tf.function` the op; the rest of the step should depend on it.
        """
        # The key is unused: the kernel only reads the clock.
        return self._ops.nanotf_stamp(tensor=tensor, group=self._handle, key=0)

    def failures(self) -> tuple[int, Failure | None]:
        """Returns the number of this rank's failed collectives and the last failure.

        TensorFlow carries only the text of a failure out of a `tf.function`.
        """
        return self._engine.failures()

    def abort(self, text: str) -> None:
        """Makes every rank's present and future collectives of this group raise `text`."""
        self._engine.abort(text)

    def close(self) -> None:
        """Leaves the group. Ranks that wait for this one raise. May be called twice."""
        self._engine.close()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Turns the error of an eager op into `CollectiveError` if its collective failed."""
        before, _ = self.failures()
        try:
            yield
        except tf.errors.OpError:
            count, failure = self.failures()
            if failure is None or count == before:
                raise  # TensorFlow's own error: no collective has failed
            raise CollectiveError(failure.message) from None

    @functools.cached_property
    def _ops(self) -> Any:
        """TensorFlow's wrappers of the native ops; None if steps call the engine's methods.

        Loaded by a collective and not earlier: the user sees a worker's warnings during calls.
        """
        # None with several hosts: only Python code exchanges with the other hosts.
        return None if self._handle is None else load_ops()

    def _in_python(
        self,
        function: Callable[..., Any],
        tensors: Sequence[Tensor],
        dtypes: Sequence[Any],
        if_read: bool = False,
    ) -> Any:
        if tf.executing_eagerly():
            results = function(*[tensor.numpy() for tensor in tensors])
            return [
                tf.constant(result, dtype) for result, dtype in zip(results, dtypes, strict=True)
            ]
        count = len(tensors)  # the `moment` of `guard` may follow them
        results = tf.numpy_function(
            lambda *arrays: function(*arrays[:count]),
            [*tensors, *lazy.guard(if_read).values()],
            dtypes,
            stateful=not if_read,  # see `lazy`
        )
        return [lazy.noted(result, if_read) for result in results] if dtypes else results


def _movable(tensor: Tensor, what: str) -> Tensor:
    dtype = tensor.dtype
    # The memory of a string tensor holds pointers of its own process.
    if not (dtype.is_floating or dtype.is_integer or dtype.is_bool or dtype.is_complex):
        raise InvalidArgumentTypeError(
            f"{what} needs a tensor of numbers or bools. Received: dtype={dtype.name}. "
            "Encode it as numbers first."
        )
    return tensor


def _with_shapes(tensors: Sequence[Tensor], shapes: Sequence[Any]) -> list[Tensor]:
    """Sets the shapes that `tf.numpy_function` loses."""
    if not tf.executing_eagerly():
        for tensor, shape in zip(tensors, shapes, strict=True):
            tensor.set_shape(shape)
    return list(tensors)
