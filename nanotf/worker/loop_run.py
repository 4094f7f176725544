"""The worker's side of a `@nano` call.

The user's function runs unchanged, on whole batches. Its calls of layers are divided (`region`).
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from nanotf.collectives.tally import CollectiveProgress
from nanotf.compat import distribute, process_state
from nanotf.compat.chance import Chance
from nanotf.compat.generators import from_generator
from nanotf.errors import ShippingError
from nanotf.region import context, recording, scope
from nanotf.region.ledger import Ledger
from nanotf.region.replica_check import ReplicaCheck, held
from nanotf.shipping import orders, state, summaries
from nanotf.shipping.data import streams
from nanotf.shipping.data.inputs import tuned
from nanotf.shipping.objects import identities, mutables, packing, programs, whole
from nanotf.wire import messages
from nanotf.wire.blocks import Block
from nanotf.wire.channel import ChannelClosed
from nanotf.wire.parts import Part
from nanotf.worker import output

PROGRAMS_KEPT = 2  # each holds its models and the graphs of its steps in memory


class _LoopBatches:
    """Batches that the parent reads for a program; outlives the calls."""

    def __init__(self, data: tuple[orders.LoopData, ...]) -> None:
        self._data = data
        self._passes: collections.Counter[int] = collections.Counter()
        self._reader: Any = None
        self._begin_again: list[Callable[[], None]] = []  # of data that can be read once

    def begin(self, reader: streams.StreamReader) -> None:
        """Begins a call."""
        self._reader = reader
        self._passes.clear()
        for begin_again in self._begin_again:
            begin_again()

    def open(self, number: int) -> Any:
        """Returns this worker's replacement for a dataset or iterator of the user's."""
        data = self._data[number]
        if data.kind == "dataset":
            return self._dataset(number, data)
        if data.kind == "generator":
            made = _Once(lambda: self._batches(number))
            self._begin_again.append(made.begin_again)
            return made
        dataset = tuned(self._read(number, data.signature))
        iterator = iter(dataset)
        self._begin_again.append(functools.partial(distribute.begin_again, iterator, dataset))
        return iterator

    def _read(self, number: int, signature: Any) -> Any:
        return from_generator(lambda: self._batches(number), signature)

    def _dataset(self, number: int, data: orders.LoopData) -> Any:
        made = self._read(number, data.signature)
        if data.cardinality != tf.data.UNKNOWN_CARDINALITY:
            made = made.apply(tf.data.experimental.assert_cardinality(data.cardinality))
        return tuned(made.prefetch(2))

    def _batches(self, number: int) -> Iterator[Any]:
        # Each pass is a stream of its own; the parent finds its source by the same rule.
        stream = number + len(self._data) * self._passes[number]
        self._passes[number] += 1
        signature = self._data[number].signature
        reader = self._reader  # a later call may end an iterator that was not read to its end
        rows = reader.iterate(stream, None, 1)
        try:
            for flat, _ in rows:
                yield tf.nest.pack_sequence_as(signature, flat)
        finally:
            rows.close()
            reader.forget(stream)


class _Once(collections.abc.Iterator[Any]):
    """A generator's replacement, which begins at the first `next`."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin
        self._rows: Iterator[Any] | None = None

    def begin_again(self) -> None:
        """Begins a new call, in which this object replaces another of the user's iterators."""
        self._rows = None

    def __next__(self) -> Any:
        if self._rows is None:
            self._rows = self._begin()
        return next(self._rows)


