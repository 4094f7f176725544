"""A worker's side of a `@nano` call.

The user's function runs as it is, under the worker's strategy, on datasets that yield this
worker's rows. Its steps run through `loop_step`.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from nanotf.collectives.tally import Progress
from nanotf.compat import (
    distribute,
    eager_context,
    keras_compiled,
    keras_names,
    random_states,
)
from nanotf.region import context, datasets, loop_step, losses, metrics
from nanotf.region.decorators import is_tf_function
from nanotf.region.share import over_whole_batch
from nanotf.shipping import jobs, objects, packing, programs, state, streams
from nanotf.shipping.inputs import share_of_rows, tuned
from nanotf.shipping.results import dump_built, dump_result, numbers_of
from nanotf.wire import messages
from nanotf.wire.blocks import Block
from nanotf.wire.channel import ChannelClosed
from nanotf.worker import output

PROGRAMS_KEPT = 2


class _Source:
    """The batches that the parent reads for a program, which outlives the jobs.

    Args:
        data: tuple of `jobs.LoopData`.
        rank, size: int.
        share: `Share`.
    """

    def __init__(self, data: tuple[jobs.LoopData, ...], rank: int, size: int, share: Any) -> None:
        self._data = data
        self._share = share
        self._rank = rank
        self._size = size
        self._passes: collections.Counter[int] = collections.Counter()
        self._reader: Any = None
        self._begin_again: list[Callable[[], None]] = []  # what yields its batches once

    def begin(self, reader: streams.StreamReader, job: jobs.LoopJob) -> None:
        """Begins a job."""
        self._reader = reader
        self._job = job
        self._shuffles = itertools.count()
        self._passes.clear()
        for begin_again in self._begin_again:
            begin_again()

    def open(self, number: int) -> Any:
        """What stands for a dataset or iterator of the user's in this worker."""
        data = self._data[number]
        if data.kind == "dataset":
            whole = self._dataset(number, data, data.whole, whole=True)
            rows = self._divide(whole, False)
            if data.is_batched:
                rows = self._dataset(number, data, data.signature)
            return datasets.SharedDataset(rows, whole, data.is_batched, self._divide, self._seeds)
        if data.kind == "generator":
            made = _Once(lambda: self._rows(number), self._share)
            self._begin_again.append(made.begin_again)
            return made
        dataset = tuned(self._read(number, data.signature))
        iterator = iter(dataset)
        self._begin_again.append(functools.partial(distribute.begin_again, iterator, dataset))
        return iterator

    def _divide(self, dataset: Any, is_batched: bool) -> Any:
        """This worker's rows of a dataset of whole batches."""

        def part(rows: Any) -> tuple[Any, Any]:
            first, count, _ = share_of_rows(tf.constant(0, tf.int64), rows, self._rank, self._size)
            return first, first + count

        return datasets.divided(dataset, is_batched, part)

    def _seeds(self, seed: Any) -> tuple[Any, Any]:
        """A seed for a shuffle, and a context in which all workers get the user's order by it."""
        if seed is None:
            seed = (self._job.seed + next(self._shuffles)) % 2**31
        return seed, lambda: eager_context.with_global_seed(self._job.global_seed)

    def _read(self, number: int, signature: Any, whole: bool = False) -> Any:
        return tf.data.Dataset.from_generator(
            lambda: self._rows(number, whole), output_signature=signature
        )

    def _dataset(
        self, number: int, data: jobs.LoopData, signature: Any, whole: bool = False
    ) -> Any:
        made = self._read(number, signature, whole)
        if data.cardinality != tf.data.UNKNOWN_CARDINALITY:
            made = made.apply(tf.data.experimental.assert_cardinality(data.cardinality))
        return tuned(made.prefetch(2))

    def _rows(self, number: int, whole: bool = False) -> Iterator[Any]:
        stream = number + len(self._data) * self._passes[number]
        self._passes[number] += 1
        signature = self._data[number].signature
        reader = self._reader  # at the end of an iterator that nobody reads, a later job may run
        rank, size = (None, 1) if whole else (self._rank, self._size)
        rows = reader.iterate(stream, rank, size, stand_in=False)
        try:
            for flat, _ in rows:
                yield tf.nest.pack_sequence_as(signature, flat)
        finally:
            rows.close()
            reader.forget(stream)


