"""What differs between the generations of Keras: `keras2` and `keras3` define the same names.

Callers ask for a fact or an action, never for the generation. To drop a generation, delete its file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from nanotf.compat.versions import is_keras_3

if TYPE_CHECKING:
    from nanotf.compat import keras_epochs


class Generation(Protocol):
    """The interface of `keras2` and `keras3`, which mypy holds both to.

    Attributes:
        MODEL, SEQUENTIAL, FUNCTIONAL: str, the modules of these classes, below `src`.
        TRAINER: str, the module with what `fit`, `evaluate` and `predict` do.
        CUSTOM_NAMES: str, the attribute of `saving.object_registration` with names by class.
        EMBEDDING_READS_WHOLE_TABLE: bool, whether a look-up in an `Embedding` reads all rows.
        PASSES_ADD_A_HISTORY: bool, whether `evaluate` and `predict` give the model a new one.
        PASSES_CAN_BE_STOPPED: bool, whether `evaluate` and `predict` obey a flag of the model.
        PREDICTS_LISTS_OF_BATCHES: bool, whether the function of `predict` takes a list.
        EACH_PASS_HAS_AN_ITERATOR: bool, whether the loop of `fit` makes an iterator for each pass
            over the data, and cuts the epoch short in which they run out. Otherwise it keeps one,
            and training ends when that does.
        KNOWS_ROWS_OF_BATCHES: bool, whether the specs of batches of arrays have their rows.
        EXCLUDED_KEYS: type, in which an optimizer keeps the keys of variables without weight decay.
    """

    MODEL: str
    SEQUENTIAL: str
    FUNCTIONAL: str
    TRAINER: str
    CUSTOM_NAMES: str
    EMBEDDING_READS_WHOLE_TABLE: bool
    PASSES_ADD_A_HISTORY: bool
    PASSES_CAN_BE_STOPPED: bool
    PREDICTS_LISTS_OF_BATCHES: bool
    EACH_PASS_HAS_AN_ITERATOR: bool
    KNOWS_ROWS_OF_BATCHES: bool
    EXCLUDED_KEYS: Callable[[Any], Any]

    # ------------------------------------------------------------------------ variables
    def variable_classes(self) -> tuple[Any, ...]:
        """Keras's own classes of variables, beside `tf.Variable`."""

    def seed_generator_classes(self) -> tuple[Any, ...]:
        """Keras's classes of objects that draw seeds."""

    def model_variables(self, model: Any) -> list[Any]:
        """The variables that training changes in a model, in a fixed order.

        Returns:
            A list of `tf.Variable`: weights, the seeds of random layers, the counters of steps
            where Keras counts them. Metrics are not among them.
        """

    def seed_variables(self, model: Any) -> list[Any]:
        """The seeds of a model's random layers, among `model_variables`."""

    def capture_seeds(self) -> Any:
        """Where Keras's own generator of seeds stands; None if it has none yet."""

    def restore_seeds(self, taken: Any) -> None:
        """Puts it where `capture_seeds` found one; it may use random numbers of Python's."""

    def variables_of_metric(self, metric: Any) -> list[Any]:
        """A metric's `tf.Variable`s, in a fixed order, those included of which Keras does not know."""

    # --------------------------------------------------------- objects in another process
    def for_another_process(self, obj: Any, attributes: dict[str, Any]) -> dict[str, Any]:
        """The attributes of an object of Keras's, without those that mean nothing elsewhere."""

    def operation_config(self, obj: Any) -> dict[str, Any] | None:
        """The configuration of a layer that is an operation of TensorFlow's; None of others."""

    def restore_identities(self, objects: Sequence[Any]) -> None:
        """Mends what objects note by the identity of others, after they came from elsewhere."""

    def cast_by(self, variable: Any) -> Any:
        """The `tf.Variable` whose values a variable casts; None for one with values of its own."""

    def casting(self, variable: Any) -> Any:
        """A variable that casts another one's values."""

    # --------------------------------------------------------------------------- models
    def global_policy(self) -> Any:
        """What `set_global_policy` takes to leave the global dtype policy as it is."""

    def is_compiled(self, model: Any) -> bool:
        """Whether `model.compile` was called."""

    def set_as_compile(self, model: Any, attributes: dict[str, Any]) -> None:
        """Sets attributes of a model as `compile` sets them, which tracks some."""

    def builds_optimizer_first(self, model: Any) -> bool:
        """Whether `fit` builds the optimizer before a step of the user's own may."""

    def call_on_specs(self, model: Any, specs: Any) -> None:
        """Builds a model by a symbolic call.

        Args:
            model: a Keras model.
            specs: nested structure of `tf.TensorSpec`; the first dimension is the batch.
        """

    def steps_per_execution(self, model: Any) -> int:
        """How many steps one execution of a compiled model's step function is."""

    def makes_one_step(self, model: Any) -> bool:
        """Whether one execution is one step, now and later."""

    def steps_at_once(self, model: Any) -> int:
        """The steps that an execution makes whatever is left of the epoch."""

    def pass_counter(self, model: Any, method: str) -> Any:
        """The variable that counts the batches of `evaluate` or `predict`, or None."""

    def step_counters(self, model: Any) -> list[Any]:
        """The variables that count a model's steps, which the progress bar reads."""

    def is_symbolic(self, leaves: Sequence[Any]) -> bool:
        """Whether a call of a layer with such arguments computes shapes alone."""

    def calls_operations(self, model: Any) -> bool:
        """Whether a functional model calls anything beside layers."""

    # -------------------------------------------------------------- losses and metrics
    def build_compiled_metrics(self, model: Any, specs: Any) -> None:
        """Creates the variables of the metrics of `compile`.

        Args:
            model: a built and compiled model.
            specs: nested structure of `tf.TensorSpec`, of one batch as `evaluate` sees it.
        """

    def unused_losses(self, model: Any) -> set[str]:
        """The metrics of `compile`'s losses that no step has used, by name.

        In one process they would not be there, and what the user's own step returns under their
        names would stand.
        """

    def metrics_in_order(self, model: Any, logs: dict[str, Any]) -> Any:
        """What `evaluate` returns for `logs`: a list, or the only value.

        Args:
            model: a model whose metrics are built.
            logs: dict of str to float, by the metrics' names.
        """

    # ----------------------------------------------------------------------- optimizers
    def plain_optimizers(self) -> list[Any]:
        """New optimizers, one of each kind."""

    def state_beside(self, optimizer: Any) -> list[Any]:
        """The `tf.Variable`s of an optimizer that may be missing in its `variables`."""

    def places_by_key(self, optimizer: Any) -> dict[Any, int]:
        """The places of the variables that an optimizer has slots for, by `_var_key`."""

    def built_with(self, optimizer: Any, candidates: Sequence[Any]) -> list[Any]:
        """The variables, in order, that an optimizer's slots were made for.

        Args:
            optimizer: an optimizer that holds no other.
            candidates: sequence of `tf.Variable`, among which they are.
        """

    def make_variable(self, value: Any, name: str) -> Any:
        """A trainable variable that optimizers accept."""

    def build_for(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Makes an optimizer's slots for such variables."""

    def apply_through(self, optimizer: Any, apply: Callable[[Any, Any, Any], None]) -> None:
        """Makes an optimizer hand gradients to a function instead of summing and applying them.

        Args:
            optimizer: the model's optimizer, in a worker.
            apply: function of `update` (the stock function, of lists of summed gradients and of
                variables), the list of gradients and the list of variables.
        """

    # ------------------------------------------------------------------------ callbacks
    def auto_verbose(self) -> int:
        """What `verbose="auto"` means outside of a parameter-server strategy."""

    def tensorboard_acts_at_batches(self, callback: Any) -> bool:
        """Whether a `TensorBoard` does anything at batches."""

    def place_to_resume(self, model: Any, initial_epoch: int, steps: int | None) -> tuple[int, int]:
        """The epoch and the step in it at which training begins, after `on_train_begin`.

        `BackupAndRestore` sets them when it has restored something.

        Args:
            model: the user's model.
            initial_epoch: int, the argument of `fit`.
            steps: int or None, batches per epoch.
        """

    def begin_at(self, model: Any, epoch: int, step: int) -> None:
        """Makes the next `fit` of a worker's model begin in the middle of an epoch.

        Args:
            model: a worker's model.
            epoch: int.
            step: int, 0 where Keras resumes at the begin of an epoch.
        """

    # ----------------------------------------------------------------------------- data
    def check_compiled(self, model: Any, method: str) -> None:
        """Raises what Keras's `fit` or `evaluate` (`method`) raises for a model not compiled."""

    def check_validation(self, model: Any, validation_data: Any, validation_freq: Any) -> None:
        """Raises what `fit` raises at the end of the first epoch, when it is to validate."""

    def split_for_validation(self, data: tuple[Any, ...], fraction: float) -> tuple[Any, Any]:
        """Keras's `validation_split`: both parts of `data` as `(x, y, sample_weight)`."""

    def open_data(
        self, model: Any, arguments: keras_epochs.DataArguments
    ) -> keras_epochs.Arrays | keras_epochs.Epochs:
        """Makes of an argument what Keras makes of it.

        A generator is asked for the one or two batches that Keras looks at.

        Args:
            model: the user's model.
            arguments: `DataArguments`.

        Raises:
            ShippingError: Keras takes sparse or ragged arrays, and workers cannot get them.
            Exception: What Keras raises.
        """

    def iterators_per_epoch(self, cardinality: int) -> int:
        """How many iterators Keras's loop makes of a dataset in an epoch that begins a new one.

        Args:
            cardinality: int, batches of the dataset, or TensorFlow's code for unknown.
        """

    def warn_that_data_ran_out(self, batches: int) -> None:
        """Says what Keras says when an epoch is cut short.

        Args:
            batches: int, how many are needed for all epochs.
        """


@functools.cache  # which also keeps AutoGraph from converting it
def generation() -> Generation:
    """The module for the generation of Keras that is installed: `keras2` or `keras3`."""
    if is_keras_3():
        from nanotf.compat import keras3

        return keras3
    from nanotf.compat import keras2

    return keras2
