"""Models of which this process holds one partition: their cuts and variables."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.compat.keras_common import tf_variable
from nanotf.smp import cut, runtime
from nanotf.smp.bodies import Call
from nanotf.smp.trace import trace
from nanotf.smp.variables import Variables


class Partitioned:
    """A model, cut once for each kind of call.

    Args:
        model: a `smp.DistributedModel`, in no partitions yet.
    """

    def __init__(self, model: Any) -> None:
        self._variables = Variables()
        self._cuts: dict[Any, cut.Cut] = {}
        self.trainable: list[Any] = []  # of this partition, set by each call

    def cut(self, call: Call) -> tuple[cut.Cut, list[Any]]:
        """Returns the cut of a call, and the tensors among its arguments."""
        flat = [_tensor(leaf) for leaf in tf.nest.flatten((call.args, call.kwargs))]
        tensors = [leaf for leaf in flat if tf.is_tensor(leaf)]
        key = _key(call, flat)
        if key is None or key not in self._cuts:
            with tf.init_scope():
                made = self._make(call, flat, [tf.TensorSpec(t.shape, t.dtype) for t in tensors])
            self._cuts[key] = made
        self.trainable = [tf_variable(v) for v in call.model.trainable_variables]
        return self._cuts[key], tensors

    def held(self, variables: Iterable[Any]) -> list[Any]:
        """Returns those of a model's variables that this process holds."""
        if not self._cuts:
            return list(variables)
        here = runtime.mp_rank()
        return [v for v in variables if self._variables.partition_of(v) == here]

    def _make(self, call: Call, flat: Sequence[Any], specs: Sequence[Any]) -> cut.Cut:
        def whole(*tensors: Any) -> Any:
            given = iter(tensors)
            leaves = [next(given) if tf.is_tensor(leaf) else leaf for leaf in flat]
            args, kwargs = tf.nest.pack_sequence_as((call.args, call.kwargs), leaves)
            return call.whole(*args, **kwargs)

        config = runtime.current()
        traced = trace(whole, specs, self._variables.create)
        default = config.default_partition
        assert default is not None
        partitions = cut.assign(traced, default)
        made = cut.cut(traced, partitions, runtime.mp_rank(), config.partitions)
        self._variables.keep(made.variables, runtime.mp_rank(), call.model.variables)
        return made


_models: weakref.WeakKeyDictionary[Any, Partitioned] = weakref.WeakKeyDictionary()


def of(model: Any) -> Partitioned | None:
    """Returns what is known of a model's partitions; None before its first call."""
    return _models.get(model)


def begun(model: Any) -> Partitioned:
    """Returns what is known of a model's partitions, in its first call a new object."""
    if model not in _models:
        _models[model] = Partitioned(model)
    return _models[model]


def _tensor(leaf: Any) -> Any:
    return tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf


def _key(call: Call, flat: Sequence[Any]) -> Any:
    """Returns what two calls have in common that one trace serves; None if that cannot be told."""
    structure = tf.nest.map_structure(lambda _: 0, (call.args, call.kwargs))
    leaves = tuple(
        (tuple(leaf.shape), leaf.dtype.name) if tf.is_tensor(leaf) else leaf for leaf in flat
    )
    try:
        hash(leaves)
    except TypeError:
        return None
    return repr(structure), leaves
