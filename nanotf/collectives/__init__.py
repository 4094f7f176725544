"""Collectives between workers: through shared memory on a host, over TCP between hosts.

Called by `region` in every step; `pool` creates a group for its workers.
May import `compat`, `machine` and `wire`.

    parent                                   worker `rank`
      owner = create_group(size)
      owner.spec (picklable), owner.fd  --->  group = Group.attach(spec, rank, fd)
      owner.close()                           group.all_reduce(tensor, key)
      owner.abort("why")                      ... raises CollectiveError("why") on every rank

- `spec.py`: the parent's side: the memory, its specification, abort.
- `group.py`: the worker's side, on tensors.
- `engine.py`: the interface of an engine, on NumPy arrays.
- `native/`, `native_library.py`, `native_engine.py`: the engine of one host, in C++.
  `native/layout.h` states the protocol; `layout.py` has the numbers that the parent needs.
- `description.py`: texts by which ranks compare their calls.
- `launcher.py`: moves TensorFlow's own collectives through a group.
- `lazy.py`: leaves out exchanges whose results a graph does not read.
- `hosts_engine.py`, `peers.py`: groups that span hosts, on top of each host's own group.
- `patience.py`: the time left for a wait, without that while all processes are frozen.
- `tally.py`: counts TensorFlow's own collectives, with transport "grpc".
- `build.py` compiles `native/`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanotf import lazy_names

if TYPE_CHECKING:
    from nanotf.collectives.group import Group
    from nanotf.collectives.native_library import native_status
    from nanotf.collectives.spec import GroupOwner, GroupSpec, HostsSpec, create_group

__all__ = [
    "Group",
    "GroupOwner",
    "GroupSpec",
    "HostsSpec",
    "create_group",
    "native_status",
]

# Lazy: `group` imports TensorFlow, which the parent's `spec` does without.
_HOMES = {
    "Group": ".group",
    "HostsSpec": ".spec",
    "native_status": ".native_library",
    "GroupOwner": ".spec",
    "GroupSpec": ".spec",
    "create_group": ".spec",
}

__getattr__, __dir__ = lazy_names.attach(globals(), _HOMES)
