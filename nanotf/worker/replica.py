"""What a worker's model does differently from the user's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from nanotf.compat import keras_names, keras_optimizers
from nanotf.compat.generation import generation
from nanotf.region import metrics, optimizers
from nanotf.region.share import Share
from nanotf.shipping.captured import Captured
from nanotf.wire import timing

_LARGEST_AVERAGED = 2**14  # elements of a variable; a larger one is a table that is read


class ReplicaMixin:
    """Mixed in before the user's class.

    A step gets `(data, share)`: this worker's rows of the global batch, and the part of the
    global batch that they are, as a scalar float64 tensor. A share of 0 means that the rows
    stand in for none, and must leave no trace in metrics or moving statistics.
    """

    # All are set on the class that `become_replica` makes, one for each model.
    _nanotf_share: Share
    _nanotf_update: Any
    _nanotf_may_be_empty: bool
    _nanotf_other_functions: tuple[Any, Any]
    _nanotf_own_steps: frozenset[str]
    _nanotf_own_logs: frozenset[str]
    _nanotf_needs_results: dict[str, bool]
    _nanotf_metrics_result: Any
    _nanotf_outputs: Any
    _nanotf_data_end: Any
    _nanotf_average: Any
    _nanotf_stopwatch: timing.Stopwatch
    _nanotf_captured: Captured
    _nanotf_assigned: list[Any]

    def train_step(self, data: Any) -> Any:
        return self._nanotf_step("train_step", super().train_step, data)  # type: ignore[misc]

    def test_step(self, data: Any) -> Any:
        return self._nanotf_step("test_step", super().test_step, data)  # type: ignore[misc]

    def predict_step(self, data: Any) -> Any:
        """The outputs; how many rows went in; and 0 if they stand in for none, else 1."""
        rows, share = _stamped(self._nanotf_stopwatch, data)
        outputs = super().predict_step(rows)  # type: ignore[misc]
        first = next(leaf for leaf in tf.nest.flatten(rows) if leaf is not None)
        count = tf.cast(tf.shape(first)[0], tf.int64)
        return outputs, tf.stack([count, tf.cast(share > 0, tf.int64)])[None]

    def make_train_function(self, force: bool = False) -> Any:
        """As in Keras; the function notes its executions."""
        super().make_train_function(force=force)  # type: ignore[misc]
        train_function: Any = self.train_function  # type: ignore[has-type]
        step = _telling_of_end(self, timing.TRAIN, again(train_function))
        self.train_function = self._nanotf_stopwatch.timed(timing.TRAIN, step)
        return self.train_function

    def make_test_function(self, force: bool = False) -> Any:
        """As in Keras; the function notes its executions."""
        super().make_test_function(force=force)  # type: ignore[misc]
        test_function: Any = self.test_function  # type: ignore[has-type]
        step = _telling_of_end(self, timing.TEST, again(test_function))
        self.test_function = self._nanotf_stopwatch.timed(timing.TEST, step)
        return self.test_function

    def make_predict_function(self, force: bool = False) -> Any:
        """As in Keras, but outputs go to `_nanotf_outputs`, and Keras collects a placeholder."""
        super().make_predict_function(force=force)  # type: ignore[misc]
        stock: Any = self.predict_function  # type: ignore[has-type]
        if not hasattr(stock, "_nanotf_takes_outputs"):

            def predict_function(data: Any) -> Any:
                self._nanotf_outputs(*stock(data))
                return tf.zeros([1])

            predict_function._nanotf_takes_outputs = True  # type: ignore[attr-defined]
            self.predict_function = self._nanotf_stopwatch.timed(timing.PREDICT, predict_function)
        return self.predict_function

    def _nanotf_step(self, name: str, step: Any, data: Any) -> Any:
        rows, share = _stamped(self._nanotf_stopwatch, data)
        before = self._nanotf_share.set(share)
        own = name == "train_step" and name in self._nanotf_own_steps
        if own:
            self._nanotf_share.begin_step()
            self._nanotf_share.known_rows = _known_rows(rows)
        whole = self._nanotf_share.whole_results
        assigned = self._nanotf_assigned if name == "train_step" else []
        values = [variable.read_value() for variable in assigned]
        try:
            _follow_results(self, name)
            if self._nanotf_may_be_empty:
                result = self._nanotf_step_or_stand_in(step, rows, share)
            else:
                result = step(rows)
            _average(assigned, values, self._nanotf_share)
            return _of_whole_batch(self, name, result) if name in self._nanotf_own_logs else result
        finally:
            if own:
                self._nanotf_share.end_step()
            self._nanotf_share.set(before)
            self._nanotf_share.whole_results = whole

    def _nanotf_step_or_stand_in(self, step: Any, rows: Any, share: Any) -> Any:
        variables = _variables_of_this_rank(self)
        values = [variable.read_value() for variable in variables]
        self._nanotf_share.remember(variables, values)
        try:
            result = step(rows)
        finally:
            self._nanotf_share.remember([], [])
        for variable, value in zip(variables, values):  # noqa: B905 - AutoGraph lacks `strict`
            variable.assign(tf.where(share > 0, variable.read_value(), value))
        return result

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As in Keras; within `fit`, moving statistics are first the mean over workers."""
        if self._nanotf_average is not None:
            self._nanotf_average()
        return super().evaluate(*args, **kwargs)  # type: ignore[misc]

    def get_metrics_result(self) -> Any:
        """As in Keras; between steps, in one prepared function.

        There every metric variable is summed over the workers, and TensorFlow makes a new
        thread pool for each sum that is asked for eagerly.
        """
        stock = super().get_metrics_result  # type: ignore[misc]
        if not tf.executing_eagerly() or self.run_eagerly:  # type: ignore[attr-defined]
            return stock()
        if self._nanotf_metrics_result is None:
            type(self)._nanotf_metrics_result = staticmethod(tf.function(stock))
        return keras_names.without_unused_losses(self, self._nanotf_metrics_result())

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Does nothing: `session` has built model, metrics and optimizer (Keras 3)."""


@tf.autograph.experimental.do_not_convert
def _stamped(stopwatch: timing.Stopwatch, data: Any) -> Any:
    """A step's data, behind a look at the clock, so that all of the step comes after it."""
    rows, share = data
    if tf.executing_eagerly():  # the order is that of the code
        stopwatch.stamp(share)
        return rows, share
    stamp = stopwatch.stamp(share)
    if stamp is None:
        return rows, share
    with tf.control_dependencies([stamp]):
        return tf.nest.map_structure(lambda t: None if t is None else tf.identity(t), rows), share


