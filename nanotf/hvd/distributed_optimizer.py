"""Optimizers and tapes whose gradients are reduced over ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from nanotf.compat import keras_common, keras_optimizers, replacements
from nanotf.compat.generation import generation
from nanotf.errors import InvalidArgumentError, InvalidArgumentTypeError
from nanotf.hvd import rank_facts
from nanotf.hvd.reductions import Average, Compression, Reduction, chosen
from nanotf.hvd.tensor_exchange import reduce_all
from nanotf.ranks import loss_scales, rank_overrides

_unconverted = tf.autograph.experimental.do_not_convert


@dataclasses.dataclass(frozen=True)
class GradientRule:
    """The way gradients are reduced."""

    op: Reduction = Average
    compression: Any = Compression.none
    sparse_as_dense: bool = False
    before: float = 1.0  # factor of this rank's gradients

    @_unconverted
    def reduce(self, grads: Sequence[Any]) -> list[Any]:
        """Reduces gradients over ranks, dense ones of a dtype in one exchange."""
        # So the result is the same, while a float16 sum of many ranks does not overflow.
        after = 1.0 / self.before
        found: list[Any] = reduce_all(
            grads, self.op, self.compression, self.sparse_as_dense, self.before, after
        )
        return found


def rule(
    op: Any,
    compression: Any,
    sparse_as_dense: bool,
    gradient_predivide_factor: float,
    process_set: Any,
) -> GradientRule:
    """Returns the way that arguments of Horovod's ask for.

    Raises:
        InvalidArgumentError: The reduction is not `Average`, but the factor is given.
        UnavailableError: nanotf lacks the reduction, or not all ranks are to take part.
    """
    rank_facts.check_process_set(process_set)
    reduction = chosen(op)
    # Horovod refuses it as well: only a mean has a division to move.
    if gradient_predivide_factor != 1.0 and reduction is not Average:
        raise InvalidArgumentError(
            "gradient_predivide_factor is for op=hvd.Average. Received: "
            f"gradient_predivide_factor={gradient_predivide_factor!r}, op={op!r}."
        )
    return GradientRule(reduction, compression, sparse_as_dense, 1.0 / gradient_predivide_factor)


# A subclass for `isinstance` alone: the methods are the inner tape's, which records.
class DistributedGradientTape(tf.GradientTape):  # type: ignore[misc]
    """A tape whose `gradient` reduces what it returns over all ranks.

    Args:
        gradtape: `tf.GradientTape`, which has recorded, or will.
        device_dense, device_sparse: ignored.
        compression: an attribute of `Compression`, default `none`.
        sparse_as_dense: bool, default False; True sums `tf.IndexedSlices` as dense tensors.
        op: `Average`, the default, `Sum`, `Min` or `Max`.
        gradient_predivide_factor: float, default 1.0; divides before the sum instead of after it.
        num_groups, groups: ignored; gradients of one dtype always move together.
        process_set: None or `global_process_set`.
        scale_local_gradients: ignored; there are no local gradients.

    Example:
        >>> with tf.GradientTape() as tape:
        ...     loss = loss_fn(y, model(x))
        >>> tape = hvd.DistributedGradientTape(tape)
        >>> grads = tape.gradient(loss, model.trainable_variables)
    """

    def __init__(
        self,
        gradtape: Any,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = Compression.none,
        sparse_as_dense: bool = False,
        op: Any = None,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Any = None,
        process_set: Any = None,
        scale_local_gradients: bool = True,
    ) -> None:
        super().__init__()  # it records nothing; the attributes of a tape must exist
        self._nanotf_inner = gradtape
        self._nanotf_rule = rule(
            op, compression, sparse_as_dense, gradient_predivide_factor, process_set
        )

    def __enter__(self) -> DistributedGradientTape:
        self._nanotf_inner.__enter__()
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        self._nanotf_inner.__exit__(kind, value, traceback)

    def watch(self, tensor: Any) -> None:
        """Watches a tensor."""
        self._nanotf_inner.watch(tensor)

    def stop_recording(self) -> Any:
        """Returns a context in which nothing is recorded."""
        return self._nanotf_inner.stop_recording()

    def reset(self) -> None:
        """Forgets what has been recorded."""
        self._nanotf_inner.reset()

    def watched_variables(self) -> Any:
        """Returns the variables that are watched."""
        return self._nanotf_inner.watched_variables()

    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the Jacobian of this rank, not reduced."""
        return self._nanotf_inner.jacobian(*args, **kwargs)

    def batch_jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the Jacobians of this rank's rows, not reduced."""
        return self._nanotf_inner.batch_jacobian(*args, **kwargs)

    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, **kwargs: Any
    ) -> Any:
        """Returns the gradients, reduced over all ranks.

        Args:
            target, sources, output_gradients, **kwargs: as for `tf.GradientTape.gradient`.
        """
        # Once for each call, also of a persistent tape: all ranks must call it as often.
        grads = self._nanotf_inner.gradient(target, sources, output_gradients, **kwargs)
        flat = tf.nest.flatten(grads)  # None and `tf.IndexedSlices` are leaves
        return tf.nest.pack_sequence_as(grads, self._nanotf_rule.reduce(flat))


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Any = None,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes a Keras optimizer reduce gradients over all ranks before it applies them.

    Args:
        optimizer: of Keras; the returned one is this object. It is saved as one of its own class.
        name, use_locking, device_dense, device_sparse: ignored.
        compression, sparse_as_dense, op, gradient_predivide_factor, num_groups, groups,
            process_set, scale_local_gradients: as in `DistributedGradientTape`.
        backward_passes_per_step: int, default 1: the number of steps whose gradients are added up
            before they are reduced and applied, counted for each list of variables.
        average_aggregated_gradients: bool, default False; True divides their sum by that number.

    Raises:
        InvalidArgumentTypeError: It is no optimizer of Keras.

    Example:
        >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size()))
        >>> model.compile(optimizer, "mse")
    """
    # An optimizer of TensorFlow 1 has another update, in which nothing would be reduced.
    if not isinstance(optimizer, keras_optimizers.optimizer_classes()):
        raise InvalidArgumentTypeError(
            "hvd.DistributedOptimizer takes an optimizer of tf.keras. Received: "
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__}. Optimizers of "
            "TensorFlow 1 need sessions: use tf.keras.optimizers."
        )
    if backward_passes_per_step < 1:
        raise InvalidArgumentError(
            "backward_passes_per_step must be at least 1. Received: "
            f"backward_passes_per_step={backward_passes_per_step!r}."
        )
    # Before the early return below: wrong arguments raise for a wrapped optimizer, too.
    found = rule(op, compression, sparse_as_dense, gradient_predivide_factor, process_set)
    if hasattr(optimizer, loss_scales.REDUCES):  # wrapped already: nothing is reduced twice
        return optimizer
    # `compile` may put it into a `LossScaleOptimizer`.
    replacements.install(rank_overrides.LOSS_SCALES, None)
    if backward_passes_per_step > 1:
        change = _every(backward_passes_per_step, average_aggregated_gradients, found)
        return _changed(optimizer, change)
    return _changed(optimizer, lambda _, apply, grads, variables: apply(found.reduce(grads)))


def _changed(optimizer: Any, change: Callable[..., Any]) -> Any:
    """Gives an optimizer a class of the same name whose update is another one.

    Args:
        change: see `Generation.updating`.
    """
    cls = type(optimizer)
    # The object itself stays: a compiled model, or the user's variable, has it already.
    body = generation().updating(cls, change)
    # The module and the name are those of Keras's class, as which it is saved.
    body |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    object.__setattr__(optimizer, "__class__", type(cls.__name__, (cls,), body))
    object.__setattr__(optimizer, loss_scales.REDUCES, True)  # Keras's own would track the value
    return optimizer


def _every(passes: int, averages: bool, found: GradientRule) -> Any:
    """Returns a change that adds up gradients, and reduces and applies them every few passes."""
    # The sums of gradients, and a count of passes since the last update, of each list of variables
    # that the optimizer gets: a script may update parts of its model in turn. Made when the first
    # gradients come; the references keep the variables, so that none takes the place of another.
    states: dict[tuple[Any, ...], tuple[list[Any], Any]] = {}

    @_unconverted
    def change(optimizer: Any, apply: Any, grads: list[Any], variables: list[Any]) -> Any:
        like = [keras_common.tf_variable(v) for v in variables]
        own = tuple(v.ref() for v in like)
        if own not in states:
            # Outside a `tf.function` that is traced now: its next trace uses them as well.
            with tf.init_scope():
                made = [tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False) for v in like]
                states[own] = made, tf.Variable(0, trainable=False)
        sums, passed = states[own]
        # A variable without a gradient in this step keeps none: Keras skips it, or warns.
        given = [place for place, grad in enumerate(grads) if grad is not None]
        for place in given:
            # Sparse gradients become dense: slices of several passes have other rows.
            sums[place].assign_add(tf.convert_to_tensor(grads[place]))

        def update() -> Any:
            total = [sums[i].read_value() if i in given else None for i in range(len(grads))]
            if averages:
                total = [None if t is None else t / tf.cast(passes, t.dtype) for t in total]
            # All ranks count alike, so that all of them come here in the same pass.
            apply(found.reduce(total))
            for place in given:
                sums[place].assign(tf.zeros_like(sums[place]))
            return passed.assign(0)

        count = passed.assign_add(1)
        # In the graph, not in Python: a step is traced once, and counts each time that it runs.
        tf.cond(count >= passes, update, lambda: tf.identity(count))
        return optimizer.iterations  # as Keras 2's `apply_gradients` does

    return change
