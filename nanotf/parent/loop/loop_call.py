"""The user's process of `@nano`, a custom training loop on several workers.

    @nano(num_processes=N)      binds the call, and finds what it refers to (`programs`)
    _LoopCall                   one order: sends state and data, receives prints and results

The function runs in every worker as it would here, on whole batches. The workers divide the calls
of layers in it (`region`). This process reads its datasets.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import queue
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from nanotf.compat import keras_layers, process_state
from nanotf.compat.chance import Chance
from nanotf.compat.versions import require_tensorflow
from nanotf.console import logger, say
from nanotf.errors import (
    CollectiveError,
    DivergedError,
    InvalidArgumentError,
    InvalidArgumentTypeError,
    NanoError,
    ShippingError,
    WorkerError,
    check_integer,
)
from nanotf.machine import processor
from nanotf.parent import calls
from nanotf.parent.loop.divergence import DivergenceDetector
from nanotf.parent.loop.loop_data import LoopSource, OnePass
from nanotf.parent.reading.fit_data import Stream
from nanotf.parent.where import Where
from nanotf.pool.plans import AnyPlan
from nanotf.pool.pool import Delivery
from nanotf.pool.supervision import POLL_SECONDS
from nanotf.region import context, recording, replica_check
from nanotf.shipping import orders, summaries
from nanotf.shipping.data import streams
from nanotf.shipping.objects import attributes, identities, mutables, programs, whole
from nanotf.shipping.state import SharedVariables, StateLayout
from nanotf.tracebacks import raising_at_the_call
from nanotf.wire import messages, timing
from nanotf.wire.blocks import Block

_CHANGES = 2  # among the parts of what a worker sends at the end
REST_SECONDS = 10.0  # by then a rank that waits in a collective reports it (`messages.Reached`)


@raising_at_the_call
def nano(
    num_processes: int | None = None,
    transport: str | None = None,
    cores_per_process: int | None = None,
    cores: Sequence[int] | None = None,
    max_restarts: int = 0,
    backend: str | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Runs a custom training loop on several core-pinned processes.

    The decorated function runs in every worker, with the same results as in one process. The
    workers divide the calls of Keras's layers and models in it: each computes its part of the
    batch's rows. When it returns, the caller's models, optimizers, metrics and variables have the
    workers' values. The function's changes also apply to the caller's lists, dicts and other
    objects. The call returns rank 0's result.

    Args:
        num_processes: int or None. None or 1 calls the function in this process. N > 1 runs it
            on N workers, each pinned to its own cores. Batches keep their size.
        transport, cores_per_process, cores: as in `nanotf.keras.Model.fit`.
        max_restarts: int, default 0, how many times to call the function again, with new workers,
            after a worker died or got stuck. The function's objects are reset to their values
            before the call. A function that begins with `CheckpointManager.restore_or_initialize`
            resumes from its last `save`. Datasets continue after the last pass that was complete
            at that `save`. Iterators and generators raise an error: they can be read only once.
        backend: str or None, as in `nanotf.keras.Model.fit`.

    Returns:
        A decorator of a function or a method.

    Raises:
        nanotf.errors.NanoError: See the subclasses. Raised when the decorated function is called;
            for invalid arguments, before any process starts.

    Example:
        >>> @nano(num_processes=4)
        ... def train(model, dataset, loss_object, optimizer, train_step):
        ...     for x, y in dataset:
        ...         print(train_step(x, y, model, loss_object, optimizer))
    """
    if callable(num_processes):
        raise InvalidArgumentTypeError(
            "@nano is written with parentheses. Received: @nano on the function "
            f"{getattr(num_processes, '__name__', num_processes)!r}. Write "
            "@nano(num_processes=2)."
        )
    where = Where.of(num_processes, transport, cores_per_process, cores, backend)
    restarts = check_integer(
        "max_restarts", max_restarts, "Pass how often the function may be called again", least=0
    )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if not callable(function):
            raise InvalidArgumentTypeError(
                "@nano(...) decorates a function. Received: an object of class "
                f"{type(function).__qualname__}."
            )
        if where.has_workers:
            _check_returns(function)

        @raising_at_the_call
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            value = call_somewhere(*args, **kwargs)
            # `nanotf compare` records what the user's process sees, not what each worker does.
            if context.current is None:
                recording.note_call(getattr(function, "__name__", "a function"), value)
            return value

        def call_somewhere(*args: Any, **kwargs: Any) -> Any:
            # In a worker, a @nano function is a part of the call that the worker runs.
            if not where.has_workers or context.current is not None:
                return function(*args, **kwargs)
            name = getattr(function, "__qualname__", "function")
            if not require_tensorflow().executing_eagerly():
                raise InvalidArgumentError(
                    "A @nano function is called eagerly, not from a graph. Received: a call of "
                    f"{name} inside a tf.function. Write @nano above @tf.function, or put "
                    "@tf.function on the step alone."
                )
            plan = where.plan(f"{name} under @nano")
            if plan is None:
                say(
                    f"TensorFlow sees GPUs; {name}() under @nano(num_processes={where.size}) "
                    "runs in this process."
                )
                return function(*args, **kwargs)
            return _run(function, args, kwargs, where, plan, restarts)

        return call

    return decorate


