"""`smp.DistributedModel`."""

from __future__ import annotations

from typing import Any

from nanotf.sagemaker.smp import config as configs
from nanotf.sagemaker.smp import from_keras, keras_checks, runtime, workers_model
from nanotf.sagemaker.smp.step_model import StepModel


class DistributedModel(StepModel):
    """A `tf.keras.Model` for `smp.step`. Derive from it, and implement `call`.

    Args:
        *args, **kwargs: as for `tf.keras.Model`.

    Raises:
        JobError: The model is called outside a function decorated by `smp.step`.
    """

    @staticmethod
    def from_keras(model: Any, partitions: int | None = None, **config: Any) -> Any:
        """Returns a functional or Sequential model as one for several processes, with `fit`.

        In a script that runs as one process, several partitions are trained in worker processes
        that `fit` starts; the model stays here, whole. Under `nanotf run --smp`, each rank keeps
        the weights of its partition and frees the others, so the given model cannot be used
        anymore.

        Args:
            model: a functional or Sequential `tf.keras.Model` of known input shape. It need not be
                compiled; the new model must be.
            partitions: int or None, with which this calls `smp.init`; None if the script has
                called it.
            **config: further keys for `smp.init`, such as `microbatches=4`.

        Returns:
            A `from_keras.KerasModel` with `compile`, `fit`, `evaluate`, `predict`, `save` and
            `save_weights`. All ranks call them with the same arguments. In a script that runs as
            one process, and for several partitions, a `workers_model.WorkersModel`, whose methods
            take `num_processes`, too.

        Raises:
            InvalidArgumentError, InvalidArgumentTypeError: The configuration breaks a rule.
            ModelError: The model is of another kind, or cannot be cut.
            UnavailableError: It has steps of its own, masked outputs, or, with several partitions,
                losses of regularizers.

        Example:
            >>> model = smp.DistributedModel.from_keras(model, partitions=2, microbatches=4)
            >>> model.compile("adam", "mse")
            >>> model.fit(x, y, num_processes=4)  # two copies of two partitions
        """
        if partitions is not None:
            config["partitions"] = partitions
        if config and not runtime.is_rank() and configs.check(config).partitions > 1:
            keras_checks.check(model, config["partitions"])
            return workers_model.WorkersModel(model, config)
        if config:  # else the script has called `smp.init`
            runtime.init(config)
        keras_checks.check(model, runtime.mp_size())
        return from_keras.KerasModel(model)
