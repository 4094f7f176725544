"""Datasets reach readers as they are now, and batches come back without a copy."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from nanotf.errors import ShippingError
from nanotf.shipping.data import datasets


class Data:
    def __init__(self) -> None:
        self.large = np.arange(datasets.LARGE, dtype=np.uint8)
        self.order = np.arange(10)
        self.new = np.random.default_rng(1)
        self.old = np.random.RandomState(2)
        self.python = random.Random(3)
        self.twin = np.random.default_rng(1)


def _loaded(snapshot: datasets.DatasetSnapshot) -> tuple[Any, list[datasets.Held]]:
    body = snapshot.pickle.array(0, (snapshot.nbytes,), np.uint8).data
    arrays = [block.array(0, (block.nbytes,), np.uint8).data for block in snapshot.arrays]
    return datasets.loads(body, arrays)


def test_only_what_has_changed_is_sent_again() -> None:
    data = Data()
    first = datasets.snapshot(data)
    assert datasets.snapshot(data, first) is first
    data.order = data.order[::-1].copy()
    second = datasets.snapshot(data, first)
    assert second is not first
    assert second.arrays == first.arrays
    data.large[-1] ^= 1  # in place
    third = datasets.snapshot(data, second)
    assert third.arrays != second.arrays
    for snapshot, last in ((first, 0), (third, 9)):
        found, _ = _loaded(snapshot)
        assert found.order[0] == last
    np.testing.assert_array_equal(_loaded(third)[0].large, data.large)
    assert _loaded(second)[0].large[-1] != data.large[-1]


def _draws(data: Any) -> list[float]:
    return [data.new.random(), data.old.rand(), data.python.random(), data.twin.random()]


def test_generators_of_a_dataset_depend_on_their_state_and_the_batch() -> None:
    snapshot = datasets.snapshot(Data())
    found = []
    for key in (b"one", b"two", b"one"):
        data, held = _loaded(snapshot)
        _draws(data)  # what another batch has drawn does not matter
        for each in held:
            each.seed(key)
        found.append(_draws(data))
    assert found[0] == found[2]
    assert not set(found[0]) & set(found[1])
    assert found[0][0] != found[0][3]
    other = Data()
    other.new = np.random.default_rng(5)
    data, held = _loaded(datasets.snapshot(other))
    for each in held:
        each.seed(b"one")
    assert _draws(data)[0] != found[0][0]


def test_what_cannot_be_sent_is_named() -> None:
    data = Data()
    data.order = (number for number in range(3))  # type: ignore[assignment]
    with pytest.raises(ShippingError, match=r"The Data .*`order`, .*generator"):
        datasets.snapshot(data)


def test_batches_lie_in_slots_that_are_used_again() -> None:
    slots = datasets.BatchMemory()
    images = np.moveaxis(np.random.default_rng(0).normal(size=(64, 8, 40)), 1, 2)
    batch = ({"images": images, "names": ["a", None]}, np.arange(64))
    body, packer = datasets.pack_batch(batch)
    assert len(body) < images.nbytes / 10
    number, block = slots.write(packer)
    assert block is not None
    memory = block.array(0, (block.nbytes,), np.uint8)
    found = datasets.unpack_batch(body, memory, packer.places())
    np.testing.assert_array_equal(found[0]["images"], images)
    assert found[0]["names"] == ["a", None]
    memory[:] = 0
    assert not found[0]["images"].any(), "the batch shares the slot's memory"

    other, new = slots.write(packer)
    assert other != number
    assert new is not None
    slots.release((number,))
    assert slots.write(packer) == (number, None)
    slots.release((number,))
    _, larger = datasets.pack_batch(np.zeros(10**6))
    again, replaced = slots.write(larger)
    assert again == number
    assert replaced is not None
