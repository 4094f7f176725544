"""The orders in which a `fit` passes over shuffled arrays, drawn by Keras in the parent.

Keras permutes row numbers by TensorFlow's seed, and the permutation depends neither on the arrays
nor on the batch size. So its own adapter, over the row numbers alone and with one batch for each
pass, draws the orders of a single process. The workers get them as a stream, ahead of the steps.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple

from nanotf.compat import eager_context
from nanotf.compat.generation import generation
from nanotf.compat.versions import require_tensorflow


class OrderSeed(NamedTuple):
    """The seed from which Keras draws the orders of a call.

    Args:
        number: int.
        is_users: bool, whether it is the seed of `tf.random.set_seed`. Otherwise each call has its
            own, with which it can draw the same orders again.
    """

    number: int
    is_users: bool

    @classmethod
    def now(cls) -> OrderSeed:
        """Returns the seed of a call that begins now."""
        given = eager_context.seeds()
        return cls(secrets.randbits(31), False) if given is None else cls(int(given[0]), True)


class Orders:
    """The orders of one `fit`, as the only turn of a stream: an element is a vector of row numbers.

    Args:
        rows: int, length of the arrays.
        epochs: int, how many epochs the whole call runs.
        seed: `OrderSeed`.
        complete: int, how many passes over the arrays are complete.
        passes: int, how many passes follow at most.
    """

    def __init__(self, rows: int, epochs: int, seed: OrderSeed, complete: int, passes: int) -> None:
        self._rows, self._epochs, self._seed = rows, epochs, seed
        self._complete, self._passes = complete, passes

    @property
    def signature(self) -> Any:
        """The `tf.TensorSpec` of an order."""
        tf = require_tensorflow()
        return tf.TensorSpec([self._rows], tf.int64)

    def drawn(self) -> Iterator[Any]:
        """Returns an iterator of the orders, from that of the next pass on.

        Call it in the main thread: Keras's dataset takes TensorFlow's seed when it is made.
        """
        with eager_context.seeded(self._seed.number):
            orders = generation().orders(self._rows, self._epochs, not self._seed.is_users)
        left = itertools.islice(orders, self._complete, self._complete + self._passes)
        return (order.numpy() for order in left)

    # ---------------------------------------------------------------- see `streams.Epochs`
    def evaluations(self) -> Iterator[Iterator[tuple[Any, Any]]]:
        return iter([((self, order) for order in self.drawn())])

    def training(self) -> Iterator[Iterator[tuple[Any, Any]]]:
        raise NotImplementedError

    def keeps(self, iterator: Any) -> bool:
        return False

    def close(self) -> None:
        pass
