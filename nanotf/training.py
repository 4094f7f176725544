"""`fit(num_processes=...)` in the parent: a job from the call to the `History`."""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from nanotf import gpu, jobs, messages, pool, topology
from nanotf.callbacks import ParentCallbacks
from nanotf.compat import keras_names
from nanotf.compat.versions import check_keras, require_tensorflow
from nanotf.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    ModelError,
    NanoError,
    ShippingError,
    WorkerError,
)
from nanotf.shipping import inputs, models, pickling, streams
from nanotf.shipping.blocks import Block
from nanotf.shipping.state import State, StateLayout
from nanotf.transports import check_transport

logger = logging.getLogger("nanotf")

# Arguments of Keras 2 that do nothing for arrays and datasets.
_INERT = {
    "max_queue_size": (10,),
    "workers": (1,),
    "use_multiprocessing": (False,),
}

STATE_BLOCK = 0  # the job's first block; one block of arrays for each array input follows


@dataclasses.dataclass(frozen=True)
class FitArguments:
    """The arguments of Keras's `fit` that workers know, with Keras's defaults."""

    x: Any = None
    y: Any = None
    batch_size: int | None = None
    epochs: int = 1
    verbose: Any = "auto"
    callbacks: Any = None
    validation_split: float = 0.0
    validation_data: Any = None
    shuffle: Any = True
    sample_weight: Any = None
    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    validation_steps: int | None = None
    validation_batch_size: int | None = None
    validation_freq: Any = 1