@tf.autograph.experimental.do_not_convert
def _known_rows(batch: Any) -> int | None:
    """How many rows a batch has, where tracing knows it."""
    shapes = [leaf.shape for leaf in tf.nest.flatten(batch) if tf.is_tensor(leaf)]
    return next((shape[0] for shape in shapes if shape.rank), None)


@tf.autograph.experimental.do_not_convert
def _average(variables: list[Any], before: list[Any], share: Share) -> None:
    """Makes variables that a step may have assigned what a single process would assign them.

    That is right for what does not depend on the rows, and for what is linear in a mean over
    them. Of a variable that no worker has assigned not a bit changes.
    """
    if not variables:
        return
    changes = [share.of(v.read_value() - value) for v, value in zip(variables, before, strict=True)]
    for variable, value, change in zip(
        variables, before, optimizers.sum_over_workers(changes), strict=True
    ):
        variable.assign(value + change)


def _assigned(model: Any, captured: Captured, strategy: Any) -> list[Any]:
    """This rank's variables that a training step of the user's may assign."""
    layers = [model, *keras_names.flat_layers(model)]
    if all(keras_names.is_keras_own(type(layer)) for layer in layers):
        return []
    return [
        strategy.experimental_local_results(variable)[0]
        for variable in [*captured.single, *keras_names.weights_assigned(model)]
        if variable.dtype.is_floating
        and variable.synchronization != tf.VariableSynchronization.ON_READ
        and variable.shape.num_elements() <= _LARGEST_AVERAGED
    ]


