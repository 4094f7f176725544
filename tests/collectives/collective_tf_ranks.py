"""Functions for the ranks of test_tensorflow.py. Few, long tests: each imports TensorFlow."""

from __future__ import annotations

import gc
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf

from nanotf.collectives import Group
from nanotf.collectives import group as group_module
from nanotf.collectives.engine import part_of
from nanotf.errors import CollectiveError, InvalidArgumentError, InvalidArgumentTypeError
from nanotf.wire.failures import Failure

REDUCIBLE = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64)


def attached(spec: Any, rank: int, fd: int, with_ops: bool) -> Group:
    """Returns a group; without ops, in a process whose TensorFlow cannot load them."""
    if not with_ops:
        group_module.OPS_LIBRARY = Path(__file__)
    group = Group.attach(spec, rank, fd)
    assert group.stamps == with_ops
    return group


def everything(spec: Any, rank: int, fd: int, with_ops: bool) -> list[str]:
    """Runs every check below; returns the texts of errors."""
    tf.config.threading.set_inter_op_parallelism_threads(4)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    group = attached(spec, rank, fd, with_ops)
    try:
        _eager(group)
        _in_function(group)
        _shared(group, with_ops)
        if group.shares_values:
            _updated(group)
        _unknown_shapes(group)
        _each_call_runs_once(group)
        _in_loop(group)
        _from_threads(group)
        _argument_errors(group)
        return _differences(group)
    finally:
        group.close()


def _eager(group: Group) -> None:
    ranks_sum = sum(range(1, group.size + 1))
    for dtype in REDUCIBLE:
        for shape in [(), (0,), (3, 5), (70_001,)]:
            ones = tf.ones(shape, dtype) * tf.cast(group.rank + 1, dtype)
            result = group.all_reduce(ones, 1)
            assert result.dtype == dtype and result.shape == ones.shape
            assert np.all(tf.cast(result, tf.float64).numpy() == ranks_sum)
            part = group.reduce_scatter([ones, ones], 5)
            back = group.gather_parts(part, [ones, ones], 6)
            assert all(np.array_equal(b.numpy(), result.numpy()) for b in back)
            assert np.all(tf.cast(ones, tf.float64).numpy() == group.rank + 1), "input changed"
    assert group.all_reduce(tf.constant(group.rank), 1, "max").numpy() == group.size - 1
    assert group.all_reduce(tf.constant(float(group.rank)), 1, "min").numpy() == 0.0
    for dtype in (*REDUCIBLE, tf.bool, tf.int8, tf.uint8, tf.uint32, tf.complex64):
        mine = tf.cast(tf.fill([group.rank + 1, 2], group.rank), dtype)
        gathered = group.all_gather(mine, 2)
        rows = np.repeat(range(group.size), range(1, group.size + 1))
        expected = tf.cast(np.stack([rows, rows], 1), dtype)
        assert np.array_equal(gathered.numpy(), expected.numpy()) and gathered.dtype == dtype
        value = group.broadcast(mine[:1], 3, group.size - 1)
        assert np.array_equal(value.numpy(), tf.fill([1, 2], expected[-1, 0]).numpy())
    empty = group.all_gather(tf.zeros([3, 0, 2]), 2)
    assert empty.shape == (3 * group.size, 0, 2)
    group.barrier(4)


def _in_function(group: Group) -> None:
    @tf.function
    def there_and_back(x: Any) -> Any:
        given = [x * 2.0, x[0]]
        part = group.reduce_scatter(given, 17)
        back = group.gather_parts(part * 3.0, given, 18)
        assert part.shape.is_fully_defined() and back[0].shape == x.shape, "static shapes"
        return back

    for repeat in range(3):
        doubled, row = there_and_back(tf.ones([2, 3]) * float(group.rank + repeat))
        total = 3 * sum(r + repeat for r in range(group.size))
        assert np.all(doubled.numpy() == 2.0 * total) and np.all(row.numpy() == total)

    @tf.function
    def step(x: Any) -> Any:
        total = group.all_reduce(x, 11)
        many = group.all_reduce_many([x * 2.0, x[0]], 12, "max")
        rows = group.all_gather(x, 13)
        group.barrier(14)
        first = group.broadcast(x, 15)
        assert total.shape == x.shape and rows.shape.as_list() == [None, 3], "static shapes"
        assert first.shape == x.shape and many[1].shape == x.shape[1:]
        return total, many, rows, first

    for repeat in range(3):
        x = tf.ones([2, 3]) * float(group.rank + repeat)
        total, many, rows, first = step(x)
        assert np.all(total.numpy() == sum(r + repeat for r in range(group.size)))
        assert np.all(many[0].numpy() == 2.0 * (group.size - 1 + repeat))
        assert np.all(many[1].numpy() == group.size - 1 + repeat)
        assert rows.shape == (2 * group.size, 3) and rows.numpy()[-1, 0] == group.size - 1 + repeat
        assert np.all(first.numpy() == repeat)


