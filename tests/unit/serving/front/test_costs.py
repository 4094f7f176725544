"""The time that models take, as the front learns it."""

import math
import random

import pytest

from nanotf.serving.front.costs import Costs


def learned(fixed, each, sizes=(1, 2, 4, 8, 32), batches=200):
    costs, rng = Costs(), random.Random(3)
    for _ in range(batches):
        rows = rng.choice(sizes)
        costs.add(rows, fixed + each * rows, 100 * rows)
    return costs


def test_a_line_is_found():
    assert learned(0.01, 0.002).line() == pytest.approx((0.01, 0.002), rel=1e-6)


def test_rows_of_one_size_say_what_a_row_costs():
    fixed, each = learned(0.01, 0.002, sizes=(4,)).line()
    assert (fixed, each) == pytest.approx((0.0, 0.0045))


def test_a_model_whose_time_does_not_grow_costs_per_batch():
    costs = learned(0.01, 0.0)
    assert costs.seconds(64, 32) == pytest.approx(0.02, rel=1e-3)


def test_nothing_is_negative():
    costs = Costs()
    for rows, seconds in ((1, 0.9), (32, 0.1), (1, 0.8), (32, 0.2)):
        costs.add(rows, seconds, rows)
    assert min(costs.line()) >= 0
    costs = Costs()
    for rows, seconds in ((1, 0.001), (32, 0.9), (1, 0.001)):
        costs.add(rows, seconds, rows)
    assert min(costs.line()) >= 0


def test_old_batches_are_forgotten():
    costs = learned(0.0, 0.1)
    for rows in (1, 2, 4, 8) * 200:
        costs.add(rows, 0.001 * rows, 100 * rows)
    assert costs.line()[1] == pytest.approx(0.001, rel=0.05)


def test_rows_are_estimated_by_the_size_of_a_body():
    costs = Costs()
    assert costs.rows_of(12345) == 1
    costs.add(4, 0.1, 400)
    assert costs.rows_of(1000) == 10
    assert costs.rows_of(1) == 1


def test_a_batch_is_kept_short_enough():
    costs = learned(0.01, 0.002)
    assert costs.rows_within(0.05) == pytest.approx(20)
    assert costs.rows_within(0.012) == 1
    assert costs.rows_within(0.001) == math.inf  # smaller batches would be late, too


def test_a_larger_batch_is_tried_where_all_were_equal():
    costs = Costs()
    assert costs.rows_within(0.01) == 1
    for _ in range(30):
        costs.add(1, 0.005, 100)  # nothing says how much of it a second row would add
    assert costs.rows_within(0.01) == pytest.approx(2)
    costs.add(2, 0.0051, 200)
    assert costs.rows_within(0.01) > 10
