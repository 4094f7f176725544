"""TensorFlow's private names for sending a `tf.data` pipeline to another process.

| name | versions seen | why |
| --- | --- | --- |
| `Dataset._variant_tensor` | 2.15-2.21 | what `tf.raw_ops.DatasetToGraphV2` takes |
| the resource type `SeedGenerator` in such a graph | 2.15-2.21 | what a shuffle has drawn of its orders |
| `data.ops.dataset_ops._VariantDataset` | 2.15-2.21 | a dataset of what `tf.raw_ops.DatasetFromGraph` returns |
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops

_FAIL_ON_STATE = 2  # tf.data.experimental.ExternalStatePolicy.FAIL


def to_graph(dataset: Any) -> bytes:
    """A dataset as a serialized graph, constants included.

    Raises:
        tf.errors.OpError: It has state outside of the graph: Python functions, tables,
            variables, random numbers.
    """
    graph: bytes = tf.raw_ops.DatasetToGraphV2(
        input_dataset=dataset._variant_tensor,
        external_state_policy=_FAIL_ON_STATE,
        strip_device_assignment=True,
    ).numpy()
    return graph


def copy_of(dataset: Any) -> Any:
    """A dataset of the same graph that was never iterated, so that its shuffles begin anew.

    Returns:
        A `tf.data.Dataset`, or None where the graph does not say all, see `to_graph`.
    """
    try:
        graph = tf.compat.v1.GraphDef.FromString(to_graph(dataset))
        for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
            for node in nodes:
                if "value" not in node.attr:  # and asking for it would make one
                    continue
                for handle in node.attr["value"].tensor.resource_handle_val:
                    if "SeedGenerator" in handle.maybe_type_name:
                        # The original's, with what it has drawn. Where it is not found, as in
                        # another process, a shuffle makes a new one of the seeds in the graph.
                        handle.name += "/copy"
        return from_graph(graph.SerializeToString(), dataset.element_spec)
    except tf.errors.OpError:
        return None


def from_graph(graph: bytes, element_spec: Any) -> Any:
    """The `tf.data.Dataset` of a graph that `to_graph` made."""
    return dataset_ops._VariantDataset(tf.raw_ops.DatasetFromGraph(graph_def=graph), element_spec)