def needs_workers(num_processes: Any, transport: Any) -> bool:
    """Checks the arguments that nanotf adds to `fit`, and says whether they ask for workers.

    Args:
        num_processes: None or an int above 0.
        transport: None or one of `transports.TRANSPORTS`.

    Raises:
        InvalidArgumentError, InvalidArgumentTypeError: They are something else.
    """
    check_transport(transport)
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
) -> Any:
    """Trains a model on `num_processes` workers.

    Args:
        model: a compiled Keras model.
        given: mapping of str to object, the arguments of Keras's `fit` that were given.
        num_processes: int, above 1.
        transport: str or None for the default, one of `transports.TRANSPORTS`.
        cores_per_process: int or None for equal shares of all usable cores.

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
    job = _FitCall(model, _arguments(given), num_processes)
    if gpus:
        return gpu.fit(model, job.recipe, given, num_processes, gpus)
    with pool.pool_for(plan, check_transport(transport)) as workers:
        return job.run(workers)


def _arguments(given: Mapping[str, Any]) -> FitArguments:
    fields = {field.name for field in dataclasses.fields(FitArguments)}
    for name in given.keys() - fields:
        if given[name] not in _INERT.get(name, (None,)):
            raise InvalidArgumentError(
                f"fit(num_processes=...) does not support `{name}` yet. "
                f"Received: {name}={_short(given[name])}. Leave it out, or train with one process."
            )
    return FitArguments(**{name: given[name] for name in given.keys() & fields})


class _FitCall:
    """One call of `fit`: everything is checked and laid out before workers are needed."""

    def __init__(self, model: Any, arguments: FitArguments, size: int) -> None:
        self.model = model
        self.size = size
        if not keras_names.is_compiled(model):
            # Keras's own words, so that programs that match them go on working.
            raise ModelError(
                "You must call `compile()` before calling `fit()`. Received: a model that is not "
                "compiled. Call model.compile(optimizer=..., loss=...) first."
            )
        self.arguments = arguments
        self.datasets: list[Any] = []  # of the stream inputs, by stream number
        self.packings: list[Any] = []  # of the array inputs, by block number less one
        self.seed = self._seed()
        train, validation = self._data()
        self.train = self._input(*train, shuffle=_shuffles(arguments.shuffle), what="x")
        self.validation = None
        if validation is not None:
            size_ = arguments.validation_batch_size or arguments.batch_size
            self.validation = self._input(*validation, size_, shuffle=False, what="validation_data")
        self._build(train[0])
        with pickling.naming(f"The model {model.name!r}"):
            recipe = models.recipe_of(model)
            models.check_can_be_rebuilt(model, recipe)
            self.recipe = pickling.dumps(recipe)
        keras_names.build_optimizer(model)
        self.variables = keras_names.model_variables(model)
        self.variables += keras_names.optimizer_variables(model.optimizer)
        self.layout = StateLayout.of(self.variables, size)
        self.turn = 0

    def _seed(self) -> int:
        """A seed that follows `set_random_seed`, without using up the user's random numbers.

        The step count makes the second of two calls in a row differ from the first.
        """
        optimizer = self.model.optimizer
        steps = 0 if optimizer is None else int(optimizer.iterations.numpy())
        state = np.random.get_state(legacy=True)
        return zlib.crc32(np.asarray(state[1]).tobytes() + f"{state[2]} {steps}".encode())

    # ---------------------------------------------------------------------------- inputs
    def _data(self) -> tuple[tuple[Any, ...], tuple[Any, ...] | None]:
        """The training and the validation data, each as `(data, batch_size)`."""
        a = self.arguments
        if _is_dataset(a.x):
            for name in ("y", "sample_weight", "batch_size"):
                if getattr(a, name) is not None:
                    raise InvalidArgumentError(
                        f"A dataset brings `{name}` itself. Received: a tf.data.Dataset as `x` "
                        f"and {name}={_short(getattr(a, name))}. Leave `{name}` out."
                    )
            if a.validation_split:
                raise InvalidArgumentError(
                    "`validation_split` needs arrays. Received: a tf.data.Dataset as `x` and "
                    f"validation_split={a.validation_split}. Use dataset.take() and skip()."
                )
            train: Any = a.x
        else:
            train = _arrays((a.x, a.y, a.sample_weight), ("x", "y", "sample_weight"))
        validation = a.validation_data
        if a.validation_split and validation is None:
            train, validation = _split(train, a.validation_split)
        elif validation is not None and not _is_dataset(validation):
            if not isinstance(validation, (tuple, list)) or not 1 <= len(validation) <= 3:
                raise InvalidArgumentError(
                    "`validation_data` must be a dataset or a tuple (x, y) or (x, y, "
                    f"sample_weight). Received: {_short(validation)}."
                )
            names = ("validation x", "validation y", "validation sample_weight")
            validation = _arrays(tuple(validation), names)
        return (train, a.batch_size), None if validation is None else (validation,)

    def _input(self, data: Any, batch_size: int | None, shuffle: bool, what: str) -> Any:
        if _is_dataset(data):
            tf = require_tensorflow()
            cardinality = int(data.cardinality())
            if cardinality == 0:
                raise InvalidArgumentError(
                    f"{what} must have at least one batch. Received: an empty dataset."
                )
            known = cardinality if cardinality > 0 else None
            self.datasets.append(data)
            return streams.StreamInput(
                len(self.datasets) - 1, streams.signature_of(data, what), known
            )
        size = 32 if batch_size is None else batch_size
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            raise InvalidArgumentError(
                f"`batch_size` must be an int above 0. Received: batch_size={size!r}."
            )
        block = 1 + len(self.packings)
        result, packing = inputs.pack_arrays(data, block, int(size), shuffle, self.seed)
        self.packings.append(packing)
        return result

    def _build(self, data: Any) -> None:
        """Builds the user's model, as the first step of a single-process `fit` would."""
        model = self.model
        if model.built and model.variables:
            return
        tf = require_tensorflow()
        if _is_dataset(data):
            signature = self.train.signature
            x = signature[0] if isinstance(signature, tuple) else signature
        else:
            x = tf.nest.map_structure(
                lambda array: tf.TensorSpec([None, *array.shape[1:]], array.dtype), data[0]
            )
        try:
            models.call_on_nothing(model, x)
        except Exception as error:
            raise ModelError(
                "A model must be built before workers can get its weights, and the input shape "
                f"does not tell how. Received: model {model.name!r}, inputs {x}, and calling it "
                f"raised {type(error).__name__}: {error}. Call the model on a batch once, or "
                "give it an Input layer."
            ) from error
        if not model.built or not model.variables:
            raise ModelError(
                "A model must be built before workers can get its weights. Received: model "
                f"{model.name!r}, which has no variables after a call on inputs {x}."
            )

    @property
    def steps(self) -> int | None:
        """Batches per epoch, where that is known."""
        return self.arguments.steps_per_epoch or self.train.steps

    # ------------------------------------------------------------------------------- run
    def run(self, workers: pool.Pool) -> Any:
        """Runs the job on a pool and brings its results home."""
        a = self.arguments
        self.workers = workers
        blocks = self._blocks()
        self.state = State(self.layout, blocks[STATE_BLOCK], self.variables)
        self.callbacks = ParentCallbacks(a.callbacks, self.model, a.verbose, a.epochs, self.steps)
        self.model.stop_training = False
        self.callbacks.list.on_train_begin()
        self.state.store(self.turn)
        self.number = workers.next_job()
        self.writers: list[streams.StreamWriter] = []
        try:
            workers.send(self._message(blocks), blocks)
            self.writers = [self._writer(i, d) for i, d in enumerate(self.datasets)]
            self._follow()
        except BaseException:
            # The workers are somewhere in a step; the next job needs them at rest.
            workers.kill()
            raise
        finally:
            for writer in self.writers:
                writer.stop()
        return self.model.history

    def _blocks(self) -> list[Block]:
        blocks = [Block(self.layout.nbytes)]
        for packing in self.packings:
            block = Block(packing.nbytes)
            packing.write(block)
            blocks.append(block)
        self.packings = []  # nothing of the user's arrays is kept beyond this point
        return blocks

    def _message(self, blocks: list[Block]) -> messages.Job:
        a, backend = self.arguments, require_tensorflow().keras.backend
        # An endless dataset with known steps lets Keras keep one iterator over all epochs.
        validation_steps = a.validation_steps
        if validation_steps is None and isinstance(self.validation, inputs.ArrayInput):
            validation_steps = self.validation.steps
        steps = a.steps_per_epoch
        if steps is None and isinstance(self.train, inputs.ArrayInput):
            steps = self.train.steps
        job = jobs.FitJob(
            recipe=self.recipe,
            settings=jobs.KerasSettings(backend.floatx(), backend.image_data_format()),
            train=self.train,
            validation=self.validation,
            epochs=a.epochs,
            initial_epoch=a.initial_epoch,
            steps_per_epoch=steps,
            validation_steps=validation_steps,
            validation_freq=a.validation_freq,
            layout=self.layout,
            state_block=STATE_BLOCK,
            events=self.callbacks.events,
            waits=self.callbacks.waits,
            seed=self.seed,
        )
        return messages.Job(self.number, pickling.dumps(job), tuple(b.nbytes for b in blocks))

    def _writer(self, stream: int, dataset: Any) -> streams.StreamWriter:
        def send(message: messages.Message, block: Block | None) -> None:
            self.workers.send(message, [] if block is None else [block])

        return streams.StreamWriter(
            stream, lambda: iter(dataset), self.size, send, self.workers.post
        )

    def _follow(self) -> None:
        """Handles what the workers say, until all have ended the job."""
        waiting: dict[int, messages.Waiting] = {}
        done: set[int] = set()
        while len(done) < self.size:
            rank, message = self.workers.receive()
            if isinstance(message, BaseException):
                raise message
            if isinstance(message, (messages.OpenStream, messages.CloseStream, messages.SlotRead)):
                self.writers[message.stream].handle(message)
            elif isinstance(message, messages.JobFailed):
                raise self._failure(message)
            elif isinstance(message, messages.Event):
                self.callbacks.call(message.hook, message.index, message.logs)
            elif isinstance(message, messages.JobDone):
                done.add(rank)
            elif isinstance(message, messages.Waiting):
                waiting[rank] = message
                if len(waiting) == self.size:
                    self._answer(waiting.pop(0), [m for m in waiting.values()])
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
            if self.callbacks.look_at_model or first.hook == "on_train_end":
                self.state.load(self.turn)
        self.callbacks.call(first.hook, first.index, first.logs)
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
        return error


