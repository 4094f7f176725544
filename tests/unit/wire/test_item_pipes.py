"""The pipes of a worker that runs items in batches."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from nanotf.wire.item_pipes import LONGEST, MOST, ItemClaims, ItemPipes


@pytest.fixture
def pipes() -> Iterator[ItemPipes]:
    made = ItemPipes()
    yield made
    made.close()


@pytest.fixture
def claims(pipes: ItemPipes) -> Iterator[ItemClaims]:
    made = ItemClaims(*(os.dup(fd) for fd in pipes.of_worker))
    yield made
    made.close()


def test_each_item_has_one_taker(pipes: ItemPipes, claims: ItemClaims) -> None:
    assert pipes.offer(1, [4, 5, 6]) == 3
    assert claims.take(1, 4)
    assert pipes.withdraw() == [5, 6]
    assert not claims.take(1, 5)
    assert pipes.withdraw() == []


def test_an_item_that_was_taken_back_may_come_again(pipes: ItemPipes, claims: ItemClaims) -> None:
    """The worker meets the old order first, and must leave the token to the new one."""
    pipes.offer(1, [4, 5])
    pipes.withdraw()
    pipes.offer(2, [5])
    assert not claims.take(1, 4) and not claims.take(1, 5)
    assert claims.take(2, 5)


def test_order_numbers_that_no_longer_fit(pipes: ItemPipes, claims: ItemClaims) -> None:
    pipes.offer(2**32 + 7, [0])
    assert claims.take(2**32 + 7, 0)


def test_records_outlive_their_writer(pipes: ItemPipes) -> None:
    claims = ItemClaims(*(os.dup(fd) for fd in pipes.of_worker))
    assert claims.record(3, 0.5, b"three") and claims.record(4, 0.25, b"")
    claims.close()
    assert list(pipes.ended()) == [(3, 0.5, b"three"), (4, 0.25, b"")]
    assert list(pipes.ended()) == []


def test_a_record_is_whole_or_not_there(pipes: ItemPipes, claims: ItemClaims) -> None:
    """One that does not fit is refused; what came before stays."""
    assert not claims.record(0, 0.0, bytes(LONGEST))
    written = 0
    while claims.record(written, 0.0, bytes(1000)):
        written += 1
    assert [item for item, _, _ in pipes.ended()] == list(range(written))
    assert claims.record(written, 0.0, b"again")
    assert [result for _, _, result in pipes.ended()] == [b"again"]


def test_a_pipe_holds_what_it_holds(pipes: ItemPipes) -> None:
    """More items are offered when there is room."""
    items = list(range(100_000))
    offered = pipes.offer(1, items)
    assert MOST <= offered < len(items)
    assert pipes.withdraw() == items[:offered]
