"""A worker's side of its calls: one session for the life of the process."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
import hashlib
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from nanotf.collectives import Group
from nanotf.compat import (
    eager_context,
    keras_common,
    keras_compiling,
    keras_metrics,
    keras_optimizers,
    process_state,
)
from nanotf.compat.run_ahead import RunAhead
from nanotf.errors import CollectiveError
from nanotf.region import overrides
from nanotf.region.ledger import Ledger
from nanotf.region.sharded_update import OptimizerShards, ShardedUpdate
from nanotf.region.strategy import WorkerStrategy
from nanotf.report.stopwatch import Stopwatch
from nanotf.shipping import orders
from nanotf.shipping.data import inputs, streams
from nanotf.shipping.objects import heap, pickling
from nanotf.wire import messages
from nanotf.wire.blocks import Block
from nanotf.wire.channel import Channel, ChannelClosed
from nanotf.wire.failures import Failure
from nanotf.worker import replica, watch
from nanotf.worker.loop_run import LoopRun
from nanotf.worker.model_runs import Abandoned, EvaluateRun, FitRun, PredictRun
from nanotf.worker.order_failure import order_failed

MODELS_KEPT = 2  # each holds its variables and the graphs of its steps in memory
# Python decides when to collect reference cycles by the number of objects, not by their size.
DROPPED_BYTES = 2**27
ORDERS_PER_COLLECTION = 16
MODELS_PER_CLEARING = 8  # of TensorFlow's kernels, some 0.2 MB for a model; to make them takes time


class Session:
    """A worker's state between calls: its strategy, and the models that it has built.

    Args:
        channel: the one to the parent.
        fds: the descriptor of the group's memory if `setup` names a group, and then
            its connections to other hosts.
    """

    def __init__(self, rank: int, channel: Channel, setup: messages.Setup, fds: list[int]) -> None:
        self.rank = rank
        self.channel = channel
        self.says_written = setup.says_written
        group = None
        if setup.group is not None:
            group = Group.attach(setup.group, rank, fds[0], setup.hosts, fds[1:])
            os.close(fds[0])  # the group has mapped it
        self.strategy = WorkerStrategy(rank, setup.size, cluster=setup.cluster, group=group)
        overrides.install(self.strategy)
        self.group = group
        self.stopwatch = Stopwatch(rank, group)
        self.reader: streams.StreamReader  # of the order that runs
        self.watched: Callable[[], None] = lambda: None  # called by a `StepWatch` at every look
        watch.Heartbeat(
            watch.beat_seconds(setup.stall_seconds),
            self.stopwatch.progress,
            lambda: self._tell(messages.Progress()),
        )
        if group is None:  # TensorFlow's collectives wait forever; a group's have a deadline
            stopwatch = self.stopwatch

            def tell(began: int) -> None:
                self._tell(messages.Stalled(began))

            watch.StepWatch(
                setup.stall_seconds,
                lambda: stopwatch.step_since,
                tell,
                lambda: self.watched(),  # looked up each time: each call sets another
            )
        self._models: collections.OrderedDict[bytes, KeptModel] = collections.OrderedDict()
        self.programs: collections.OrderedDict[bytes, Any] = collections.OrderedDict()
        self._dropped = 0  # bytes of variables of models that were dropped in this call
        self._dropped_models = 0  # since the kernels were cleared
        self._has_dropped = False
        self._orders = 0
        self._seeding = 0  # that of the last call; see `eager_context.seeding`

    def _tell(self, message: messages.Message) -> None:
        with contextlib.suppress(ChannelClosed):  # the inbox ends this process
            self.channel.send(message)

    def run(
        self,
        inbox: Any,
        message: messages.Order,
        blocks: list[Block],
        reader: streams.StreamReader,
    ) -> None:
        """Runs an order received by `inbox`, and reports its end."""
        self.stopwatch.begin()
        self.reader = reader
        failed, _ = self._failures()
        try:
            message.state.restore()
            order = pickling.loads(message.body)
            run = _RUNS[type(order)](self, inbox, message.order, order, blocks)
            try:
                result = run.run()
            except Abandoned:
                result = None  # the parent knows why
            times = self.stopwatch.finish()
            answer: messages.Message = messages.OrderDone(
                message.order, self.rank, result, times, run.written, run.parts
            )
        except BaseException as error:
            answer = order_failed(message.order, self.rank, error)
            reader.end()  # before the error is dropped: it may hold an iterator's last reference
            count, why = self._failures()
            # TensorFlow keeps only the text of an error raised inside a graph.
            if count > failed and _is_of_op(error):
                answer = dataclasses.replace(answer, failure=why)
        reader.end()
        try:
            self.channel.send(answer)
        except ChannelClosed:
            raise
        except Exception as error:  # a result that cannot be pickled
            self.channel.send(order_failed(message.order, self.rank, error))
        self._orders += 1
        if self._has_dropped or self._orders % ORDERS_PER_COLLECTION == 0:
            # Models and datasets of ended calls are in reference cycles. Datasets keep blocks
            # mapped, each with a file descriptor. Python would not collect them for hundreds of
            # calls. The parent has the answer, and works on it meanwhile.
            gc.collect()
            if self._dropped_models >= MODELS_PER_CLEARING:
                self._dropped_models = 0
                eager_context.forget_kernels()
            self._dropped, self._has_dropped = 0, False

    def _failures(self) -> tuple[int, Failure | None]:
        return (0, None) if self.group is None else self.group.failures()

    def follow_seed(self, order: orders.ModelOrder) -> None:
        """Sets TensorFlow's own seed as it is in the parent.

        Only if the user has set one since the last call, random operations of traced functions
        start anew, as they do there: all functions are prepared again then, which takes seconds.
        """
        eager_context.follow(order.chance.tensorflow, order.seeding != self._seeding)
        self._seeding = order.seeding

    def model(
        self,
        data: bytes,
        trace: int,
        specs: Any,
        metrics: bool = True,
        trains: bool = False,
        shards: OptimizerShards | None = None,
    ) -> KeptModel:
        """Returns the model pickled by `heap.dump_model`, made now or by an earlier call.

        The first call that needs metrics and optimizers builds them.
        """
        # Traced functions keep the state that was current when they were traced.
        state = repr((trace, process_state.trace_key()))
        key = hashlib.sha256(data + state.encode()).digest()
        kept = self._models.get(key)
        # An optimizer is built for its shards: for others the model is made anew.
        if kept is None or (trains and kept.has_optimizer and kept.shards != shards):
            model, numbered = heap.load_model(data)
            ahead = replica.become_replica(model, self.stopwatch)
            kept = self._models[key] = KeptModel(model, numbered, ahead)
        self._models.move_to_end(key)
        while len(self._models) > MODELS_KEPT:
            self._drop_oldest()
        if metrics and not kept.has_metrics:
            self._build_metrics(kept, specs, "train_step" if trains else "test_step")
        if trains and not kept.has_optimizer:
            self._build_optimizers(kept, specs, shards)
        return kept

    def _drop_oldest(self) -> None:
        _, kept = self._models.popitem(last=False)
        variables = keras_optimizers.training_variables(kept.model)
        self._has_dropped = True
        self._dropped_models += 1
        self._dropped += sum(v.shape.num_elements() * v.dtype.size for v in variables)
        if self._dropped > DROPPED_BYTES:  # too much to keep until the call's end
            self._dropped = 0
            del kept, variables  # this frame must not keep the model from being collected
            gc.collect()

    def _build_metrics(self, kept: KeptModel, specs: Any, step: str) -> None:
        own = keras_common.has_own_step(kept.model, step)
        trace = functools.partial(
            keras_compiling.trace_step, kept.model, step, (specs, inputs.extent_spec())
        )
        keras_metrics.build_metrics(kept.model, specs, trace if own else None)
        kept.has_metrics = True

    def _build_optimizers(
        self, kept: KeptModel, specs: Any, shards: OptimizerShards | None
    ) -> None:
        model = kept.model
        if shards is not None:
            trainable = model.trainable_variables
            kept.update = ShardedUpdate(self.strategy, model.optimizer, trainable, shards)
        keras_optimizers.build_optimizers(model, (specs, inputs.extent_spec()))
        kept.has_optimizer, kept.shards = True, shards


@dataclasses.dataclass
class KeptModel:
    """A model in a worker, and how much of it is built."""

    model: Any
    numbered: list[Any]  # the objects in the model; see `shipping.objects.heap`
    ahead: RunAhead  # for its training steps
    update: ShardedUpdate | None = None  # None if this worker makes the whole update
    has_metrics: bool = False
    has_optimizer: bool = False
    shards: OptimizerShards | None = None
    ledger: Ledger = dataclasses.field(default_factory=Ledger)  # of the model's parts


def _is_of_op(error: BaseException | None) -> bool:
    """Returns True if an op or a collective raised the error, or raised an error that caused it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, (tf.errors.OpError, CollectiveError)):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


_RUNS: dict[type, Any] = {
    orders.FitOrder: FitRun,
    orders.EvaluateOrder: EvaluateRun,
    orders.PredictOrder: PredictRun,
    orders.LoopOrder: LoopRun,
}