def _chance() -> Chance:
    """Returns the random states; TensorFlow's are equal on all workers even without a seed."""
    chance, seed = Chance.capture(), calls.seed_of_user(0)
    if chance.tensorflow is not None:
        return chance
    return chance._replace(tensorflow=(seed, random.Random(seed).getstate()))


def _check_returns(function: Callable[..., Any]) -> None:
    """Raises `InvalidArgumentTypeError` if a call does not itself run the function's code."""
    yields = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    if yields or inspect.iscoroutinefunction(function):
        kind, word = ("generator", "yield") if yields else ("coroutine", "async")
        raise InvalidArgumentTypeError(
            "A @nano function runs to its end in the workers, and returns. Received: the "
            f"{kind} function {getattr(function, '__qualname__', function)!r}. Write it without "
            f"{word!r}, and return its results in a list."
        )


def _run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    where: Where,
    plan: AnyPlan,
    max_restarts: int,
) -> Any:
    # Raises `TypeError` for wrong arguments, as a plain call would.
    arguments = inspect.signature(function).bind(*args, **kwargs)
    return _LoopCall(function, arguments, plan.size, max_restarts).run_on(where, plan)


def _loaded(pickled: Any, block: Block, known: whole.Known) -> list[Any]:
    """Returns what a worker has sent; puts the attributes that have changed."""

    def put(parts: Sequence[Any]) -> None:
        attributes.put(known["object"], parts[_CHANGES])

    try:
        return whole.load(pickled, block, known, is_checked=False, put=put)
    except Exception as error:
        raise NanoError(
            "The result of a @nano function could not be unpickled in your process. Received: "
            f"{type(error).__name__}: {error}"
        ) from error


