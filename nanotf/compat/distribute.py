"""TensorFlow's private names for distribution (seen alike in 2.14 to 2.21).

`MultiWorkerMirroredStrategy` has no public way to be told its rank without starting a
gRPC server, nor one to replace the code that moves the bytes. The names used are:

| name | why |
| --- | --- |
| `collective_all_reduce_strategy.CollectiveAllReduceExtended` | base class of the strategy's implementation; overridden so that no server starts |
| its `_initialize_local`, `_num_workers`, `_id_in_cluster`, `_is_chief`, `_task_type`, `_task_id`, `_cluster_spec` | local mode, then told rank and size |
| its `_cross_device_ops`, `_host_cross_device_ops`, `_collective_keys`, `_communication_options`, `_worker_device` | rebuilt for the real group size |
| its `_use_merge_call` | see `WorkerStrategy.without_merging` |
| its `_get_variable_creator_initial_value` | variables whose values are known need no broadcast |
| `cross_device_ops.CollectiveAllReduce`, its `_launchers`, `_devices` | holds the launcher of each device |
| its `_all_reduce_per_replica_values`, `_all_reduce`, `_lock`, and `distribute_utils.regroup`, `values.Mirrored` | see `reduce_without_semaphores` |
| `cross_device_utils.CollectiveReplicaLauncher` and its `_device` | the one class through which all collectives pass, reductions through its `all_reduce`, gathers through its `_all_gather` |
| `trackable.base.CheckpointInitialValue`, its `wrapped_value` | what a variable is made of that a checkpoint restores when it is made |
| `Dataset._inputs` | the datasets that a dataset is made of |
| `iterator_ops.OwnedIterator`, its `_next_internal`, `_iterator_resource`, `Dataset._variant_tensor` | iterators whose elements a step reads, and that begin again |
| `mirrored_run._MirroredReplicaThread.graph` | see `in_inner_graph` |
| `FuncGraph.is_control_flow_graph`, `outer_graph` | the function that a loop's body belongs to |
| `values.DistributedVariable`, its `handle`, Keras 2's `losses.Loss._get_reduction` | see `read_as_numbers`, `explain_place` |
| `values.SyncOnReadVariable` | see `add_outside_of_replicas` |
| `tf.train.Checkpoint._maybe_create_save_counter` | see `count_saves_alone` |
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.data.ops import iterator_ops
from tensorflow.python.distribute import (
    collective_all_reduce_strategy,
    cross_device_ops,
    cross_device_utils,
    distribute_utils,
    values,
)
from tensorflow.python.distribute.cluster_resolver import cluster_resolver
from tensorflow.python.trackable import base as trackable

from nanotf.errors import InvalidArgumentError

Extended: Any = collective_all_reduce_strategy.CollectiveAllReduceExtended
Launcher: Any = cross_device_utils.CollectiveReplicaLauncher


def empty_cluster() -> Any:
    """A cluster resolver without a cluster: the strategy starts in its local mode."""
    return cluster_resolver.SimpleClusterResolver(cluster_resolver.ClusterSpec({}))


def inputs_of(dataset: Any) -> list[Any]:
    """The datasets that a dataset reads directly."""
    return list(dataset._inputs()) if isinstance(dataset, tf.data.Dataset) else []


def read_through(hook: Callable[[], Callable[[Any], Any] | None]) -> None:
    """Makes iterators of datasets pass their elements through a function.

    Args:
        hook: callable that returns the function, or None for none; asked at every element.
    """
    stock = iterator_ops.OwnedIterator._next_internal

    def _next_internal(self: Any) -> Any:
        element, read = stock(self), hook()
        return element if read is None else read(element)

    iterator_ops.OwnedIterator._next_internal = _next_internal


def begin_again(iterator: Any, dataset: Any) -> None:
    """Makes an iterator of a dataset begin again, in graphs that refer to it as well."""
    tf.raw_ops.MakeIterator(dataset=dataset._variant_tensor, iterator=iterator._iterator_resource)


def function_graph() -> Any:
    """The graph of the innermost `tf.function` that is being traced; None when eager."""
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
    return graph


def in_inner_graph() -> bool:
    """Whether a branch, a graph's loop or a function inside of a replica's code is being traced."""
    graph = getattr(threading.current_thread(), "graph", None)  # the replica's
    return graph is not None and graph is not tf.compat.v1.get_default_graph()


def initial_tensor(value: Any, dtype: Any) -> Any:
    """The tensor of a variable's initial value, which may come from a checkpoint."""
    if isinstance(value, trackable.CheckpointInitialValue):
        value = value.wrapped_value
    return tf.convert_to_tensor(value, dtype=dtype)