def _shared(group: Group, with_ops: bool) -> None:
    """Values in shared memory: equal ones, never written while anything holds them, freed."""
    likes = [tf.zeros([7, 5]), tf.zeros([]), tf.zeros([3, 0]), tf.zeros([70_001])]
    size = sum(like.shape.num_elements() for like in likes)
    begin, end = part_of(group.rank, group.size, size)
    variables = [tf.Variable(like) for like in likes]

    @tf.function
    def step(number: Any) -> Any:
        whole = tf.range(size, dtype=tf.float32) + number
        given = group.gather_parts(whole[begin:end], likes, 71, place=1)
        for variable, value in zip(variables, given, strict=True):
            variable.assign(value)
        return given

    held: dict[int, Any] = {}
    for number in range(8):
        found = step(tf.constant(float(number)))
        if number in (3, 4, 6) and group.rank == 0:  # so that others have sets free, and this none
            held[number] = found
        del found
        for old, tensors in {number: variables, **held}.items():
            flat = np.concatenate([tensor.numpy().reshape(-1) for tensor in tensors])
            assert np.array_equal(flat, np.arange(size, dtype=np.float32) + old)
    variables[0].assign_add(tf.ones([7, 5]))  # which TensorFlow does in memory of its own
    group.barrier(72)
    assert float(variables[0][0, 0]) == 8.0, "another rank's variable has changed"
    table = group.gather_parts(_own_rows(group, 5, 3), [tf.zeros([5, 3])], 73, place=2)[0]
    assert np.array_equal(table.numpy(), np.arange(15.0).reshape(5, 3))
    before = _memory_files()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))  # no memory for such a file
    table = group.gather_parts(_own_rows(group, 5, 3), [tf.zeros([5, 3])], 74, place=3)[0]
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert np.array_equal(table.numpy(), np.arange(15.0).reshape(5, 3))
    assert _memory_files() == before, "without memory each rank copies"
    group.drop_values(1)
    group.drop_values(2)
    held.clear()
    variables.clear()
    del table, step
    gc.collect()
    assert before - _memory_files() == (2 if with_ops else 0), "a place is one file"


def _updated(group: Group) -> None:
    """Rows that ranks replace in a table, whatever the table held before and whoever holds it."""
    count, place = 5 * group.size - 2, 4  # the last rank has fewer
    begin, end = part_of(group.rank, group.size, count)
    random = np.random.default_rng(7)  # equal on all ranks
    table = tf.Variable(random.normal(size=(count, 3)))
    expected = table.numpy()

    @tf.function(reduce_retracing=True)
    def step(indices: Any, values: Any) -> None:
        table.assign(group.update_rows(table, indices, values, 81, place))

    held = []
    for number in range(20):
        rows = random.integers(0, count, random.integers(0, 7))  # also none, and some twice
        replaced = random.normal(size=(count, 3))
        own = rows[(rows >= begin) & (rows < end)]
        step(tf.constant(own, tf.int64), tf.constant(replaced[own]))
        expected[rows] = replaced[rows]
        assert np.array_equal(table.numpy(), expected), number
        if number == 6:  # other code changes it on all ranks
            table.assign(table * 2.0)
            expected *= 2.0
        if number in (9, 10, 14) and group.rank == 0:
            held.append((table.read_value(), expected.copy()))
        if number == 12:
            held.clear()
    for tensor, value in held:
        assert np.array_equal(tensor.numpy(), value), "held values have changed"
    every = tf.range(begin, end, dtype=tf.int64)
    whole = group.update_rows(tf.zeros([count, 2]), every, _own_rows(group, count, 2), 82)
    assert np.array_equal(whole.numpy(), np.arange(2.0 * count).reshape(count, 2))
    group.drop_values(place)


def _memory_files() -> int:
    """Returns how many shared files in memory this process has mapped."""
    return Path("/proc/self/maps").read_text().count("/memfd:nanotf")


def _own_rows(group: Group, rows: int, length: int) -> Any:
    begin, end = part_of(group.rank, group.size, rows)
    return tf.reshape(tf.range(rows * length, dtype=tf.float32), [rows, length])[begin:end]


