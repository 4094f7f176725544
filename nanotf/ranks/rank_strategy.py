"""Strategies of `tf.distribute` over ranks, in place of those that a script makes.

Each rank runs the script, with one replica of the strategy. `region.strategy.WorkerStrategy`, a
`MultiWorkerMirroredStrategy`, moves the bytes. What differs from it, so that a script written for
one process with several replicas (`MirroredStrategy`) trains alike:

- a dataset is divided by rows of each global batch, never by files;
- at its creation all ranks take over rank 0's random states, so that they shuffle alike, and start
  from the same random weights;
- a file that all ranks would write is written once (`rank_files`).

A script for `MultiWorkerMirroredStrategy` shards its data and chooses its paths by TF_CONFIG, so
there everything is TensorFlow's.
"""

from __future__ import annotations

import os
import pickle
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.collectives.launcher import EAGER_KEY
from nanotf.compat import replacements
from nanotf.compat.chance import Chance
from nanotf.compat.versions import check_keras
from nanotf.ranks import rank_overrides, this_rank
from nanotf.region.strategy import WorkerStrategy

_SEED_BITS = 31  # of the seed that scripts without one get


class RankStrategy(WorkerStrategy):
    """A strategy with one replica in each rank.

    Args:
        *args, **kwargs: those of the class that it replaces. They name devices and clusters, and
            are ignored.
    """

    stands_for: type = tf.distribute.MultiWorkerMirroredStrategy

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_keras()
        place, group = this_rank.place(), this_rank.group()
        super().__init__(place.rank, place.size, group=group)
        replacements.install(rank_overrides.KERAS, self)
        replacements.install(rank_overrides.LOSS_SCALES, self)
        if not self._is_multi_worker:
            replacements.install(rank_overrides.FILES, self)
            _share_chance(group, place.rank)

    @property
    def _is_multi_worker(self) -> bool:
        """True if the script was written for several processes."""
        return issubclass(self.stands_for, tf.distribute.MultiWorkerMirroredStrategy)

    @property
    def cluster_resolver(self) -> Any:
        """The resolver of TF_CONFIG, which names the ranks, for a script of several processes."""
        if self._is_multi_worker and "TF_CONFIG" in os.environ:  # a script may have removed it
            return tf.distribute.cluster_resolver.TFConfigClusterResolver()
        return super().cluster_resolver

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Divides the batches of a dataset between the ranks; see `tf.distribute.Strategy`."""
        if not self._is_multi_worker and isinstance(dataset, tf.data.Dataset):
            by_rows = tf.data.Options()
            policy = tf.data.experimental.AutoShardPolicy.DATA
            by_rows.experimental_distribute.auto_shard_policy = policy
            dataset = dataset.with_options(by_rows)
        return super().experimental_distribute_dataset(dataset, options)


def _share_chance(group: Any, rank: int) -> None:
    """Gives all ranks the random states of rank 0."""
    chance = Chance.capture()
    if chance.tensorflow is None:  # no seed: TensorFlow's operations would differ between ranks
        # It must fit the int32 of `tf.constant`: ranks broadcast tensors of one dtype.
        seed = int.from_bytes(os.urandom(4), "big") % 2**_SEED_BITS
        tf.random.set_seed(int(group.broadcast(tf.constant(seed), EAGER_KEY)))
        chance = chance._replace(tensorflow=Chance.capture().tensorflow)
    data = np.frombuffer(pickle.dumps(chance), np.uint8)
    # A broadcast needs one shape, and other ranks' pickles may differ in length.
    length = int(group.broadcast(tf.constant(len(data)), EAGER_KEY))
    data = data if rank == 0 else np.zeros(length, np.uint8)
    pickle.loads(group.broadcast(tf.constant(data), EAGER_KEY).numpy().tobytes()).restore()