def _is_dataset(value: Any) -> bool:
    return isinstance(value, require_tensorflow().data.Dataset)


def _shuffles(shuffle: Any) -> bool:
    if not isinstance(shuffle, (bool, np.bool_)):
        raise InvalidArgumentTypeError(
            f"`shuffle` must be a bool under `num_processes`. Received: shuffle={shuffle!r}."
        )
    return bool(shuffle)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."


def _arrays(data: tuple[Any, ...], names: tuple[str, ...]) -> tuple[Any, ...]:
    """`(x, y, sample_weight)` as NumPy arrays, without trailing Nones."""
    tf = require_tensorflow()
    if data[0] is None:
        raise InvalidArgumentError(f"`{names[0]}` must be given. Received: {names[0]}=None.")
    while data and data[-1] is None:
        data = data[:-1]
    result = []
    for value, name in zip(data, names, strict=False):
        if value is None:
            raise InvalidArgumentError(
                f"`{name}` must be given before what follows it. Received: {name}=None."
            )
        if hasattr(value, "__next__") or not _is_structure_of_arrays(value):
            raise ShippingError(
                f"`{name}` must be arrays, tensors or a tf.data.Dataset. "
                f"Received: {name} of type {type(value).__name__}."
            )
        result.append(tf.nest.map_structure(lambda v, n=name: inputs.to_numpy(v, n), value))
    return tuple(result)


def _is_structure_of_arrays(value: Any) -> bool:
    return all(hasattr(leaf, "__array__") for leaf in require_tensorflow().nest.flatten(value))


def _split(data: tuple[Any, ...], fraction: float) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Keras's rule for `validation_split`: the last samples, before any shuffling."""
    tf = require_tensorflow()
    rows = len(tf.nest.flatten(data)[0])
    if not 0 < fraction < 1 or int(rows * (1 - fraction)) in (0, rows):
        raise InvalidArgumentError(
            "`validation_split` must leave samples on both sides. "
            f"Received: validation_split={fraction!r} of {rows} samples."
        )
    at = int(np.floor(rows * (1.0 - fraction)))
    train = tf.nest.map_structure(lambda array: array[:at], data)
    return train, tf.nest.map_structure(lambda array: array[at:], data)
