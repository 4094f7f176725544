"""Requests that wait: their order, what one worker takes, and what is dropped."""

import types

from nanotf.serving.front.waiting_line import Pending, WaitingLine
from nanotf.serving.interface import Request


def pending(name="m", body=b"x", began=0.0, version=None, lost=False):
    incoming = types.SimpleNamespace(began=began, has_left=False)
    return Pending(
        incoming,
        None,
        Request("rest", "predict", body),
        (name, version),
        began + 60.0,
        lambda pending, answer: None,
        lost,
    )


def filled(*waiting):
    line = WaitingLine()
    for each in waiting:
        line.add(each)
    return line


def test_a_worker_takes_what_waits_in_order():
    several = [pending() for _ in range(5)]
    line = filled(*several)
    assert line.take(("m", None), 32, 3) == several[:3]
    assert line.take(("m", None), 32, 3) == several[3:]
    assert ("m", None) not in line
    assert (line.count, line.nbytes) == (0, 0)


def test_rows_limit_a_batch_but_not_a_single_request():
    line = WaitingLine()
    line.costs["m"].add(1, 0.1, 10)  # ten bytes are a row
    big, small = pending(body=b"x" * 1000), pending(body=b"x" * 40)
    line.add(big)
    line.add(small)
    assert line.take(("m", None), 32, 32) == [big]
    line.add(pending(body=b"x" * 400))
    assert line.take(("m", None), 32, 32) == [small]


def test_models_and_versions_are_not_mixed_and_the_oldest_is_first():
    line = filled(
        pending("b", began=2.0), pending("a", began=1.0), pending("a", began=3.0, version=7)
    )
    assert line.by_age() == [("a", None), ("b", None), ("a", 7)]
    assert [each.key for each in line.take(("a", None), 32, 32)] == [("a", None)]


def test_clients_that_left_are_dropped():
    gone, here = pending(), pending()
    gone.incoming.has_left = True
    line = filled(gone, here)
    assert line.take(("m", None), 32, 32) == [here]
    assert line.count == 0
    line = filled(gone)
    assert line.take(("m", None), 32, 32) == []
    assert ("m", None) not in line


def test_a_request_that_a_worker_has_lost_runs_first_and_alone():
    first, second, lost = pending(), pending(), pending(lost=True)
    line = filled(first, second, lost)
    assert line.take(("m", None), 32, 32) == [lost]
    assert line.take(("m", None), 32, 32) == [first, second]
    line = filled(first)
    line.add(second)
    second.was_lost = True
    assert line.take(("m", None), 32, 32) == [first]


def test_removed_requests_are_no_longer_counted():
    several = [pending(body=b"x" * size) for size in range(1, 8)]
    line = filled(*several)
    found = line.remove(lambda each: each.nbytes % 2 == 0)
    assert [each.nbytes for each in found] == [2, 4, 6]
    assert (line.count, line.nbytes) == (4, 1 + 3 + 5 + 7)
    assert line.remove(lambda each: True)
    assert not line.by_age()
    assert line.seconds(32) == 0.0


def test_the_time_of_all_that_waits_is_estimated():
    line = WaitingLine()
    for rows in (1, 2, 8, 32):
        line.costs["m"].add(rows, 0.010 + 0.001 * rows, 10 * rows)
    for _ in range(64):
        line.add(pending(body=b"x" * 10))
    assert 0.080 < line.seconds(32) < 0.088  # two batches of 32 rows
