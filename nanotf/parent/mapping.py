"""`nanotf.map` and `nanotf.imap`: a function of many items, on warm workers with their own cores.

Each worker runs one item at a time, in a process where nothing of Keras is replaced. Folds, seeds
and hyper-parameters of small models run side by side.
"""

from __future__ import annotations

import inspect
import shutil
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nanotf.compat.versions import require_tensorflow
from nanotf.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    NanoError,
    check_choice,
)
from nanotf.machine import topology
from nanotf.parent import calls
from nanotf.parent.item_run import ItemRun, Outcome, Parcel, Policy, Task, label_of
from nanotf.pool import backends, interrupts
from nanotf.pool.plans import AnyPlan
from nanotf.shipping import jobs, whole
from nanotf.shipping.packing import Packer

ON_ERROR = ("raise", "return")
VERBOSE = ("auto", 0, 1, 2)
END_SECONDS = 60.0  # limit for the workers of an interrupted call to end


def map(
    function: Callable[..., Any],
    items: Iterable[Any],
    num_processes: int | str = "auto",
    cores_per_process: int | None = None,
    shared: Mapping[str, Any] | None = None,
    on_error: str = "raise",
    *,
    cores: Sequence[int] | None = None,
    seed: int | None = None,
    max_restarts: int = 0,
    recycle_after: int | None = None,
    memory_limit: int | None = None,
    verbose: Any = "auto",
) -> list[Any]:
    """Calls `function(item)` for every item, on several core-pinned processes side by side.

    A function may build, train and return a Keras model: the model arrives built, compiled and
    with the state of its optimizer. The function and everything that it refers to are sent to each
    worker once in a call, and stay there from one item to the next. Its large arrays, and those in
    `shared`, lie in memory that all workers map; they are read-only there. The workers stay warm
    for the next call.

    Before each item Keras's names and settings, and the seeds of Python, NumPy and TensorFlow,
    are set: the results do not depend on the number of workers, on which worker runs an item, nor
    on what it ran before.

    Args:
        function: callable. It is called in a worker, and its result is sent back.
        items: iterable, read to its end before a worker starts. Not empty.
        num_processes: int or "auto", the default: as many as there are items, or cores if those
            are fewer.
        cores_per_process: int or None, the default: equal shares of the usable cores.
        shared: mapping of str to object or None. `function` gets them as keyword arguments.
        on_error: "raise", the default, raises the first failure and stops the workers.
            "return" runs all items, and the exception takes the place of the result; its `index`
            tells the item, its text has the worker's traceback.
        cores: sequence of int or None, logical CPUs to divide, as in `fit`.
        seed: int or None. With an item's index it seeds the item, as
            `tf.keras.utils.set_random_seed` does. None draws one from NumPy's global generator, so
            that `set_random_seed` in your program fixes it, and two calls differ.
        max_restarts: int, default 0, how many times an item is run again after its worker died.
            Other items are not affected.
        recycle_after: int or None, the default. A worker is replaced after that many items of the
            call.
        memory_limit: int or None, the default, bytes. A worker that uses more after an item is
            replaced. TensorFlow itself takes a few hundred MB of it.
        verbose: "auto", 0, 1 or 2, as in `fit`: 0 shows no progress bar.

    Returns:
        A list of the results, in the order of the items.

    Raises:
        InvalidArgumentError, InvalidArgumentTypeError: An argument cannot be used.
        PlacementError: There are fewer cores than workers need.
        ShippingError: The function or an item cannot be sent; the message names it.
        WorkerError: An item failed, with on_error="raise". It can also be caught as the
            exception's own class.
        WorkerDied: A worker died with an item, with on_error="raise".

    Example:
        >>> nanotf.map(train_fold, range(5), shared={"x": x, "y": y})
    """
    with imap(
        function,
        items,
        num_processes,
        cores_per_process,
        shared,
        on_error,
        ordered=True,
        cores=cores,
        seed=seed,
        max_restarts=max_restarts,
        recycle_after=recycle_after,
        memory_limit=memory_limit,
        verbose=verbose,
    ) as results:
        return list(results)


