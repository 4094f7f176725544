"""Sparse gradients in optimizers.

`SummedRows` overrides Keras's private methods, which `compat.keras_optimizers` lists.
"""

from __future__ import annotations

from typing import Any

from nanotf.compat.versions import require_tensorflow
from nanotf.region import rows, scope


class SummedRows:
    """A mixin, before an optimizer class, that replaces a sparse gradient by its sum by rows.

    A row that occurs several times in a `tf.IndexedSlices` counts as the sum of its values. This
    includes clipping, where Keras takes each value separately. So each worker can sum them before
    it sends them.

    Without workers it sums each gradient once, since XLA cannot do it twice; see `sum_rows`.
    """

    def aggregate_gradients(self, grads_and_vars: Any) -> Any:
        """Sums over workers in Keras 2; other workers' gradients may have the same rows."""
        if _has_replicas():
            grads_and_vars = [(sum_rows(grad), variable) for grad, variable in grads_and_vars]
        return super().aggregate_gradients(grads_and_vars)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        """Clips gradients, the first action of an update in both generations."""
        tf = require_tensorflow()
        # Joined sums of several workers may be of one row, and are summed once more.
        grads = [sum_rows(joined_of_sums(gradient)) for gradient in grads]
        limit = getattr(self, "global_clipnorm", None)
        if limit and any(isinstance(gradient, tf.IndexedSlices) for gradient in grads):
            return tf.clip_by_global_norm(grads, limit)[0]  # Keras 3 would make them dense
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def _deduplicate_sparse_grad(self, grads: Any) -> Any:
        """Returns gradients unchanged: Keras 2 would sum them again."""
        return grads

    def _all_reduce_sum_gradients(self, grads_and_vars: Any) -> Any:
        """Sums over replicas of TensorFlow's own strategies; Keras 3 does this after clipping."""
        pairs = super()._all_reduce_sum_gradients(grads_and_vars)  # type: ignore[misc]
        return [(sum_rows(grad), var) for grad, var in pairs] if _has_replicas() else pairs


def _has_replicas() -> bool:
    return bool(require_tensorflow().distribute.get_strategy().num_replicas_in_sync > 1)


def joined_of_sums(gradient: Any) -> Any:
    """Joins the sparse gradients of all workers, each of which sends the sums of its rows."""
    tf = require_tensorflow()
    part = rows.part_of(gradient)
    if scope.exchange is None or not isinstance(part, tf.IndexedSlices):
        return gradient
    return rows.joined_slices(scope.exchange, sum_rows(part))


def sum_rows(gradient: Any) -> Any:
    """Returns a sparse gradient with each row once; returns other gradients unchanged.

    In code compiled by XLA, the length of the result is known only at run time. XLA's `tf.unique`
    takes the padding of such a vector for rows, so the result must not be summed again there.
    """
    tf = require_tensorflow()
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, gradient.dense_shape)