def read_as_numbers() -> None:
    """Lets `float(variable)` and its like read a distributed variable, as they do a plain one."""
    cls: Any = values.DistributedVariable
    cls.__float__ = lambda self: float(self.numpy())
    cls.__int__ = lambda self: int(self.numpy())
    cls.__complex__ = lambda self: complex(self.numpy())
    cls.__array__ = lambda self, dtype=None, copy=None: np.asarray(self.numpy(), dtype)


def explain_place(in_loop: Callable[[], bool]) -> None:
    """Makes what works in a step alone say, in a `@nano` function, where it has to stand.

    Args:
        in_loop: callable, whether such a function runs.
    """

    def explaining(stock: Any) -> Any:
        @functools.wraps(stock)
        def explained(self: Any) -> Any:
            try:
                return stock(self)
            except ValueError as error:  # it has no other
                if not in_loop():
                    raise
                raise InvalidArgumentError(
                    "Inside of a @nano function gradients are computed and applied in steps that "
                    "the workers share. Received: code outside of one, of which TensorFlow says: "
                    f"{error} Put @nano_multiprocessing on the function that it stands in, or "
                    "call that with get_strategy().run()."
                ) from error

        return explained

    variable: Any = values.DistributedVariable
    variable.handle = property(explaining(variable.handle.fget))
    loss: Any = tf.keras.losses.Loss
    if hasattr(loss, "_get_reduction"):
        loss._get_reduction = explaining(loss._get_reduction)