def imap(
    function: Callable[..., Any],
    items: Iterable[Any],
    num_processes: int | str = "auto",
    cores_per_process: int | None = None,
    shared: Mapping[str, Any] | None = None,
    on_error: str = "raise",
    *,
    ordered: bool = False,
    cores: Sequence[int] | None = None,
    seed: int | None = None,
    max_restarts: int = 0,
    recycle_after: int | None = None,
    memory_limit: int | None = None,
    verbose: Any = 0,
) -> Results:
    """Returns an iterator over the results of `map`, each as soon as it is there.

    The workers begin at once, and continue while your program works on a result. Use the iterator
    in a `with` statement if you may leave it early: that stops the workers.

    Args:
        function, items, num_processes, cores_per_process, shared, on_error, cores, seed,
            max_restarts, recycle_after, memory_limit: as in `map`.
        ordered: bool, default False: results come in the order in which items end, as from
            `multiprocessing.Pool.imap_unordered`. True keeps the order of the items.
        verbose: as in `map`, default 0.

    Returns:
        `Results`, an iterator.

    Raises:
        NanoError: As `map`. Arguments are checked before any worker starts.

    Example:
        >>> with nanotf.imap(train, seeds) as results:
        ...     for model in results:
        ...         ensemble.append(model)
    """
    check_choice("on_error", on_error, ON_ERROR)
    _check_verbose(verbose)
    chosen = _check_items(items)
    given = _check_shared(function, chosen[0], shared)
    policy = Policy(
        _plan(num_processes, cores_per_process, cores, len(chosen)),
        calls.check_max_restarts(max_restarts),
        _check_positive("recycle_after", recycle_after, "the items of a worker"),
        _check_positive("memory_limit", memory_limit, "bytes"),
    )
    run = ItemRun(_task(function, chosen, given, _check_seed(seed)), policy)
    bar = None if verbose == 0 else _progress_bar(len(chosen), verbose)
    return Results(run, len(chosen), ordered, on_error == "raise", bar)


class Results(Iterator[Any]):
    """The results of `imap`: an iterator, and a context that stops the workers at its end.

    Args:
        run: `ItemRun`, not yet running.
        count: int, number of items.
        ordered: bool, whether results keep the order of the items.
        raises: bool, whether a failed item raises; otherwise its exception is a result.
        bar: Keras's progress bar or None.
    """

    def __init__(self, run: ItemRun, count: int, ordered: bool, raises: bool, bar: Any) -> None:
        self._run = run
        self._ordered, self._raises, self._bar = ordered, raises, bar
        self._early: dict[int, Outcome] = {}  # by index; came before one that is to precede it
        self._count, self._passed = count, 0
        self._thread = threading.Thread(target=run.run, name="nanotf-map", daemon=True)
        self._stop = weakref.finalize(self, run.cancel)  # an iterator that nobody reads
        self._stop.atexit = False
        self._thread.start()

    def __iter__(self) -> Results:
        return self

    def __next__(self) -> Any:
        if self._passed == self._count:
            self.close()
            raise StopIteration
        try:
            outcome = self._next_outcome()
            self._passed += 1
            if outcome.error is not None and self._raises:
                raise outcome.error
            value = outcome.error if outcome.error is not None else _result(outcome)
        except BaseException:
            self.close()
            raise
        if self._passed == self._count:
            self.close()  # the pool is free when the last result is there
        return value

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Stops the workers if they still have items. No further result comes."""
        if self._passed < self._count:
            with interrupts.held_back():
                self._passed = self._count
                self._stop()
                self._thread.join(END_SECONDS)
        else:
            self._stop.detach()
            self._thread.join(END_SECONDS)

    def _next_outcome(self) -> Outcome:
        if self._ordered and self._passed in self._early:
            return self._early.pop(self._passed)
        while True:
            outcome = self._run.outcomes.get()
            if isinstance(outcome, BaseException):
                raise outcome
            assert outcome is not None, "the run ends after its last outcome"
            if self._bar is not None:
                self._bar.add(1)
            failed = outcome.error is not None and self._raises
            if not self._ordered or failed or outcome.index == self._passed:
                return outcome
            self._early[outcome.index] = outcome


def _result(outcome: Outcome) -> Any:
    """Returns the result that a worker has sent."""
    assert outcome.result is not None
    message, block = outcome.result.message, outcome.result.block
    try:
        return whole.load(message.value, block)
    except Exception as error:
        raise NanoError(
            "The result of an item could not be unpickled in your process. Received: "
            f"{type(error).__name__}: {error}, for item {outcome.index}. Return arrays, numbers or "
            "a Keras model."
        ) from error


# ---------------------------------------------------------------------------- the arguments
def _check_verbose(verbose: Any) -> None:
    if isinstance(verbose, bool) or verbose not in VERBOSE:
        raise InvalidArgumentError(
            f"`verbose` must be one of {', '.join(repr(v) for v in VERBOSE)}. Received: "
            f"verbose={verbose!r}."
        )


def _check_items(items: Any) -> list[Any]:
    try:
        iterator = iter(items)
    except TypeError:
        raise InvalidArgumentTypeError(
            "`items` must be iterable: the function is called with each element. Received: "
            f"items={label_of(items)} ({type(items).__name__}). Pass a list or a range."
        ) from None
    found = list(iterator)
    if not found:
        raise InvalidArgumentError(
            f"`items` must have an element. Received: {type(items).__name__} without any. Check "
            "what it was made from."
        )
    return found


def _check_shared(function: Any, item: Any, shared: Any) -> dict[str, Any]:
    """Checks that the function takes an item, and the shared objects by name."""
    if not callable(function):
        raise InvalidArgumentTypeError(
            "`function` must be callable. Received: an object of class "
            f"{type(function).__qualname__}. Pass the function itself, without parentheses."
        )
    given = {} if shared is None else shared
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidArgumentTypeError(
            "`shared` must be a dict of names to objects, which the function takes as keyword "
            f"arguments. Received: {type(shared).__name__}. Pass shared={{'x': x}}."
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin that does not describe itself
        return dict(given)
    try:
        signature.bind(item, **given)
    except TypeError as error:
        raise InvalidArgumentTypeError(
            "`function` must take an item, and the names in `shared` as keyword arguments. "
            f"Received: {_name_of(function)}{signature}, and shared={sorted(given)}: {error}. "
            "Change the function's parameters, or `shared`."
        ) from None
    return dict(given)


def _check_positive(name: str, value: Any, unit: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        kind = InvalidArgumentError if isinstance(value, int) else InvalidArgumentTypeError
        raise kind(
            f"`{name}` must be an integer above 0, {unit}, or None. Received: {name}={value!r}. "
            "Pass such a number, or leave it out."
        )
    return int(value)


def _check_seed(seed: Any) -> int:
    """Returns the base of the items' seeds."""
    if seed is None:
        return int(np.random.randint(2**31))
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        kind = InvalidArgumentError if isinstance(seed, int) else InvalidArgumentTypeError
        raise kind(
            f"`seed` must be an integer that is not negative, or None. Received: seed={seed!r}. "
            "Pass a number such as seed=1."
        )
    return int(seed)


