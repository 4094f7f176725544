"""`sharding`: the process in which a `tf.data.Dataset` is read.

"parent": once, in the user's process, which hands out the batches (`streams`). Everything can be
read there, in the same order as in a single process, and the work is done once.

"data": the pipeline is sent to the workers as a graph. Each worker runs all of it, and keeps its
rows of every batch. Nothing is copied between processes, but all work is done N times, on fewer
cores each. All workers must see the same batches. So a pipeline is refused if it has state outside
the graph (Python functions, tables, random numbers), or if its order differs from run to run.

"auto" is "parent", by measurement: two workers with a core each, on a machine busy with other
work, and a model of one dense layer, so that the data take most of the time. Milliseconds per
batch of 256 rows, best of five epochs:

| pipeline | "parent" | "data" |
| --- | --- | --- |
| slices of 32 numbers a row | 9.9 | 9.5 |
| one constant batch of 64x64x3 images (13 MB), nothing to compute | 30 | 20 |
| `map` with a 128x128 matrix product a row | 67 | 125 |

Reading twice is as fast or faster if the pipeline computes next to nothing. If it does compute, N
workers make it N times slower. A dataset does not tell which is the case, and only "parent" works
for all datasets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from nanotf.compat.versions import require_tensorflow
from nanotf.errors import InvalidArgumentError, ShippingError
from nanotf.shipping.data.inputs import (
    claiming,
    own_rows,
    resumed,
    tuned,
    until_rows_differ,
    with_extent,
)

SHARDINGS = ("auto", "data", "parent")


def check_sharding(sharding: str | None) -> str:
    """Checks an argument `sharding`; returns where to read a dataset: "data" or "parent".

    Raises:
        InvalidArgumentError: It is not one of `SHARDINGS`.
    """
    if sharding is not None and sharding not in SHARDINGS:
        raise InvalidArgumentError(
            f"`sharding` must be one of {', '.join(map(repr, SHARDINGS))}. Received: "
            f'sharding={sharding!r}. Use "parent" to read a dataset once, in your process, or '
            '"data" to have every worker run the tf.data pipeline.'
        )
    return "data" if sharding == "data" else "parent"


@dataclasses.dataclass(frozen=True)
class PipelineInput:
    """A `tf.data` pipeline of global batches that every worker runs."""

    graph: bytes  # see `compat.dataset_graphs`
    element_spec: Any  # nested structure of `tf.TensorSpec`, as the dataset has it
    signature: Any  # same, for any number of rows
    cardinality: int  # batches, or TensorFlow's codes for endless and unknown
    steps: int | None  # batches per epoch; None if not known
    # How many iterators to make and drop first: a shuffle draws an order for each, and an earlier
    # pool has used the orders of its epochs.
    iterated: int = 0
    taken: int = 0  # batches to skip in the first iterator, since they were used already

    def dataset(self, rank: int, size: int, refuse: Callable[[InvalidArgumentError], None]) -> Any:
        """Returns the worker's dataset.

        Args:
            size: number of workers.
            refuse: see `inputs.until_rows_differ`.
        """
        from nanotf.compat import dataset_graphs

        tf = require_tensorflow()

        @tf.autograph.experimental.do_not_convert
        def divided(*elements: Any) -> Any:
            batch = elements if isinstance(self.element_spec, tuple) else elements[0]
            first_of_batch = tf.nest.flatten(batch)[0]
            rows = first_of_batch.shape[0]
            rows = tf.shape(first_of_batch, out_type=tf.int64)[0] if rows is None else rows
            first, count = own_rows(rows, rank, size)
            own = tf.nest.map_structure(lambda t: t[first : first + count], batch)
            return with_extent(own, rows)

        shipped = dataset_graphs.from_graph(self.graph, self.element_spec)
        made = tuned(until_rows_differ(shipped, refuse).map(divided).prefetch(2))
        for _ in range(self.iterated):
            iter(made)
        return claiming(resumed(made, self.taken), self.cardinality)


def pipeline_input(
    dataset: Any,
    signature: Any,
    cardinality: int,
    steps: int | None,
    what: str,
    alike: bool = True,
) -> PipelineInput:
    """Describes a dataset as an input that every worker runs.

    Args:
        dataset: `tf.data.Dataset` of batches, or None for data of another kind.
        signature, cardinality, steps: see `PipelineInput`.
        what: the argument's name, for the error.
        alike: whether all workers must see the same batches.

    Raises:
        ShippingError: It cannot run in workers, or would differ between them.
    """
    from nanotf.compat import dataset_graphs

    tf = require_tensorflow()
    if dataset is None:
        raise ShippingError(
            f"{what} must be a tf.data.Dataset to be read by the workers. Received: "
            'sharding="data" and data that only your process can read. Use sharding="parent".'
        )
    try:
        graph = dataset_graphs.to_graph(dataset)
    except tf.errors.OpError as error:
        raise ShippingError(
            f"{what} must not depend on Python or on state outside its graph to be read by the "
            f'workers. Received: sharding="data" and a dataset that TensorFlow rejects: '
            f'{error.message} Use sharding="parent".'
        ) from error
    definition = tf.compat.v1.GraphDef.FromString(graph)
    for reason in differences(definition) if alike else ():
        raise ShippingError(
            f"{what} must yield the same batches in every worker to be read by them. Received: "
            f'sharding="data" and {reason}, or use sharding="parent".'
        )
    return PipelineInput(graph, dataset.element_spec, signature, cardinality, steps)


def differences(definition: Any) -> Iterator[str]:
    """Yields reasons why a graph's batches would differ between workers, with their remedies."""
    tf = require_tensorflow()
    for nodes in (definition.node, *(f.node_def for f in definition.library.function)):
        values = {
            node.name: tf.make_ndarray(node.attr["value"].tensor)
            for node in nodes
            if node.op == "Const" and node.attr["dtype"].type == tf.int64.as_datatype_enum
        }
        for node in nodes:
            if node.attr["deterministic"].s == b"false":
                yield "a dataset with deterministic=False; leave that out"
            if "Shuffle" in node.op and "Dataset" in node.op:
                # TensorFlow takes the seeds 0 and 0 for none.
                seeds = [values.get(name.split(":")[0]) for name in node.input[2:4]]
                if all(seed is not None and not np.any(seed) for seed in seeds):
                    yield "a shuffle() without a seed; give it one, or call set_random_seed()"
