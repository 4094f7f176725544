"""Models of which this process holds one partition: their cuts and variables."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.compat import keras_optimizers
from nanotf.compat.keras_common import tf_variable
from nanotf.errors import ModelError, UnavailableError
from nanotf.sagemaker.smp import auto_partition, cut, runtime, step_seeds
from nanotf.sagemaker.smp.bodies import BodyCall
from nanotf.sagemaker.smp.cut import EVERYWHERE, Cut
from nanotf.sagemaker.smp.partition_variables import Variables
from nanotf.sagemaker.smp.trace import TracedCall, trace


class Partitioned:
    """A `smp.DistributedModel`, cut once for each kind of call."""

    def __init__(self) -> None:
        self._variables = Variables()
        self._cuts: dict[Any, tuple[Cut, int]] = {}  # and the operations counted at its end
        self._draws: set[Any] = set()  # keys of the calls that draw: each microbatch has a cut
        self.trainable: list[Any] = []  # of this partition, set by each call
        self.flow = cut.GradientFlow((), ())  # the same
        self.is_whole = False  # while `held` returns all variables

    def cut(self, call: BodyCall) -> tuple[Cut, list[Any]]:
        """Returns the cut of a call, and the tensors among its arguments."""
        flat = [_tensor(leaf) for leaf in tf.nest.flatten((call.args, call.kwargs))]
        tensors = [leaf for leaf in flat if tf.is_tensor(leaf)]
        for tensor in tensors:
            if not isinstance(tensor, (tf.Tensor, tf.Variable)):
                raise UnavailableError(
                    "A model in several partitions takes dense tensors. Received: "
                    f"{type(tensor).__name__}. Pass its parts, or use partitions=1."
                )
        key = _key(call, flat)
        seeds, own = step_seeds.current(), key
        if key in self._draws and seeds is not None:
            own = key, seeds.state
        # An argument that cannot be hashed may differ in each call, so each is cut anew.
        if key is None or own not in self._cuts:
            begin = seeds.state if seeds is not None else None
            with tf.init_scope():  # out of the step's graph: later traces use the cut, too
                made, draws = self._make(
                    call, flat, [tf.TensorSpec(t.shape, t.dtype) for t in tensors]
                )
            if draws:
                self._draws.add(key)
                own = key, begin
            self._cuts[own] = made, seeds.count if seeds is not None else 0
        self.trainable = [tf_variable(v) for v in call.model.trainable_variables]
        owners = {self._variables.partition_of(v) for v in all_trainable(call.model)}
        found, count = self._cuts[own]
        self.flow = cut.gradient_flow(found, runtime.mp_size(), owners)
        if seeds is not None and own != key:  # a cut that was made before has counted nothing
            seeds.count = count
        return found, tensors

    @property
    def is_cut(self) -> bool:
        """True once a step has called the model."""
        return bool(self._cuts)

    @property
    def written(self) -> set[int]:
        """The ids of the handles of variables that calls of the model write."""
        return {handle for found, _ in self._cuts.values() for handle in found.written}

    def check_reads(self, variables: Iterable[Any]) -> None:
        """Raises `ModelError` if some of the variables that a step's function reads are parts.

        The function would compute something else in each process.
        """
        parts = [v.name for v in variables if self._variables.partition_of(v) is not EVERYWHERE]
        if parts:
            raise ModelError(
                "A step reads the weights of a model in several partitions in the model's call "
                "alone: each process has those of its own part. Received: a read of "
                f"{', '.join(dict.fromkeys(parts))} outside it. Return what needs them, such as a "
                "penalty, from the model's call, or use the optimizer's weight_decay."
            )

    def held(self, variables: Iterable[Any]) -> list[Any]:
        """Returns those of a model's variables that this process holds."""
        if not self.is_cut or self.is_whole:
            return list(variables)
        places = (runtime.mp_rank(), EVERYWHERE)
        return [v for v in variables if self._variables.partition_of(v) in places]

    def numbered(self) -> dict[str, Any]:
        """Returns the variables that this process holds, by names that differ in no other run."""
        return {
            f"variable_{number}": variable
            for number, variable in enumerate(self._variables.held_by(runtime.mp_rank()))
        }

    @contextlib.contextmanager
    def unlimited(self) -> Iterator[None]:
        """Makes `held` return all variables, with values or without, in this context."""
        before, self.is_whole = self.is_whole, True
        try:
            yield
        finally:
            self.is_whole = before

    @contextlib.contextmanager
    def whole(self) -> Iterator[bool]:
        """Makes the model whole in rank 0, in this context, which all ranks enter.

        Yields:
            True in rank 0, False elsewhere.
        """
        place = runtime.place()
        if place.dp_rank > 0:  # another copy of the same model
            yield False
            return
        with self._variables.gathered(runtime.mailbox(), place.mp_group, place.mp_rank):
            if place.mp_rank > 0:
                yield False
                return
            with self.unlimited():
                yield True

    def _make(self, call: BodyCall, flat: Sequence[Any], specs: Sequence[Any]) -> tuple[Cut, bool]:
        def whole(*tensors: Any) -> Any:
            given = iter(tensors)
            leaves = [next(given) if tf.is_tensor(leaf) else leaf for leaf in flat]
            args, kwargs = tf.nest.pack_sequence_as((call.args, call.kwargs), leaves)
            return call.whole(*args, **kwargs)

        config = runtime.current()
        traced = trace(whole, specs, self._variables.create)
        if config.auto_partition:
            partitions = auto_partition.assign(traced, config, self._variables.partitions)
        else:
            assert config.default_partition is not None  # `config.check` requires it
            partitions = cut.assign(traced, config.default_partition)
        made = cut.cut(traced, partitions, runtime.mp_rank(), config.partitions)
        self._check_strangers(call.model, traced, made)
        self._variables.keep(made.variables, runtime.mp_rank(), call.model.variables)
        return made, traced.draws

    def _check_strangers(self, model: Any, traced: TracedCall, made: Cut) -> None:
        """Refuses variables that are not the model's: one partition alone would train them."""
        with self.unlimited():
            own = {id(tf_variable(variable).handle) for variable in model.variables}
        strangers = [
            variable.name
            for variable in traced.function.graph.variables
            if id(variable.handle) not in own
            and (variable.trainable or id(variable.handle) in made.written)
        ]
        if strangers:
            raise ModelError(
                "A model in several partitions owns the variables that its call trains or writes. "
                f"Received: {', '.join(strangers)}, which the call of {model.name!r} uses. Make "
                "them, or the layer that has them, attributes of the model (self.x = ...), or a "
                "variable that is only read tf.Variable(..., trainable=False)."
            )