class _Once(collections.abc.Iterator[Any]):
    """A generator's stand-in, which begins when it is first asked.

    Args:
        begin: callable, the batches.
        share: `Share`, whose `read` gets what a step asks for.
    """

    def __init__(self, begin: Callable[[], Iterator[Any]], share: Any) -> None:
        self._begin = begin
        self._share = share
        self._rows: Iterator[Any] | None = None

    def begin_again(self) -> None:
        """A new job: what stands behind it is another of the user's iterators."""
        self._rows = None

    def __next__(self) -> Any:
        if self._rows is None:
            self._rows = self._begin()
        element, read = next(self._rows), self._share.read
        return element if read is None else read(element)


class _KeptProgram:
    """A program in this worker, with the graphs of its steps.

    Args:
        job: `jobs.LoopJob`.
        session: `session.Session`.
    """

    def __init__(self, job: jobs.LoopJob, session: Any) -> None:
        self.strategy = strategy = session.strategy
        self._share = session.share
        self._stopwatch = session.stopwatch
        self.source = _Source(job.data, strategy.rank, strategy.size, session.share)
        self._bodies: dict[Any, Any] = {}
        self.run: LoopRun  # the call; set for each
        with strategy.known_values():
            self.program = programs.Program(job.shipment, self.source.open)
            objects.exclude_from_decay(self.program.roots, job.excluded)
            objects.build_optimizers(self.program.roots, job.optimizers)

    def begin(self, run: LoopRun, arrays: Block | None) -> tuple[Any, Any]:
        """Begins a call; returns its arguments. `arrays` holds the arrays of its pickles."""
        self.run, shipped = run, run.job.shipment
        self.source.begin(run.reader, run.job)
        with self.strategy.known_values():
            self.program.begin(shipped.program, arrays)
        kept = set(map(id, self.program.graphs))  # all other functions are new ones
        self._bodies = {key: found for key, found in self._bodies.items() if key[0] in kept}
        args, kwargs = self.program.arguments(shipped.arguments, arrays)
        return args, kwargs

    def follow_share(self) -> None:
        """Makes losses and metrics see the rows that they need; all that the roots have by now."""
        found = [r for r in self.program.roots if isinstance(r, tf.keras.losses.Loss)]
        losses.follow_losses(found, self._share)
        found = objects.metrics_of(self.program.roots)
        metrics.follow_results(found, self._share)
        if metrics.follow_share(found, self._share):
            self._bodies.clear()  # in which they do not

    def fits(self, counts: tuple[int, ...]) -> bool:
        """Whether the roots have as many variables as in the parent."""
        return tuple(len(objects.variables_of(root)) for root in self.program.roots) == counts

    def variables(self) -> list[Any]:
        """The variables of all roots, each once."""
        return objects.distinct_variables(self.program.roots)

    def local_variables(self) -> list[Any]:
        """Those that differ between ranks until they are read."""
        roots = self.program.roots
        moving = {id(v) for v in objects.moving_variables(roots)}
        alike = {id(v) for v in metrics.whole_batch_variables(objects.metrics_of(roots))}
        return [
            v
            for v in self.variables()
            if id(v) in moving
            or (v.synchronization == tf.VariableSynchronization.ON_READ and id(v) not in alike)
        ]

    # What `context.Loop` asks for.
    def before_save(self) -> None:
        """All workers are about to save: the parent notes which passes over the data are complete.

        It must know before the files are there, since a worker may die at any moment after.
        """
        self.run.agree("save")

    def saved(self, path: str) -> None:
        """Rank 0 has written a checkpoint."""
        self.run.tell(messages.Saved(self.run.number, path))

    def restored(self, path: str | None) -> None:
        """All workers have restored a checkpoint, if there is one: the data go on from there."""
        if path is not None:
            self.run.tell(messages.Restored(self.run.number, path))
        self.run.agree("restored")

    def run_step(
        self, step: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a step of the user's on all workers."""
        python = getattr(function, "python_function", function)
        if not tf.distribute.in_cross_replica_context():
            return python(*args, **kwargs)  # a step inside of a step
        key = (id(function), tf.executing_eagerly())
        if key not in self._bodies:
            body = loop_step.body_of(python, self.strategy, self._share, self.local_variables)
            if is_tf_function(function) and tf.executing_eagerly():
                body = tf.function(body, reduce_retracing=keras_names.reduces_retracing(function))
            self._bodies[key] = (function, body)  # which keeps the function's id its own
        with self._stopwatch.stepping(), self._named(step):
            return self._bodies[key][1](*args, **kwargs)

    @contextlib.contextmanager
    def _named(self, step: Any) -> Iterator[None]:
        """Names the step in what is said of the collectives in it."""
        tally = self.strategy.tally
        if tally is not None:
            tally.step = getattr(step, "__name__", "")
        try:
            yield
        finally:
            if tally is not None:
                tally.step = ""

    def over_whole_batch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A loss function whose scalar is that of all workers' rows."""
        return over_whole_batch(function, self._share, with_gradient=True)


class LoopRun:
    """One `@nano` call in one worker.

    Args:
        session: `session.Session`.
        inbox: `worker.Inbox`.
        number: int, the job's.
        job: `jobs.LoopJob`.
        blocks: list of `Block`, those of the job.
    """

    written: messages.Written = ()  # see `messages.JobDone`

    def __init__(
        self, session: Any, inbox: Any, number: int, job: jobs.LoopJob, blocks: list[Block]
    ) -> None:
        self.session = session
        self.inbox = inbox
        self.number = number
        self.job = job
        self.blocks = blocks
        self.reader = session.reader

    def agree(self, hook: str) -> None:
        """Waits until all ranks are at this hook, and the parent has taken notice."""
        self.session.channel.send(messages.Waiting(self.number, self.session.rank, hook))
        self.inbox.answer()

    def tell(self, message: messages.Message) -> None:
        """Tells the parent, if this is rank 0."""
        if self.session.rank == 0:
            self.session.channel.send(message)

    def run(self) -> jobs.LoopEnd:
        """Calls the user's function; returns how it ended."""
        job, session = self.job, self.session
        job.settings.put()
        if tf.keras.mixed_precision.global_policy().name != job.dtype_policy:
            tf.keras.mixed_precision.set_global_policy(job.dtype_policy)
        arrays = None if job.array_block is None else self.blocks[job.array_block]
        kept = self._program(arrays)
        self._load(kept)
        args, kwargs = kept.begin(self, arrays)
        session.stopwatch.ready()
        # Alike on all ranks: what a loop decides by chance, all must decide alike.
        random_states.put(job.random_states)
        prints = output.to_parent(session, self.number, self.job.terminal)
        scope = session.strategy.scope()
        with prints, self._current(kept), scope, self._counted():
            value = kept.program.function(*args, **kwargs)
        with session.strategy.scope():
            built = self._built(kept)
            if session.rank == 0:
                self._send(kept, value, built)
        return self._end(kept)

    def _program(self, arrays: Block | None) -> _KeptProgram:
        """The program of this call, as an earlier one has left it if it is the same."""
        job, kept = self.job, self.session.programs
        shipped = job.shipment
        parts = [*shipped.roots, shipped.program.body, repr((job.data, job.settings)).encode()]
        parts += [] if arrays is None else shipped.program.arrays(arrays)
        key = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()
        if key in kept and not kept[key].fits(job.counts):
            del kept[key]  # the user has made some of its objects anew
        if key not in kept:
            tf.random.set_seed(job.seed + self.session.rank * state.SEED_DISTANCE)
            kept[key] = _KeptProgram(job, self.session)
        kept.move_to_end(key)
        kept[key].follow_share()
        while len(kept) > PROGRAMS_KEPT:
            kept.popitem(last=False)
        found: _KeptProgram = kept[key]
        return found

    def _load(self, kept: _KeptProgram) -> None:
        """Gives the roots the values that the user's have."""
        self.known = kept.variables()
        self.state = state.State(
            self.job.layout,
            self.blocks[self.job.state_block],
            self.known,
            self.session.strategy,
            seeds=objects.seed_variables(kept.program.roots),
            rank=self.session.rank,
            divides_sums=True,  # those of metrics
        )
        self.state.load(0)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Tells the parent how far this rank has come, where the transport does not."""
        tally, session = self.session.strategy.tally, self.session
        if tally is None:
            yield
            return
        tally.active, before = True, tally.progress()
        last = told = before

        def tell(progress: Progress) -> None:
            now = progress.since(before)
            session.channel.send(
                messages.Reached(self.number, session.rank, now.count, now.fingerprint, now.what)
            )

        def look() -> None:
            nonlocal last, told
            rests, last = last, tally.progress()
            if rests == last != told:
                told = last
                with contextlib.suppress(ChannelClosed):  # the inbox ends this process
                    tell(last)

        session.watched = look
        try:
            yield
        finally:
            tally.active, session.watched = False, lambda: None
            tell(tally.progress())

    @contextlib.contextmanager
    def _current(self, kept: _KeptProgram) -> Iterator[None]:
        context.current = kept
        self.session.share.in_loop = True
        try:
            yield
        finally:
            context.current = None
            self.session.share.in_loop = False

    def _send(self, kept: _KeptProgram, value: Any, built: jobs.Built) -> None:
        """Sends the function's value, and what it has built, to the parent."""
        packer = packing.Packer()
        roots = kept.program.roots
        pickled = dump_result(value, numbers_of(roots), packer)
        # Before it builds anything, the parent knows of the parts of models these alone.
        pickled_built = dump_built(built, numbers_of(roots, ("compiled",)), packer)
        block = Block(packer.nbytes)
        packer.write(block)
        assert block.fd is not None
        message = messages.Returned(self.number, pickled, pickled_built, block.nbytes)
        self.session.channel.send(message, [block.fd])
        block.close_fd()

    def _built(self, kept: _KeptProgram) -> jobs.Built:
        """What the function has built; every rank takes part, since each has its own sums."""
        roots = kept.program.roots
        known = {id(variable) for variable in self.known}
        optimizers = objects.built_optimizers(roots)
        result = jobs.Built({}, {}, optimizers, {}, random_states.take())
        for index, root in enumerate(roots):
            variables = objects.variables_of(root)
            if all(id(variable) in known for variable in variables):
                continue
            result.values[index] = self._whole_values(kept, variables)
            if isinstance(root, tf.keras.layers.Layer):
                result.layers[index] = keras_names.build_config(root)
            if isinstance(root, tf.keras.Model):
                result.compiled[index] = keras_compiled.built_state(root)
        return result

    def _whole_values(self, kept: _KeptProgram, variables: Sequence[Any]) -> list[Any]:
        """The values of variables, those that differ between ranks combined over all."""
        strategy = self.session.strategy
        differ = {id(v) for v in kept.local_variables()}
        values = []
        for variable in variables:
            value = strategy.experimental_local_results(variable)[0].read_value()
            if id(variable) in differ:
                mean = variable.aggregation != tf.VariableAggregation.SUM
                value = strategy.reduce("MEAN" if mean else "SUM", value, axis=None)
            values.append(value.numpy())
        return values

    def _end(self, kept: _KeptProgram) -> jobs.LoopEnd:
        self.state.store_rank(1, self.session.rank)
        if self.session.says_written:
            spans = self.state.spans_of_rank(1, self.session.rank)
            self.written = messages.written(self.job.state_block, spans)
        local = self.session.strategy.experimental_local_results
        differ = {id(v) for v in kept.local_variables()}
        differ |= {id(v) for v in objects.seed_variables(kept.program.roots)}
        sums = []
        for variable in kept.variables():
            if id(variable) not in differ and variable.dtype.is_floating:
                value = tf.cast(local(variable)[0].read_value(), tf.float64)
                sums.append(float(tf.reduce_sum(tf.abs(value))))
        return jobs.LoopEnd(tuple(sums))
