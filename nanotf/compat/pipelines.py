"""TensorFlow's private names for sending a `tf.data` pipeline to other processes.

| name | versions seen | why |
| --- | --- | --- |
| `Dataset._variant_tensor` | 2.15-2.21 | what `tf.raw_ops.DatasetToGraphV2` and its like take |
| `data.ops.dataset_ops._VariantDataset` | 2.15-2.21 | a dataset of what `tf.raw_ops.DatasetFromGraph` and its like return |
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


def from_graph(graph: bytes, element_spec: Any) -> Any:
    """The `tf.data.Dataset` of a graph that `to_graph` made."""
    return dataset_ops._VariantDataset(tf.raw_ops.DatasetFromGraph(graph_def=graph), element_spec)


def files_of(dataset: Any, index: int, size: int) -> Any:
    """A dataset that reads every `size`-th file, from file `index` on.

    As `tf.distribute` divides it: a shuffle of the names comes after the division.

    Raises:
        tf.errors.OpError: TensorFlow finds no files in it, or something that it cannot divide.
    """
    flat = tf.nest.flatten(dataset.element_spec)
    variant = tf.raw_ops.AutoShardDataset(
        input_dataset=dataset._variant_tensor,
        num_workers=size,
        index=index,
        output_types=[spec.dtype for spec in flat],
        output_shapes=[spec.shape for spec in flat],
        auto_shard_policy=int(tf.data.experimental.AutoShardPolicy.FILE),
        num_replicas=size,
    )
    return dataset_ops._VariantDataset(variant, dataset.element_spec)


def batch_size(dataset: Any) -> int:
    """Rows of a batch, but for short ones; -1 where the dataset's graph does not say it."""
    return int(tf.raw_ops.ComputeBatchSize(input_dataset=dataset._variant_tensor).numpy())
