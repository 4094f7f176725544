"""TensorFlow's private names for sending a `tf.data` pipeline to other processes.

| name | versions seen | why |
| --- | --- | --- |
| `Dataset._variant_tensor` | 2.15-2.21 | what `tf.raw_ops.DatasetToGraphV2` and its like take |
| `data.ops.dataset_ops._VariantDataset` | 2.15-2.21 | a dataset of what `tf.raw_ops.DatasetFromGraph` and its like return |
| `data.ops.dataset_ops.UnaryUnchangedStructureDataset`, `DatasetSpec` | 2.15-2.21 | base class of a dataset that is another one's variant; what it is as an argument of a `tf.function` |
| the resource type `SeedGenerator` in such a graph | 2.15-2.21 | what a shuffle has drawn of its orders |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops

VariantDataset: Any = dataset_ops._VariantDataset
VariantOfAnother: Any = dataset_ops.UnaryUnchangedStructureDataset
DatasetSpec: Any = dataset_ops.DatasetSpec

_IGNORE_STATE, _FAIL_ON_STATE = 1, 2  # tf.data.experimental.ExternalStatePolicy


def _nodes(definition: Any) -> Iterator[Any]:
    yield from definition.node
    for function in definition.library.function:
        yield from function.node_def


def to_graph(dataset: Any) -> bytes:
    """A dataset as a serialized graph, constants included.

    Raises:
        tf.errors.OpError: It has state outside of the graph: Python functions, tables,
            variables, random numbers.
    """
    return _graph(dataset, _FAIL_ON_STATE)


def _graph(dataset: Any, policy: int, strip_devices: bool = True) -> bytes:
    graph: bytes = tf.raw_ops.DatasetToGraphV2(
        input_dataset=dataset._variant_tensor,
        external_state_policy=policy,
        strip_device_assignment=strip_devices,
    ).numpy()
    return graph


def copy_of(dataset: Any) -> Any:
    """A dataset of the same graph that was never iterated, so that its shuffles begin anew.

    It is for the same process, where the names of Python functions, tables and variables that stand
    in the graph are known. `py_function` is not known without its device.

    Returns:
        A `tf.data.Dataset`, or None where TensorFlow cannot write the graph.
    """
    try:
        state = _graph(dataset, _IGNORE_STATE, strip_devices=False)
        graph = tf.compat.v1.GraphDef.FromString(state)
        for node in _nodes(graph):
            if "value" not in node.attr:  # and asking for it would make one
                continue
            for handle in node.attr["value"].tensor.resource_handle_val:
                if "SeedGenerator" in handle.maybe_type_name:
                    # The original's, with what it has drawn. Where it is not found, as in
                    # another process, a shuffle makes a new one of the seeds in the graph.
                    handle.name += "/copy"
        copy = from_graph(graph.SerializeToString(), dataset.element_spec)
    except tf.errors.OpError:
        return None
    copy._nanotf_original = dataset  # which keeps its Python functions alive
    return copy


def from_graph(graph: bytes, element_spec: Any) -> Any:
    """The `tf.data.Dataset` of a graph that `to_graph` made."""
    return dataset_ops._VariantDataset(tf.raw_ops.DatasetFromGraph(graph_def=graph), element_spec)


def batch_size(dataset: Any) -> int:
    """Rows of a batch, but for short ones; -1 where the dataset's graph does not say it."""
    return int(tf.raw_ops.ComputeBatchSize(input_dataset=dataset._variant_tensor).numpy())
