"""Chooses the strategies of a script, once it imports TensorFlow.

The script of a rank may set variables of TensorFlow before it imports it, so nothing is imported
earlier.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence

from nanotf.console import say
from nanotf.ranks import this_rank

_TENSORFLOW = "tensorflow"


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function when TensorFlow has been imported.

    Args:
        call: the function.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _TENSORFLOW:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                # No earlier: `importlib.util.find_spec` asks, too, and imports nothing.
                sys.meta_path.remove(self)
                self._call()

            # On the loader that Python has made: other code reads resources through it.
            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def use_ranks() -> None:
    """Makes the strategies that the script of this rank creates be strategies over the ranks."""
    if _TENSORFLOW in sys.modules:
        _replace()
    else:
        sys.meta_path.insert(0, _AfterImport(_replace))


def _replace() -> None:
    from nanotf.compat import one_replica

    def choose(cls: type) -> type | None:
        if one_replica.has_gpus():
            return None
        from nanotf.ranks.rank_strategy import RankStrategy

        this_rank.note_use("tf.distribute")
        return one_replica.in_place_of(RankStrategy, cls)

    one_replica.replace(choose)


def tell_of_ranks(has_workers: bool) -> None:
    """Makes the first strategy of a script that runs in one process say how to use all cores.

    Args:
        has_workers: True puts strategies of one replica in place of TensorFlow's.
    """
    from nanotf.compat import one_replica

    def choose(cls: type) -> type | None:
        if not one_replica.has_gpus() and this_rank.note_use("tf.distribute"):
            say(
                f"{cls.__name__}() has one replica in this process. `{this_rank.command()}` runs "
                "the script in several processes, with a replica in each.",
                sys.stderr,
            )
        return one_replica.of_one_replica(cls) if has_workers else None

    one_replica.replace(choose)
