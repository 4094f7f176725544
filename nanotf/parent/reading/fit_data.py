"""The data of one `fit`, laid out for the workers.

Keras itself checks and converts the data in the parent (`compat.keras_epochs`), before any
process starts.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from nanotf.compat import (
    keras_common,
    keras_compiling,
    keras_epochs,
    keras_models,
    random_states,
)
from nanotf.compat.generation import generation
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import UndividedError
from nanotf.parent.fit_arguments import FitArguments
from nanotf.parent.reading import read_ahead
from nanotf.parent.reading.passes import Resume, epochs_cut_short
from nanotf.parent.reading.shuffle_orders import Orders, OrderSeed
from nanotf.shipping.data import inputs, pipelines, streams
from nanotf.shipping.data.arrays import PackedArrays
from nanotf.wire.blocks import Block

Input = inputs.ArrayInput | streams.StreamInput | pipelines.PipelineInput


class FitData:
    """The training and validation data of one `fit`.

    Args:
        model: the user's model.
        first_block: the number of the call's first block for arrays.
        sharding: "data" or "parent", where datasets are read; or "trial", which is "data" with an
            order that may differ between workers.
        trains: whether the data are for training; otherwise for a single pass.
        resume: where training continues; None if it begins.

    Attributes:
        train: `ArrayInput`, `StreamInput` or `PipelineInput`.
        validation: same, or None.
        own_validation: validation's x, y and sample weights if the model has its own `evaluate`,
            which this process calls; else None.
        steps: int or None, batches per epoch, if known.
        steps_per_epoch, validation_steps: int or None, what a worker's `fit` gets.
        streams: list of the data that the parent reads, by stream number.
        specs: nested structure of `tf.TensorSpec`, of one batch of `train`.
        validation_specs: same, of `validation`, or None.
        is_endless: bool, whether a single pass would never end.
        orders: `Orders`, if `train` are arrays that are shuffled, or None.
        order_seed: `OrderSeed`.

    Raises:
        UndividedError: An argument cannot be used with workers.
        Exception: What Keras raises.
    """

    def __init__(
        self,
        model: Any,
        arguments: FitArguments,
        first_block: int,
        sharding: str = "parent",
        trains: bool = True,
        resume: Resume | None = None,
    ) -> None:
        self._sharding = sharding
        self._resume = resume
        self._model = model
        self._arguments = a = arguments
        self._first_block = first_block
        self.order_seed = OrderSeed.now() if resume is None else resume.order_seed
        self._packed: list[PackedArrays] = []
        self.streams: list[Stream] = []
        self.read: keras_epochs.Epochs | None = None  # training data that have to be read
        self.is_endless = False
        self.orders: Orders | None = None
        self.train: Input
        self.validation: Input | None = None
        self.validation_specs: Any = None
        self.validation_steps: int | None = None
        self.own_validation: Any = None
        self._cut: list[bool] = []  # by epoch, whether it ends before its last step
        # Keras looks at the first batches each time that it opens data.
        read_ahead.reopen(a.x, a.validation_data)
        data, validation = (a.x, a.y, a.sample_weight), None
        if a.validation_split and a.validation_data is None:
            data, validation = generation().split_for_validation(data, a.validation_split)
        elif a.validation_data is not None:
            validation = keras_epochs.unpack(a.validation_data)
        if not trains:
            self._open_pass(*data)
            return
        self._open_training(*data)
        if validation is not None and keras_models.overrides(model, "evaluate"):
            self.own_validation = validation
        elif validation is not None:
            self._open_validation(*validation)

    def _open_pass(self, x: Any, y: Any, sample_weight: Any) -> None:
        """Sets `train`, `specs` and `steps`, for `evaluate` and `predict`."""
        a = self._arguments
        self.steps = self.steps_per_epoch = steps = a.steps_per_epoch
        opened = self._open_for_evaluation(x, y, sample_weight, a.batch_size, steps)
        if isinstance(opened, keras_epochs.Epochs):
            self.train, self.specs = self._stream("x", opened, trains=False)
            self.steps = steps or opened.steps
            infinite = require_tensorflow().data.INFINITE_CARDINALITY
            self.is_endless = (
                opened.dataset is not None and int(opened.dataset.cardinality()) == infinite
            )
            return
        self.train = self._arrays(opened, 1)
        self.specs = _specs(opened.structure)
        self.steps = steps or opened.size

    def _open_for_evaluation(
        self, x: Any, y: Any, sample_weight: Any, batch_size: int | None, steps: int | None
    ) -> keras_epochs.Arrays | keras_epochs.Epochs:
        arguments = keras_epochs.DataArguments(
            x, y, sample_weight, batch_size, steps, **self._reading()
        )
        return generation().open_data(self._model, arguments)

    def _open_training(self, x: Any, y: Any, sample_weight: Any) -> None:
        a, resume = self._arguments, self._resume
        steps = a.steps_per_epoch
        opened = generation().open_data(
            self._model,
            keras_epochs.DataArguments(
                self._rewound(x),
                y,
                sample_weight,
                a.batch_size,
                steps,
                shuffle=a.shuffle,
                class_weight=a.class_weight,
                epochs=a.epochs,
                initial_epoch=a.initial_epoch,
                **self._reading(),
            ),
        )
        if isinstance(opened, keras_epochs.Epochs):
            if resume is not None:
                rewound = isinstance(x, require_tensorflow().data.Dataset)
                is_read_again = rewound or hasattr(x, "__getitem__")  # as a `PyDataset`
                # Data that are not rewound continue where they are: nothing of them is skipped.
                opened.resume(
                    resume.epochs if rewound or opened.is_of_arrays else 0,
                    resume.random_states if is_read_again else None,
                )
            self.read = opened
            self.train, self.specs = self._stream("x", opened, trains=True)
            self.steps, self.steps_per_epoch = opened.steps, steps
            if opened.is_of_arrays and not generation().EACH_PASS_HAS_AN_ITERATOR:
                self.steps_per_epoch = opened.steps
            return
        passes = self._passes_of_training(opened.size)
        complete = taken = 0
        if resume is not None:
            complete, taken = resume.place(steps or opened.size, opened.size, self._steps_at_once())
        if passes is not None and not generation().EACH_PASS_HAS_AN_ITERATOR:
            passes = max(1, passes - complete)
        arrays = self._arrays(opened, passes)
        order = self._order(opened, complete, taken) if opened.is_shuffled else None
        self.train = dataclasses.replace(arrays, order=order, taken=taken)
        self.specs = _specs(opened.structure)
        self.steps = steps or opened.size
        # A known number lets Keras keep one endless iterator over all epochs.
        self.steps_per_epoch = steps or opened.size

    def _order(self, data: keras_epochs.Arrays, complete: int, taken: int) -> int:
        """Sets `orders`; returns the number of their stream.

        Args:
            complete, taken: passes that are complete, and batches used of the next.
        """
        a, at_once = self._arguments, self._steps_at_once()
        epochs = a.epochs - a.initial_epoch
        left = epochs if self._resume is None else epochs - self._resume.epochs
        each = a.steps_per_epoch or data.size  # Keras 2: -1 for all batches
        # An execution makes all of its steps, even beyond the end of an epoch.
        steps = left * at_once * math.ceil((each if each > 0 else data.size) / at_once)
        # A pass that has begun is one more.
        passes = min(left + bool(taken), math.ceil((taken + steps) / data.size))
        self.orders = Orders(
            data.rows,
            data.batch_size,
            epochs,
            self.order_seed,
            complete,
            max(0, passes),
            data.one_iterator,
        )
        self.streams.append(Stream(self.orders, self.orders.signature, ahead=True))
        return len(self.streams) - 1

    def random_states_of(self, epoch: int, first_epoch: int) -> random_states.States | None:
        """Returns the random states from when this process began to read an epoch of training.

        Args:
            epoch: the epoch that was not complete.
            first_epoch: the call's `initial_epoch`.

        Returns:
            None if this process does not read the data, or had not begun to.
        """
        if self.read is None:
            return None
        resume = self._resume
        if self.read.begun is None:  # the workers that were to continue the epoch died before it
            return resume.random_states if resume is not None and resume.epoch == epoch else None
        begin = first_epoch if resume is None else resume.epoch
        number, states = self.read.begun
        return states if begin + number == epoch else None

    def _rewound(self, x: Any) -> Any:
        """Returns a dataset as it was when training began; other data continue where they are.

        A copy of the dataset's graph draws the same shuffle orders as a new dataset.
        """
        from nanotf.compat import dataset_graphs

        tf, resume = require_tensorflow(), self._resume
        if resume is None or not isinstance(x, tf.data.Dataset):
            return x
        copy = dataset_graphs.copy_of(x)
        return x if copy is None else copy

    def _passes_of_training(self, size: int) -> int | None:
        """Returns how many passes an iterator over arrays makes; None is endless.

        If each pass has an iterator, Keras cuts short the epoch in which the data run out.
        Otherwise one iterator makes one pass per epoch, and training ends when it runs out.
        """
        steps = self._arguments.steps_per_epoch
        epochs = self._arguments.epochs - self._arguments.initial_epoch
        if steps is None:
            return None
        if generation().EACH_PASS_HAS_AN_ITERATOR:
            # An execution of several steps makes all of them, even beyond the end of the epoch.
            at_once = self._steps_at_once()
            if 0 < steps <= size and size % steps == 0 and steps % at_once == 0:
                return None
            self._cut = epochs_cut_short(-(-steps // at_once), -(-size // at_once), epochs)
            return 1
        if 0 < steps <= size:
            return None
        self._cut = [(epoch + 1) * steps > size * epochs for epoch in range(epochs)]
        return epochs

    def _open_validation(self, x: Any, y: Any, sample_weight: Any) -> None:
        a = self._arguments
        steps = a.validation_steps
        batch_size = a.validation_batch_size or a.batch_size
        opened = self._open_for_evaluation(x, y, sample_weight, batch_size, steps)
        self.validation_steps = steps
        if isinstance(opened, keras_epochs.Epochs):
            self.validation, specs = self._stream("validation_data", opened, trains=False)
            self.validation_specs = specs
            return
        self.validation_specs = _specs(opened.structure)
        at_once = self._steps_at_once()
        runs_out = steps is not None and not 0 < -(-steps // at_once) * at_once <= opened.size
        self.validation = self._arrays(opened, 1 if runs_out else None)
        if not runs_out:
            self.validation_steps = steps or opened.size

    def batch_specs(self) -> Any:
        """Returns `specs`, with the first batch's rows if Keras's `predict` knows them."""
        train = self.train
        if not (generation().KNOWS_ROWS_OF_BATCHES and isinstance(train, inputs.ArrayInput)):
            return self.specs
        return _with_rows(inputs.without_lists(self.specs), min(train.batch_size, train.rows))

    def _steps_at_once(self) -> int:
        return generation().steps_at_once(self._model)

    def _reading(self) -> dict[str, Any]:
        a = self._arguments
        return {
            "workers": a.workers,
            "use_multiprocessing": a.use_multiprocessing,
            "max_queue_size": a.max_queue_size,
        }

    def _stream(self, what: str, data: keras_epochs.Epochs, trains: bool) -> tuple[Input, Any]:
        """Returns a workers' input for data that have to be read, and the specs of a batch."""
        if data.cardinality == 0:
            raise UndividedError(
                f"{what} must have at least one batch to be shared between workers. Received: an "
                "empty dataset. Pass some, or leave num_processes out."
            )
        signature = streams.signature_of(data.element_spec, what)
        if self._sharding in ("data", "trial") and not data.is_of_arrays:
            alike = self._sharding == "data"
            made = pipelines.pipeline_input(
                data.dataset, signature, data.cardinality, data.steps, what, alike
            )
            place: dict[str, Any] = {}
            if trains and self._resume is not None:
                steps = self._arguments.steps_per_epoch
                place = self._resume.place_of_workers(steps, data.cardinality)
            return dataclasses.replace(made, **place), signature
        rows = streams.rows_of_batches(data.element_spec)
        arrays = len(require_tensorflow().nest.flatten(signature))
        unlike = rows is None and arrays > 1
        may_differ = trains and unlike and takes_unlike_rows(self._model, self._sharding)
        stream = Stream(data, signature, trains, specs=data.element_spec, may_differ=may_differ)
        self.streams.append(stream)
        number, cardinality = len(self.streams) - 1, data.cardinality
        read = streams.StreamInput(number, signature, cardinality, data.steps, rows, may_differ)
        return read, signature

    def _arrays(self, data: keras_epochs.Arrays, passes: int | None) -> inputs.ArrayInput:
        block = self._first_block + len(self._packed)
        size = int(data.batch_size)
        result, packed = inputs.pack_arrays(data.structure, block, size, passes)
        self._packed.append(packed)
        return result

    def blocks(self) -> list[Block]:
        """Copies the arrays into shared blocks; can be called only once."""
        blocks = [packed.block() for packed in self._packed]
        self._packed = []  # nothing refers to the user's arrays beyond this point
        return blocks

    def arrays(self) -> list[list[np.ndarray[Any, Any]]]:
        """Returns the arrays of each input that has some, for use in this process."""
        return [packed.arrays for packed in self._packed]

    def facts(self) -> dict[str, Any]:
        """Returns what decides the batches of each step and their order, ready for JSON."""
        a, train = self._arguments, self.train
        specs = [s for s in require_tensorflow().nest.flatten(self.specs) if s is not None]
        found: dict[str, Any] = {
            "inputs": [f"{tuple(spec.shape)} {spec.dtype.name}" for spec in specs],
            "initial_epoch": a.initial_epoch,
            "steps_per_epoch": a.steps_per_epoch,
        }
        if isinstance(train, inputs.ArrayInput):
            rows, size, shuffled = train.rows, train.batch_size, train.order is not None
            return found | {"samples": rows, "batch_size": size, "shuffle": shuffled}
        if self.read is not None and self.read.is_of_arrays:
            found |= {"shuffle": "batch", "seed": self.order_seed.number}
        return found | {"batches": train.cardinality}

    def keras_specs(self, source: Input | None) -> Any:
        """Returns Keras's specs of a batch of `train` or `validation`, with known rows."""
        if isinstance(source, streams.StreamInput):
            return self.streams[source.stream].specs
        if not isinstance(source, inputs.ArrayInput):
            return None if source is None else source.element_spec
        specs = self.specs if source is self.train else self.validation_specs
        whole = generation().KNOWS_ROWS_OF_BATCHES and source.rows % source.batch_size == 0
        return _with_rows(specs, source.batch_size) if whole else specs

    def warn_of_pass(self) -> None:
        """Warns as Keras does if `evaluate` or `predict` has too little data in arrays."""
        steps = self._arguments.steps_per_epoch
        if isinstance(self.train, inputs.ArrayInput) and steps and steps > self.train.steps:
            generation().warn_that_data_ran_out(steps)

    def warn_of_epoch(self, epoch: int) -> None:
        """Warns as Keras does if an epoch has too little data in arrays."""
        a = self._arguments
        number = epoch - a.initial_epoch
        if 0 <= number < len(self._cut) and self._cut[number] and a.steps_per_epoch:
            generation().warn_that_data_ran_out(a.steps_per_epoch * (a.epochs - a.initial_epoch))


