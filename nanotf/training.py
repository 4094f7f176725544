"""`fit(num_processes=...)` in the parent: a job from the call to the `History`."""

from __future__ import annotations

import logging
import os
import pickle
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from nanotf import gpu, jobs, messages, rejections, topology, warm
from nanotf.callbacks import ParentCallbacks
from nanotf.compat import data_adapters, keras_names
from nanotf.compat.versions import check_keras, require_tensorflow
from nanotf.errors import (
    ModelError,
    NanoError,
    WorkerError,
)
from nanotf.fit_data import FitArguments, FitData, Stream
from nanotf.pool import Pool
from nanotf.shipping import models, pickling, streams
from nanotf.shipping.blocks import Block
from nanotf.shipping.pipelines import check_sharding
from nanotf.shipping.state import State, StateLayout
from nanotf.transports import check_transport

logger = logging.getLogger("nanotf")

STATE_BLOCK = 0  # the job's first block; the blocks of arrays follow


def needs_workers(num_processes: Any, transport: str | None, sharding: str | None = None) -> bool:
    """Checks the arguments that nanotf adds to `fit`, and says whether they ask for workers.

    Args:
        num_processes: None or an int above 0.
        transport: None or one of `transports.TRANSPORTS`.
        sharding: None or one of `shipping.pipelines.SHARDINGS`.

    Raises:
        InvalidArgumentError, InvalidArgumentTypeError: They are something else.
    """
    check_transport(transport)
    check_sharding(sharding)
    if num_processes is None:
        return False
    topology.check_num_processes(num_processes)
    return bool(num_processes > 1)


def fit(
    model: Any,
    given: Mapping[str, Any],
    num_processes: int,
    transport: str | None = None,
    cores_per_process: int | None = None,
    sharding: str | None = None,
) -> Any:
    """Trains a model on `num_processes` workers.

    Args:
        model: a compiled Keras model.
        given: mapping of str to object, the arguments of Keras's `fit` that were given.
        num_processes: int, above 1.
        transport: str or None for the default, one of `transports.TRANSPORTS`.
        cores_per_process: int or None for equal shares of all usable cores.
        sharding: str or None for "auto", one of `shipping.pipelines.SHARDINGS`.

    Returns:
        The `keras.callbacks.History` of the user's model.

    Raises:
        InvalidArgumentError, InvalidArgumentTypeError, PlacementError, ModelError,
        ShippingError: Something given cannot be used. No process was started.
        WorkerError: A worker raised or died.
    """
    check_keras()
    if "NANOTF_RANK" in os.environ:
        raise NanoError(
            "A worker cannot start workers of its own. Received: fit(num_processes="
            f"{num_processes}) inside worker {os.environ['NANOTF_RANK']}. Remove the argument "
            "there."
        )
    gpus = gpu.devices()
    if not gpus:
        plan = topology.plan(num_processes, cores_per_process)
    job = _FitCall(model, FitArguments.of(given), num_processes, check_sharding(sharding))
    if gpus:
        return gpu.fit(model, job.recipe, given, num_processes, gpus)
    with warm.pool_for(plan, check_transport(transport)) as workers:
        return job.run(workers)


