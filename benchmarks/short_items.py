"""Measures items of nothing and longer ones: `python -m benchmarks.short_items [--seconds 0 10]`.

`nanotf.map` and joblib's loky, which sends items in batches, too, take turns with the same items.
nanotf seeds the random numbers of each item, and hands it the function as it was at the call. loky
does neither, so a third contestant is loky with a function that sets the seeds first. "cold" is a
call with the start of the workers, "warm" the median of later calls.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from benchmarks import report
from benchmarks.others import Others

SECONDS = (0.0, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0)  # of an item
CALL_SECONDS = 2.0  # about how long a call's items take one process
MOST_ITEMS = 30_000  # of a call
ASLEEP_FROM = (
    1e-3  # s; an item that is as long sleeps, so that the load of the machine is no matter
)
CALLS = 3  # after the cold one

Call = Callable[[int], Sequence[int]]


def work(item: int, seconds: float) -> int:
    """Takes so many seconds; returns the item."""
    if seconds >= ASLEEP_FROM:
        time.sleep(seconds)
    elif seconds:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass
    return item


def seeded(item: int, seconds: float) -> int:
    """Sets the seeds of an item first."""
    import tensorflow as tf

    tf.keras.utils.set_random_seed(item)
    return work(item, seconds)


def _processor_seconds() -> dict[int, float]:
    """Returns the processor time of this process and its descendants, by process id."""
    here = psutil.Process()
    return {p.pid: sum(p.cpu_times()[:2]) for p in (here, *here.children(recursive=True))}


def _measure(call: Call, count: int) -> dict[str, float]:
    """Returns the seconds of a call, its processor time (s), and the share of others."""
    before = _processor_seconds()
    with Others(()) as others:
        begin = time.perf_counter()
        found = call(count)
        seconds = time.perf_counter() - begin
    if list(found) != list(range(count)):
        raise RuntimeError("the results are not the items")
    spent = sum(now - before.get(pid, 0.0) for pid, now in _processor_seconds().items())
    return {"seconds": seconds, "processor": spent, "others": others.share}


def measure_all(
    processes: int, lengths: Sequence[float], most: int = MOST_ITEMS
) -> list[dict[str, Any]]:
    """Measures all contestants with items of all lengths, interleaved.

    Args:
        processes: int, number of workers.
        lengths: sequence of float, s, of an item.
        most: int, number of items of a call.

    Returns:
        A list of dicts with `name`, `seconds` (of an item), `items` (their number), `cold` and
        `warm` (s for all), `processor` (s of processor time an item, warm) and `others`.
    """
    import joblib
    from joblib.externals.loky import get_reusable_executor

    import nanotf

    def loky(function: Callable[[int, float], int], seconds: float, count: int) -> Any:
        calls = (joblib.delayed(function)(item, seconds) for item in range(count))
        return joblib.Parallel(n_jobs=processes, backend="loky")(calls)

    def mapped(seconds: float, count: int) -> Any:
        of_item = functools.partial(work, seconds=seconds)
        return nanotf.map(of_item, range(count), processes, verbose=0)

    def end_loky() -> None:
        get_reusable_executor().shutdown(wait=True)

    rows = []
    for seconds in lengths:
        count = min(most, max(2 * processes, int(CALL_SECONDS / max(seconds, 1e-9))))
        contestants: dict[str, tuple[Call, Callable[[], None]]] = {
            "nanotf.map": (functools.partial(mapped, seconds), nanotf.shutdown),
            "joblib, loky": (functools.partial(loky, work, seconds), end_loky),
            "joblib, loky, seeds set": (functools.partial(loky, seeded, seconds), end_loky),
        }
        cold, warm = {}, {name: list[dict[str, float]]() for name in contestants}
        for name, (call, end) in contestants.items():
            end()
            cold[name] = _measure(call, count)
            if name.endswith("loky"):
                end()  # the next contestant's workers are others
        for _ in range(CALLS):
            for name, (call, _) in contestants.items():
                warm[name].append(_measure(call, count))
        rows += [_row(name, seconds, count, cold[name], warm[name]) for name in contestants]
    nanotf.shutdown()
    end_loky()
    return rows


def _row(
    name: str, seconds: float, count: int, cold: dict[str, float], warm: Sequence[dict[str, float]]
) -> dict[str, Any]:
    return {
        "name": name,
        "seconds": seconds,
        "items": count,
        "cold": cold["seconds"],
        "warm": statistics.median(each["seconds"] for each in warm),
        "processor": statistics.median(each["processor"] for each in warm) / count,
        "others": max(each["others"] for each in warm),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.short_items", description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, nargs="+", default=SECONDS, help="of an item")
    parser.add_argument("--items", type=int, default=MOST_ITEMS, help="of a call, at most")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    options = parser.parse_args(arguments)
    # Workers import this module by its name, which `__main__` is not.
    from benchmarks import short_items

    rows = short_items.measure_all(options.processes, options.seconds, options.items)
    print(json.dumps(rows) if options.json else report.short_items(rows))


if __name__ == "__main__":
    main()
