"""`nanotf.map` and `nanotf.imap`: a function of many items, on warm workers with their own cores.

Each worker runs one item at a time, in a process where nothing of Keras is replaced. Folds, seeds
and hyper-parameters of small models run side by side.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nanotf.compat.process_state import ProcessState
from nanotf.machine import topology
from nanotf.parent.map import item_arguments
from nanotf.parent.map.item_results import Results, progress_bar
from nanotf.parent.map.item_run import ItemRun, PackedObject, Policy, Task
from nanotf.parent.where import check_may_start
from nanotf.pool import backends
from nanotf.pool.plans import AnyPlan
from nanotf.shipping import orders
from nanotf.shipping.objects import whole
from nanotf.shipping.objects.packing import Packer
from nanotf.tracebacks import raising_at_the_call

_NO_TERMINAL = {"stdout": False, "stderr": False}


@raising_at_the_call
def map(
    function: Callable[..., Any],
    items: Iterable[Any],
    num_processes: int | str = "auto",
    *,
    cores_per_process: int | None = None,
    shared: Mapping[str, Any] | None = None,
    on_error: str = "raise",
    cores: Sequence[int] | None = None,
    seed: int | None = None,
    max_restarts: int = 0,
    recycle_after: int | None = None,
    memory_limit: int | str | None = "auto",
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
    on what it ran before. Only the number of its cores may change the last digits of a sum.

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
        memory_limit: "auto", int or None. A worker that uses more bytes after an item is replaced;
            TensorFlow itself takes a few hundred MB of them. "auto", the default, replaces a worker
            that has grown by 256 MiB since its first item. None sets no limit.
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
        cores_per_process=cores_per_process,
        shared=shared,
        on_error=on_error,
        ordered=True,
        cores=cores,
        seed=seed,
        max_restarts=max_restarts,
        recycle_after=recycle_after,
        memory_limit=memory_limit,
        verbose=verbose,
    ) as results:
        return results.all()


@raising_at_the_call
def imap(
    function: Callable[..., Any],
    items: Iterable[Any],
    num_processes: int | str = "auto",
    *,
    cores_per_process: int | None = None,
    shared: Mapping[str, Any] | None = None,
    on_error: str = "raise",
    ordered: bool = False,
    cores: Sequence[int] | None = None,
    seed: int | None = None,
    max_restarts: int = 0,
    recycle_after: int | None = None,
    memory_limit: int | str | None = "auto",
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
    item_arguments.check_on_error(on_error)
    item_arguments.check_verbose(verbose)
    chosen = item_arguments.check_items(items)
    given = item_arguments.check_shared(function, chosen[0], shared)
    base = item_arguments.check_seed(seed)
    policy = Policy(
        _plan(num_processes, cores_per_process, cores, len(chosen)),
        item_arguments.check_max_restarts(max_restarts),
        item_arguments.check_recycle_after(recycle_after),
        item_arguments.check_memory_limit(memory_limit),
    )
    # Bars that several workers redraw would overwrite each other.
    terminal = orders.Terminal(_NO_TERMINAL, shutil.get_terminal_size().columns)
    run = ItemRun(task_of(function, chosen, given, base, terminal), policy)
    bar = None if verbose == 0 else progress_bar(len(chosen), verbose)
    return Results(run, len(chosen), ordered, on_error == "raise", bar)


def _plan(num_processes: Any, cores_per_process: Any, cores: Any, count: int) -> AnyPlan:
    """Plans the workers of this machine for a number of items."""
    check_may_start(f"nanotf.map(num_processes={num_processes!r})")
    if num_processes == topology.AUTO:
        share = topology.check_cores_per_process(cores_per_process) or 1
        usable = len(cores) if cores is not None else topology.usable_count()
        # With fewer cores than one worker needs, the plan says so.
        num_processes = max(1, min(count, usable // share))
    return backends.plan("local", num_processes, cores_per_process, cores)


def task_of(
    function: Any,
    items: Sequence[Any],
    shared: Mapping[str, Any],
    seed: int,
    terminal: orders.Terminal,
) -> Task:
    """Pickles the function and the items; see `Task`.

    Raises:
        ShippingError: One of them cannot be sent; names it.
    """
    # All arrays are shared, and so read-only: no item finds in them what another has written.
    packer, name = Packer(inline=1), item_arguments.name_of(function)
    parts = {f"The function {name}": function}
    parts |= {f"shared[{key!r}]": value for key, value in shared.items()}
    sent = PackedObject(whole.dump(parts, packer, by_value=function), packer)
    parcels = [_parcel(f"Item {index}", item) for index, item in enumerate(items)]
    return Task(
        name,
        tuple(shared),
        sent,
        parcels,
        [item_arguments.label_of(item) for item in items],
        seed,
        ProcessState.capture(),
        terminal,
    )


def _parcel(what: str, item: Any) -> PackedObject:
    packer = Packer()
    return PackedObject(whole.dump({what: item}, packer), packer)
