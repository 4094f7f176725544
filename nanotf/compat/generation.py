"""The differences between Keras generations: `keras2` and `keras3` define the same names.

Callers ask for a fact or an action, never for the generation. To drop a generation, delete its
file.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from nanotf.compat.versions import is_keras_3

if TYPE_CHECKING:
    from nanotf.compat import keras_epochs


class Generation(Protocol):
    """The interface of `keras2` and `keras3`; mypy checks both against it.

    Attributes:
        MODEL, SEQUENTIAL, FUNCTIONAL: str, modules of these classes, below `src`.
        TRAINER: str, module that implements `fit`, `evaluate` and `predict`.
        CUSTOM_NAMES: str, attribute of `saving.object_registration` with names by class.
        EMBEDDING_READS_WHOLE_TABLE: bool, whether a look-up in an `Embedding` reads all rows.
        PASSES_ADD_A_HISTORY: bool, whether `evaluate` and `predict` set a new `model.history`.
        PASSES_CAN_BE_STOPPED: bool, whether `evaluate` and `predict` obey a flag of the model.
        PREDICTS_LISTS_OF_BATCHES: bool, whether the function of `predict` takes a list.
        EACH_PASS_HAS_AN_ITERATOR: bool, whether the loop of `fit` makes an iterator for each pass
            over the data and cuts an epoch short if the data run out. Otherwise it keeps one
            iterator, and training ends when that does.
        KNOWS_ROWS_OF_BATCHES: bool, whether specs of array batches include the number of rows.
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

    # ------------------------------------------------------------------------ variables
    def variable_classes(self) -> tuple[Any, ...]:
        """Returns Keras's own variable classes, besides `tf.Variable`."""

    def seed_generator_classes(self) -> tuple[Any, ...]:
        """Returns Keras's classes of seed generators."""

    def trainable_variables(self, model: Any) -> list[Any]:
        """Returns a model's trainable variables; those that it has, if parts of it are not built."""

    def model_variables(self, model: Any) -> list[Any]:
        """Returns the variables of a model that training changes, in a fixed order.

        Returns:
            A list of `tf.Variable`: weights, the seeds of random layers and, where Keras counts
            steps, the step counters. Metrics are not included.
        """

    def seed_variables(self, model: Any) -> list[Any]:
        """Returns the seeds of a model's random layers; `model_variables` includes them."""

    def drawn_seeds(self) -> Any:
        """Returns the state that random operations without a seed draw from as they run, or None.

        `restore_seeds` sets it.
        """

    def capture_seeds(self) -> Any:
        """Returns the state of Keras's own seed generator, None if there is none yet."""

    def restore_seeds(self, taken: Any) -> None:
        """Restores what `capture_seeds` returned. May draw from Python's random numbers."""

    def seed(self, number: int) -> None:
        """Does the part of `tf.keras.utils.set_random_seed` that concerns Keras's own seeds."""

    def session_parts(self) -> Sequence[Any]:
        """Returns objects of this thread's session; others, or more, once something has used it."""

    def variables_of_metric(self, metric: Any) -> list[Any]:
        """Returns a metric's `tf.Variable`s in a fixed order, even if unknown to Keras."""

    # --------------------------------------------------------- objects in another process
    def for_another_process(self, obj: Any, attributes: dict[str, Any]) -> dict[str, Any]:
        """Returns a Keras object's attributes without those that are valid only in this process."""

    def operation_config(self, obj: Any) -> dict[str, Any] | None:
        """Returns the config of a layer that is a TensorFlow operation, None for other layers."""

    def class_of_wrapper(self, variable: Any) -> Any:
        """Returns the class of a variable around another, whatever strategy made that.

        Keras 2 makes a subclass for variables of a strategy. `restore_identities` sets it.
        """

    def restore_identities(self, objects: Sequence[Any]) -> None:
        """Fixes state keyed by objects' identities, after the objects came from another process."""

    # --------------------------------------------------------------------------- models
    def global_policy(self) -> Any:
        """Returns the argument of `set_global_policy` that keeps the current dtype policy."""

    def is_compiled(self, model: Any) -> bool:
        """Returns True if `model.compile` was called."""

    def uncompiled(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Makes a model look as before `compile`, in this context."""

    def builds_optimizer_first(self, model: Any) -> bool:
        """Returns True if `fit` builds the optimizer before the user's own step can."""

    def note_first_trace(self, optimizer: Any) -> None:
        """Leaves in a built optimizer what Keras's first trace of a step leaves.

        A trace that makes the optimizer's variables is followed by another. Keras 2's `Nadam`
        counts its updates in a Python attribute, once per variable and trace, and its numbers
        depend on the count.
        """

    def as_step_builds(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Makes an optimizer's variables as the first step of `fit` does, in this context."""

    def call_on_specs(self, model: Any, specs: Any) -> None:
        """Builds a model by a symbolic call.

        Args:
            model: a Keras model.
            specs: nested structure of `tf.TensorSpec`; the first dimension is the batch.
        """

    def called_with(self, model: Any) -> Any:
        """Returns what a subclassed model was first called with, None if it was not called.

        Returns:
            A nested structure of `tf.TensorSpec`: the first argument. Keras 3 keeps no dtypes; they
            are those to which the model casts floats.
        """

    def steps_per_execution(self, model: Any) -> int:
        """Returns the number of steps in one execution of a compiled model's step function."""

    def makes_one_step(self, model: Any) -> bool:
        """Returns True if every execution is one step, now and later."""

    def steps_at_once(self, model: Any) -> int:
        """Returns the steps per execution, even if fewer are left in the epoch."""

    def pass_counter(self, model: Any, method: str) -> Any:
        """Returns the variable that counts batches of `evaluate` or `predict`, or None."""

    def step_counters(self, model: Any) -> list[Any]:
        """Returns a model's step counters, which the progress bar reads."""

    def is_symbolic(self, leaves: Sequence[Any]) -> bool:
        """Returns True if a layer call with such arguments only computes shapes."""

    def context_of_calls(self) -> Any:
        """Returns what the calls around a layer's call pass on to it, such as `training`."""

    def around_step(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context for a traced step: in it AutoGraph converts what Keras lets it convert."""

    def converted_as_here(self, function: Any) -> Any:
        """Returns a loss's or metric's function, converted by AutoGraph as Keras converts it."""

    # -------------------------------------------------------------- losses and metrics
    def build_compiled_metrics(self, model: Any, specs: Any) -> None:
        """Creates the variables of the metrics of `compile`.

        Args:
            model: a built and compiled model.
            specs: nested structure of `tf.TensorSpec`, of one batch as `evaluate` sees it.
        """

    def step_builds_losses(self, model: Any) -> bool:
        """Returns True if the losses of `compile` take the form of what a step passes to them first.

        Then each of these outputs gets a metric, and only the user's own step knows them.
        """

    def unused_losses(self, model: Any) -> set[str]:
        """Returns the names of loss metrics of `compile` that no step has used.

        In one process these metrics would not exist, and values that the user's own step returns
        under their names would be kept.
        """

    def metrics_in_order(self, model: Any, logs: dict[str, Any]) -> Any:
        """Returns the result of `evaluate` for `logs`: a list, or the only value.

        Args:
            model: a model whose metrics are built.
            logs: the metrics' values, by their names.
        """

    # ----------------------------------------------------------------------- optimizers
    def state_beside(self, optimizer: Any) -> list[Any]:
        """Returns the `tf.Variable`s of an optimizer that its `variables` may omit."""

    def places_by_key(self, optimizer: Any) -> dict[Any, int]:
        """Returns, by `_var_key`, the index of each variable that an optimizer has slots for."""

    def make_variable(self, value: Any, name: str) -> Any:
        """Returns a trainable variable that optimizers accept."""

    def apply_through(
        self, optimizer: Any, twin: Any, apply: Callable[[Any, Any, Any], None]
    ) -> None:
        """Makes an optimizer hand gradients to a function instead of summing and applying them.

        Args:
            optimizer: the model's optimizer, in a worker.
            twin: another optimizer, which applies them.
            apply: takes `update`, the list of gradients and the list of variables.
                `update` is the twin's; it takes lists of summed gradients and variables.
        """

    def updating(self, cls: Any, change: Callable[..., Any]) -> dict[str, Any]:
        """Returns the attributes of a subclass of an optimizer's class with another update.

        Args:
            change: takes the optimizer, a function of a list of gradients that makes the class's
                own update, the list of gradients, with None where there is none, and the list of
                variables.
        """

    # ------------------------------------------------------------------------ callbacks
    def auto_verbose(self) -> int:
        """Returns the value of `verbose="auto"` without a parameter-server strategy."""

    def tensorboard_acts_at_batches(self, callback: Any) -> bool:
        """Returns True if a `TensorBoard` callback does anything at batch hooks."""

    def place_to_resume(self, model: Any, initial_epoch: int, steps: int | None) -> tuple[int, int]:
        """Returns the epoch, and the step in it, where training begins after `on_train_begin`.

        `BackupAndRestore` sets them when it restores something.

        Args:
            model: the user's model.
            initial_epoch: the argument of `fit`.
            steps: batches per epoch; None if Keras does not know.
        """

    def begin_at(self, model: Any, epoch: int, step: int) -> None:
        """Makes the next `fit` of a worker's model begin in the middle of an epoch.

        Args:
            model: a worker's model.
            step: 0 where Keras resumes at the start of an epoch.
        """

    # ----------------------------------------------------------------------------- data
    def check_compiled(self, model: Any, method: str) -> None:
        """Raises what Keras's `fit` or `evaluate` (`method`) raises for an uncompiled model."""

    def check_validation(self, model: Any, validation_data: Any, validation_freq: Any) -> None:
        """Raises what `fit` would raise when it validates at the end of the first epoch."""

    def untraced_hidden(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Hides a step function that was not traced from callbacks, in this context.

        Keras 2's `TensorBoard` writes the graph of the function that it finds.
        """

    def keep_validation_data(self, model: Any, given: dict[str, Any], steps: int | None) -> None:
        """Opens validation data as `fit` does before it calls `evaluate`, unless they are open.

        Args:
            model: a Keras model.
            given: x, y, sample_weight and batch_size, by these names.
            steps: `validation_steps`.
        """

    def split_for_validation(self, data: tuple[Any, ...], fraction: float) -> tuple[Any, Any]:
        """Applies `validation_split`: returns both parts as `(x, y, sample_weight)`."""

    def open_data(
        self, model: Any, arguments: keras_epochs.DataArguments
    ) -> keras_epochs.Arrays | keras_epochs.Epochs:
        """Converts the data arguments as Keras does.

        Reads from a generator the one or two batches that Keras looks at.

        Args:
            model: the user's model.

        Raises:
            ShippingError: An array is sparse or ragged. Keras accepts such arrays; workers cannot.
            Exception: Any exception that Keras raises.
        """

    def orders(self, rows: int, size: int, epochs: int, repeats: bool) -> Iterator[Any]:
        """Lets Keras draw the orders in which `fit` passes over arrays with `shuffle=True`.

        With a seed, it draws the same order for each pass if it makes an iterator for each, since
        each iterator draws from the beginning: see `Arrays.one_iterator`.

        Args:
            size: rows of a piece. An order does not depend on it.
            epochs: how many epochs the call of `fit` runs.
            repeats: whether to draw every order from one iterator, so that they differ.

        Returns:
            An iterator of vectors of row numbers: the pieces of the order of each pass. Keras has
            made its dataset, which takes TensorFlow's seed; each order is drawn when it is asked
            for.
        """

    def batches_looked_at(self) -> int:
        """Returns how many batches of a `PyDataset` or `Sequence` Keras reads for their types.

        It reads the first ones, in order, when it opens the data, and reads them again later.
        """

    def iterators_per_epoch(self, cardinality: int) -> int:
        """Returns how many iterators Keras's loop makes in an epoch that starts a new one.

        Args:
            cardinality: batches of the dataset, or TensorFlow's code for unknown.
        """

    def warn_that_data_ran_out(self, batches: int) -> None:
        """Logs Keras's warning that the data ran out.

        Args:
            batches: the number needed for all epochs.
        """


@functools.cache  # which also keeps AutoGraph from converting it
def generation() -> Generation:
    """Returns the module for the installed Keras generation: `keras2` or `keras3`."""
    if is_keras_3():
        from nanotf.compat import keras3

        return keras3
    from nanotf.compat import keras2

    return keras2
