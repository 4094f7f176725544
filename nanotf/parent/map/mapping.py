"""`nanotf.map` and `nanotf.imap`: a function of many items, on warm workers with their own cores.

Each worker runs one item at a time, in a process where nothing of Keras is replaced. Folds, seeds
and hyper-parameters of small models run side by side. Short items travel in batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nanotf import console
from nanotf.compat import versions
from nanotf.parent.map import item_arguments
from nanotf.tracebacks import raising_at_the_call

if TYPE_CHECKING:
    from nanotf.parent.map.item_results import Results


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
    output: str = "prefix",
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
        memory_limit: "auto", int or None. A worker that uses more bytes after an item, or after a
            batch of short ones, is replaced; TensorFlow itself takes a few hundred MB of them.
            "auto", the default, replaces a worker that has grown by 256 MiB since its first item.
            None sets no limit.
        verbose: "auto", 0, 1 or 2. 0 shows nothing of nanotf's own. 1 and "auto" show a bar on
            stderr, with how many items have ended and run, and the time left; without a terminal
            a line from time to time. 2 shows a line for each item that has ended.
        output: "prefix", "keep" or "drop": what becomes of the text that items print, to stdout,
            to stderr or by `tf.print`. "prefix", the default, shows it in whole lines, each with
            its item's index in front, such as "[3] loss 0.2". "keep" shows nothing: if an item
            fails, its error ends with the last lines and has the text as `printed`. "drop" forgets
            it. With any of them, Keras's own bars are quiet unless the function passes `verbose`.

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
    with _results(
        function,
        items,
        num_processes,
        verbose,
        cores_per_process=cores_per_process,
        shared=shared,
        on_error=on_error,
        ordered=True,
        cores=cores,
        seed=seed,
        max_restarts=max_restarts,
        recycle_after=recycle_after,
        memory_limit=memory_limit,
        output=output,
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
    output: str = "prefix",
) -> Results:
    """Returns an iterator over the results of `map`, each as soon as it is there.

    The workers begin at once, and continue while your program works on a result. `items` is read
    to its end before they start, and results wait here until you take them; those of short items
    come together, about 50 ms late. Use the iterator in a `with` statement if you may leave it
    early: that stops the workers.

    Args:
        function, items, num_processes, cores_per_process, shared, on_error, cores, seed,
            max_restarts, recycle_after, memory_limit, output: as in `map`.
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
    return _results(
        function,
        items,
        num_processes,
        verbose,
        cores_per_process=cores_per_process,
        shared=shared,
        on_error=on_error,
        ordered=ordered,
        cores=cores,
        seed=seed,
        max_restarts=max_restarts,
        recycle_after=recycle_after,
        memory_limit=memory_limit,
        output=output,
    ).begin()


def _results(
    function: Callable[..., Any],
    items: Iterable[Any],
    num_processes: int | str,
    verbose: Any,
    **options: Any,
) -> Results:
    """Returns the results of a call whose workers have not begun."""
    item_arguments.check_verbose(verbose)
    with console.silent(verbose == 0):
        versions.import_visibly()
        from nanotf.parent.map.item_call import run_items  # imports TensorFlow, too

        bar = console.ItemBar("map", verbose)
        return run_items(function, items, num_processes, bar, str, **options)
