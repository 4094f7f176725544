"""The distribution strategy of a worker.

Every worker runs the same Keras code under a `tf.distribute.MultiWorkerMirroredStrategy`. Keras
and TensorFlow do the training. Two things differ from the stock strategy:

- With transport "shm" it starts no server and opens no socket. It starts in the stock strategy's
  local mode, then gets its rank and the number of workers, and moves the bytes of every
  collective through shared memory (`collectives`).
- A dataset that already yields this worker's share is iterated unchanged, not wrapped, sharded and
  rebuilt at every epoch.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from nanotf.collectives import engine, launcher
from nanotf.collectives.tally import Tally
from nanotf.compat import distribute, eager_context
from nanotf.region import scope
from nanotf.wire import ports


class _Extended(distribute.Extended):  # type: ignore[misc]
    """The stock implementation, with its own ways to make variables equal on all ranks."""

    values_are_known = False
    group: Any = None
    tally: Any = None

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: Any, primary_var: Any, **kwargs: Any
    ) -> Callable[[], Any]:
        def stock(initial_value: Any, dtype: Any) -> Callable[[], Any]:
            given = {**kwargs, "initial_value": initial_value, "dtype": dtype}
            found: Callable[[], Any] = super(_Extended, self)._get_variable_creator_initial_value(
                replica_id, device, primary_var, **given
            )
            return found

        if replica_id != 0:
            return stock(kwargs["initial_value"], kwargs.get("dtype"))

        def initial_value() -> Any:
            value = kwargs["initial_value"]
            value = value() if callable(value) else value
            if self.values_are_known:
                return value
            value = distribute.initial_tensor(value, kwargs.get("dtype"))
            if self.group is not None:
                return self.group.broadcast(value, launcher.INITIAL_VALUE_KEY)
            if self.tally is not None:
                self.tally.begin_initial_value(value)
            # TensorFlow's collectives cannot broadcast bfloat16.
            wide = tf.float32 if value.dtype == tf.bfloat16 else value.dtype
            return tf.cast(stock(tf.cast(value, wide), wide)(), value.dtype)

        return initial_value


@contextlib.contextmanager
def _telling_of_taken_port(port: int | None) -> Iterator[None]:
    """Raises `PortTaken` if TensorFlow's server does not start because its port is taken.

    Only the text of TensorFlow's error names the cause.
    """
    try:
        yield
    except tf.errors.OpError as error:
        if port is None or ports.is_free(port):  # the error has another cause
            raise
        raise ports.PortTaken(f"TCP port {port} was taken meanwhile: {error}") from error


def _check_not_compiled() -> None:
    if scope.compiled:
        raise scope.NotCompiled


class WorkerStrategy(tf.distribute.MultiWorkerMirroredStrategy):  # type: ignore[misc]
    """A `tf.distribute.MultiWorkerMirroredStrategy` for one worker of a pool.

    Args:
        size: number of workers.
        cluster: `host:port` by rank, for transport "grpc". This rank's port must
            be free; TensorFlow's server binds it on all interfaces.
        group: `collectives.Group` attached to this rank, for transport "shm".

    Pass exactly one of `cluster` and `group`.

    Raises:
        PortTaken: Another process has taken this rank's port.

    Attributes:
        tally: the `Tally` of TensorFlow's own collectives; None with transport "shm".
    """

    tally: Tally | None = None
    _gather: Any = None

    def __init__(
        self, rank: int, size: int, cluster: tuple[str, ...] = (), group: Any = None
    ) -> None:
        if cluster:
            os.environ["TF_CONFIG"] = json.dumps(
                {"cluster": {"worker": list(cluster)}, "task": {"type": "worker", "index": rank}}
            )
            # It reads the environment, and takes no cluster as an argument.
            resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        else:
            resolver = distribute.empty_cluster()
        with _telling_of_taken_port(int(cluster[rank].rpartition(":")[2]) if cluster else None):
            extended = _Extended(
                self,
                cluster_resolver=resolver,
                communication_options=tf.distribute.experimental.CommunicationOptions(),
            )
        if group is not None:
            extended.group = group
            distribute.set_rank(extended, rank, size)
            self._keys = keys = launcher.Keys()
            self._places = itertools.count(1)  # 0 names no memory, see `place_for`
            distribute.use_launcher(
                extended, size, lambda device: launcher.ShmLauncher(group, keys, device)
            )
        else:
            distribute.move_in_float32(extended, size)
            self.tally = extended.tally = Tally()
            distribute.count_collectives(extended, self.tally)
        distribute.reduce_without_semaphores(extended)
        # The parent class's would make the stock implementation instead.
        tf.distribute.Strategy.__init__(self, extended)
        self.rank = rank
        self.size = size
        self.feeds_branches = group is not None

    def sum_dense(self, tensors: Sequence[Any]) -> list[Any]:
        """Sums tensors of one or several dtypes over workers, if read (see `gather_rows`)."""
        _check_not_compiled()
        group, found = self.extended.group, [tf.convert_to_tensor(t) for t in tensors]
        if group is None:
            return list(tf.nest.flatten(self._launcher.batch_all_reduce([found])))
        # In the tensors' order, which is that of all ranks: each dtype is a collective of its own.
        for dtype in dict.fromkeys(tensor.dtype for tensor in found):
            places = [i for i, tensor in enumerate(found) if tensor.dtype == dtype]
            summed = group.all_reduce_many(
                [found[i] for i in places], self._keys.next(), if_read=True
            )
            for place, tensor in zip(places, summed, strict=True):
                found[place] = tensor
        return found

    def gather_rows(self, rows: Any, if_read: bool = False) -> Any:
        """Gathers the rows of all workers, in the order of ranks.

        Args:
            rows: tensor of at least one dimension; the first may differ between workers.
            if_read: whether a graph gathers them only if something reads the result. Over gRPC it
                always does.
        """
        _check_not_compiled()
        if rows.dtype == tf.string:
            return self._gather_strings(rows, if_read)
        group = self.extended.group
        if group is not None:
            return group.all_gather(rows, self._keys.next(), if_read)
        if tf.executing_eagerly():  # TensorFlow gathers only in graphs
            if self._gather is None:
                # Not a graph for each length: the last batch of an epoch is often shorter.
                self._gather = tf.function(self.gather_rows, reduce_retracing=True)
            with eager_context.unrecorded():
                return self._gather(rows)
        # TensorFlow's collectives take no bool.
        wide = tf.cast(rows, tf.int32) if rows.dtype == tf.bool else rows
        return tf.cast(self._launcher.all_gather(wide, axis=0), rows.dtype)

    def _gather_strings(self, rows: Any, if_read: bool) -> Any:
        """Gathers strings as their bytes and lengths.

        Puts a byte before each, since TensorFlow cannot gather a tensor that is empty everywhere.
        """
        texts = tf.strings.join([" ", tf.reshape(rows, [-1])])
        lengths = self.gather_rows(tf.strings.length(texts), if_read)
        codes = tf.io.decode_raw(tf.strings.reduce_join(texts), tf.uint8)
        codes = tf.cast(self.gather_rows(codes, if_read), tf.int32)
        characters = tf.gather(tf.constant([bytes([code]) for code in range(256)]), codes)
        ragged = tf.RaggedTensor.from_row_lengths(characters, lengths, validate=False)
        joined = tf.strings.reduce_join(ragged, axis=-1)
        whole = tf.strings.substr(joined, tf.ones_like(lengths), lengths - 1)
        return tf.reshape(whole, tf.concat([[-1], tf.shape(rows)[1:]], axis=0))

    @property
    def _launcher(self) -> Any:
        return distribute.launcher_of(self.extended)

    # For `sharded_update`; transport "shm" only.
    def part_of(self, elements: int) -> tuple[int, int]:
        """Returns this rank's part of a vector: its first index and the index after its last."""
        return engine.part_of(self.rank, self.size, elements)

    def reduce_scatter(self, tensors: Sequence[Any]) -> Any:
        """Sums dense tensors, treated as one vector, over the ranks; returns this rank's part."""
        return self.extended.group.reduce_scatter(tensors, self._keys.next())

    def gather_parts(self, part: Any, likes: Sequence[Any], place: int) -> list[Any]:
        """Joins the parts of all ranks into tensors with the shapes of `likes`.

        Args:
            place: the result of `place_for`.
        """
        gathered: list[Any]
        gathered = self.extended.group.gather_parts(part, likes, self._keys.next(), place)
        return gathered

    def update_rows(self, table: Any, indices: Any, values: Any, place: int) -> None:
        """Replaces rows of a `tf.Variable` that is equal on all ranks; each replaces rows of its part.

        Args:
            indices: int64 vector, rows of the table.
            values: their new values; equal ones for equal indices.
            place: the result of `place_for`.
        """
        if place:
            group = self.extended.group
            table.assign(group.update_rows(table, indices, values, self._keys.next(), place))
        else:
            found = [self.gather_rows(each) for each in (values, indices)]
            table.scatter_update(tf.IndexedSlices(*found))

    def place_for(self, owner: Any) -> int:
        """Returns a number for memory that all ranks share, which is freed after `owner`.

        0 if they share none.
        """
        if not self.extended.group.shares_values:
            return 0
        place = next(self._places)
        weakref.finalize(owner, self.extended.group.drop_values, place)
        return place

    @contextlib.contextmanager
    def values_known(self) -> Iterator[None]:
        """Keeps variables created in this context from being broadcast.

        They are set later, start equal on every rank, or belong to this rank alone.
        """
        before = self.extended.values_are_known
        self.extended.values_are_known = True
        try:
            yield
        finally:
            self.extended.values_are_known = before
