"""Sparse gradients in optimizers.

`SummedRows` overrides Keras's private methods, which `compat.keras_optimizers` lists.
"""

from __future__ import annotations

from typing import Any

from nanotf.compat.versions import require_tensorflow
from nanotf.region import rows, scope


class SummedRows:
    """Mixed in before an optimizer class to which a sparse gradient is its sum by rows.

    A row that occurs several times in a `tf.IndexedSlices` counts as the sum of its values, in
    clipping, too, for which Keras takes them one by one. So they can be summed in each worker
    before it sends them.

    Without workers each gradient is summed once, since XLA cannot do it twice, see `sum_rows`.
    """

    def aggregate_gradients(self, grads_and_vars: Any) -> Any:
        """Keras 2's sum over workers; those of other workers may bring the same rows."""
        if _has_replicas():
            grads_and_vars = [(sum_rows(grad), variable) for grad, variable in grads_and_vars]
        return super().aggregate_gradients(grads_and_vars)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        """Does what both generations do first with the gradients of an update."""
        tf = require_tensorflow()
        grads = [sum_rows(_joined_of_sums(gradient)) for gradient in grads]
        limit = getattr(self, "global_clipnorm", None)
        if limit and any(isinstance(gradient, tf.IndexedSlices) for gradient in grads):
            return tf.clip_by_global_norm(grads, limit)[0]  # Keras 3 would make them dense
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def _deduplicate_sparse_grad(self, grads: Any) -> Any:
        """Keras 2 would sum them again."""
        return grads

    def _all_reduce_sum_gradients(self, grads_and_vars: Any) -> Any:
        """Keras 3's sum over replicas of TensorFlow's own strategies comes after clipping."""
        pairs = super()._all_reduce_sum_gradients(grads_and_vars)  # type: ignore[misc]
        return [(sum_rows(grad), var) for grad, var in pairs] if _has_replicas() else pairs


def _has_replicas() -> bool:
    return bool(require_tensorflow().distribute.get_strategy().num_replicas_in_sync > 1)


def _joined_of_sums(gradient: Any) -> Any:
    """A sum over workers of sparse gradients, of which each has sent the sums of its rows."""
    tf = require_tensorflow()
    part = rows.part_of(gradient)
    if scope.exchange is None or not isinstance(part, tf.IndexedSlices):
        return gradient
    return rows.joined_slices(scope.exchange, sum_rows(part))


def sum_rows(gradient: Any) -> Any:
    """A sparse gradient in which each row occurs once; others as they are.

    In what XLA compiles the length of the result is known only when it runs. XLA's `tf.unique`
    takes the padding of such a vector for rows, so the result must not be summed again there.
    """
    tf = require_tensorflow()
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, gradient.dense_shape)
