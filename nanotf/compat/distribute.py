"""TensorFlow's private names for distribution (identical in 2.14 to 2.21).

`MultiWorkerMirroredStrategy` has no public way to set its rank without starting a gRPC server,
and none to replace the code that moves the bytes. The names used are:

| name | why |
| --- | --- |
| `collective_all_reduce_strategy.CollectiveAllReduceExtended` | base class of the strategy's implementation, overridden so that no server starts |
| its `_initialize_local`, `_num_workers`, `_id_in_cluster`, `_is_chief`, `_task_type`, `_task_id`, `_cluster_spec` | start in local mode, then set rank and size |
| its `_cross_device_ops`, `_host_cross_device_ops`, `_collective_keys`, `_communication_options`, `_worker_device` | rebuilt for the real group size |
| its `_get_variable_creator_initial_value` | variables whose values are known need no broadcast |
| `cross_device_ops.CollectiveAllReduce`, its `_launchers`, `_devices` | holds the launcher of each device |
| its `_all_reduce_per_replica_values`, `_all_reduce`, `_lock`, and `distribute_utils.regroup`, `values.Mirrored` | see `reduce_without_semaphores` |
| `cross_device_utils.CollectiveReplicaLauncher` and its `_device` | every collective passes through this class: reductions through `all_reduce`, gathers through `_all_gather` |
| `trackable.base.CheckpointInitialValue`, its `wrapped_value` | initial value of a variable that a checkpoint restores at creation |
| `OwnedIterator._iterator_resource`, `Dataset._variant_tensor` | restarts iterators |
| `distribute_lib._push_per_thread_mode`, `_pop_per_thread_mode`, `_get_default_replica_mode`, `Graph._variable_creator_stack` | see `single_process` |
| `concrete_function._FORWARD_PREFIX`, `_BACKWARD_PREFIX` | see `name_of_function` |
| `FuncGraph.is_control_flow_graph`, `outer_graph` | the function that contains a loop's body |
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import (
    collective_all_reduce_strategy,
    cross_device_ops,
    cross_device_utils,
    distribute_lib,
    distribute_utils,
    values,
)
from tensorflow.python.distribute.cluster_resolver import cluster_resolver
from tensorflow.python.eager.polymorphic_function import concrete_function
from tensorflow.python.trackable import base as trackable

Extended: Any = collective_all_reduce_strategy.CollectiveAllReduceExtended
Launcher: Any = cross_device_utils.CollectiveReplicaLauncher


def empty_cluster() -> Any:
    """Returns a cluster resolver without a cluster; the strategy then starts in local mode."""
    return cluster_resolver.SimpleClusterResolver(cluster_resolver.ClusterSpec({}))


def begin_again(iterator: Any, dataset: Any) -> None:
    """Restarts an iterator of a dataset, also in graphs that refer to it."""
    tf.raw_ops.MakeIterator(dataset=dataset._variant_tensor, iterator=iterator._iterator_resource)


@contextlib.contextmanager
def single_process() -> Iterator[None]:
    """Makes TensorFlow see only its default strategy in this context, whatever is around it.

    Keras's `clear_session` may be called in it. That replaces TensorFlow's stacks of scopes.
    """
    graph = tf.compat.v1.get_default_graph()
    scopes = list(graph._distribution_strategy_stack)
    distribute_lib._push_per_thread_mode(distribute_lib._get_default_replica_mode())
    creators, graph._variable_creator_stack = graph._variable_creator_stack, []
    try:
        yield
    finally:
        now = tf.compat.v1.get_default_graph()  # another one after `clear_session`
        now._variable_creator_stack = creators
        now._distribution_strategy_stack[:] = scopes


def in_branch() -> bool:
    """Returns True while a branch or a loop of a graph is traced."""
    graph = tf.compat.v1.get_default_graph()
    return not tf.executing_eagerly() and bool(getattr(graph, "is_control_flow_graph", False))


def function_graph() -> Any:
    """Returns the graph of the innermost `tf.function` being traced, None when eager."""
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
    return graph


def name_of_function(graph: Any) -> str:
    """Returns a function graph's name, equal in every process that traces the same functions.

    TensorFlow makes more graphs to differentiate a function. It ends their names with a counter per
    process; this drops the counter.
    """
    name = str(graph.name)
    for prefix in (concrete_function._FORWARD_PREFIX, concrete_function._BACKWARD_PREFIX):
        if name.startswith(prefix):
            return name.rpartition("_")[0]
    return name


def initial_tensor(value: Any, dtype: Any) -> Any:
    """Returns a variable's initial value as a tensor; it may come from a checkpoint."""
    if isinstance(value, trackable.CheckpointInitialValue):
        value = value.wrapped_value
    return tf.convert_to_tensor(value, dtype=dtype)


def set_rank(extended: Any, rank: int, size: int) -> None:
    """Sets the rank and the number of workers of a strategy in local mode."""
    extended._num_workers = size
    extended._id_in_cluster = rank
    extended._is_chief = rank == 0
    extended._task_type = "worker"
    extended._task_id = rank


def use_launcher(extended: Any, size: int, make: Callable[[str], Any]) -> None:
    """Rebuilds the collectives of a strategy for `size` workers.

    Args:
        extended: the strategy's implementation, in local mode.
        size: number of workers.
        make: takes a device's name and returns a `Launcher` for it.
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


def launcher_of(extended: Any) -> Any:
    """Returns the collective launcher of a worker's only device."""
    return extended._cross_device_ops._launchers[0]


def reduce_without_semaphores(extended: Any) -> None:
    """Makes eager reductions launch their collectives from a plain thread.

    TensorFlow makes a `multiprocessing.pool.ThreadPool` for each reduction. The pool needs
    semaphores, which need a writable /dev/shm (AWS Lambda has none). A worker has only one device.

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
    mine = [value.values[0] for value in per_replica]  # of the only device
    # A thread, like TensorFlow's: the caller's gradient tape and device do not apply in it.
    with operations._lock, concurrent.futures.ThreadPoolExecutor(1) as thread:
        reduced = thread.submit(operations._all_reduce, reduce_op, mine, 0, options).result()
    return [distribute_utils.regroup((value,), wrap_class=values.Mirrored) for value in reduced]


def move_in_float32(extended: Any, size: int) -> None:
    """Makes TensorFlow's own collectives move 16-bit floats as float32 where needed.

    They cannot gather bfloat16. They sum in 16 bits and round after every addition. A sum of two
    numbers is rounded once, as it should be; a sum of three or more is wrong.

    Args:
        extended: the strategy's implementation, with its own launchers.
        size: number of workers.
    """
    summed = (tf.bfloat16, tf.float16) if size > 2 else ()
    for operations in (extended._cross_device_ops, extended._host_cross_device_ops):
        for launcher in operations._launchers:
            launcher.all_reduce = _as_float32(launcher.all_reduce, summed)
            launcher._all_gather = _as_float32(launcher._all_gather, (tf.bfloat16,))


def count_collectives(extended: Any, tally: Any) -> None:
    """Makes a tally count the collectives that TensorFlow's own code begins.

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
