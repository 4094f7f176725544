"""Graphs, functions, variables and datasets of TensorFlow are read and changed as nanotf needs."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from nanotf.compat import (
    dataset_graphs,
    distribute,
    eager_context,
    functions,
    graphs,
    values,
    variable_handles,
)
from nanotf.errors import ModelError
from nanotf.wire.blocks import Block

pytestmark = pytest.mark.both_generations


def test_graph_of_the_function_behind_a_loop() -> None:
    graphs: list[Any] = []

    @tf.function
    def function(n: Any) -> Any:
        graphs.append(tf.compat.v1.get_default_graph())

        def body(i: Any) -> Any:
            graphs.append(distribute.function_graph())
            return i + 1

        return tf.while_loop(lambda i: i < n, body, [tf.constant(0)])

    function(tf.constant(3))
    assert graphs[1:]
    assert all(graph is graphs[0] for graph in graphs)
    assert distribute.function_graph() is None


def test_variables_share_the_memory_of_arrays_that_nobody_writes_to() -> None:
    block = Block(4 * 4096)
    block.array(0, (4096,), np.float32)[...] = 1.0
    fixed = block.array(0, (4096,), np.float32)
    fixed.flags.writeable = False
    variable = tf.Variable(tf.zeros([4096]))
    values.share(variable, fixed)
    before = values.array_of(variable)
    assert before.__array_interface__["data"][0] == fixed.__array_interface__["data"][0]
    variable.assign_add(tf.ones([4096]))
    assert set(variable.numpy()) == {2.0}
    assert set(fixed) == set(before) == {1.0}
    values.share(variable, copied := np.full(4096, 3.0, np.float32))
    copied[...] = 4.0
    assert set(variable.numpy()) == {3.0}


def test_seeds_of_operations() -> None:
    tf.random.set_seed(3)
    before = eager_context.seeds()
    assert before is not None
    assert before[0] == 3
    drawn = float(tf.random.uniform([]))
    assert eager_context.seeds() != before
    eager_context.restore_seeds(before)
    assert float(tf.random.uniform([])) == drawn


def test_pipelines_as_graphs() -> None:
    dataset = tf.data.Dataset.range(5).map(lambda n: n * 2).batch(2)
    again = dataset_graphs.from_graph(dataset_graphs.to_graph(dataset), dataset.element_spec)
    assert [b.tolist() for b in again.as_numpy_iterator()] == [[0, 2], [4, 6], [8]]
    random = tf.data.Dataset.range(3).map(lambda n: tf.random.uniform([], seed=4))
    with pytest.raises(tf.errors.OpError):
        dataset_graphs.to_graph(random)
    assert dataset_graphs.batch_size(tf.data.Dataset.range(5).batch(2)) == 2


@pytest.mark.parametrize("graph", [True, False])
def test_a_variable_with_its_own_handle(graph: bool) -> None:
    """A variable's copy of its handle names the same memory, but has a separate gradient."""
    variable = tf.Variable([1.0, 2.0])

    def compute() -> Any:
        before = variable_handles.handle_of(variable)
        with tf.GradientTape() as tape:
            variable_handles.note_use([variable])
            copy = tf.identity_n([before])[0]
            variable_handles.name_same(copy, before)
            variable_handles.set_handle(variable, copy)
            try:
                with variable_handles.VariableReads() as used:
                    loss = tf.reduce_sum(variable * tf.gather(variable, [0, 1]))
                assert [v is variable for v in used.variables] == [True]
                variable.assign_add([1.0, 1.0])
                after = tf.reduce_sum(variable)
            finally:
                variable_handles.set_handle(variable, before)
        return loss, after, tf.convert_to_tensor(tape.gradient(loss, variable))

    loss, after, gradient = (tf.function(compute) if graph else compute)()
    assert (float(loss), float(after)) == (5.0, 5.0)
    assert gradient.numpy().tolist() == [2.0, 4.0]
    assert variable_handles.handle_of(variable) is not None


def test_a_graph_for_xla() -> None:
    found = []

    def note() -> tf.Tensor:
        found.append(functions.is_for_xla(tf.compat.v1.get_default_graph()))
        return tf.constant(1)

    for compiles in (False, True):
        tf.function(tf.function(note), jit_compile=compiles).get_concrete_function()
    assert found == [False, True]


def test_options_of_functions() -> None:
    assert functions.options_of(tf.function(abs)) == {}
    given = {"input_signature": (tf.TensorSpec([None], tf.float32),), "autograph": False}
    found = functions.options_of(tf.function(tf.abs, reduce_retracing=True, **given))
    assert found["autograph"] is False
    assert found["reduce_retracing"] is True
    assert tf.nest.flatten(found["input_signature"])[0].shape.rank == 1


def test_work_of_operations() -> None:
    @tf.function
    def product(a: Any, b: Any) -> Any:
        return tf.matmul(a, b)

    known, rows = tf.TensorSpec([4, 8]), tf.TensorSpec([None, 4])
    found = graphs.float_operations(
        product.get_concrete_function(known, tf.TensorSpec([8, 4])).graph
    )
    assert found["MatMul"] == 2 * 4 * 8 * 4
    found = graphs.float_operations(product.get_concrete_function(rows, known).graph)
    assert "MatMul" not in found


