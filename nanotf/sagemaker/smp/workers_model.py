"""A model in partitions for a plain script: `fit` in worker processes, the model here.

    WorkersModel._call      the model, its compile arguments, the optimizer's state, the data
      joint_items.together    ... to N workers, the ranks, with the ends of a mailbox
        in_workers.run_rank     a `KerasModel` there: cut, compile, fit
      WorkersModel._take      each rank returns what it holds: variables, slots

Between two calls this process has the whole model and the values of the optimizer's slots, in the
shared memory where the ranks have written them. For a call, they are copied into that which the
ranks read, and this process lets the old one go. So they lie once in shared memory while ranks
train, and a call that fails changes neither.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf import console
from nanotf.compat import eager_context, keras_optimizers, values
from nanotf.compat.chance import Chance
from nanotf.compat.generation import generation
from nanotf.compat.keras_common import holds_numbers, tf_variable
from nanotf.errors import InvalidArgumentError, UnavailableError, WorkerDied
from nanotf.machine import topology
from nanotf.parent.map import joint_items
from nanotf.pool.stalls import stall_seconds
from nanotf.sagemaker.smp import config as configs
from nanotf.sagemaker.smp import keras_checks, rank_groups, step_report
from nanotf.sagemaker.smp.in_workers import OptimizerState, RankResult, callbacks_of, run_rank
from nanotf.sagemaker.smp.mailboxes.mailbox_owner import MailboxOwner, supervised
from nanotf.sagemaker.smp.step_model import SAVE_PATH, file_call
from nanotf.shipping.objects import pickling
from nanotf.shipping.objects.identities import data_classes

Array = np.ndarray[Any, Any]


class WorkersModel:
    """A Keras model that is trained in partitions, in worker processes of this one.

    `smp.DistributedModel.from_keras` makes it in a script that runs as one process. Whatever it
    does not define itself is the model's: `summary`, `layers`, `trainable` ... Files have the
    weights, and not what `compile` got.

    Args:
        model: a functional or Sequential model that passes `keras_checks.check`.
        config: mapping, the configuration of smp.

    Attributes:
        original: the model. After each call it has the trained weights.
        optimizer: the optimizer that `compile` got. Set its `learning_rate` between calls.
    """

    original: Any
    optimizer: Any
    _given: dict[str, Any]  # each rank passes it to `smp.init`
    _config: configs.Config
    _compiled: dict[str, Any] | None  # without the optimizer; None until `compile`
    _state: OptimizerState  # of the last `fit`: the optimizer here is never built
    _earlier: dict[str, int]  # by method, the calls since `compile` and `tf.random.set_seed`
    _seeding: int  # tells calls of `tf.random.set_seed`

    def __init__(self, model: Any, config: Mapping[str, Any]) -> None:
        self.original, self.optimizer, self._compiled = model, None, None
        self._given, self._config = dict(config), configs.check(config)
        self._state, self._earlier = OptimizerState(), {}
        self._seeding = eager_context.seeding()

    def __getattr__(self, name: str) -> Any:
        if name == "original":  # not yet set, as in a copy
            raise AttributeError(name)
        return getattr(self.original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in WorkersModel.__annotations__:
            object.__setattr__(self, name, value)
        else:  # such as `trainable`
            setattr(self.original, name, value)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles as `tf.keras.Model.compile`, without `jit_compile` and `steps_per_execution`.

        Raises:
            UnavailableError: An argument or the optimizer cannot be used in partitions.
        """
        given = keras_checks.compile_arguments(args, kwargs)
        optimizer = tf.keras.optimizers.get(given.pop("optimizer", "rmsprop"))
        keras_checks.check_optimizer(optimizer, self._config.partitions)
        legacy = keras_optimizers.is_legacy(optimizer)
        if legacy or keras_optimizers.is_built(optimizer):
            kind = "one of tf.keras.optimizers.legacy" if legacy else "one that is built"
            raise UnavailableError(
                "Each rank builds the optimizer for the variables that it holds. Received: "
                f"{kind}, {optimizer!r}. Pass a new optimizer of tf.keras.optimizers."
            )
        if optimizer is not self.optimizer:  # else it has its slots, as Keras's own would
            self._state = OptimizerState()
        self.optimizer, self._compiled = optimizer, given
        self._earlier.clear()  # as in Keras, steps are traced anew and draw from the beginning

    def fit(self, *args: Any, num_processes: int | None = None, **kwargs: Any) -> Any:
        """Trains as `tf.keras.Model.fit`, in partitions.

        Callbacks run in all ranks; those of rank 0 come back with their attributes.

        Args:
            *args, **kwargs: as for `tf.keras.Model.fit`. The data are arrays.
            num_processes: int or None, the number of workers, divisible by that of partitions.
                None, the default, starts one for each partition; more train copies of the model.

        Returns:
            The `History`.

        Raises:
            InvalidArgumentError: The number is not divisible.
            PlacementError: There are fewer cores than workers.
            ShippingError: An argument cannot be sent to the workers.
            UnavailableError: The data are no arrays. Or the optimizer has state that differs
                between partitions and is no slot: a number, or from the second call on anything.
            WorkerError: A worker has failed. The model is as it was before the call.
        """
        return self._call("fit", args, kwargs, num_processes)

    def evaluate(self, *args: Any, num_processes: int | None = None, **kwargs: Any) -> Any:
        """Evaluates as `tf.keras.Model.evaluate`, in partitions. Arguments as of `fit`."""
        return self._call("evaluate", args, kwargs, num_processes)

    def predict(self, *args: Any, num_processes: int | None = None, **kwargs: Any) -> Any:
        """Predicts as `tf.keras.Model.predict`, in partitions. Arguments as of `fit`."""
        return self._call("predict", args, kwargs, num_processes)

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Raises `UnavailableError`: workers would begin anew for each batch."""
        raise self._no_batch("train_on_batch", "fit(x, y, batch_size=len(x))")

    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Raises `UnavailableError`: workers would begin anew for each batch."""
        raise self._no_batch("test_on_batch", "evaluate(x, y, batch_size=len(x))")

    def _no_batch(self, method: str, remedy: str) -> UnavailableError:
        return UnavailableError(
            f"A model in partitions trains in worker processes, by fit(). Received: {method}() of "
            f"{self.original.name!r}. Use {remedy}, or start the script with `nanotf run --smp`."
        )

    def save_model(self, save_path: str | os.PathLike[str] = SAVE_PATH) -> None:
        """Saves as `DistributedModel.save_model`. Plain Keras loads the files, too."""
        method, args, options = file_call(save_path)
        self._write(method, args, options)

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Saves as `tf.keras.Model.save`, not compiled."""
        self._write("save", args, kwargs)

    def save_weights(self, *args: Any, **kwargs: Any) -> None:
        """Saves as `tf.keras.Model.save_weights`, without the optimizer's state."""
        self._write("save_weights", args, kwargs)

    def _write(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with generation().uncompiled(self.original):
            getattr(self.original, method)(*args, **kwargs)

    def _call(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], size: int | None
    ) -> Any:
        given = keras_checks.named(method, args, kwargs)
        if self._compiled is None:
            raise InvalidArgumentError(
                f"{method}() needs a compiled model. Received: {self.original.name!r}, which is "
                "not compiled. Call compile() of the model that from_keras has returned."
            )
        _check_data(given)
        if method == "fit":
            self._check_state()
        if self._seeding != eager_context.seeding():
            self._seeding = eager_context.seeding()
            self._earlier.clear()
        size = self._config.partitions if size is None else topology.check_num_processes(size)
        labels = [self._label(rank, size) for rank in range(size)]
        # Read in each call: the user may have set the learning rate.
        early = [v.numpy() for v in keras_optimizers.optimizer_variables(self.optimizer)]
        shared = {
            "size": size,
            "config": self._given,
            "model": self.original,
            "compiled": self._compiled,
            "optimizer": self.optimizer,
            "state": dataclasses.replace(self._state, early=early),
            "method": method,
            "given": given,
            "chance": Chance.capture(),
            "earlier": self._earlier.get(method, 0),
        }
        call = f"{method}(num_processes={size})"
        owner = MailboxOwner(size, stall_seconds())
        try:
            silence = console.silent(given.get("verbose") == 0)
            with supervised(owner), silence:
                ended: Sequence[RankResult] = joint_items.together(
                    run_rank, labels, shared, lambda rank: owner.spec(rank).fds, call, self._move
                )
        except WorkerDied as error:
            if error.index is not None:
                error.partition = self._place(error.index, size).mp_rank
            raise
        finally:
            owner.close()
        return self._take(method, ended, callbacks_of(given))

    def _check_state(self) -> None:
        """Raises `UnavailableError` if a `fit` cannot continue with the optimizer's state."""
        if self._state.late is None:
            raise UnavailableError(
                "A further fit() continues with the optimizer's state, which is one slot per "
                "variable, or the same in all partitions. Received: "
                f"{type(self.optimizer).__name__}, with other state. Call compile() with a new "
                "optimizer, or start the script with `nanotf run --smp`, where each rank keeps its "
                "own."
            )
        if self._state.trained not in (None, _trainable(self.original)):
            raise UnavailableError(
                "A further fit() trains the variables for which the optimizer has slots. Received: "
                f"{self.original.name!r}, of which other variables are trainable than in the last "
                "fit(). Call compile() with a new optimizer after a change of `trainable`."
            )

    def _move(self, moved: Callable[[Array], Array]) -> None:
        """Lets this process's weights and slots be those in shared memory, which the ranks read.

        Args:
            moved: returns the array there for one that lies in this process.
        """
        variables = filter(holds_numbers, map(tf_variable, self.original.variables))
        freed = sum(_move(variable, moved) for variable in variables)
        values.return_freed(2 * freed)  # what has made the values has left as much, at most
        for slots in self._state.slots.values():
            for number, array in slots.items():
                slots[number] = moved(array)

    def _place(self, rank: int, size: int) -> rank_groups.Place:
        return rank_groups.place(
            rank, size, self._config.partitions, self._config.placement_strategy
        )

    def _label(self, rank: int, size: int) -> str:
        place = self._place(rank, size)
        copy = f" of copy {place.dp_rank}" if place.dp_size > 1 else ""
        return f"Rank {rank} (partition {place.mp_rank}{copy})"

    def _take(self, method: str, ended: Sequence[RankResult], callbacks: Sequence[Any]) -> Any:
        """Takes the results of all ranks into this process's model; returns the user's."""
        first = ended[0]
        assert first.chance is not None  # of rank 0
        variables = self.original.variables
        for each in ended:
            for number, value in each.values.items():
                values.share(tf_variable(variables[number]), value)  # copies none in shared memory
        if method == "fit":
            self._state = _joined([each.state for each in ended if each.state is not None])
            self._state.trained = _trainable(self.original)
            early = keras_optimizers.optimizer_variables(self.optimizer)
            for variable, value in zip(early, self._state.early, strict=True):
                variable.assign(value)
        for callback, attributes in zip(callbacks, first.callbacks, strict=True):
            if attributes is not None:
                vars(callback).update(pickling.loads(attributes))
        self._earlier[method] = self._earlier.get(method, 0) + 1
        first.chance.restore()  # the script draws on where plain Keras would leave it
        if method != "fit":
            return tf.nest.map_structure(_own, first.result)
        step_report.remember(first.report)
        return self._history(first)

    def _history(self, first: RankResult) -> Any:
        made = tf.keras.callbacks.History()
        made.set_model(self.original)
        vars(made).update(first.result, nanotf=first.report)
        return made


