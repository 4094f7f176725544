"""Optimizers: `from nanotf.optimizers import SparseAdam`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from nanotf.compat import keras_common, keras_models, keras_optimizers
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import InvalidArgumentError
from nanotf.keras.models import KerasTwin
from nanotf.region.sparse_gradients import SummedRows

__all__ = ["SparseAdam"]

_KerasAdam: Any = keras_optimizers.adam_class()
_tf: Any = require_tensorflow()


class SparseAdam(SummedRows, _KerasAdam, metaclass=KerasTwin):  # type: ignore[misc]
    r"""Adam that updates only the embedding rows used in the batch.

    For a dense gradient it is Keras's `Adam`. For a sparse gradient (`tf.IndexedSlices`, the
    gradient of embedding lookups), let g_i be the sum of all its values with index i, theta_i, m_i
    and v_i row i of the variable and its moments, and t the number of this step, counting all
    steps, even the steps that did not touch row i. Then, for every i that occurs:

        m_i     <- beta_1 m_i + (1 - beta_1) g_i
        v_i     <- beta_2 v_i + (1 - beta_2) g_i^2
        theta_i <- theta_i - learning_rate sqrt(1 - beta_2^t) / (1 - beta_1^t)
                             m_i / (sqrt(v_i) + epsilon)

    Nothing else changes. With `amsgrad`, sqrt(v_i) uses the largest v_i of the steps that
    touched row i.

    Adam applies the same formulas to all rows, with g_i = 0 for rows that do not occur: their
    moments decay, and the rest of m_i still moves them. So the two differ as soon as a step
    leaves out a row that was touched before; they agree if each step touches every row.
    (Keras 3's Adam also differs for a row that occurs several times: it adds the squares of the
    values instead of squaring their sum.) A step takes time and memory for the rows of the
    batch; Adam's takes them for the whole table.

    PyTorch's SparseAdam and the LazyAdam of TensorFlow Addons do the same, including the bias
    correction by the global step.

    Keras still changes whole variables, at their full cost: `weight_decay` shrinks all rows at
    each step, unless Keras's method exclude_from_weight_decay names the embedding, and `use_ema`
    averages all rows. Clipping sees the summed rows.

    With `jit_compile=True` in one process, the shape of the batch must determine how many rows a
    step looks up. If it does not (after a `tf.boolean_mask` or `tf.unique` in the model), the
    results are wrong: rows are summed with `tf.unique`, which XLA then gets wrong.

    A saved model that was compiled with it loads once `nanotf.keras` or this module is imported;
    Keras without nanotf loads it with `compile=False`.

    Args:
        *args, **kwargs: as for `tf.keras.optimizers.Adam`.

    Raises:
        InvalidArgumentError: `gradient_accumulation_steps` is given (accumulated gradients are
            dense), or `loss_scale_factor` (Keras cannot divide sparse gradients by it).

    Example:
        >>> model.compile(nanotf.optimizers.SparseAdam(1e-3), "sparse_categorical_crossentropy")
        >>> model.fit(tokens, labels, num_processes=4)
    """

    if TYPE_CHECKING:  # the arguments that both Keras generations take

        def __init__(
            self,
            learning_rate: Any = 0.001,
            beta_1: float = 0.9,
            beta_2: float = 0.999,
            epsilon: float = 1e-07,
            *,
            amsgrad: bool = False,
            weight_decay: float | None = None,
            clipnorm: float | None = None,
            clipvalue: float | None = None,
            global_clipnorm: float | None = None,
            use_ema: bool = False,
            ema_momentum: float = 0.99,
            ema_overwrite_frequency: int | None = None,
            **kwargs: Any,
        ) -> None: ...
    else:

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._check_options()

    def _check_options(self) -> None:
        for name, reason, remedy in (
            (
                "gradient_accumulation_steps",
                "accumulate gradients: their sum is dense, and every row would count as touched",
                "Make the batch larger, or use tf.keras.optimizers.Adam.",
            ),
            (
                "loss_scale_factor",
                "scale the loss by itself: Keras cannot divide a sparse gradient by a number",
                "Use tf.keras.mixed_precision.LossScaleOptimizer(SparseAdam(...)).",
            ),
        ):
            value = getattr(self, name, None)
            if value is not None:
                raise InvalidArgumentError(
                    f"SparseAdam cannot {reason}. Received: {name}={value}. {remedy}"
                )

    def update_step(self, gradient: Any, variable: Any, *learning_rate: Any) -> None:
        """Updates one variable; called by Keras.

        Args:
            gradient: dense tensor, or `tf.IndexedSlices` in which each row occurs once.
            variable: `tf.Variable`.
            *learning_rate: in Keras 3, the scalar tensor.
        """
        if not isinstance(gradient, _tf.IndexedSlices):
            super().update_step(gradient, variable, *learning_rate)
            return
        variable = keras_common.tf_variable(variable)
        dtype = variable.dtype
        rate = _tf.cast(learning_rate[0] if learning_rate else self.learning_rate, dtype)
        step = _tf.cast(self.iterations + 1, dtype)
        correction = _tf.sqrt(1 - _tf.pow(_in(self.beta_2, dtype), step))
        alpha = rate * correction / (1 - _tf.pow(_in(self.beta_1, dtype), step))
        epsilon = self.epsilon
        if getattr(self, "adaptive_epsilon", False):  # tf_keras from 2.21 on
            epsilon = epsilon * correction
        first, second, largest = keras_optimizers.adam_slots(self, variable)
        rows, values = gradient.indices, _tf.cast(gradient.values, dtype)
        m = _moved(first, rows, values, 1 - self.beta_1)
        v = _moved(second, rows, _tf.square(values), 1 - self.beta_2)
        if largest is not None:
            v = _tf.maximum(_tf.gather(largest, rows), v)
            largest.scatter_update(_tf.IndexedSlices(v, rows))
        change = m * alpha / (_tf.sqrt(v) + epsilon)
        # Takes two thirds of the time of `scatter_sub`.
        variable.scatter_update(_tf.IndexedSlices(_tf.gather(variable, rows) - change, rows))


def _in(number: Any, dtype: Any) -> Any:
    """Converts a number or a tensor to a tensor; `tf.cast` would round numbers to float32."""
    return _tf.cast(number, dtype) if _tf.is_tensor(number) else _tf.constant(number, dtype)


def _moved(variable: Any, rows: Any, target: Any, part: Any) -> Any:
    """Moves rows of a variable toward `target`, by `part` of the distance. Returns them."""
    before = _tf.gather(variable, rows)
    after = before + (target - before) * part
    variable.scatter_update(_tf.IndexedSlices(after, rows))
    return after


class AdamInPlace(SparseAdam):
    """A `SparseAdam` that replaces Adam, see `patching`. It takes all of Adam's arguments."""

    def _check_options(self) -> None:
        """Accepts all options: gradients are then dense, as in Keras's Adam, or Keras fails."""


class Adam(AdamInPlace):
    """The class behind `tf.keras.optimizers.Adam` while TensorFlow is patched.

    Saved models name Keras's class, so that they load without nanotf. The variables are the same.
    """


_init: Any = SparseAdam.__init__
_init.__signature__ = inspect.signature(_KerasAdam.__init__)
# Saved models use this name; `nanotf.keras` imports this module, so that they load.
_tf.keras.utils.register_keras_serializable("nanotf")(SparseAdam)
Adam._nanotf_original = AdamInPlace  # workers create this class
Adam.__module__ = _KerasAdam.__module__
keras_models.save_as(Adam, _KerasAdam)