@tf.autograph.experimental.do_not_convert
def _variables_of_this_rank(model: Any) -> list[Any]:
    """Metrics and moving statistics: what differs between ranks until it is read."""
    variables = [keras_names.tf_variable(v) for v in model.non_trainable_variables]
    variables += keras_names.metric_variables(model)
    local = [v for v in variables if v.synchronization == tf.VariableSynchronization.ON_READ]
    shared = {id(v) for v in keras_names.synchronized_variables(model)}
    shared |= {id(v) for v in metrics.whole_batch_variables(model.metrics)}
    return [v for v in local + generation().moving_variables(model) if id(v) not in shared]


class _ResultsNeeded(Exception):
    """A step turned out, in tracing, to report metrics as all workers have them."""

    ag_pass_through = True  # AutoGraph would replace it by another


def again(step: Any) -> Any:
    """A Keras step function that traces itself again after `_ResultsNeeded`; None stays None.

    Or another function that traces a step. What the first trace made of the graph is thrown away,
    and nothing of it has run.
    """
    if step is None or hasattr(step, "_nanotf_again"):
        return step

    def traced(*arguments: Any) -> Any:
        try:
            return step(*arguments)
        except _ResultsNeeded:
            return step(*arguments)

    traced.__dict__.update(vars(step), _nanotf_again=True)
    return traced


def _telling_of_end(model: Any, kind: str, step: Any) -> Any:
    """A Keras step function that calls `_nanotf_data_end` where its data end."""
    if step is None or hasattr(step, "_nanotf_kind"):
        return step

    def telling(iterator: Any) -> Any:
        try:
            return step(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            if model._nanotf_data_end is not None:
                model._nanotf_data_end(kind)
            raise

    telling.__dict__.update(vars(step), _nanotf_kind=kind)
    return telling


@tf.autograph.experimental.do_not_convert
def _follow_results(model: Any, name: str) -> None:
    """Before a step: whether the results of metrics in it are those of all workers.

    In Keras 2 they always are. In Keras 3 it takes communication in each step, in vain where
    Keras replaces what the step returns by the results of the metrics, as it does where the names
    are the same. A trace finds that out; without one, the first step does.
    """
    share = model._nanotf_share
    share.whole_results = share.has_results = False
    if name in model._nanotf_own_logs:
        metrics.follow_results(_metrics(model), share)
        needs = model._nanotf_needs_results.get(name, tf.executing_eagerly())
        share.whole_results = needs or generation().SUMS_RESULTS_OF_STEPS


@tf.autograph.experimental.do_not_convert
def _of_whole_batch(model: Any, name: str, result: Any) -> Any:
    """What the user's own step returns, where no metric will say it for the whole epoch."""
    share = model._nanotf_share
    names = {metric.name for metric in _metrics(model)} - generation().unused_losses(model)
    needs = isinstance(result, dict) and set(result) != names
    if not needs or share.has_results:
        model._nanotf_needs_results[name] = needs
    if not needs:
        return result
    if share.has_results and not share.whole_results:
        raise _ResultsNeeded
    context = tf.distribute.get_replica_context()
    means = {}
    for key, value in result.items():
        value = tf.convert_to_tensor(value)
        if value.dtype.is_floating and value.shape.rank == 0:
            value = share.of(value)
            if not generation().SUMS_RESULTS_OF_STEPS:
                value = context.all_reduce(tf.distribute.ReduceOp.SUM, value)
        means[key] = value
    return means


@tf.autograph.experimental.do_not_convert
def _metrics(model: Any) -> list[Any]:
    """A model's metrics, those inside Keras 3's container of compiled metrics among them."""
    found: list[Any] = []
    for metric in model.metrics:
        found += getattr(metric, "metrics", None) or [metric]
    return found


class _LossOfShareMixin:
    """For a `train_step` of Keras's own that takes the gradient of what this returns."""

    _nanotf_share: Share

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)  # type: ignore[misc]
        if loss is None or self._nanotf_share.current is None:
            return loss
        return self._nanotf_share.of(loss)