def _trainable(model: Any) -> tuple[int, ...]:
    """Returns the numbers of a model's trainable variables, among all."""
    numbers = {id(tf_variable(v)): n for n, v in enumerate(model.variables)}
    return tuple(numbers[id(tf_variable(v))] for v in model.trainable_variables)


def _check_data(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if any(isinstance(leaf, data_classes()) for leaf in tf.nest.flatten(value)):
            raise UnavailableError(
                "Ranks that fit() starts get arrays. Received: "
                f"{name}={value!r}. Pass arrays, or start the script with `nanotf run --smp`, "
                "where each rank makes the dataset itself."
            )


def _move(variable: Any, moved: Callable[[Array], Array]) -> int:
    """Moves a variable's value; returns the bytes that it takes no more. See `WorkersModel`."""
    own = values.array_of(variable)
    shared = moved(own)
    if shared is own:
        return 0
    values.share(variable, shared)
    return own.nbytes


def _own(value: Any) -> Any:
    """Returns a copy of an array that lies in shared memory, for the user."""
    return value.copy() if isinstance(value, np.ndarray) else value


def _joined(states: Sequence[OptimizerState]) -> OptimizerState:
    """Returns the whole model's state.

    Args:
        states: by partition.
    """
    # Frozen layers have no slots; their partition's optimizer only counts.
    first, *others = [state for state in states if state.slots] or states
    is_equal = all(_bits(first.late) == _bits(state.late) for state in others)
    joined = OptimizerState(early=first.early, late=first.late if is_equal else None)
    for state in states:
        for name, slots in state.slots.items():
            joined.slots.setdefault(name, {}).update(slots)
    return joined


def _bits(arrays: Sequence[Array] | None) -> list[tuple[Any, ...]]:
    return [(array.dtype, array.shape, array.tobytes()) for array in arrays or ()]
