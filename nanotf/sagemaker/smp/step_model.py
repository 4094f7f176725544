"""A model that steps may call, saved as a whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from nanotf.compat import graphs
from nanotf.compat.checkpointing import AskedByCheckpoints
from nanotf.compat.versions import is_keras_3
from nanotf.errors import JobError, ModelError, UnavailableError
from nanotf.sagemaker.smp import communication, partitioned, pipeline, runtime

SAVE_PATH = "/opt/ml/model"  # SageMaker uploads it at the end of a job


def _of_this_partition(name: str) -> property:
    """Returns a property of `tf.keras.Model`, limited to the variables that this process holds."""
    inherited = getattr(tf.keras.Model, name)

    def held(self: Any) -> list[Any]:
        found, known = inherited.fget(self), partitioned.of(self)
        return list(found) if known is None else known.held(found)

    return property(held)


class StepModel(AskedByCheckpoints, tf.keras.Model):  # type: ignore[misc]
    """A `tf.keras.Model` that steps call: the base of `smp.DistributedModel`.

    Args:
        *args, **kwargs: as for `tf.keras.Model`.

    Raises:
        JobError: The model is called outside a function decorated by `smp.step`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        models = runtime.calling.get()
        if models is None:
            raise JobError(
                "A smp.DistributedModel is called in a function decorated by smp.step. Received: "
                f"a call of {self.name!r} outside one. Put the call into such a function; for "
                "fit(), evaluate() and predict(), derive the model from tf.keras.Model."
            )
        if getattr(self, "_nanotf_spec", None) is None and args:
            self._nanotf_spec = tf.nest.map_structure(rows_spec, args[0])
        models.setdefault(self)
        runtime.called.setdefault(self)
        known = partitioned.of(self)
        # The model is whole in rank 0 while it is saved, and an export calls it.
        if runtime.mp_size() == 1 or (known is not None and known.is_whole):
            return super().__call__(*args, **kwargs)
        return pipeline.call(self, super().__call__, args, kwargs)

    variables = _of_this_partition("variables")
    trainable_variables = _of_this_partition("trainable_variables")
    non_trainable_variables = _of_this_partition("non_trainable_variables")
    weights = _of_this_partition("weights")
    trainable_weights = _of_this_partition("trainable_weights")
    non_trainable_weights = _of_this_partition("non_trainable_weights")

    @property
    def losses(self) -> list[Any]:
        """The losses of regularizers and `add_loss`, with one partition."""
        if not partitioned.is_part(self):
            return list(super().losses)
        with partitioned.begun(self).unlimited(), graphs.reading_released():
            found = super().losses
        if found:
            raise UnavailableError(
                "A model in several partitions has no losses of its own: each process knows those "
                f"of its own part alone. Received: {self.name!r} with {len(found)} losses of "
                "regularizers or add_loss. Return them from the model's call, or use "
                "partitions=1."
            )
        return []

    def save_model(self, save_path: str | os.PathLike[str] = SAVE_PATH) -> None:
        """Saves the whole model. Call it in all ranks; rank 0 writes.

        Args:
            save_path: str or path-like, default "/opt/ml/model", the folder of a SavedModel. Its
                endpoint `serve` computes without training. A path that ends in ".keras" or ".h5"
                gets a file of Keras; in ".weights.h5", the weights alone.

        Raises:
            ModelError: No step has called the model yet, so it has no variables.
        """
        spec = getattr(self, "_nanotf_spec", None)
        if spec is None:
            raise ModelError(
                "A model is saved after a step has called it. Received: save_model() of "
                f"{self.name!r}, which no step has called."
            )
        method, args, kwargs = file_call(save_path)
        with self._saving() as writes:
            if writes and method == "export":
                self._export(os.fspath(save_path), spec)
            elif writes:
                getattr(self, method)(*args, **kwargs)

    @contextlib.contextmanager
    def _saving(self) -> Iterator[bool]:
        """Makes the model whole in rank 0, in this context, which all ranks enter.

        Yields:
            True in rank 0, False elsewhere.
        """
        with contextlib.ExitStack() as stack:
            writes = runtime.rank() == 0
            if runtime.mp_size() > 1:  # rank 0 lacks the values of other partitions
                writes = stack.enter_context(partitioned.begun(self).whole())
            with runtime.allowed():
                yield writes
        communication.barrier()  # no rank continues before the file is complete

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Saves as `tf.keras.Model.save`. With several partitions, all ranks call it."""
        self._write("save", args, kwargs)

    def save_weights(self, *args: Any, **kwargs: Any) -> None:
        """Saves as `tf.keras.Model.save_weights`. With several partitions, all ranks call it."""
        self._write("save_weights", args, kwargs)

    def export(self, *args: Any, **kwargs: Any) -> None:
        """Exports as `tf.keras.Model.export`. With several partitions, all ranks call it."""
        self._write("export", args, kwargs)

    def _write(self, method: str, args: Any, kwargs: Any) -> None:
        inherited = getattr(super(), method)
        if not partitioned.is_part(self):
            inherited(*args, **kwargs)
            return
        with self._saving() as writes:
            if writes:
                inherited(*args, **kwargs)

    def load_weights(self, *args: Any, **kwargs: Any) -> None:
        """Loads as `tf.keras.Model.load_weights`, with one partition."""
        self._check_whole("load_weights()", "smp.CheckpointManager restores a model in partitions")
        super().load_weights(*args, **kwargs)

    def get_weights(self) -> Any:
        """Returns what `tf.keras.Model.get_weights` does, with one partition."""
        self._check_whole("get_weights()", "`weights` has the variables of this partition")
        return super().get_weights()

    def set_weights(self, weights: Any) -> None:
        """Does what `tf.keras.Model.set_weights` does, with one partition."""
        self._check_whole("set_weights()", "assign to the variables in `weights`")
        super().set_weights(weights)

    def _check_whole(self, call: str, remedy: str) -> None:
        if partitioned.is_part(self):
            raise ModelError(
                f"Each process holds the weights of one partition. Received: {call} of "
                f"{self.name!r}, in partition {runtime.mp_rank()}. Instead, {remedy}; "
                "save_model(path), called in all ranks, writes the whole model."
            )

    def count_params(self) -> int:
        """Returns the number of the whole model's parameters, those of other partitions too."""
        with partitioned.begun(self).unlimited():
            return int(super().count_params())

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """Prints the summary of the whole model."""
        with partitioned.begun(self).unlimited():
            super().summary(*args, **kwargs)

    def check_checkpoint(self) -> None:
        """Raises `ModelError` with several partitions: a checkpoint would have one of them."""
        if partitioned.is_part(self):
            partitioned.check_checkpoint(self.name)

    def profile(self, *args: Any, **kwargs: Any) -> None:
        """Raises `UnavailableError`: the first step measures the layers by itself."""
        raise UnavailableError(
            "auto_partition measures the model's layers before the first step, so nothing is left "
            f"to profile. Received: a call of profile() of {self.name!r}. Leave it out; "
            "smp.last_report() tells the times of a step."
        )

    def _export(self, path: str, spec: Any) -> None:
        # `export` of Keras 3 describes the inputs by what it recorded when it built the model,
        # which is a microbatch with a fixed number of rows.
        archive = tf.keras.export.ExportArchive()
        archive.track(self)
        archive.add_endpoint("serve", lambda x: self(x, training=False), [spec])
        archive.write_out(path, verbose=False)


def file_call(save_path: str | os.PathLike[str]) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Returns the method of a model of Keras that writes a file, and its arguments.

    Args:
        save_path: as in `StepModel.save_model`.
    """
    path = os.fspath(save_path)
    if path.endswith(".weights.h5"):
        return "save_weights", (path,), {}
    if path.endswith((".keras", ".h5")):
        return "save", (path,), {}
    if is_keras_3():
        return "export", (path,), {}
    return "save", (path,), {"save_format": "tf"}


def rows_spec(tensor: Any) -> Any:
    """Returns the `tf.TensorSpec` of a tensor, variable or symbol, for any number of rows."""
    if tensor is None:
        return None
    if not hasattr(tensor, "shape"):  # a number
        tensor = tf.convert_to_tensor(tensor)
    shape = tf.TensorShape(tensor.shape)
    return tf.TensorSpec([None, *shape[1:]] if shape.rank else shape, tensor.dtype)
