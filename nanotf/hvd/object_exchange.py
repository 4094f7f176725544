"""Exchanges of variables and of objects, eagerly but for `broadcast_variables`."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.compat import keras_common
from nanotf.errors import ShippingError, UnavailableError
from nanotf.hvd import rank_facts
from nanotf.hvd.tensor_exchange import from_root, gather_rows
from nanotf.ranks import this_rank


@tf.autograph.experimental.do_not_convert
def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: Any = None, inplace: bool = False
) -> None:
    """Gives all ranks the root's values of variables, in one exchange for each dtype.

    Args:
        variables: of TensorFlow or Keras, of the same shapes on all ranks.
        root_rank: int, the rank whose values all get.
        process_set: None or `global_process_set`.
        inplace: ignored; values are always assigned.

    Raises:
        CollectiveError: Ranks have different variables.
    """
    rank_facts.check_process_set(process_set)
    root = rank_facts.check_root(root_rank)
    found = [keras_common.tf_variable(v) for v in variables]
    if rank_facts.size() == 1:
        return
    for dtype in dict.fromkeys(v.dtype for v in found):  # in the order that all ranks share
        mine = [v for v in found if v.dtype == dtype]
        # One exchange takes less time than one for each small variable.
        flat = tf.concat([tf.reshape(v, [-1]) for v in mine], axis=0)
        parts = tf.split(from_root(flat, root), [v.shape.num_elements() for v in mine])
        for variable, part in zip(mine, parts, strict=True):
            variable.assign(tf.reshape(part, variable.shape))


def broadcast_global_variables(root_rank: int) -> None:
    """Raises `UnavailableError`: TensorFlow 2 has no global variables.

    Args:
        root_rank: int, ignored.
    """
    raise UnavailableError(
        "TensorFlow 2 keeps no list of global variables. Received: "
        f"hvd.broadcast_global_variables({root_rank}). Call "
        "hvd.broadcast_variables(model.variables, root_rank=0), and the same for the optimizer's."
    )


def _bytes_of(obj: Any) -> np.ndarray[Any, Any]:
    try:
        return np.frombuffer(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), np.uint8)
    except Exception as error:  # whatever an object's __reduce__ raises
        raise ShippingError(
            "Objects must be picklable to be sent. Received: an object of type "
            f"{type(obj).__name__} ({error}). Send its picklable parts."
        ) from error


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: Any = None,
) -> Any:
    """Returns the root's object on all ranks.

    Args:
        obj: picklable; ignored on other ranks than the root.
        root_rank: int, default 0.
        session, name: ignored.
        process_set: None or `global_process_set`.

    Raises:
        ShippingError: The object cannot be pickled.
    """
    rank_facts.check_process_set(process_set)
    root = rank_facts.check_root(root_rank)
    if rank_facts.size() == 1:
        return obj
    is_root = rank_facts.rank() == root
    data = _bytes_of(obj) if is_root else np.empty(0, np.uint8)  # others need not be picklable
    # First the length: a broadcast needs arrays of one shape on all ranks.
    length = int(from_root(tf.constant(data.size, tf.int64), root))
    data = from_root(tf.constant(data if is_root else np.zeros(length, np.uint8)), root).numpy()
    # The root keeps its own object, as in Horovod.
    return obj if is_root else pickle.loads(data.tobytes())


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: Any = None
) -> list[Any]:
    """Returns the objects of all ranks, in the order of ranks.

    Args:
        obj: picklable.
        session, name, process_set: as in `broadcast_object`.

    Raises:
        ShippingError: The object cannot be pickled.
    """
    rank_facts.check_process_set(process_set)
    data = _bytes_of(obj)
    # Where the bytes of each rank end. Ranks that have joined are in neither gather.
    ends = np.cumsum(gather_rows(tf.constant([data.size], tf.int64)).numpy())
    whole = gather_rows(tf.constant(data)).numpy()
    return [pickle.loads(part.tobytes()) for part in np.split(whole, ends[:-1])]


def join(device: str = "") -> int:
    """Waits until all ranks have called it: call it when this rank's data have ended.

    Until then the other ranks reduce and gather as before. This rank gives zeros to their sums and
    averages, which are still divided by the number of all ranks, and nothing to a minimum or a
    maximum. `allgather` returns the rows of the others.

    Args:
        device: ignored.

    Returns:
        The rank that came last. Its variables have had all updates.

    Raises:
        CollectiveError: Another rank makes a broadcast or an `alltoall` meanwhile, or has ended.
    """
    # A key of its own: the other ranks' next collective is not the one that ends the wait.
    return 0 if rank_facts.size() == 1 else this_rank.group().join(this_rank.JOIN_KEY)