def _unknown_shapes(group: Group) -> None:
    reduce = tf.function(
        lambda x: group.all_reduce(x, 21), input_signature=[tf.TensorSpec(None, tf.int32)]
    )
    gather = tf.function(
        lambda x: group.all_gather(x, 22), input_signature=[tf.TensorSpec(None, tf.bool)]
    )
    for shape in [(), (5,), (2, 0), (3, 4)]:
        assert np.all(reduce(tf.ones(shape, tf.int32)).numpy() == group.size)
    assert gather(tf.ones([group.rank, 2], tf.bool)).shape[1] == 2


def _each_call_runs_once(group: Group) -> None:
    """Equal calls are not merged, calls on constants not pre-computed, unused calls not dropped."""
    calls = tf.Variable(0.0)

    @tf.function
    def step() -> Any:
        one = tf.constant(1.0)
        first = group.all_reduce(one, 31)
        second = group.all_reduce(one, 31)
        group.all_reduce(one, 31)  # its result is unused
        calls.assign_add(second)
        return first

    for _ in range(3):
        step()
    assert calls.numpy() == 3.0 * group.size

    @tf.function
    def unequal() -> Any:
        # One rank traces the unused call, the other uses it. If either lost a call, the numbers of
        # the calls of this key would differ, and so would the sums below.
        unused = group.all_reduce(tf.constant(1.0), 32)
        used = group.all_reduce(tf.constant(10.0), 32)
        return used if group.rank else used + 0.0 * unused

    for _ in range(3):
        assert unequal().numpy() == 10.0 * group.size


def _in_loop(group: Group) -> None:
    @tf.function
    def loop(count: Any) -> Any:
        total = tf.zeros([1000])
        for _ in tf.range(count):
            total += group.all_reduce(tf.ones([1000]), 41)
        return total

    assert np.all(loop(tf.constant(20)).numpy() == 20 * group.size)


def _from_threads(group: Group) -> None:
    """Calls two functions in two threads, begun in opposite orders on even and odd ranks."""
    functions = [tf.function(lambda x, key=key: group.all_reduce(x, key)) for key in (51, 52)]
    failures: list[BaseException] = []

    def run(function: Callable[[Any], Any]) -> None:
        try:
            for _ in range(20):
                assert np.all(function(tf.ones([30_000])).numpy() == group.size)
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=run, args=(function,))
        for function in functions[:: 1 if group.rank % 2 else -1]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def _argument_errors(group: Group) -> None:
    _raises(InvalidArgumentTypeError, lambda: group.all_reduce(tf.constant([True]), 1))
    _raises(InvalidArgumentTypeError, lambda: group.broadcast(tf.constant("text"), 1))
    _raises(InvalidArgumentError, lambda: group.all_reduce(tf.ones(3), 1, "mean"))
    _raises(InvalidArgumentError, lambda: group.all_reduce(tf.ones(3), -1))
    _raises(InvalidArgumentError, lambda: group.all_gather(tf.constant(1.0), 1))
    _raises(InvalidArgumentError, lambda: group.broadcast(tf.constant(1.0), 1, group.size))


def _raises(kind: type[Exception], function: Callable[[], Any]) -> None:
    try:
        function()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


def _failure_of(group: Group, kind: type[Exception], function: Callable[[], Any]) -> Failure:
    """Returns the failure recorded by the group after `function` raised, as it must."""
    before, _ = group.failures()
    try:
        function()
    except kind as error:
        count, failure = group.failures()
        assert count == before + 1
        assert failure is not None
        assert failure.message in str(error)
        return failure
    raise AssertionError(f"no {kind.__name__}")


def _differences(group: Group) -> list[Failure]:
    last = group.rank == group.size - 1
    found = [
        _failure_of(
            group,
            CollectiveError,
            lambda: group.all_reduce(tf.ones([2, 3 if last else 4]), 61),
        )
    ]
    many = [tf.ones([5])] * 6 + [tf.ones([2 if last else 3])]
    for function in (
        tf.function(lambda: group.all_reduce(tf.ones([2, 3 if last else 4]), 62)),
        tf.function(lambda: group.all_reduce_many(many, 63)),
    ):
        found.append(_failure_of(group, tf.errors.OpError, function))
    assert group.all_reduce(tf.ones([]), 64).numpy() == group.size, "usable afterwards"
    group.barrier(65)
    if last:
        group.abort("enough")

    def proceed() -> None:
        while True:
            group.all_reduce(tf.ones([3]), 66)

    return [*found, _failure_of(group, CollectiveError, proceed)]


def rank_that_raises(spec: Any, rank: int, fd: int) -> Failure:
    """Raises a user's exception in one rank, while the other is in a tf.function."""
    group = Group.attach(spec, rank, fd)
    function = tf.function(lambda: group.all_reduce(tf.ones([100_000]), 1))
    function()
    if rank == 1:
        raise RuntimeError("a user's error")
    return _failure_of(group, tf.errors.OpError, function)