class _LoopCall(calls.Call):
    """One `@nano` call."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: inspect.BoundArguments,
        size: int,
        max_restarts: int,
    ) -> None:
        super().__init__(size)
        self.max_restarts = max_restarts
        self.name = getattr(function, "__qualname__", "function")
        self.manifest = programs.Manifest(function, arguments)
        self.sources = [LoopSource(data) for data in self.manifest.data]
        self._check_sources()
        if any(map(keras_layers.computes_in_bfloat16, self.manifest.numbered)):
            processor.warn_of_slow_bfloat16(f"bfloat16, in which a model of {self.name} computes,")
        self.shipment, self.packer = self.manifest.ship()
        self.variables = identities.distinct_variables(self.manifest.numbered)
        self.layout = StateLayout.of(self.variables, size)
        # Complete passes over each source: when the last save began, and by path of a checkpoint.
        # A worker may die after it wrote the last save's files, before it could report them.
        self.complete = [0] * len(self.sources)
        self.complete_at: dict[str, list[int]] = {}
        self.clock.prepared = timing.now()

    def _check_sources(self) -> None:
        """Raises `InvalidArgumentError` if data could not be read again."""
        for source in self.sources:
            if self.max_restarts and source.data.kind != "dataset":
                raise InvalidArgumentError(
                    "Data must be readable again after a restart. Received: "
                    f"max_restarts={self.max_restarts}, and {self.name} refers to data of kind "
                    f"{source.data.kind!r}, which can be read only once. Pass a tf.data.Dataset."
                )

    # ------------------------------------------------------------------------------ the call
    def prepare_restart(self, error: WorkerError) -> None:
        self.tell_restart(error, f"{self.name} is called again")
        self._rewind(self.complete)

    def _rewind(self, complete: Sequence[int]) -> None:
        for source, passes in zip(self.sources, complete, strict=True):
            source.begin_again(passes)

    def _complete(self) -> list[int]:
        """Returns the passes over each source that all workers ended, even before a restart."""
        count = len(self.sources)
        closed = collections.Counter(n % count for n, c in self._closed.items() if c == self.size)
        return [source.passed + closed[number] for number, source in enumerate(self.sources)]

    def _go_on_from(self, path: str) -> None:
        """Adjusts the position in the data after workers restored a checkpoint."""
        if not self.restarts:
            self.complete_at.setdefault(path, self._complete())
        elif not self._passes:  # the first restore after a restart, before anything is read
            complete = self.complete_at.setdefault(path, self.complete)
            if complete != self.complete:  # `prepare_restart` rewinds the data to `self.complete`
                self._rewind(complete)

    def begin(self) -> list[Block]:
        self.returned: Delivery | None = None  # of rank 0
        self.detector = DivergenceDetector(self.name, self.size)
        # By number; a pass over a dataset is a stream of its own.
        self._open: dict[int, streams.StreamWriter] = {}
        self._closed: dict[int, int] = {}  # how many workers have closed each
        self._closing: list[streams.StreamWriter] = []  # closed by all; a thread may still run
        self._passes: list[tuple[LoopSource, OnePass, streams.StreamWriter]] = []
        blocks = [self.workers.state_block(self.layout.nbytes)]  # the first: `STATE_BLOCK`
        if self.packer.nbytes:
            blocks.append(self.packer.block())
        self.state = SharedVariables(self.layout, blocks[0], self.variables)
        self.state.store(0)
        return blocks

    def order(self) -> orders.LoopOrder:
        return orders.LoopOrder(
            shipment=self.shipment,
            array_block=1 if self.packer.nbytes else None,
            data=tuple(source.data for source in self.sources),
            layout=self.layout,
            state_block=calls.STATE_BLOCK,
            chance=_chance(),
            terminal=orders.Terminal.capture(),
            summaries=summaries.has_default(),
        )

    def _on_reached(self, rank: int, message: messages.Reached) -> None:
        self.detector.note(message)

    def _on_summary(self, rank: int, message: messages.Summary) -> None:
        summaries.write(message, self.manifest.numbered, {})

    def _on_wrote(self, rank: int, message: messages.Wrote) -> None:
        self.workers.send(message)  # all ranks get what rank 0's write returned

    def _on_saved(self, rank: int, message: messages.Saved) -> None:
        self.complete_at[message.path] = self.complete

    def _on_restored(self, rank: int, message: messages.Restored) -> None:
        self._go_on_from(message.path)

    def _on_returned(self, rank: int, message: Delivery) -> None:
        self.returned = message

    HANDLERS: ClassVar[Mapping[type, str]] = {
        **calls.Call.HANDLERS,
        messages.Reached: "_on_reached",
        messages.Summary: "_on_summary",
        messages.Wrote: "_on_wrote",
        messages.Saved: "_on_saved",
        messages.Restored: "_on_restored",
        Delivery: "_on_returned",
    }

    def reply(self, first: messages.Waiting) -> messages.Proceed:
        """Lets all workers save, or continue after they restored."""
        if first.hook == "save":
            self.complete = self._complete()
        return messages.Proceed(self.number)

    def divided(self, stream: Stream) -> Any:
        return ()

    def on_stream_message(self, rank: int, message: Any) -> None:
        number = message.stream
        if isinstance(message, messages.OpenStream) and number not in self._open:
            # Each pass has a number of its own, which is its source's modulo the number of sources.
            source = self.sources[number % len(self.sources)]
            stream = source.stream()
            self._open[number] = writer = self._writer(number, stream)
            self._passes.append((source, stream.data, writer))
            self._closed[number] = 0
            writer.begin()
        writer = self._open[number]
        writer.handle(message)
        if isinstance(message, messages.CloseStream):
            self._closed[number] += 1
            if self._closed[number] == self.size:
                writer.finish()
                self._closing.append(self._open.pop(number))
                self._closing = [w for w in self._closing if not w.reap()]

    def open_writers(self) -> Sequence[streams.StreamWriter]:
        return list(self._open.values())

    def on_idle(self, ended: set[int]) -> None:
        self.detector.poll(self.workers.group, ended)

    def failure(self, message: messages.OrderFailed) -> BaseException:
        self.manifest.forget()  # workers may have changed their objects before one failed
        error = super().failure(message)
        parted = self._parted(message, getattr(error, "original", None))
        if parted is None:
            return error
        parted.__cause__ = error
        return parted

    def _parted(
        self, message: messages.OrderFailed, original: BaseException | None
    ) -> CollectiveError | None:
        """Returns the error for diverged ranks, if that is why one has failed."""
        if message.failure is not None:
            return self.detector.explain(message.rank, message.failure)
        op_error = require_tensorflow().errors.OpError
        if self.workers.transport != "grpc" or not isinstance(original, op_error):
            return None
        # TensorFlow's collectives fail on one rank, and do not name the other ranks' collectives.
        self._hear_where_others_are(message.rank)
        try:
            self.detector.check()
        except CollectiveError as parted:
            return parted
        return None

    def _hear_where_others_are(self, failed: int) -> None:
        """Waits until all other ranks report their collectives, at most `REST_SECONDS`."""
        told, deadline = {failed}, time.monotonic() + REST_SECONDS
        while len(told) < self.size and time.monotonic() < deadline:
            try:
                rank, message = self.workers.receive(POLL_SECONDS)
            except queue.Empty:
                self.workers.check_progress(())  # raises if a worker has ended or is stuck
                continue
            if isinstance(message, messages.Reached):
                self.detector.note(message)
            if isinstance(message, (messages.Reached, messages.OrderFailed, messages.OrderDone)):
                told.add(rank)

    def collect(self) -> None:
        self.state.load(1)

    def all_writers(self) -> Sequence[streams.StreamWriter]:
        return [*self._open.values(), *self._closing]

    def release(self) -> None:
        # The last pass first: `put_back` puts batches before those that are there.
        for source, batches, writer in reversed(self._passes):
            source.put_back(batches.unread(writer.taken))
        self._passes.clear()
        del self.state

    # ------------------------------------------------------------------------------ the end
    def end(self, results: list[orders.LoopEnd]) -> Any:
        assert self.returned is not None
        message, block = self.returned.message, self.returned.block
        manifest = self.manifest
        known = {"object": manifest.numbered, "mutable": manifest.shipped}
        value, contents, changes, chance = _loaded(message.value, block, known)
        # Without a seed of the user's the workers had one of the call's, see `_chance`. It must not
        # seed this process.
        seeded = Chance.capture().tensorflow is not None
        (chance if seeded else chance._replace(tensorflow=None)).restore()
        self.detector.check()
        self.check_alike(results)
        if not results[0].divides:
            logger.warning(
                "%s called no layer that could be divided: each of the %d workers has done all of "
                "the work.",
                self.name,
                self.size,
            )
        mutables.put(manifest.shipped, contents)
        process_state.adopt(results[0].changes)
        is_users = any(number < manifest.held for number in contents)
        if changes or is_users:
            manifest.forget()
        if changes and not is_users and attributes.are_keras_own(manifest.numbered, changes):
            with contextlib.suppress(ShippingError):  # then the next call traces again
                manifest.grow(changes)
        return value

    def check_alike(self, results: list[orders.LoopEnd]) -> None:
        """Raises `DivergedError` if variables differ between the workers."""
        for parts in zip(*(result.held for result in results), strict=True):
            if replica_check.differ(np.array([[size] for _, size in parts])):
                raise DivergedError(
                    "All workers run the same program, and must compute the same numbers. "
                    f"Received: after {self.name}, they differ in {parts[0][0]}. "
                    "Let nothing in the program depend on the time, on the process or on the order "
                    "of a set, and seed every random generator."
                )
