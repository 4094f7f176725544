"""Seeds of a step's random operations: a stream for each copy of the model and each microbatch.

An operation such as `tf.random.normal` gets two seeds when it is traced: that of
`tf.random.set_seed`, and the number of operations before it in its graph. Then it draws a new
number in each execution. A step in partitions puts the microbatches of all into one graph, each
rank in the order of its own schedule, so these numbers would differ from rank to rank: the loss
would belong to other noise than the gradient. A step in one partition traces its function once, so
all microbatches would draw the same. Therefore, in a step:

1. Each microbatch counts its operations by itself, those in the model's call among them.
2. All ranks of a copy take the seed of its first partition. Without one, it draws one for all.
3. The first microbatch of the first copy gets TensorFlow's own seeds: the numbers of a plain
   `tf.function`. Those of any other are mixed with its number and its copy's; and with that of the
   call, where workers begin a script's further `fit` anew: Keras's would continue.
4. Code that draws is traced for each microbatch: the step's function, `tf.function`s that it
   calls, the model's call.

Keras 3's layers draw from variables instead (`SeedGenerator`), which count from microbatch to
microbatch. Copies mix their number into what these give.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import os
import weakref
from typing import Any

import tensorflow as tf

from nanotf.compat import functions
from nanotf.compat.replacements import KERAS_3, Override
from nanotf.sagemaker.smp import exchange, runtime

_WITHOUT = 87654321  # TensorFlow's seed for operations with a seed of their own and no other
_BELOW = 2**31 - 1  # seeds of operations are 32 bits wide


@dataclasses.dataclass
class SeedStream:
    """The seeds of one microbatch, in one trace of the step."""

    microbatch: int
    copy: int  # of the model
    base: int | None = None  # the seed of all ranks of the copy; None for that of the graph
    call: int = dataclasses.field(default_factory=lambda: earlier_calls.get())
    has_drawn: bool = False
    # By graph, of the operations made so far. The function's graphs and those of the model's call
    # share the number of `_main`.
    _counts: weakref.WeakKeyDictionary[Any, int] = dataclasses.field(
        default_factory=weakref.WeakKeyDictionary
    )
    _main: weakref.WeakSet[Any] = dataclasses.field(default_factory=weakref.WeakSet)
    count: int = 0
    # Traces of `tf.function`s for this microbatch.
    _functions: weakref.WeakKeyDictionary[Any, Any] = dataclasses.field(
        default_factory=weakref.WeakKeyDictionary
    )

    def continues_in(self, graph: Any) -> None:
        """Counts the operations of a graph together with those of the function's."""
        self._main.add(graph)

    @property
    def state(self) -> tuple[Any, ...]:
        """The facts on which the seeds of the next operations depend."""
        return self.base, self.copy, self.microbatch, self.count

    def seeds(self, stock: Any, own: int | None) -> Any:
        """Returns the seeds of an operation.

        Args:
            stock: TensorFlow's function that returns them.
            own: the seed that the code gives the operation, if any.
        """
        self.has_drawn = True
        graph = tf.compat.v1.get_default_graph()
        base = graph.seed if self.base is None else self.base
        if base is None and own is None:
            return stock(None)  # the operation draws its seeds by itself
        before, graph.seed = graph.seed, _WITHOUT if base is None else base  # `stock` reads it
        try:
            first, second = stock(self._next(graph) if own is None else own)
        finally:
            graph.seed = before
        return _mixed(first, self.copy, self.microbatch, self.call), second

    def _next(self, graph: Any) -> int:
        if graph in self._main:
            self.count += 1
            return self.count - 1
        self._counts[graph] = self._counts.get(graph, 0) + 1
        return self._counts[graph] - 1

    def version_of(self, function: Any) -> Any:
        """Returns a `tf.function` with traces for this microbatch alone."""
        if function not in self._functions:
            self._functions[function] = functions.anew(function)
        return self._functions[function]


def _mixed(seed: int, copy: int, microbatch: int, call: int = 0) -> int:
    if copy == microbatch == call == 0:
        return seed
    text = f"{seed} {copy} {microbatch} {call}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") % _BELOW


_current: contextvars.ContextVar[SeedStream | None] = contextvars.ContextVar(
    "nanotf_smp_seeds", default=None
)


# The script's earlier calls of the same method, in other processes.
earlier_calls: contextvars.ContextVar[int]
earlier_calls = contextvars.ContextVar("nanotf_smp_earlier_calls", default=0)


def current() -> SeedStream | None:
    """Returns the stream of the microbatch whose code is traced; None outside a step."""
    return _current.get()


def drawing_from(stream: SeedStream | None) -> contextlib.AbstractContextManager[None]:
    """Makes random operations take their seeds from a stream, if traced in the returned context.

    Args:
        stream: None leaves them alone, as those of initial values.
    """
    return runtime.setting(_current, stream)


def agreed(step: str) -> int:
    """Returns the seed for all ranks of this copy of the model; all call this.

    Args:
        step: unique to the step, and the same on all ranks.
    """
    given = tf.compat.v1.get_default_graph().seed
    # Not from a generator of Python's or NumPy's, whose next numbers are the script's.
    own = int.from_bytes(os.urandom(4), "little") if given is None else given
    return exchange.known_everywhere(f"{step}.seed", own % _BELOW)[0]


def _seeding(stock: Any, _: Any) -> Any:
    @functools.wraps(stock)
    def get_seed(op_seed: Any) -> Any:
        stream = _current.get()
        if stream is None or tf.executing_eagerly():
            return stock(op_seed)
        return stream.seeds(stock, op_seed)

    return get_seed


def _tracing(stock: Any, _: Any) -> Any:
    @functools.wraps(stock)
    def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
        stream = _current.get()
        if stream is None or tf.executing_eagerly():
            return stock(self, *args, **kwargs)
        return stock(stream.version_of(self), *args, **kwargs)

    return _call


def _generating(stock: Any, _: Any) -> Any:
    @functools.wraps(stock)
    def next(self: Any, *args: Any, **kwargs: Any) -> Any:
        drawn = stock(self, *args, **kwargs)
        if _current.get() is None or not runtime.has_replicas() or runtime.dp_rank() == 0:
            return drawn
        # A pair: the seed, which differs by copy, and Keras's count of the draws.
        own = [_mixed(0, runtime.dp_rank(), 0), 0]
        return drawn + tf.cast(tf.constant(own, tf.int64), drawn.dtype)

    return next


TABLE = (
    Override(
        "tensorflow.python.framework.random_seed:get_seed",
        "operations of a step have the seeds of their microbatch",
        _seeding,
    ),
    Override(
        "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function._call",
        "a function traced elsewhere has the seeds of another microbatch",
        _tracing,
    ),
    Override(
        "keras.src.random.seed_generator:SeedGenerator.next",
        "copies of a model draw different numbers for their rows",
        _generating,
        KERAS_3,
    ),
)
