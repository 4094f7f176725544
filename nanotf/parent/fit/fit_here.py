"""`fit(resume=...)` without workers: Keras's own loop in this process, with checkpoints.

The batches are those that workers get, so a run may continue with workers, or without.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from nanotf.compat import keras_metrics, keras_models, keras_steps
from nanotf.compat.generators import from_generator
from nanotf.compat.values import plain_logs
from nanotf.compat.versions import require_tensorflow
from nanotf.parent import one_process
from nanotf.parent.callbacks import list_of
from nanotf.parent.fit.fit_call import FitCall
from nanotf.parent.fit.fit_options import FitOptions
from nanotf.parent.fit_arguments import FitArguments
from nanotf.parent.keras_call import KerasCall
from nanotf.parent.resume.moments import Moment, read_all, write_all
from nanotf.parent.resume.resumption import finished
from nanotf.parent.resume.writer import CheckpointWriter
from nanotf.shipping.data import inputs, streams


def fit(keras_call: KerasCall, hint: str, options: FitOptions, watch: Any = None) -> Any:
    """Trains a model in this process, or continues to.

    Args:
        keras_call: the call of Keras's `fit`, of a compiled model; its arguments are known by name.
        hint: the end of the report's text.
        options: checked; `resume` is not None.
        watch: `first_epochs.Watch` or None, which watches the training.

    Returns:
        The `keras.callbacks.History` of the user's model.

    Raises:
        NanoError: As in `training.fit`.
    """
    assert keras_call.given is not None
    call = FitCall(keras_call.model, FitArguments.of(keras_call.given), 1, options)
    checkpoints = call.checkpoints
    assert checkpoints is not None
    if call.is_finished:
        return finished(call)
    with checkpoints:
        arguments = _arguments(call, checkpoints, watch)
        return one_process.fit(keras_call.with_arguments(arguments), hint)


def _arguments(call: FitCall, checkpoints: CheckpointWriter, watch: Any) -> dict[str, Any]:
    """Returns the arguments of Keras's `fit`, and brings the model to where training continues."""
    resumption = checkpoints.resumption
    a, last = call.arguments, call.progress.last
    call.progress.first = a.initial_epoch, 0
    epochs, first = a.epochs, a.initial_epoch
    if last is not None:
        call.place_data(last, resumption.reading)
        write_all(call.variables, last.values)
        first = last.epoch
        if resumption.stops:
            epochs = first  # no further epoch, only Keras's work at the end of training
    return {
        **_data(call),
        "epochs": epochs,
        "initial_epoch": first,
        "validation_freq": a.validation_freq,
        "callbacks": _callbacks(call, checkpoints, watch),
        "shuffle": False,  # the data come in the order that was drawn
        "verbose": 0,  # the list has the bar
    }


def _data(call: FitCall) -> dict[str, Any]:
    """Returns Keras's arguments for the data."""
    data = call.data
    arrays = iter(data.arrays())

    def dataset(source: Any) -> Any:
        orders = None if source.order is None or data.orders is None else data.orders.drawn()
        # `arrays` has those for training first, as `FitData` opens them.
        return source.dataset_over(next(arrays), orders, 0, 1, extents=False)

    if data.read is not None:
        found = {"x": _dataset_of(data.read, data.train), "steps_per_epoch": data.steps_per_epoch}
    else:
        train, steps = inputs.passes_for(call.model, data.train, data.steps_per_epoch)
        found = {"x": dataset(train), "steps_per_epoch": steps}
    is_read = isinstance(data.validation, streams.StreamInput)  # each pass over them starts over
    if is_read or data.own_validation is not None:
        a, own = call.arguments, data.own_validation
        found["validation_data"] = a.validation_data if own is None else own
        found["validation_steps"] = a.validation_steps
        found["validation_batch_size"] = a.validation_batch_size or a.batch_size
    elif data.validation is not None:
        source, steps = inputs.passes_for(call.model, data.validation, data.validation_steps)
        found |= {"validation_data": dataset(source), "validation_steps": steps}
    return found


def _dataset_of(read: Any, train: Any) -> Any:
    """Returns a dataset of the batches that Keras itself would read, in the same order.

    Args:
        read: `compat.keras_epochs.Epochs`.
        train: the `streams.StreamInput` for the same data.
    """
    tf = require_tensorflow()
    epochs = read.training()
    epoch: Any = iter(())

    def one_pass() -> Iterator[Any]:
        nonlocal epoch
        for _ in epoch:  # what Keras does at the end of an epoch
            pass
        keeps = True
        while keeps and (epoch := next(epochs, None)) is not None:
            last = None
            for iterator, batch in epoch:
                last = iterator
                yield tuple(streams.flat_arrays(batch, train.signature))
            keeps = last is not None and read.keeps(last)
        epoch = iter(())

    specs = tuple(tf.nest.flatten(train.signature))
    dataset = from_generator(one_pass, specs)
    dataset = dataset.map(lambda *flat: tf.nest.pack_sequence_as(train.signature, flat))
    return inputs.claiming(dataset, train.cardinality)