class _KeptProgram:
    """A program that this worker keeps between calls, with the graphs of its steps."""

    def __init__(self, order: orders.LoopOrder, session: Any) -> None:
        self.strategy = session.strategy
        self._stopwatch = session.stopwatch
        self.source = _LoopBatches(order.data)
        self.ledger = Ledger()
        self.divides = False  # whether calls of layers were divided, in this or an earlier call
        self.run: LoopRun  # the current call
        with distribute.single_process(), _current(self):
            self.program = programs.ShippedProgram(order.shipment, self.source.open)

    def begin(self, run: LoopRun, arrays: Block | None) -> None:
        """Begins a call; `arrays` holds the arrays of its pickle."""
        self.run, self.replica_check = run, ReplicaCheck(self.strategy)
        self.source.begin(run.reader)
        with distribute.single_process():
            self.program.begin(run.order.shipment.call, arrays)
        self.variables = identities.distinct_variables(self.program.numbered)

    # The interface of `context.Loop`.
    def once(self, what: str, write: Callable[[], Any]) -> Any:
        """Calls a function that writes a file, only on rank 0; all ranks return its result."""
        run = self.run
        if run.session.rank:
            return run.inbox.wrote(run.number, what).path
        value = write()
        run.tell(messages.Wrote(run.number, what, value if isinstance(value, str) else None))
        return value

    def before_save(self) -> None:
        """Lets the parent record the complete passes over the data, before all workers save.

        The parent must record them before the files exist: a worker may die at any later moment.
        """
        self.run.agree("save")

    def saved(self, path: str) -> None:
        """Tells the parent that rank 0 has written a checkpoint."""
        self.run.tell(messages.Saved(self.run.number, path))

    def restored(self, path: str | None) -> None:
        """Waits until all workers have restored a checkpoint; the data then resume there."""
        if path is not None:
            self.run.tell(messages.Restored(self.run.number, path))
        self.run.agree("restored")

    def run_step(
        self, step: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs one of the user's steps, and records its times."""
        if not tf.executing_eagerly():
            return function(*args, **kwargs)  # a step inside a step
        with self._stopwatch.stepping(), self._named(step):
            value = function(*args, **kwargs)
        name = getattr(step, "__name__", "a step")
        if not self.strategy.rank:
            recording.note_call(name, value)
        self.replica_check.check(name, value, self.variables)
        return value

    @contextlib.contextmanager
    def _named(self, step: Any) -> Iterator[None]:
        """Names the step in reports of its collectives."""
        tally = self.strategy.tally
        if tally is not None:
            tally.step = getattr(step, "__name__", "")
        try:
            yield
        finally:
            if tally is not None:
                tally.step = ""


@contextlib.contextmanager
def _current(kept: _KeptProgram) -> Iterator[None]:
    """Marks this context as running the code of a program."""
    context.current = kept
    try:
        yield
    finally:
        context.current = None


def _known_to_parent(program: programs.ShippedProgram) -> whole.Known:
    """Returns the objects that a result refers to by number."""
    return {"object": program.numbered, "mutable": program.mutables}


class LoopRun:
    """One `@nano` call in one worker.

    Args:
        number: of the order.
        blocks: of the order.
    """

    written: messages.Written = ()  # see `messages.OrderDone`
    parts: tuple[Part, ...] = ()  # the same

    def __init__(
        self, session: Any, inbox: Any, number: int, order: orders.LoopOrder, blocks: list[Block]
    ) -> None:
        self.session = session
        self.inbox = inbox
        self.number = number
        self.order = order
        self.blocks = blocks
        self.reader = session.reader

    def agree(self, hook: str) -> None:
        """Waits until all ranks are at this hook and the parent has answered."""
        self.session.channel.send(messages.Waiting(self.number, hook))
        self.inbox.answer()

    def tell(self, message: messages.Message) -> None:
        """Tells the parent, if this is rank 0."""
        if self.session.rank == 0:
            self.session.channel.send(message)

    def run(self) -> orders.LoopEnd:
        """Calls the user's function; returns how it ended."""
        order, session = self.order, self.session
        arrays = None if order.array_block is None else self.blocks[order.array_block]
        kept = self._program()
        kept.begin(self, arrays)
        self._load(kept)
        program = kept.program
        # Rank 0 alone sends what the function has changed.
        before = mutables.ContentsSnapshot(program.mutables if session.rank == 0 else ())
        if session.rank == 0:
            program.note_attributes()
        session.stopwatch.ready()
        # The same on all ranks: a loop's random decisions must not differ.
        with distribute.single_process():
            order.chance.restore()
        stands = process_state.ProcessState.capture()
        prints = output.to_parent(session, self.number, self.order.terminal)
        divided = scope.dividing(session.strategy, kept.ledger)
        alone = distribute.single_process()
        written = summaries.sending(summaries.Sender(self.number, self.tell), order.summaries)
        with prints, _current(kept), alone, divided, written, self._counted():
            before_it = scope.regions
            value = program.function(*program.args, **program.kwargs)
            kept.divides |= scope.regions > before_it
        self.parts = kept.ledger.parts
        self.changes = stands.changes()
        with distribute.single_process():
            if session.rank == 0:
                self._send(
                    program,
                    {
                        "returns": value,
                        "leaves in an object of its caller's": before.changed(
                            lambda value: self._pickles(program, value)
                        ),
                        "leaves in an attribute": program.changed_attributes(),
                        "draws": Chance.capture(),
                    },
                )
        return self._end(kept)

    def _program(self) -> _KeptProgram:
        """Returns the program of this call, reusing an earlier call's if it is the same."""
        order, kept = self.order, self.session.programs
        # Traced steps keep the state that was current when they were traced.
        key = order.shipment.key, repr((order.data, process_state.trace_key()))
        grown = order.shipment.grown
        before = kept.pop((grown.key, key[1]), None) if grown and key not in kept else None
        if before is not None:
            before.program.grow(grown)
            kept[key] = before
        if key not in kept:
            kept[key] = _KeptProgram(order, self.session)
        kept.move_to_end(key)
        while len(kept) > PROGRAMS_KEPT:
            kept.popitem(last=False)
        found: _KeptProgram = kept[key]
        return found

    def _load(self, kept: _KeptProgram) -> None:
        """Copies the values of the user's objects to this worker's objects."""
        block = self.blocks[self.order.state_block]
        self.known = {id(variable) for variable in kept.variables}
        self.state = state.SharedVariables(self.order.layout, block, kept.variables)
        self.state.load(0)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Reports this rank's collectives to the parent if the transport does not."""
        tally, session = self.session.strategy.tally, self.session
        if tally is None:
            yield
            return
        tally.active, before = True, tally.progress()
        last = told = before

        def tell(progress: CollectiveProgress) -> None:
            now = progress.since(before)
            session.channel.send(
                messages.Reached(self.number, session.rank, now.count, now.fingerprint, now.what)
            )

        def look() -> None:
            nonlocal last, told
            rests, last = last, tally.progress()
            if rests == last != told:  # none since the last look, and not told yet
                told = last
                with contextlib.suppress(ChannelClosed):  # the inbox ends this process
                    tell(last)

        session.watched = look
        try:
            yield
        finally:
            tally.active, session.watched = False, lambda: None
            tell(tally.progress())

    def _send(self, program: programs.ShippedProgram, parts: dict[str, Any]) -> None:
        """Sends the parent the parts of the result."""
        packer, known = packing.Packer(), _known_to_parent(program)
        named = {f"What a @nano function {does}": part for does, part in parts.items()}
        pickled = whole.dump(named, packer, known)
        block = packer.block()
        assert block.fd is not None
        self.session.channel.send(messages.Returned(self.number, pickled, block.nbytes), [block.fd])
        block.close_fd()  # the parent has its own by now

    def _pickles(self, program: programs.ShippedProgram, value: Any) -> bool:
        try:
            whole.dump({"A value": value}, packing.Packer(), _known_to_parent(program))
        except ShippingError:
            return False
        return True

    def _end(self, kept: _KeptProgram) -> orders.LoopEnd:
        self.state.store_rank(1, self.session.rank)  # turn 0 has the parent's values
        if self.session.says_written:
            spans = self.state.spans_of_rank(1, self.session.rank)
            self.written = messages.written(self.order.state_block, spans)
        variables = identities.all_variables(kept.program.numbered)
        return orders.LoopEnd(tuple(held(variables)), kept.divides, self.changes)
