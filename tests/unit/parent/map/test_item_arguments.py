"""Arguments of `nanotf.map` that need no worker, and the seeds of items."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from nanotf.errors import InvalidArgumentError, InvalidArgumentTypeError
from nanotf.parent.map import item_arguments
from nanotf.parent.map.item_task import seeds_of


def test_items_have_seeds_of_their_own() -> None:
    seeds = [seed for base in range(10) for seed in seeds_of(base, 100)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**32 for seed in seeds)  # as `set_random_seed` takes them
    assert seeds[:3] == seeds_of(0, 3)  # more items do not change the first ones


def test_the_seed_follows_numpys() -> None:
    np.random.seed(1)
    first = item_arguments.check_seed(None)
    assert item_arguments.check_seed(None) != first
    np.random.seed(1)
    assert item_arguments.check_seed(None) == first
    assert item_arguments.check_seed(np.int64(3)) == 3


@pytest.mark.parametrize("value", ["auto", None, 5, np.int64(5)])
def test_memory_limits(value: Any) -> None:
    assert item_arguments.check_memory_limit(value) == value


@pytest.mark.parametrize("value", [True, 1e9, "1G", [1]])
def test_memory_limits_of_another_type(value: Any) -> None:
    with pytest.raises(InvalidArgumentTypeError, match=r"memory_limit.*Pass 'auto', None, or"):
        item_arguments.check_memory_limit(value)


def test_numbers_that_are_too_small() -> None:
    for check, value in (
        (item_arguments.check_recycle_after, 0),
        (item_arguments.check_memory_limit, -1),
        (item_arguments.check_max_restarts, -1),
        (item_arguments.check_seed, -1),
    ):
        with pytest.raises(InvalidArgumentError, match=rf"must be at least \d.*={value}\."):
            check(value)


def test_functions_that_do_not_describe_themselves() -> None:
    assert item_arguments.check_shared(print, 1, {"sep": ""}) == {"sep": ""}
    assert item_arguments.check_shared(min, [1], None) == {}


def test_names_for_people() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise ValueError

        def __call__(self, item: int) -> int:
            return item

    assert "Broken" in item_arguments.label_of(Broken())
    assert item_arguments.label_of(range(3)) == "range(0, 3)"
    assert len(item_arguments.label_of("a" * 1000)) < 50
    assert item_arguments.name_of(Broken()).endswith("Broken")
    assert item_arguments.name_of(sys.exit) == "exit"
