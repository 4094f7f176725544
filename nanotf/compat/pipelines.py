"""TensorFlow's private names for sending a `tf.data` pipeline to other processes.

| name | versions seen | why |
| --- | --- | --- |
| `Dataset._variant_tensor` | 2.14-2.21 | input of `tf.raw_ops.DatasetToGraphV2` and similar ops |
| `data.ops.dataset_ops._VariantDataset` | 2.14-2.21 | wraps the result of `tf.raw_ops.DatasetFromGraph` and similar ops |
| `data.ops.dataset_ops.UnaryUnchangedStructureDataset`, `DatasetSpec` | 2.14-2.21 | base class of a dataset that is another's variant; its type as an argument of a `tf.function` |
| the resource type `SeedGenerator` in such a graph | 2.14-2.21 | state of a shuffle's random orders |
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops

from nanotf.compat.graphs import RUN_PYTHON, nodes_of

VariantDataset: Any = dataset_ops._VariantDataset
VariantOfAnother: Any = dataset_ops.UnaryUnchangedStructureDataset
DatasetSpec: Any = dataset_ops.DatasetSpec

_IGNORE_STATE, _FAIL_ON_STATE = 1, 2  # tf.data.experimental.ExternalStatePolicy


def to_graph(dataset: Any) -> bytes:
    """Serializes a dataset as a graph, including constants.

    Raises:
        tf.errors.OpError: The dataset has state outside the graph: Python functions, tables,
            variables, random numbers.
    """
    return _graph(dataset, _FAIL_ON_STATE)


def definition_of(dataset: Any) -> Any:
    """Returns the `tf.compat.v1.GraphDef` of a dataset, whatever state its operations have.

    Raises:
        tf.errors.OpError: TensorFlow cannot write it.
    """
    return tf.compat.v1.GraphDef.FromString(_graph(dataset, _IGNORE_STATE))


def _graph(dataset: Any, policy: int, strip_devices: bool = True) -> bytes:
    graph: bytes = tf.raw_ops.DatasetToGraphV2(
        input_dataset=dataset._variant_tensor,
        external_state_policy=policy,
        strip_device_assignment=strip_devices,
    ).numpy()
    return graph


def copy_of(dataset: Any) -> Any:
    """Returns a never-iterated dataset of the same graph, so that its shuffles start over.

    Works only in this process, which has the Python functions, tables and variables that the graph
    names. `py_function` needs its device.

    Returns:
        A `tf.data.Dataset`, or None if TensorFlow cannot write the graph.
    """
    try:
        state = _graph(dataset, _IGNORE_STATE, strip_devices=False)
        graph = tf.compat.v1.GraphDef.FromString(state)
        for node in nodes_of(graph):
            if "value" not in node.attr:  # reading it would add one
                continue
            for handle in node.attr["value"].tensor.resource_handle_val:
                if "SeedGenerator" in handle.maybe_type_name:
                    # The old name would find the original generator, with its state. If no such
                    # name exists, a shuffle makes a new generator from the seeds in the graph.
                    handle.name += "/copy"
        copy = from_graph(graph.SerializeToString(), dataset.element_spec)
    except tf.errors.OpError:
        return None
    copy._nanotf_original = dataset  # keeps its Python functions alive
    return copy


def copy_without_effects(dataset: Any) -> Any:
    """Returns `copy_of`, or None if to read it would run Python or change a variable."""
    for node in nodes_of(definition_of(dataset)):
        of_variable = "value" in node.attr and any(
            "SeedGenerator" not in handle.maybe_type_name
            for handle in node.attr["value"].tensor.resource_handle_val
        )
        if of_variable or node.op in RUN_PYTHON:
            return None
    return copy_of(dataset)


def from_graph(graph: bytes, element_spec: Any) -> Any:
    """Returns the `tf.data.Dataset` of a graph that `to_graph` made."""
    return dataset_ops._VariantDataset(tf.raw_ops.DatasetFromGraph(graph_def=graph), element_spec)


def batch_size(dataset: Any) -> int:
    """Returns the rows of a full batch; -1 if the dataset's graph does not tell."""
    return int(tf.raw_ops.ComputeBatchSize(input_dataset=dataset._variant_tensor).numpy())