def test_graphs_that_are_cut() -> None:
    variable = values.uninitialized([2], tf.float32, {"trainable": True})
    initialized = tf.raw_ops.VarIsInitializedOp
    assert isinstance(variable, tf.Variable) and not initialized(resource=variable.handle)
    for value in ([1.0, 2.0], [3.0, 4.0]):
        graphs.refill(variable, tf.constant(value))
        assert variable.numpy().tolist() == value
        graphs.release(variable, "it is elsewhere")
        with pytest.raises(ModelError, match="it is elsewhere"):
            variable.numpy()
        assert tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=tf.float32).shape == [0]
    graphs.refill(variable, tf.zeros(2))
    effects = graphs.SideEffects()

    def traced(x: Any) -> Any:
        with effects.ordered():
            variable.assign_add(x)
            return variable * 2.0

    graph = tf.compat.v1.wrap_function(traced, [tf.TensorSpec([2], tf.float32)]).graph
    (assign,) = [op for op in effects.operations if op.type == "AssignAddVariableOp"]
    (read,) = [op for op in graph.get_operations() if assign in op.control_inputs]
    graphs.keep_control_inputs(read, [])
    assert list(read.control_inputs) == []


def test_conversion_by_autograph() -> None:
    def branch(x: Any) -> Any:
        if x > 0:
            return x
        return -x

    with tf.Graph().as_default():
        found = graphs.converted(branch)(tf.compat.v1.placeholder(tf.float32, []))
    assert tf.is_tensor(found)


def test_names_that_older_versions_have() -> None:
    outside = tf.constant(2.0)
    assert eager_context.has_begun()
    with eager_context.earlier_inputs() as used:
        inside = tf.constant(3.0)
        outside * inside
    assert list(used) == [eager_context.key_of(outside)]
    with tf.GradientTape() as tape:
        assert not eager_context.may_have_gradient(outside)
        tape.watch(outside)
        assert eager_context.may_have_gradient(outside)
        with eager_context.unrecorded():
            result = outside * 2.0
    assert tape.gradient(result, outside) is None


def test_branches_are_known() -> None:
    seen = []

    @tf.function
    def compute(x: Any) -> Any:
        outer = distribute.function_graph()
        seen.append(distribute.in_branch())

        def branch() -> Any:
            seen.append(distribute.in_branch() and distribute.function_graph() is outer)
            return x

        return tf.cond(x > 0, branch, lambda: -x)

    compute(tf.constant(1.0))
    assert seen == [False, True]
    assert distribute.function_graph() is None


def _doubled_in_python(dataset: Any, function: Any) -> Any:
    return dataset.map(lambda x: function(lambda value: 2 * value, [x], tf.int64))


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d,
        lambda d: d.map(lambda x: 2 * x),
        lambda d: _doubled_in_python(d, tf.numpy_function),
        lambda d: _doubled_in_python(d, tf.py_function),
        lambda d: d.map(lambda x: x + tf.random.uniform([1], 0, 1000, tf.int64, seed=5)),
    ],
    ids=["plain", "mapped", "numpy_function", "py_function", "random"],
)
def test_copy_of_a_pipeline_draws_the_orders_of_a_new_one(change: Any) -> None:
    dataset = change(tf.data.Dataset.range(50).shuffle(50, seed=3).batch(50))
    drawn = [next(iter(dataset)).numpy().tolist() for _ in range(3)]
    dataset = dataset_graphs.copy_of(dataset)  # so that the original can be freed
    gc.collect()
    assert [next(iter(dataset)).numpy().tolist() for _ in range(3)] == drawn
    assert drawn[0] != drawn[1]


def test_description_of_a_dataset() -> None:
    """Its graph is equal each time; its copy reads the variables that it is given."""
    factor = tf.Variable([2.0])
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(tf.constant([1], tf.int64), [5.0]), 0.0
    )
    dataset = tf.data.Dataset.range(4).batch(2).map(lambda i: table.lookup(i) * factor)
    found = dataset_graphs.describe(dataset)
    assert found is not None and found.graph == dataset_graphs.describe(dataset).graph
    assert found.variables == (factor,)
    other = tf.Variable([3.0])
    copy = dataclasses.replace(found, variables=(other,)).make()
    assert [batch.tolist() for batch in copy.as_numpy_iterator()] == [[0.0, 15.0], [0.0, 0.0]]
    other.assign([1.0])
    assert next(copy.as_numpy_iterator()).tolist() == [0.0, 5.0]
    assert (
        dataset_graphs.describe(dataset.map(lambda x: tf.numpy_function(abs, [x], x.dtype))) is None
    )


def test_functions_are_sent_with_the_features_of_their_module() -> None:
    """AutoGraph finds `from __future__ import annotations` among a function's globals."""
    from nanotf.shipping.objects import pickling

    def step(x: Any) -> Any:
        return x + 1

    step.__module__ = "__main__"  # functions of `__main__` are sent by value
    copy = pickling.loads(pickling.dumps(step))
    assert copy(1) == 2
    assert copy.__globals__["annotations"].compiler_flag