class _Run:
    """The work for checkpoints at the hooks of Keras's loop; see `_list_class`."""

    def __init__(self, call: FitCall, checkpoints: CheckpointWriter) -> None:
        self.call, self.checkpoints = call, checkpoints
        self.resumption = checkpoints.resumption
        self.epoch = self.step = 0  # of the step that ended last
        self.logs: Any = None

    def passed_steps(self) -> int:
        """Returns the number of this epoch's steps that an earlier run completed."""
        last = self.resumption.moment
        return last.step if last is not None and last.epoch == self.epoch else 0

    def begin_epoch(self) -> None:
        """Restores what Keras and the callbacks have changed in an epoch that had begun."""
        last, call = self.resumption.moment, self.call
        if last is not None and self.passed_steps():
            write_all(call.variables, last.values)
            write_all(keras_metrics.metric_state(call.model), last.metrics)
            self.resumption.restore_callbacks()
            self.step, self.logs = last.step, last.logs
            reads = call.data.read is not None
            keras_steps.pass_over(call.model, last.step, last.logs, reads)

    def end_step(self, index: int, logs: Any) -> None:
        """Writes a checkpoint after a step if SIGTERM has come."""
        call = self.call
        self.step = keras_steps.steps_after(call.model, index, call.data.steps)
        self.logs = logs
        # A callback that stops training ends the epoch here.
        if self.checkpoints.sigterm.heard and not call.model.stop_training:
            self._take_within(is_due=True)
            self.checkpoints.write()

    def begin_validation(self) -> None:
        """Takes a checkpoint for SIGTERM during validation; a resumed `fit` validates again."""
        if not self.call.model.stop_training:
            self._take_within(is_due=False)

    def _take_within(self, is_due: bool) -> None:
        call = self.call
        values = read_all(call.variables)
        metrics = read_all(keras_metrics.metric_state(call.model))
        moment = Moment(self.epoch, self.step, values, metrics, plain_logs(self.logs))
        self.checkpoints.take(moment, is_due)

    def validate(self) -> None:
        """Writes the checkpoint of a validation's beginning if SIGTERM has come."""
        if self.checkpoints.sigterm.heard and self.checkpoints.taken is not None:
            self.checkpoints.write()

    def end_epoch(self, epoch: int, logs: Any) -> None:
        """Writes a checkpoint."""
        call = self.call
        call.progress.last = Moment(epoch + 1, 0, read_all(call.variables), logs=plain_logs(logs))
        self.checkpoints.take(call.progress.last)
        self.checkpoints.write()

    def end(self, logs: Any) -> None:
        """Writes the checkpoint of the end of training."""
        self.call.progress.has_ended = True
        self.checkpoints.take(self.call.moment_at_end(plain_logs(logs)))
        self.checkpoints.write()


def _list_class(base: Any) -> Any:
    """Returns a class of Keras's callback lists that also writes checkpoints.

    A callback would get the hooks of steps that an earlier run completed, as others would.

    Args:
        base: Keras's class, or one made from it.
    """

    class ResumedCallbackList(base):  # type: ignore[misc]
        def __init__(self, run: _Run, callbacks: Any, **options: Any) -> None:
            self._nanotf = run
            super().__init__(callbacks, **options)

        def on_train_begin(self, logs: Any = None) -> None:
            super().on_train_begin(logs)
            self._nanotf.resumption.begin(self.callbacks)
            self._nanotf.checkpoints.sigterm.holds = True

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self._nanotf.epoch = epoch
            super().on_epoch_begin(epoch, logs)
            self._nanotf.begin_epoch()

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch >= self._nanotf.passed_steps():
                super().on_train_batch_begin(batch, logs)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch >= self._nanotf.passed_steps():
                super().on_train_batch_end(batch, logs)
                self._nanotf.end_step(batch, logs)

        def on_test_begin(self, logs: Any = None) -> None:
            self._nanotf.begin_validation()
            super().on_test_begin(logs)

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            super().on_test_batch_end(batch, logs)
            self._nanotf.validate()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            super().on_epoch_end(epoch, logs)
            self._nanotf.end_epoch(epoch, logs)

        def on_train_end(self, logs: Any = None) -> None:
            last = self._nanotf.call.progress.last
            if logs is None and last is not None:
                logs = last.logs  # no epoch was left to run
            super().on_train_end(logs)
            self._nanotf.end(logs)

    return ResumedCallbackList


def _callbacks(call: FitCall, checkpoints: CheckpointWriter, watch: Any) -> Any:
    """Returns the callback list for Keras's `fit`."""
    a, list_class = call.arguments, keras_models.callback_list_class()
    given = a.callbacks
    if isinstance(given, list_class):
        given = given.callbacks  # it has a History and a progress bar, or not
    watched = list_class if watch is None else watch.watched(list_class)
    kind = functools.partial(_list_class(watched), _Run(call, checkpoints))
    return list_of(kind, given, call.model, a.verbose, a.epochs, call.data.steps)
