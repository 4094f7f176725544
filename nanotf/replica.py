"""What a worker's model does differently from the user's."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from nanotf.compat import keras_names


class ReplicaMixin:
    """Mixed in before the user's class.

    A step gets `(data, share)`: this worker's rows of the global batch, and the part of the
    global batch that they are, as a scalar float64 tensor. A share of 0 means that the rows
    stand in for none, and must leave no trace in metrics or moving statistics.
    """

    # All are set on the class that `become_replica` makes, one for each model.
    _nanotf_share: keras_names.LossShare
    _nanotf_update: Any
    _nanotf_may_be_empty: bool
    _nanotf_metrics_result: Any

    def train_step(self, data: Any) -> Any:
        return self._nanotf_step(super().train_step, data)  # type: ignore[misc]

    def test_step(self, data: Any) -> Any:
        return self._nanotf_step(super().test_step, data)  # type: ignore[misc]

    def _nanotf_step(self, step: Any, data: Any) -> Any:
        rows, share = data
        before = self._nanotf_share.set(share)
        try:
            if self._nanotf_may_be_empty:
                return self._nanotf_step_or_stand_in(step, rows, share)
            return step(rows)
        finally:
            self._nanotf_share.set(before)

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
    return [v for v in variables if v.synchronization == tf.VariableSynchronization.ON_READ]


def become_replica(model: Any, share: keras_names.LossShare, update: Any = None) -> None:
    """Turns a model into one whose steps take `(data, share)`; it stays the same object.

    Args:
        model: a Keras model, in a worker.
        share: `LossShare`.
        update: `optimizer_shards.ShardedUpdate`, or None where each worker updates everything.
    """
    cls = type(model)
    body = {
        "__module__": cls.__module__,
        "_nanotf_share": share,
        "_nanotf_update": update,
        "_nanotf_may_be_empty": True,
        "_nanotf_metrics_result": None,
    }
    object.__setattr__(model, "__class__", type(cls.__name__, (ReplicaMixin, cls), body))
