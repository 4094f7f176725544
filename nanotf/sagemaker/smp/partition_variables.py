"""The variables of a model of which each process holds a part.

While the model's call is traced, variables are made without values (`Variables.create`). Once the
call is cut, `Variables.keep` gives values to those of this process's partition and takes those of
others that the model had before. All processes run all initializers, in the order in which one
process does, since initializers without a seed may draw theirs from a common generator. Only one
value that is not kept exists at a time.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from nanotf.compat import graphs, values
from nanotf.compat.keras_common import tf_variable
from nanotf.errors import ModelError
from nanotf.sagemaker.smp.cut import EVERYWHERE
from nanotf.sagemaker.smp.step_seeds import drawing_from


class Variables:
    """The variables of one model."""

    def __init__(self) -> None:
        self.partitions: dict[int, int] = {}  # by the id of the handle
        self.all: list[Any] = []  # in the same order in all partitions
        self._initializers: list[tuple[Any, Any]] = []  # variables without values, and their values

    def create(self, next_creator: Callable[..., Any], **arguments: Any) -> Any:
        """Makes a variable without a value; a variable creator of `tf.variable_creator_scope`."""
        value = arguments["initial_value"]
        with tf.init_scope():
            if callable(value):
                # Traced, not computed. An initializer of Keras 2 draws its seed in its first call.
                with drawing_from(None):
                    spec = tf.function(value, autograph=False).get_concrete_function()
                shape, dtype = spec.output_shapes, spec.output_dtypes
            else:
                value = tf.convert_to_tensor(value, dtype=arguments.get("dtype"))
                shape, dtype = value.shape, value.dtype
            made = values.uninitialized(shape, dtype, arguments)
        self._initializers.append((made, value))
        self.all.append(made)
        return made

    def keep(self, partitions: Mapping[int, int], stage: int, existing: Iterable[Any]) -> None:
        """Gives values to the variables of this process's partition, and frees all others.

        Args:
            partitions: by the id of a variable's handle, for those that the call uses. All
                processes hold the others, such as those of metrics.
            stage: this process's partition.
            existing: the model's variables.

        Raises:
            ModelError: An earlier call has put some into other partitions.
        """
        self._check_stay(partitions)
        self.partitions.update(partitions)
        for variable, value in self._initializers:
            with warnings.catch_warnings():
                # Keras 2 warns of an initializer that gives the same values twice, as it must here.
                warnings.filterwarnings("ignore", ".*called multiple times", UserWarning)
                initial = value() if callable(value) else value
            if self.partition_of(variable) in (stage, EVERYWHERE):
                variable.assign(initial)
            else:
                self._release(variable)
        self._initializers = []
        known = {id(variable) for variable in self.all}
        # Keras 2's casting variables wrap the one that has the value.
        for variable in (values.behind(tf_variable(each)) for each in existing):
            if id(variable) not in known:
                self.all.append(variable)
                if self.partition_of(variable) not in (stage, EVERYWHERE):
                    self._release(variable)

    def _check_stay(self, partitions: Mapping[int, int]) -> None:
        places = {**partitions, **self.partitions}  # those of earlier calls, where there are any
        moved = [
            f"{variable.name!r}, in partition {places[handle]} and now in {partitions[handle]}"
            for variable, handle in ((each, id(each.handle)) for each in self.all)
            if handle in partitions and places[handle] != partitions[handle]
        ]
        if moved:
            raise ModelError(
                "A variable stays in the partition that has it after the model's first call. "
                f"Received: another kind of call that uses {'; '.join(moved[:3])}. Let each call "
                "use it in the same part of the model, or use partitions=1."
            )

    def _release(self, variable: Any) -> None:
        graphs.release(
            variable,
            "Each process holds the variables of one partition. Received: a read of "
            f"{variable.name!r}, which is in partition {self.partition_of(variable)}. "
            "Read `model.weights`, those of this one; save_model(path) in all ranks writes all.",
        )

    def partition_of(self, variable: Any) -> int | None:
        """Returns the partition of a variable, of either generation of Keras."""
        return self.partitions.get(id(tf_variable(variable).handle), EVERYWHERE)

    def held_by(self, stage: int) -> list[Any]:
        """Returns the variables that a partition's process holds."""
        return [v for v in self.all if self.partition_of(v) in (stage, EVERYWHERE)]

    @contextlib.contextmanager
    def gathered(self, box: Any, ranks: Sequence[int], stage: int) -> Iterator[None]:
        """Gives the first partition's process the values of all variables, in this context.

        All processes of one copy of the model call this.

        Args:
            ranks: by partition.
            stage: this process's partition.
        """
        owners = [(v, self.partition_of(v)) for v in self.all]
        # Not of 0, the first partition, nor of None, all partitions.
        elsewhere = [(v, owner) for v, owner in owners if owner]
        for variable, owner in elsewhere:  # one by one: a process sends no copy of all at once
            if stage == owner:
                box.send(ranks[0], "smp: variable", [variable.numpy()])
            elif stage == 0:
                (value,) = box.receive(ranks[owner], "smp: variable", "smp: a model that is saved")
                graphs.refill(variable, value)
        try:
            yield
        finally:
            for variable, _ in elsewhere if stage == 0 else []:
                self._release(variable)
