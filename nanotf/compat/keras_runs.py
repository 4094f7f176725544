"""The runs of `fit`, `evaluate` and `predict` in both Keras generations: limits, validation, counts.

| name | generation, versions seen | why |
| --- | --- | --- |
| `backend.tensorflow.trainer.potentially_ragged_concat`, `engine.training.` | 3 / 2 | how `predict` joins batches whose outputs differ in shape |
"""

from __future__ import annotations

from typing import Any

from nanotf.compat.generation import generation
from nanotf.compat.keras_common import flat_layers, source_module, tf_variable
from nanotf.compat.versions import require_tensorflow


def is_validated(model: Any, epoch: int | None, validation_freq: Any) -> bool:
    """Returns True if `fit` evaluates the model after an epoch, counted from 0."""
    return bool(model._should_eval(epoch, validation_freq))


def validate(model: Any, data: Any, batch_size: Any, steps: Any, callbacks: Any) -> Any:
    """Calls a model's own `evaluate` as Keras's `fit` calls it at the end of an epoch.

    Args:
        model: a Keras model.
        data: tuple of x, y and sample weights, of `validation_data`.
        batch_size: int or None.
        steps: int or None, `validation_steps`.
        callbacks: a `CallbackList`.

    Returns:
        What `evaluate` returns, a dict of str to float.
    """
    x, y, sample_weight = data
    given = {"x": x, "y": y, "sample_weight": sample_weight, "batch_size": batch_size}
    generation().keep_validation_data(model, given, steps)
    # The last argument makes it read what `keep_validation_data` has opened.
    return model.evaluate(
        **given, steps=steps, callbacks=callbacks, return_dict=True, _use_cached_eval_dataset=True
    )


def forget_validation_data(model: Any) -> None:
    """Drops the `validation_data` that a `fit` kept when it ended by an exception.

    The next `fit` would validate on them (Keras 2, and Keras 3 before 3.15).
    """
    for name in ("_eval_epoch_iterator", "_eval_data_handler"):  # Keras 3's, Keras 2's
        if hasattr(model, name):
            delattr(model, name)


def run_limits() -> tuple[int | None, int | None]:
    """Returns Keras 3's limits on epochs and on steps per epoch; None is no limit.

    Newer versions set both publicly: `keras.config.set_max_epochs`, `set_max_steps_per_epoch`.
    """
    config: Any = getattr(require_tensorflow().keras, "config", None)
    if not hasattr(config, "max_epochs"):
        return None, None
    return config.max_epochs(), config.max_steps_per_epoch()


def set_run_limits(epochs: int | None, steps: int | None) -> None:
    """Sets what `run_limits` returns, if this version has it."""
    config: Any = getattr(require_tensorflow().keras, "config", None)
    if hasattr(config, "max_epochs"):
        config.set_max_epochs(epochs)
        config.set_max_steps_per_epoch(steps)


def join_batches(batches: list[Any]) -> Any:
    """Joins the outputs of batches as `predict` does: ragged where their shapes differ.

    Args:
        batches: list of tensors, dense, ragged or sparse, with one row for each sample.

    Returns:
        A `numpy.ndarray`, or a ragged or sparse tensor.
    """
    joined = source_module(generation().TRAINER).potentially_ragged_concat(batches)
    return joined.numpy() if isinstance(joined, require_tensorflow().Tensor) else joined


def step_count(model: Any, method: str) -> int | None:
    """Returns the number of batches of the last `evaluate` or `predict`, if Keras counts them.

    Args:
        model: a Keras model.
        method: "evaluate" or "predict".
    """
    counter = generation().pass_counter(model, method)
    return None if counter is None else int(counter.numpy())


def counters_of_steps(model: Any) -> list[Any]:
    """Returns the variables in which Keras counts a model's batches and its optimizer's steps."""
    # With accumulated gradients the number is computed from another, and is no variable.
    steps = getattr(getattr(model, "optimizer", None), "iterations", None)
    counted = [tf_variable(steps)] if hasattr(steps, "assign") else []
    return generation().step_counters(model) + counted


def set_step_count(model: Any, method: str, steps: int | None) -> None:
    """Sets what `step_count` returns; None changes nothing."""
    if steps is not None:
        generation().pass_counter(model, method).assign(steps)


def counting_generators(owner: Any) -> list[Any]:
    """Returns the generators of Keras 2's layers that have a seed: each trace takes the next."""
    found = [getattr(layer, "_random_generator", None) for layer in flat_layers(owner)]
    return [each for each in found if getattr(each, "_seed", None) is not None]
