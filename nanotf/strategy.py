"""The distribution strategy of a worker.

Every worker runs the same Keras code under a `tf.distribute.MultiWorkerMirroredStrategy`;
Keras and TensorFlow do the training. Two things differ from the stock strategy:

- With transport "shm" it starts no server and opens no socket. It begins in the local mode
  of the stock strategy, is then told its rank and the number of workers, and moves the bytes
  of every collective through shared memory (`collectives`).
- A dataset that already yields this worker's share is iterated as it is, instead of being
  wrapped, sharded and rebuilt at every epoch.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from nanotf.compat import distribute


def mark_as_share(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Marks a dataset as yielding this worker's share, so that it is not sharded again."""
    dataset._nanotf_is_share = True
    return dataset


class _Extended(distribute.Extended):
    """The stock implementation, which can skip the broadcast of values that are known."""

    values_are_known = False

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: Any, primary_var: Any, **kwargs: Any
    ) -> Callable[[], Any]:
        if self.values_are_known and replica_id == 0:

            def initial_value() -> Any:
                value = kwargs["initial_value"]
                return value() if callable(value) else value

            return initial_value
        broadcast: Callable[[], Any] = super()._get_variable_creator_initial_value(
            replica_id, device, primary_var, **kwargs
        )
        return broadcast


class WorkerStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """A `tf.distribute.MultiWorkerMirroredStrategy` for one worker of a pool.

    Args:
        rank: int, this worker's rank.
        size: int, number of workers.
        cluster: sequence of str, `host:port` by rank, for transport "grpc". The port of this
            rank must be free; TensorFlow's server binds it on all interfaces.
        group: `collectives.Group` attached to this rank, for transport "shm".

    Exactly one of `cluster` and `group` is given.
    """

    def __init__(
        self, rank: int, size: int, cluster: tuple[str, ...] = (), group: Any = None
    ) -> None:
        if cluster:
            os.environ["TF_CONFIG"] = json.dumps(
                {"cluster": {"worker": list(cluster)}, "task": {"type": "worker", "index": rank}}
            )
            resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        else:
            resolver = distribute.empty_cluster()
        tf.distribute.Strategy.__init__(
            self,
            _Extended(
                self,
                cluster_resolver=resolver,
                communication_options=tf.distribute.experimental.CommunicationOptions(),
            ),
        )
        self.rank = rank
        self.size = size

    @contextlib.contextmanager
    def known_values(self) -> Iterator[None]:
        """Variables created in this context are set by the caller, so none is broadcast."""
        before = self.extended.values_are_known
        self.extended.values_are_known = True
        try:
            with self.scope():
                yield
        finally:
            self.extended.values_are_known = before

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """As in TensorFlow, except that a worker's own share is returned as it is."""
        if getattr(dataset, "_nanotf_is_share", False):
            return dataset
        return super().experimental_distribute_dataset(dataset, options)