def become_replica(
    model: Any,
    share: Share,
    stopwatch: timing.Stopwatch,
    captured: Captured,
    strategy: Any,
) -> None:
    """Turns a model into one whose steps take `(data, share)`; it stays the same object.

    Args:
        model: a built model.
        share: `Share`, installed in this process.
        stopwatch: `timing.Stopwatch`, which hears of its steps.
        captured: `shipping.captured.Captured`.
        strategy: `strategy.WorkerStrategy`.
    """
    cls = type(model)
    own_steps = frozenset(
        name
        for name in ("train_step", "test_step")
        if not keras_names.is_keras_own(getattr(cls, name))
    )
    own_logs = own_steps
    if not keras_names.is_keras_own(cls.compute_metrics):  # its result is that of Keras's steps
        own_logs = frozenset(("train_step", "test_step"))
    of_loss = "train_step" not in own_steps and generation().GRADIENT_OF_COMPUTED_LOSS
    mixins: tuple[type, ...] = (ReplicaMixin, _LossOfShareMixin) if of_loss else (ReplicaMixin,)
    body = {
        "__module__": cls.__module__,
        "_nanotf_share": share,
        "_nanotf_update": None,
        "_nanotf_may_be_empty": False,
        "_nanotf_other_functions": (None, None),
        "_nanotf_own_steps": own_steps,
        "_nanotf_own_logs": own_logs,
        "_nanotf_needs_results": {},
        "_nanotf_metrics_result": None,
        "_nanotf_outputs": None,
        "_nanotf_data_end": None,
        "_nanotf_average": None,
        "_nanotf_stopwatch": stopwatch,
        "_nanotf_captured": captured,
        "_nanotf_assigned": _assigned(model, captured, strategy),
    }
    object.__setattr__(model, "__class__", type(cls.__name__, (*mixins, cls), body))


def weigh_steps(model: Any, update: Any, strategy: Any) -> None:
    """Makes training steps weigh what they sum over workers by the share.

    In the user's own step optimizers do so by themselves, see `region.optimizers`.

    Args:
        model: a replica, its optimizers built.
        update: `sharded_update.ShardedUpdate`, or None where each worker updates everything.
        strategy: `strategy.WorkerStrategy`.
    """
    type(model)._nanotf_update = update
    if "train_step" in model._nanotf_own_steps:
        return
    if update is None:
        for optimizer in keras_optimizers.optimizers_of(model):
            optimizers.update_in_branches(optimizer, strategy)
            optimizers.sum_gradients_first(optimizer)
    optimizers.weigh_loss(model.optimizer, model._nanotf_share)


def average_before_validation(model: Any, strategy: Any) -> None:
    """Makes validation use the mean over workers of moving statistics, as later calls do.

    Training goes on from the mean: what moves by averaging ends at the same mean.

    Args:
        model: a replica.
        strategy: `strategy.WorkerStrategy`.
    """
    variables = generation().variables_to_average(model)
    local = [strategy.experimental_local_results(v)[0] for v in variables]

    def replace() -> None:
        sums = optimizers.sum_over_workers([variable.read_value() for variable in local])
        for variable, total in zip(local, sums, strict=True):
            variable.assign(total / tf.cast(strategy.num_replicas_in_sync, total.dtype))

    if local:
        average = tf.function(lambda: strategy.run(replace), autograph=False)
        type(model)._nanotf_average = staticmethod(average)


def expect_empty_shares(model: Any, expected: bool) -> None:
    """Says whether a share can be 0 in the steps that come.

    Steps traced before do not expect it, and are traced again; they come back with jobs like
    those before, since a function that was traced for other data first may trace no more what
    it has traced for these. What was never traced without is not for that alone.
    """
    others = model._nanotf_other_functions
    if expected == model._nanotf_may_be_empty or not (expected or any(others)):
        return
    type(model)._nanotf_may_be_empty = expected
    type(model)._nanotf_other_functions = (model.train_function, model.test_function)
    model.train_function, model.test_function = others


@contextlib.contextmanager
def at_end_of_data(model: Any, hear: Callable[[str], None]) -> Iterator[None]:
    """Calls `hear` with the kind of step, one of `timing.KINDS`, where its data end."""
    type(model)._nanotf_data_end = staticmethod(hear)
    try:
        yield
    finally:
        type(model)._nanotf_data_end = None


@contextlib.contextmanager
def outputs_to(model: Any, take: Callable[[Any, Any], None]) -> Iterator[None]:
    """Hands the outputs and counts of every execution of `predict` to `take`, in this context."""
    type(model)._nanotf_outputs = staticmethod(take)
    try:
        yield
    finally:
        type(model)._nanotf_outputs = None
