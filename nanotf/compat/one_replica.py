"""Strategies of one replica in place of TensorFlow's, for programs that nanotf runs.

A script that makes a `tf.distribute.MirroredStrategy` expects TensorFlow to divide its work between
devices. Under `nanotf run`, and in a `@nano` function, nanotf divides the work between processes.
There, the constructors of `STRATEGIES` return a strategy of one replica that works like
TensorFlow's default one: `scope()` changes nothing, `run(f)` calls `f`, a distributed dataset is
the dataset. No server starts, whatever `TF_CONFIG` says.

The private name is `distribute_lib._get_default_strategy`: `tf.distribute.get_strategy()` returns
the default strategy only outside all scopes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib

# Classes under `tf.distribute` that divide steps between the devices that a process or a cluster
# has. `ParameterServerStrategy` and `TPUStrategy` need a cluster of their own and are left alone.
STRATEGIES = (
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "experimental.CentralStorageStrategy",
    "experimental.MultiWorkerMirroredStrategy",
)


class OneReplica(tf.distribute.Strategy):  # type: ignore[misc]
    """A strategy of one replica whose scope is transparent.

    Args:
        *args, **kwargs: those of the class that it replaces. They name devices and clusters, and
            are ignored.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Variables, datasets and reductions are the default strategy's. Its `extended` also tells
        # TensorFlow's checks that this is no strategy but the default one.
        tf.distribute.Strategy.__init__(self, distribute_lib._get_default_strategy().extended)

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context that changes nothing."""
        return self._transparent()

    @contextlib.contextmanager
    def _transparent(self) -> Iterator[Any]:
        yield self

    @property
    def cluster_resolver(self) -> Any:
        """A resolver without a cluster; scripts then take this process for the chief."""
        resolvers = tf.distribute.cluster_resolver
        nothing = tf.train.ClusterSpec({})
        return resolvers.SimpleClusterResolver(nothing, task_type=None, task_id=None)


def making(stock: Any = None, given: Any = None) -> Callable[..., Any]:
    """Returns a `__new__` for a class of `STRATEGIES` that makes strategies of one replica.

    Classes derived from it are not affected. Where TensorFlow sees GPUs, neither is the class.

    Args:
        stock, given: ignored; the signature is that of `replacements.Override.replacement`.
    """
    return _making(of_one_replica)


def _making(choose: Callable[[type], type | None]) -> Callable[..., Any]:
    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        return object.__new__((choose(cls) if cls in _classes() else None) or cls)

    return __new__


def _stock_new(cls: type, *args: Any, **kwargs: Any) -> Any:
    return object.__new__(cls)


def _classes() -> list[type]:
    return [functools.reduce(getattr, name.split("."), tf.distribute) for name in STRATEGIES]


def has_gpus() -> bool:
    """Returns True if TensorFlow sees GPUs, which strategies then divide the work between."""
    return bool(tf.config.list_physical_devices("GPU"))


def of_one_replica(cls: type) -> type | None:
    """Returns the class of one replica in place of a class of `STRATEGIES`; None with GPUs."""
    return None if has_gpus() else in_place_of(OneReplica, cls)


@functools.cache
def in_place_of(base: type, cls: type) -> type:
    """Returns a class that behaves like `base` and whose objects are instances of `cls`, too.

    Its attribute `stands_for` is `cls`.
    """
    return type(cls.__name__, (base, cls), {"__doc__": base.__doc__, "stands_for": cls})


def replace(choose: Callable[[type], type | None] = of_one_replica) -> None:
    """Makes the constructors of `STRATEGIES` return objects of other classes.

    Args:
        choose: takes the class; returns the other one, or None for the class itself.
    """
    for cls in _classes():
        cls.__new__ = _making(choose)  # type: ignore[method-assign]


def restore() -> None:
    """Undoes `replace`."""
    for cls in _classes():
        # Not deleted: CPython would then no longer accept arguments for `__init__`, see
        # https://github.com/python/cpython/issues/49572.
        if "__new__" in vars(cls):
            cls.__new__ = _stock_new  # type: ignore[assignment,method-assign]
