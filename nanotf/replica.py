"""What a worker's model does differently from the user's."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from nanotf.compat import keras_names, keras_share
from nanotf.compat.versions import is_keras_3


class ReplicaMixin:
    """Mixed in before the user's class.

    A step gets `(data, share)`: this worker's rows of the global batch, and the part of the
    global batch that they are, as a scalar float64 tensor. A share of 0 means that the rows
    stand in for none, and must leave no trace in metrics or moving statistics.
    """

    # All are set on the class that `become_replica` makes, one for each model.
    _nanotf_share: keras_share.Share
    _nanotf_may_be_empty: bool
    _nanotf_own_steps: frozenset[str]
    _nanotf_metrics_result: Any

    def train_step(self, data: Any) -> Any:
        return self._nanotf_step("train_step", super().train_step, data)  # type: ignore[misc]

    def test_step(self, data: Any) -> Any:
        return self._nanotf_step("test_step", super().test_step, data)  # type: ignore[misc]

    def _nanotf_step(self, name: str, step: Any, data: Any) -> Any:
        rows, share = data
        before = self._nanotf_share.set(share)
        try:
            if self._nanotf_may_be_empty:
                result = self._nanotf_step_or_stand_in(step, rows, share)
            else:
                result = step(rows)
            return self._nanotf_of_whole_batch(result) if name in self._nanotf_own_steps else result
        finally:
            self._nanotf_share.set(before)

    def _nanotf_of_whole_batch(self, result: Any) -> Any:
        """What the user's own step returns, where no metric will say it for the whole epoch."""
        if not isinstance(result, dict) or set(result) == {m.name for m in _metrics(self)}:
            return result
        share, context = self._nanotf_share, tf.distribute.get_replica_context()
        means = {}
        for name, value in result.items():
            value = tf.convert_to_tensor(value)
            if value.dtype.is_floating and value.shape.rank == 0:
                value = share.of(value)
                if is_keras_3():  # Keras 2 sums what steps return
                    value = context.all_reduce(tf.distribute.ReduceOp.SUM, value)
            means[name] = value
        return means

    def _nanotf_step_or_stand_in(self, step: Any, rows: Any, share: Any) -> Any:
        variables = _variables_of_this_rank(self)
        values = [variable.read_value() for variable in variables]
        result = step(rows)
        for variable, value in zip(variables, values):  # noqa: B905 - AutoGraph lacks `strict`
            variable.assign(tf.where(share > 0, variable.read_value(), value))
        return result

    def get_metrics_result(self) -> Any:
        """As in Keras; between steps, in one prepared function.

        There every metric variable is summed over the workers, and TensorFlow makes a new
        thread pool for each sum that is asked for eagerly.
        """
        stock = super().get_metrics_result  # type: ignore[misc]
        if not tf.executing_eagerly() or self.run_eagerly:  # type: ignore[attr-defined]
            return stock()
        if self._nanotf_metrics_result is None:
            type(self)._nanotf_metrics_result = staticmethod(tf.function(stock))
        return self._nanotf_metrics_result()

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Does nothing: `session` has built model, metrics and optimizer (Keras 3)."""


@tf.autograph.experimental.do_not_convert
def _variables_of_this_rank(model: Any) -> list[Any]:
    """Metrics and moving statistics: what differs between ranks until it is read."""
    variables = [keras_names.tf_variable(v) for v in model.non_trainable_variables]
    variables += keras_names.metric_variables(model)
    local = [v for v in variables if v.synchronization == tf.VariableSynchronization.ON_READ]
    return local + keras_names.moving_variables(model)


@tf.autograph.experimental.do_not_convert
def _metrics(model: Any) -> list[Any]:
    """A model's metrics, those inside Keras 3's container of compiled metrics among them."""
    found: list[Any] = []
    for metric in model.metrics:
        found += getattr(metric, "metrics", None) or [metric]
    return found


class _LossOfShareMixin:
    """For Keras 2, whose own `train_step` takes the gradient of what this returns."""

    _nanotf_share: keras_share.Share

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)  # type: ignore[misc]
        if loss is None or self._nanotf_share.current is None:
            return loss
        return self._nanotf_share.of(loss)


def become_replica(model: Any, share: keras_share.Share) -> None:
    """Turns a model into one whose steps take `(data, share)`; it stays the same object.

    Args:
        model: a built model; `keras_names.build_for_training` was called.
        share: `Share`, installed in this process.
    """
    cls = type(model)
    own_steps = frozenset(
        name
        for name in ("train_step", "test_step")
        if not keras_share.is_keras_own(getattr(cls, name))
    )
    mixins: tuple[type, ...] = (ReplicaMixin,)
    keras_share.follow_share(model, share)
    if "train_step" in own_steps:
        for optimizer in keras_names.optimizers_of(model):
            keras_share.weigh_gradients(optimizer, share)
    elif is_keras_3():
        keras_share.weigh_loss(model.optimizer, share)
    else:
        mixins = (ReplicaMixin, _LossOfShareMixin)
    body = {
        "__module__": cls.__module__,
        "_nanotf_share": share,
        "_nanotf_may_be_empty": True,
        "_nanotf_own_steps": own_steps,
        "_nanotf_metrics_result": None,
    }
    object.__setattr__(model, "__class__", type(cls.__name__, (*mixins, cls), body))
