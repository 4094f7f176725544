"""TensorFlow's collectives of one replica, moved through shared memory.

All collectives of `MultiWorkerMirroredStrategy` pass through one object per device, its
`CollectiveReplicaLauncher`: gradients, metrics, the strategy's `reduce` and `gather`. This one
hands them to a `Group`.

Ranks match collectives by a key, made from the name of the traced `tf.function` and the
collective's place in it. So a rank that traces a function once more than the others, as happens
when shapes differ between ranks, uses the same keys. Collectives of two functions that run
concurrently have different keys. Eager collectives run in program order and share one key.
"""

from __future__ import annotations

import collections
import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from nanotf.collectives.group import Group
from nanotf.compat import distribute, functions
from nanotf.errors import InvalidArgumentError

EAGER_KEY = 1
INITIAL_VALUE_KEY = 2  # of the broadcasts of variables' initial values
_FIRST_GRAPH_KEY = 16  # those below are for collectives outside functions


class Keys:
    """The keys of a process's collectives, by the function that contains them."""

    def __init__(self) -> None:
        # By function graph; weak, since a graph may end long before the process.
        self._places: weakref.WeakKeyDictionary[Any, collections.Counter[str]] = (
            weakref.WeakKeyDictionary()
        )

    def next(self) -> int:
        """Returns the key of the collective that is launched next.

        Raises:
            InvalidArgumentError: It is in a function that XLA is to compile.
        """
        graph = distribute.function_graph()
        if graph is None:
            return EAGER_KEY
        if functions.is_for_xla(graph):
            raise InvalidArgumentError(
                "XLA compiles no exchanges between ranks. Received: jit_compile=True for the step, "
                f"in {distribute.name_of_function(graph)}. Pass jit_compile=False to compile(), or "
                "let tf.function(jit_compile=True) hold only the part of the step before them."
            )
        counter = self._places.setdefault(graph, collections.Counter())
        place = counter["collectives"]
        counter["collectives"] += 1
        code = zlib.crc32(f"{distribute.name_of_function(graph)}:{place}".encode())
        return max(code, _FIRST_GRAPH_KEY)


class ShmLauncher(distribute.Launcher):  # type: ignore[misc]
    """Launches the collectives of one device on a `Group`.

    Args:
        keys: shared by all launchers of a process.
    """

    def __init__(self, group: Group, keys: Keys, device: str) -> None:
        # Not the base class's `__init__`: it makes a variable that orders TensorFlow's collectives.
        self._group = group
        self._keys = keys
        self._device = device
        self._group_size = group.size

    def can_order_nccl(self) -> bool:
        """Returns True: collectives run in program order."""
        return True

    # `options` (a timeout, ring or NCCL) are not read: the group has a deadline, and sums one way.
    def all_reduce(self, input_tensor: Any, control_input: Any = None, options: Any = None) -> Any:
        """Sums a dense tensor over all ranks."""
        return self.batch_all_reduce([[input_tensor]], options)[0]

    def batch_all_reduce(
        self, input_tensor_packs: Sequence[Sequence[Any]], options: Any = None
    ) -> list[Any]:
        """Sums packs of dense tensors; each pack is one collective per dtype, without a copy."""
        outputs: list[Any] = []
        with tf.device(self._device):
            for pack in input_tensor_packs:
                outputs.extend(self._reduce_pack(list(pack)))
        return outputs

    def _reduce_pack(self, pack: list[Any]) -> list[Any]:
        places: dict[Any, list[int]] = {}
        for place, tensor in enumerate(pack):
            pack[place] = tf.convert_to_tensor(tensor)
            places.setdefault(pack[place].dtype, []).append(place)
        for of_dtype in places.values():
            reduced = self._group.all_reduce_many([pack[i] for i in of_dtype], self._keys.next())
            for place, tensor in zip(of_dtype, reduced, strict=True):
                pack[place] = tensor
        return pack

    def _all_gather(self, input_tensor: Any, options: Any = None) -> Any:
        with tf.device(self._device):
            return self._group.all_gather(input_tensor, self._keys.next())

    def all_gather(self, input_tensor: Any, axis: Any, options: Any = None) -> Any:
        """Concatenates tensors along `axis`, the only one where ranks may differ."""
        tensor = tf.convert_to_tensor(input_tensor)
        rank = tf.rank(tensor)
        # The group gathers along the first axis: move `axis` there, and back afterwards.
        there = tf.concat([[axis], tf.range(axis), tf.range(axis + 1, rank)], axis=0)
        back = tf.concat([tf.range(1, axis + 1), [0], tf.range(axis + 1, rank)], axis=0)
        return tf.transpose(self._all_gather(tf.transpose(tensor, there)), back)

    def all_reduce_indexed_slices(self, input_slices: Any, options: Any = None) -> Any:
        """Sums sparse gradients by joining the rows of all ranks; their numbers may differ."""
        return tf.IndexedSlices(
            values=self._all_gather(input_slices.values),
            indices=self._all_gather(input_slices.indices),
            dense_shape=input_slices.dense_shape,
        )
