"""Loads models whose optimizers then reduce gradients over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from nanotf.hvd.distributed_optimizer import DistributedOptimizer
from nanotf.hvd.reductions import Compression


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Loads a saved Keras model, and wraps its optimizer by `DistributedOptimizer`.

    Args:
        filepath: path of the model.
        custom_optimizers: classes of the user's own optimizers.
        custom_objects: names and the user's own classes, as in Keras's `load_model`.
        compression: an attribute of `Compression`.
        legacy_opts: ignored.

    Returns:
        The model. On rank 0 or on all ranks, as the script likes: wrapping communicates nothing.
    """
    # A wrapped optimizer was saved by its own class's name: no class of Horovod's is needed.
    objects = {cls.__name__: cls for cls in custom_optimizers or ()} | dict(custom_objects or {})
    model = tf.keras.models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None:
        # Changes the object in place: the model keeps its optimizer, with the state that was saved.
        DistributedOptimizer(model.optimizer, compression=compression)
    return model