class _FitCall:
    """One call of `fit`: everything is checked and laid out before workers are needed."""

    def __init__(self, model: Any, arguments: FitArguments, size: int, sharding: str) -> None:
        self.model = model
        self.size = size
        data_adapters.check_compiled(model)
        self.arguments = arguments
        self.seed = self._seed()
        self.data = FitData(model, arguments, self.seed, STATE_BLOCK + 1, sharding)
        self._build()
        with pickling.naming(f"The model {model.name!r}"):
            recipe = models.recipe_of(model)
            models.check_can_be_rebuilt(model, recipe)
            self.recipe = pickling.dumps(recipe)
        self.variables = keras_names.training_variables(model)
        self.layout = StateLayout.of(self.variables, size)
        self.turn = 0

    def _seed(self) -> int:
        """A seed that follows `set_random_seed`, without using up the user's random numbers.

        The step count makes the second of two calls in a row differ from the first.
        """
        optimizer = self.model.optimizer
        steps = 0 if optimizer is None else int(optimizer.iterations.numpy())
        state: Any = np.random.get_state(legacy=False)
        position = f"{state['state']['pos']} {steps}".encode()
        return zlib.crc32(state["state"]["key"].tobytes() + position)

    def _build(self) -> None:
        """Builds the user's model, as the first step of a single-process `fit` would."""
        model, specs = self.model, self.data.specs
        if rejections.looks_wrong(model, specs):
            rejections.trace_step(model, specs)
        if not model.built or not model.variables:
            x = specs[0] if isinstance(specs, tuple) else specs
            try:
                models.call_on_nothing(model, x)
            except Exception as error:
                raise ModelError(
                    "A model must be built before workers can get its weights, and the inputs do "
                    f"not tell how. Received: model {model.name!r}, inputs {x}, and calling it "
                    f"raised {type(error).__name__}: {error}. Call the model on a batch once, or "
                    "give it an Input layer."
                ) from error
            if not model.built or not model.variables:
                raise ModelError(
                    "A model must be built before workers can get its weights. Received: model "
                    f"{model.name!r}, which has no variables after a call on inputs {x}."
                )
        keras_names.build_for_training(model, specs)

    @property
    def steps(self) -> int | None:
        """Batches per epoch, where that is known."""
        return self.data.steps

    # ------------------------------------------------------------------------------- run
    def run(self, workers: Pool) -> Any:
        """Runs the job on a pool and brings its results home."""
        a = self.arguments
        self.workers = workers
        blocks = [Block(self.layout.nbytes), *self.data.blocks()]
        self.state = State(self.layout, blocks[STATE_BLOCK], self.variables)
        self.callbacks = ParentCallbacks(a.callbacks, self.model, a.verbose, a.epochs, self.steps)
        self.model.stop_training = False
        self.callbacks.list.on_train_begin()
        self.state.store(self.turn)
        self.number = workers.next_job()
        self.writers: list[streams.StreamWriter] = []
        try:
            workers.send(self._message(blocks), blocks)
            for block in blocks:
                block.close_fd()
            self.writers = [self._writer(i, s) for i, s in enumerate(self.data.streams)]
            self._follow()
        except BaseException:
            # The workers are somewhere in a step; the next job needs them at rest.
            workers.kill()
            if self.turn > 0:  # the model gets what the last completed epoch left
                self.state.load(self.turn)
            raise
        finally:
            for writer in self.writers:
                writer.stop()
            for block in blocks:
                block.discard()
        return self.model.history

    def _message(self, blocks: list[Block]) -> messages.Job:
        a, backend = self.arguments, require_tensorflow().keras.backend
        job = jobs.FitJob(
            recipe=self.recipe,
            settings=jobs.KerasSettings(backend.floatx(), backend.image_data_format()),
            specs=self.data.specs,
            train=self.data.train,
            validation=self.data.validation,
            epochs=a.epochs,
            initial_epoch=a.initial_epoch,
            steps_per_epoch=self.data.steps_per_epoch,
            validation_steps=self.data.validation_steps,
            validation_freq=a.validation_freq,
            layout=self.layout,
            state_block=STATE_BLOCK,
            events=self.callbacks.events,
            waits=self.callbacks.waits,
            seed=self.seed,
        )
        return messages.Job(self.number, pickling.dumps(job), tuple(b.nbytes for b in blocks))

    def _writer(self, number: int, stream: Stream) -> streams.StreamWriter:
        def send(message: messages.Message, block: Block | None) -> None:
            self.workers.send(message, [] if block is None else [block])
            if block is not None:
                block.close_fd()

        return streams.StreamWriter(
            number,
            stream.data,
            stream.signature,
            stream.trains,
            self.size,
            send,
            self.workers.post,
        )

    def _tell_data(self, hook: str, index: int | None) -> None:
        """Tells those who read the data how far training has got."""
        if hook == "on_epoch_begin" and index is not None:
            self.data.warn_of_epoch(index)
        for writer in self.writers:
            if hook == "on_epoch_begin":
                writer.begin_epoch()
            elif hook == "on_epoch_end" and not self.model.stop_training:
                writer.end_epoch()
            elif hook == "on_train_end":
                writer.finish()

    def _follow(self) -> None:
        """Handles what the workers say, until all have ended the job."""
        waiting: dict[int, messages.Waiting] = {}
        done: set[int] = set()
        while len(done) < self.size:
            rank, message = self.workers.receive()
            if isinstance(message, BaseException):
                raise message
            if isinstance(message, (messages.OpenStream, messages.CloseStream, messages.SlotRead)):
                if message.job == self.number:
                    self.writers[message.stream].handle(message)
            elif isinstance(message, messages.JobFailed):
                raise self._failure(message)
            elif isinstance(message, messages.Event):
                self.callbacks.call(message.hook, message.index, message.logs)
                self._tell_data(message.hook, message.index)
            elif isinstance(message, messages.JobDone):
                done.add(rank)
            elif isinstance(message, messages.Waiting):
                waiting[rank] = message
                if len(waiting) == self.size:
                    self._answer(waiting.pop(0), list(waiting.values()))
                    waiting.clear()

    def _answer(self, first: messages.Waiting, others: list[messages.Waiting]) -> None:
        """Calls the hook that all ranks have reached, and lets them go on."""
        if any(m.hook != first.hook or m.index != first.index for m in others):
            raise WorkerError(
                "All workers must reach the same hook. Received: rank 0 at "
                f"{first.hook}({first.index}), others at "
                f"{[(m.rank, m.hook, m.index) for m in others]}."
            )
        if first.state:
            self.turn += 1
            self.state.combine(self.turn)
        if first.hook == "on_train_end" or (first.state and self.callbacks.look_at_model):
            self.state.load(self.turn)
        self.callbacks.call(first.hook, first.index, first.logs)
        self._tell_data(first.hook, first.index)
        reload = False
        if first.state and self.callbacks.look_at_model:
            reload = self.state.differs(self.turn)
            if reload:
                self.state.store(self.turn)
        self.workers.send(
            messages.Proceed(self.number, stop=bool(self.model.stop_training), reload=reload)
        )

    def _failure(self, message: messages.JobFailed) -> BaseException:
        worker = self.workers.workers[message.rank]
        error = WorkerError(
            f"Worker {message.rank} raised {message.summary}",
            rank=message.rank,
            pid=worker.process.pid,
            cores=worker.cores,
            remote_traceback=message.traceback,
            log_tail=worker.log_tail(),
        )
        try:
            original = pickle.loads(message.exception) if message.exception else None
        except Exception:
            original = None
        error.__cause__ = original
        if original is None or self.turn > 0:
            return error
        rejected = rejections.rejection(self.model, self.data.specs, original)
        if rejected is not None:
            rejected.__cause__ = error
            return rejected
        return error