def add_outside_of_replicas(rank: int) -> None:
    """Lets sums over workers, those of Keras 2's metrics, be added to outside of replicas.

    All workers add the same there, which counts once: the first one's.
    """
    cls: Any = values.SyncOnReadVariable

    def once(stock: Any, name: str) -> Any:
        @functools.wraps(stock)
        def add(self: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            outside = tf.distribute.in_cross_replica_context()
            if not outside or self.aggregation != tf.VariableAggregation.SUM:
                return stock(self, value, *args, **kwargs)
            local = tf.distribute.get_strategy().experimental_local_results(self)[0]
            part = value if rank == 0 else tf.zeros_like(value)
            return getattr(local, name)(part, *args, **kwargs)

        return add

    for name in ("assign_add", "assign_sub"):
        setattr(cls, name, once(getattr(cls, name), name))


def count_saves_alone(known_values: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
    """Lets one rank alone save a `tf.train.Checkpoint`, whose counter is made by the first save.

    Args:
        known_values: see `WorkerStrategy.values_known`; it begins at 0 on every rank.
    """
    cls: Any = tf.train.Checkpoint
    stock = cls._maybe_create_save_counter

    @functools.wraps(stock)
    def create(self: Any) -> None:
        with known_values():
            stock(self)

    cls._maybe_create_save_counter = create


def set_rank(extended: Any, rank: int, size: int) -> None:
    """Tells a strategy in local mode its place among `size` workers."""
    extended._num_workers = size
    extended._id_in_cluster = rank
    extended._is_chief = rank == 0
    extended._task_type = "worker"
    extended._task_id = rank


def use_launcher(extended: Any, size: int, make: Callable[[str], Any]) -> None:
    """Rebuilds the collectives of a strategy for `size` workers.

    Args:
        extended: the strategy's implementation, in local mode.
        size: int, number of workers.
        make: callable of a device's name that returns a `Launcher` for it.
    """
    for name, devices in (
        ("_cross_device_ops", extended.worker_devices),
        ("_host_cross_device_ops", [extended._worker_device]),
    ):
        operations = cross_device_ops.CollectiveAllReduce(
            devices=devices,
            group_size=len(devices) * size,
            options=extended._communication_options,
            collective_keys=extended._collective_keys,
        )
        operations._launchers = [make(launcher._device) for launcher in operations._launchers]
        setattr(extended, name, operations)


def reduce_without_semaphores(extended: Any) -> None:
    """Makes eager reductions launch their collectives from a plain thread.

    TensorFlow makes a `multiprocessing.pool.ThreadPool` for each of them, which needs semaphores,
    and those a /dev/shm that can be written (AWS Lambda has none). A worker has one device.

    Args:
        extended: the strategy's implementation, with its launchers.
    """
    for operations in (extended._cross_device_ops, extended._host_cross_device_ops):
        stock = operations._all_reduce_per_replica_values
        operations._all_reduce_per_replica_values = functools.partial(
            _reduce_in_thread, operations, stock
        )


def _reduce_in_thread(
    operations: Any, stock: Any, reduce_op: Any, per_replica: Any, options: Any
) -> Any:
    if not tf.executing_eagerly():
        return stock(reduce_op, per_replica, options)
    mine = [value.values[0] for value in per_replica]
    # A thread, as TensorFlow's: the caller's gradient tape and device do not reach into it.
    with operations._lock, concurrent.futures.ThreadPoolExecutor(1) as thread:
        reduced = thread.submit(operations._all_reduce, reduce_op, mine, 0, options).result()
    return [distribute_utils.regroup((value,), wrap_class=values.Mirrored) for value in reduced]


def move_in_float32(extended: Any, size: int) -> None:
    """Makes TensorFlow's own collectives move 16-bit floats as float32 where they must.

    They gather no bfloat16. They sum in 16 bits, and so round after every addition: of more than
    two numbers the sum is wrong then; that of two is rounded once.

    Args:
        extended: the strategy's implementation, with its own launchers.
        size: int, number of workers.
    """
    summed = (tf.bfloat16, tf.float16) if size > 2 else ()
    for operations in (extended._cross_device_ops, extended._host_cross_device_ops):
        for launcher in operations._launchers:
            launcher.all_reduce = _as_float32(launcher.all_reduce, summed)
            launcher._all_gather = _as_float32(launcher._all_gather, (tf.bfloat16,))


def count_collectives(extended: Any, tally: Any) -> None:
    """Makes TensorFlow's own collectives count what they begin.

    Args:
        extended: the strategy's implementation, with its own launchers.
        tally: `collectives.tally.Tally`.
    """
    for operations in (extended._cross_device_ops, extended._host_cross_device_ops):
        for launcher in operations._launchers:
            for name, method in (("all_reduce", "all_reduce"), ("all_gather", "_all_gather")):
                setattr(launcher, method, _counted(getattr(launcher, method), name, tally))


def _counted(stock: Callable[..., Any], name: str, tally: Any) -> Callable[..., Any]:
    def counted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        tensor = tally.begin(name, tf.convert_to_tensor(tensor))
        return tally.end(stock(tensor, *args, **kwargs))

    return counted


def _as_float32(stock: Callable[..., Any], dtypes: Sequence[Any]) -> Callable[..., Any]:
    def moved(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        tensor = tf.convert_to_tensor(tensor)
        if tensor.dtype not in dtypes:
            return stock(tensor, *args, **kwargs)
        return tf.cast(stock(tf.cast(tensor, tf.float32), *args, **kwargs), tensor.dtype)

    return moved
