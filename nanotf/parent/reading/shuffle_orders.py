"""The orders in which a `fit` passes over shuffled arrays, drawn by Keras in the parent.

Keras permutes row numbers by TensorFlow's seed, and the permutation depends neither on the arrays
nor on the batch size. So its own adapter, over the row numbers alone, draws the orders of a single
process. The workers get them as a stream, ahead of the steps: an element is a piece of an order, of
many batches, so that the first step need not wait for all of a long one.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple

from nanotf.compat import eager_context
from nanotf.compat.generation import generation
from nanotf.compat.versions import require_tensorflow
from nanotf.shipping.data.inputs import pieces_of
from nanotf.shipping.data.streams import EpochsToRead


class OrderSeed(NamedTuple):
    """The seed from which Keras draws the orders of a call."""

    number: int
    # Whether it is the seed of `tf.random.set_seed`. Otherwise each call has its own, with which it
    # can draw the same orders again.
    is_users: bool

    @classmethod
    def now(cls) -> OrderSeed:
        """Returns the seed of a call that begins now."""
        given = eager_context.seeds()
        return cls(secrets.randbits(31), False) if given is None else cls(int(given[0]), True)


class Orders(EpochsToRead):
    """The orders of one `fit`, as the only turn of a stream: an element is a piece of an order.

    Args:
        rows: length of the arrays.
        epochs: of the whole call, those before a resumption included.
        complete: passes over the arrays that are complete, whose orders are drawn and dropped.
        passes: how many passes follow at most.
        one_iterator: see `keras_epochs.Arrays`.
    """

    def __init__(
        self,
        rows: int,
        batch_size: int,
        epochs: int,
        seed: OrderSeed,
        complete: int,
        passes: int,
        one_iterator: bool,
    ) -> None:
        self._rows, self._epochs, self._seed = rows, epochs, seed
        self._size, self._pieces = pieces_of(rows, batch_size)
        self._complete, self._passes = complete, passes
        self._one_iterator = one_iterator

    @property
    def signature(self) -> Any:
        """The `tf.TensorSpec` of a piece of an order."""
        tf = require_tensorflow()
        return tf.TensorSpec([None], tf.int64)

    def drawn(self) -> Iterator[Any]:
        """Returns an iterator of the pieces of the orders, from those of the next pass on.

        Call it in the main thread: Keras's dataset takes TensorFlow's seed when it is made.
        """
        with eager_context.seeded(self._seed.number):
            # With a seed Keras draws the same order in each new iterator. The call's own seed must
            # not have that effect.
            repeats = self._one_iterator or not self._seed.is_users
            orders = generation().orders(self._rows, self._size, self._epochs, repeats)
        begin, count = self._pieces * self._complete, self._pieces * self._passes
        return (piece.numpy() for piece in itertools.islice(orders, begin, begin + count))

    def evaluations(self) -> Iterator[Iterator[tuple[Any, Any]]]:
        return iter([((self, order) for order in self.drawn())])