# An attribute of the model: a cut refers to the model, so a table of models, even with weak keys,
# would keep both.
_ATTRIBUTE = "_nanotf_partitioned"


def of(model: Any) -> Partitioned | None:
    """Returns what is known of a model's partitions; None before its first call."""
    found: Partitioned | None = vars(model).get(_ATTRIBUTE)
    return found


def is_cut(model: Any) -> bool:
    """Returns True once a step has cut the model."""
    known = of(model)
    return known is not None and known.is_cut


def is_part(model: Any) -> bool:
    """Returns True for a model that a step has cut, outside contexts that make it whole."""
    known = of(model)
    return known is not None and known.is_cut and not known.is_whole


# While `smp.CheckpointManager` saves or restores parts.
saves_parts: contextvars.ContextVar[bool]
saves_parts = contextvars.ContextVar("nanotf_smp_saves_parts", default=False)


def check_checkpoint(name: str) -> None:
    """Raises `ModelError` for a checkpoint with a part of a model or of its optimizer.

    Args:
        name: that of the model or optimizer.
    """
    if not saves_parts.get():
        raise ModelError(
            f"A tf.train.Checkpoint saves what one process holds. Received: one with {name!r}, "
            f"which is divided among {runtime.mp_size()} partitions. Use "
            "smp.CheckpointManager(checkpoint), in all ranks."
        )


def check_optimizer(optimizer: Any) -> None:
    """Raises `ModelError` for a checkpoint with an optimizer that updates a part of a model."""
    parts = (v for model in runtime.called if is_part(model) for v in model.trainable_variables)
    if any(keras_optimizers.updates(optimizer, variable) for variable in parts):
        check_checkpoint(optimizer.name)


def all_trainable(model: Any) -> list[Any]:
    """Returns a model's trainable variables, of all partitions."""
    known = of(model)
    with contextlib.nullcontext() if known is None else known.unlimited():
        return list(model.trainable_variables)


def begun(model: Any) -> Partitioned:
    """Returns what is known of a model's partitions, in its first call a new object."""
    known = of(model)
    if known is None:
        known = Partitioned()
        object.__setattr__(model, _ATTRIBUTE, known)  # Keras's would look for variables in it
    return known


def _tensor(leaf: Any) -> Any:
    return tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf


def _key(call: BodyCall, flat: Sequence[Any]) -> Any:
    """Returns what two calls have in common that one trace serves; None if that cannot be told."""
    # Compared as a text, since lists and dicts cannot be hashed.
    structure = tf.nest.map_structure(lambda _: 0, (call.args, call.kwargs))
    leaves = tuple(
        (tuple(leaf.shape), leaf.dtype.name) if tf.is_tensor(leaf) else leaf for leaf in flat
    )
    try:
        hash(leaves)
    except TypeError:
        return None
    return repr(structure), leaves
