"""The results of a `nanotf.map`, as an iterator in the user's thread."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import copy
import weakref
from collections.abc import Iterator
from typing import Any

from nanotf.errors import NanoError, WorkerError
from nanotf.parent.map.item_run import ItemRun
from nanotf.parent.map.item_task import Outcome
from nanotf.pool import interrupts
from nanotf.shipping.objects import whole
from nanotf.tracebacks import raising_at_the_call
from nanotf.wire.own_threads import OwnThread

END_SECONDS = 60.0  # limit for the workers of an interrupted call to end


class Results(Iterator[Any]):
    """The results of `imap`: an iterator, and a context that stops the workers at its end.

    The run begins with `begin`, or with the context.

    Args:
        run: `ItemRun`, not yet running.
        count: int, number of items.
        ordered: bool, whether results keep the order of the items.
        raises: bool, whether a failed item raises; otherwise its exception is a result.
        in_place: bool, whether arrays in results are read-only, and stay in shared memory.
    """

    def __init__(
        self, run: ItemRun, count: int, ordered: bool, raises: bool, in_place: bool = False
    ) -> None:
        self._run, self._bar = run, run.bar
        self._ordered, self._raises, self._in_place = ordered, raises, in_place
        self._arrived: collections.deque[Outcome] = collections.deque()  # not yet looked at
        self._early: dict[int, Outcome] = {}  # by index; came before one that is to precede it
        self._open = set(range(count))  # indices of items without an outcome
        self._count, self._passed = count, 0
        # A daemon, and no finalizer at exit: the process does not wait for results that nobody
        # reads, and `warm` ends the workers.
        context = contextvars.copy_context()  # has the user's `console.silent`
        self._thread = OwnThread(
            target=context.run, args=(run.run,), name="nanotf-map", daemon=True
        )
        self._stop = weakref.finalize(self, run.cancel)  # an iterator that nobody reads
        self._stop.atexit = False

    def begin(self) -> Results:
        """Begins the run. An interruption meanwhile ends it, as one of a later wait does."""
        try:
            self._thread.start()
        except BaseException as error:
            self._end(error)
            raise
        return self

    def __iter__(self) -> Results:
        return self

    @raising_at_the_call
    def __next__(self) -> Any:
        return self._take()

    def _take(self) -> Any:
        if self._passed == self._count:
            self.close()
            raise StopIteration
        try:
            outcome = self._next_outcome()
            self._passed += 1
            if outcome.error is not None and self._raises:
                raise outcome.error
            value = outcome.error if outcome.error is not None else self._result(outcome)
        except BaseException as error:
            self._end(error)
            raise
        if self._passed == self._count:
            self.close()  # the pool is free when the last result is there
        return value

    @raising_at_the_call
    def all(self) -> list[Any]:
        """Returns all results that are left, in their order.

        Raises:
            Exception: As `__next__`. A `NanoError` has the results of all items that have ended.
        """
        found: dict[int, Any] = {}
        try:
            with self._bar.shown():
                while self._passed < self._count:
                    number = self._passed
                    found[number] = self._take()
        except NanoError as error:
            error.results = {**found, **self._ended()}
            raise
        return [*found.values()]

    def _ended(self) -> dict[int, Any]:
        """Returns the results that nobody has taken, by index, once the run has ended."""
        while not self._run.outcomes.empty():
            if isinstance(outcomes := self._run.outcomes.get(), list):
                self._arrived.extend(outcomes)
        self._early.update({outcome.index: outcome for outcome in self._arrived})
        found: dict[int, Any] = {}
        for number, outcome in self._early.items():
            with contextlib.suppress(NanoError):  # one that cannot be unpickled here
                if outcome.error is None:
                    found[number] = self._result(outcome)
        return found

    def _result(self, outcome: Outcome) -> Any:
        """Returns the result that a worker has sent."""
        assert outcome.result is not None
        try:
            (result,) = whole.load(
                outcome.result, outcome.block, in_place=self._in_place, is_checked=False
            )
            return result
        except Exception as error:
            raise NanoError(
                "The result of an item could not be unpickled in your process. Received: "
                f"{type(error).__name__}: {error}, for item {outcome.index}. Return arrays, "
                "numbers or a Keras model."
            ) from error

    def __enter__(self) -> Results:
        # Begun before the `with` statement, it would run on after a Ctrl-C in between.
        return self if self._thread.ident is not None else self.begin()

    def __exit__(self, kind: Any, error: BaseException | None, *_: Any) -> None:
        self._end(error)

    def close(self) -> None:
        """Stops the workers if they still have items. No further result comes."""
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        self._bar.end()  # before an error is printed
        if self._passed < self._count:
            with interrupts.held_back(error):
                self._passed = self._count  # `next` then stops
                self._stop()
                if self._run.has_workers:  # else it waits for them, for the next call
                    interrupts.wait_for(self._thread, END_SECONDS)
        else:
            self._stop.detach()
            self._thread.join(END_SECONDS)

    def _next_outcome(self) -> Outcome:
        if self._ordered and self._passed in self._early:
            return self._early.pop(self._passed)
        while True:
            while not self._arrived:
                self._arrived.extend(self._wait())
            outcome = self._arrived.popleft()
            self._open.remove(outcome.index)
            # A failure that raises ends the call at once, whatever is to precede it.
            failed = outcome.error is not None and self._raises
            if not self._ordered or failed or outcome.index == self._passed:
                return outcome
            self._early[outcome.index] = outcome

    def _wait(self) -> list[Outcome]:
        """Returns the next outcomes; raises what has ended the call."""
        found = self._bar.wait_for(self._run.outcomes)
        if isinstance(found, list):
            return found
        assert found is not None, "the run ends after its last outcome"
        is_lost = self._raises or len(self._open) == self._count
        if is_lost or not isinstance(found, Exception):
            raise found
        # What has ended is not lost with the rest.
        return [Outcome(index, error=_of_item(found, index)) for index in sorted(self._open)]


def _of_item(error: Exception, index: int) -> Exception:
    """Returns an error that has ended a call, as that of an item."""
    found = copy.copy(error)
    if isinstance(found, WorkerError):
        found.index = index
    return found