def _plan(num_processes: Any, cores_per_process: Any, cores: Any, count: int) -> AnyPlan:
    """Plans the workers of this machine for a number of items."""
    calls.check_may_start(f"nanotf.map(num_processes={num_processes!r})")
    if num_processes == topology.AUTO:
        share = topology.check_cores_per_process(cores_per_process) or 1
        usable = len(cores) if cores is not None else topology.usable_count()
        num_processes = max(1, min(count, usable // share))
    return backends.plan("local", num_processes, cores_per_process, cores)


# -------------------------------------------------------------------------------- shipping
def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", None) or f"a {type(function).__qualname__}"


def _task(function: Any, items: Sequence[Any], shared: dict[str, Any], seed: int) -> Task:
    """Pickles the function and the items.

    Raises:
        ShippingError: One of them cannot be sent; names it.
    """
    packer, name = Packer(), _name_of(function)
    parts = {f"The function {name}": function}
    parts |= {f"shared[{key!r}]": value for key, value in shared.items()}
    sent = Parcel(whole.dump_named(parts, packer, by_value=function), packer)
    parcels = [_parcel(f"Item {index}", item) for index, item in enumerate(items)]
    return Task(
        name,
        tuple(shared),
        sent,
        parcels,
        [label_of(item) for item in items],
        seed,
        jobs.KerasSettings.capture(),
        shutil.get_terminal_size().columns,
    )


def _parcel(what: str, item: Any) -> Parcel:
    packer = Packer()
    return Parcel(whole.dump(what, item, packer), packer)


def _progress_bar(count: int, verbose: Any) -> Any:
    keras = require_tensorflow().keras
    shown = 1 if verbose == "auto" else verbose
    return keras.utils.Progbar(count, verbose=shown, unit_name="item")
