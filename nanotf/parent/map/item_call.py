"""Begins a call of `nanotf.imap`: checks the arguments, and ships the function and the items."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nanotf.compat.process_state import ProcessState
from nanotf.console import ItemBar
from nanotf.machine import topology
from nanotf.parent.map import item_arguments
from nanotf.parent.map.item_output import output_of
from nanotf.parent.map.item_results import Results
from nanotf.parent.map.item_run import ItemRun
from nanotf.parent.map.item_task import PackedObject, Policy, Task
from nanotf.parent.where import check_may_start
from nanotf.pool import backends
from nanotf.pool.plans import AnyPlan
from nanotf.shipping import orders
from nanotf.shipping.objects import whole
from nanotf.shipping.objects.packing import Packer

_NO_TERMINAL = {"stdout": False, "stderr": False}


def run_items(
    function: Callable[..., Any],
    items: Iterable[Any],
    num_processes: int | str,
    bar: ItemBar,
    name: Callable[[int], object],
    *,
    cores_per_process: int | None,
    shared: Mapping[str, Any] | None,
    on_error: str,
    cores: Sequence[int] | None,
    seed: int | None,
    max_restarts: int,
    output: str,
    ordered: bool = False,
    recycle_after: int | None = None,
    memory_limit: int | str | None = topology.AUTO,
) -> Results:
    """Returns the results of `imap`.

    Args:
        bar: shows how far the call is; begins here.
        name: returns what stands for an item in front of its output, given its index.

    Raises:
        NanoError: As `map`.
    """
    item_arguments.check_on_error(on_error)
    item_arguments.check_output(output)
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
    task = task_of(function, chosen, given, base, terminal, quiet=True)
    bar.begin(len(chosen))
    run = ItemRun(task, policy, bar, output_of(output, name))
    return Results(run, len(chosen), ordered, on_error == "raise")


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
    quiet: bool,
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
    dumper = whole.ItemDumper()
    parcels = [
        PackedObject(*dumper.dump(f"Item {index}", item)) for index, item in enumerate(items)
    ]
    return Task(
        name,
        tuple(shared),
        sent,
        parcels,
        items,
        seed,
        ProcessState.capture(),
        terminal,
        quiet,
    )