@dataclasses.dataclass(frozen=True)
class Stream:
    """Data that the parent reads."""

    data: streams.EpochsToRead
    signature: Any  # nested structure of `tf.TensorSpec`, of one batch
    trains: bool = False  # otherwise they are for evaluation or prediction
    ahead: bool = False  # whether they are read before a worker asks
    specs: Any = None  # Keras's own specs of a batch; None if it has none
    may_differ: bool = False  # see `streams.StreamInput`


def takes_unlike_rows(model: Any, sharding: str) -> bool:
    """Returns True if a model's training takes batches whose arrays differ in rows.

    Keras's own step does not. The graph of such a batch is another, which only nanotf's function of
    one step calls. Workers that run a `tf.data` pipeline divide all batches.

    Args:
        model: a compiled model.
        sharding: see `pipelines.check_sharding`.
    """
    own = keras_common.has_own_step(model)
    return own and sharding == "parent" and keras_compiling.makes_steps_one_by_one(model)


def _specs(structure: Any) -> Any:
    tf = require_tensorflow()
    return tf.nest.map_structure(
        lambda a: None if a is None else tf.TensorSpec([None, *a.shape[1:]], a.dtype), structure
    )


def _with_rows(specs: Any, rows: int) -> Any:
    tf = require_tensorflow()
    return tf.nest.map_structure(
        lambda s: None if s is None else tf.TensorSpec([rows, *s.shape[1:]], s.dtype), specs
    )
