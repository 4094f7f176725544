"""Mailboxes: arrays between processes, sends that never wait, ends and deadlocks that do."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from forked_ranks import end_well, forked

from nanotf.errors import (
    CollectiveError,
    InvalidArgumentError,
    InvalidArgumentTypeError,
    WorkerDied,
)
from nanotf.sagemaker.smp.mailboxes.letters import MailboxWait, WaitReport
from nanotf.sagemaker.smp.mailboxes.mailbox import Mailbox
from nanotf.sagemaker.smp.mailboxes.mailbox_owner import mailboxes
from nanotf.sagemaker.smp.mailboxes.waits import RankReports, stuck

MANY = 400  # letters; far more than any system's queue of datagrams holds


def on_all(boxes: list[Mailbox], function: Callable[[Mailbox], Any]) -> list[Any]:
    with futures.ThreadPoolExecutor(len(boxes)) as pool:
        return [future.result() for future in [pool.submit(function, box) for box in boxes]]


def test_arrays_of_all_kinds() -> None:
    rng = np.random.default_rng(0)
    sent = [
        rng.normal(size=(3, 4)).astype("float32"),
        np.array(2.5),
        np.zeros((0, 5), "int8"),
        np.array([True, False]),
        rng.normal(size=(300, 301)).T,  # 700 KB, not contiguous
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    ]
    with mailboxes(2) as (one, other):
        for arrays in (sent, sent[:3], []):
            one.send(1, "kinds", arrays)
            found = other.receive(0, "kinds")
            assert [(a.dtype, a.shape) for a in found] == [(a.dtype, a.shape) for a in arrays]
            for array, right in zip(found, arrays, strict=True):
                np.testing.assert_array_equal(array, right)
                assert array.flags.writeable


def test_many_arrays_have_a_long_description() -> None:
    with mailboxes(2) as (one, other):
        one.send(1, "many", [np.full(1, n) for n in range(3000)])
        assert [int(array[0]) for array in other.receive(0, "many")] == list(range(3000))


def test_order_within_a_tag_and_choice_of_tag() -> None:
    with mailboxes(2) as (one, other):
        for n in range(10):
            one.send(1, "even" if n % 2 == 0 else "odd", [np.array(n)])
        for tag, begin in (("odd", 1), ("even", 0)):
            found = [int(other.receive(0, tag)[0]) for _ in range(5)]
            assert found == list(range(begin, 10, 2))


def test_a_sender_changes_its_array_afterwards() -> None:
    with mailboxes(2) as (one, other):
        for elements in (10, 100_000):
            array = np.ones(elements)
            one.send(1, "x", [array])
            array[:] = 7
            np.testing.assert_array_equal(other.receive(0, "x")[0], np.ones(elements))


def test_sends_never_wait_for_the_receiver() -> None:
    """All ranks send far more than queues hold, small and in blocks, before anyone receives."""

    def run(box: Mailbox) -> list[int]:
        for n in range(MANY):
            elements = 3000 if n % 20 == 0 else 1
            box.send(1 - box.rank, "x", [np.full(elements, n)])
        together.wait()
        return [int(box.receive(1 - box.rank, "x")[0][0]) for _ in range(MANY)]

    together = threading.Barrier(2)
    with mailboxes(2) as boxes:
        assert on_all(boxes, run) == [list(range(MANY))] * 2


def test_to_all_and_to_itself() -> None:
    with mailboxes(3) as boxes:
        boxes[1].send_to_all(range(3), "x", [np.arange(5000)])
        found = on_all(boxes, lambda box: box.receive(1, "x")[0])
        assert all(np.array_equal(array, np.arange(5000)) for array in found)


def test_between_processes() -> None:
    def run(box: Mailbox) -> None:
        total = np.zeros(50_000)
        for n in range(20):  # a ring
            box.send((box.rank + 1) % 3, "ring", [np.full(50_000, box.rank + n)])
            total += box.receive((box.rank - 1) % 3, "ring")[0]
        assert total[0] == total[-1] == 20 * ((box.rank - 1) % 3) + 190

    with forked(3, run) as (_, pids):
        assert end_well(pids)


def test_what_cannot_be_sent() -> None:
    with mailboxes(2) as (one, _):
        with pytest.raises(InvalidArgumentError, match=r"0 to 1. Received: destination=2"):
            one.send(2, "x", [])
        with pytest.raises(InvalidArgumentError, match=r"Received: source=-1"):
            one.receive(-1, "x")
        with pytest.raises(InvalidArgumentTypeError, match="dtype object"):
            one.send(1, "x", [np.array([{}])])
    with pytest.raises(CollectiveError, match="has closed its mailbox"):
        one.receive(1, "x")


def test_ranks_that_wait_for_each_other() -> None:
    def run(box: Mailbox) -> str:
        with pytest.raises(CollectiveError) as caught:
            box.receive((box.rank + 1) % 3, f"tag {box.rank}")
        return str(caught.value)

    with mailboxes(3) as boxes:
        texts = on_all(boxes, run)
    assert texts[0] == texts[1] == texts[2]
    for rank in range(3):
        assert (
            f"rank {rank} waits in receive(source={(rank + 1) % 3}, tag='tag {rank}')" in texts[0]
        )


def test_a_rank_that_waits_for_ranks_that_wait_for_each_other() -> None:
    def run(box: Mailbox) -> None:
        with pytest.raises(CollectiveError, match=r"rank 0 waits in receive\(source=1"):
            box.receive((1, 0, 0)[box.rank], "abc"[box.rank])

    with mailboxes(3) as boxes:
        on_all(boxes, run)


def _waits_for_rank_1(tag: str, kind: type[Exception], match: str) -> Callable[[Mailbox], None]:
    def run(box: Mailbox) -> None:
        if box.rank == 1:
            box.send(0, "y", [np.ones(3)])
            return
        with pytest.raises(kind, match=match):
            box.receive(1, tag)

    return run


def test_a_rank_that_has_ended() -> None:
    match = r"receive\(source=1, tag='x'\) on rank 0, but rank 1 has ended; .* the tags \['y'\]"
    with forked(2, _waits_for_rank_1("x", CollectiveError, match)) as (owner, pids):
        assert os.waitpid(pids[1], 0)[1] == 0
        owner.tell_ended(1)
        assert os.waitpid(pids[0], 0)[1] == 0


def test_letters_of_a_rank_that_has_ended_arrive() -> None:
    def run(box: Mailbox) -> None:
        if box.rank == 1:
            for n in range(100):
                box.send(0, "y", [np.array(n)])
            return
        assert [int(box.receive(1, "y")[0]) for n in range(100)] == list(range(100))
        with pytest.raises(CollectiveError, match=r"send.*rank 1 has ended"):
            while True:
                box.send(1, "z", [])

    with forked(2, run) as (owner, pids):
        assert os.waitpid(pids[1], 0)[1] == 0
        owner.tell_ended(1)
        assert os.waitpid(pids[0], 0)[1] == 0


def test_a_rank_that_has_died() -> None:
    def run(box: Mailbox) -> None:
        if box.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(WorkerDied, match="rank 1 is gone") as caught:
            box.receive(2, "x")  # of another rank, which waits for the dead one
        assert caught.value.rank == 1

    with forked(3, run) as (owner, pids):
        assert os.waitpid(pids[1], 0)[1] == signal.SIGKILL
        owner.fail(WorkerDied("rank 1 is gone", rank=1))
        assert [os.waitpid(pids[rank], 0)[1] for rank in (0, 2)] == [0, 0]


def _report(
    rank: int,
    source: int,
    sent: int = 0,
    received: int = 0,
    cpu: float = 0.0,
    is_busy: bool = False,
) -> WaitReport:
    wait = MailboxWait(rank, source, "receive")
    return WaitReport(rank, (wait,), (sent, sent), (received, received), cpu, is_busy)


@pytest.mark.parametrize(
    ("change", "is_stuck"),
    [
        (lambda t: {}, True),
        (lambda t: {"sent": 1}, False),  # a letter is under way
        (lambda t: {"sent": t, "received": t}, False),  # it sends
        (lambda t: {"cpu": float(t)}, False),  # it computes in another thread
        (lambda t: {"is_busy": t == 4}, False),  # or waits for a core to do so
    ],
)
def test_who_is_stuck(change: Callable[[int], dict[str, Any]], is_stuck: bool) -> None:
    now = 0.0
    watch = RankReports(lambda: now)
    for second in range(6):
        now = float(second)
        watch.note(_report(0, 1))
        watch.note(_report(1, 0, **change(second)))
    assert bool(watch.stuck()) == is_stuck
    now += 10  # no reports: the ranks do not wait any more
    assert watch.stuck() == []


def test_a_rank_with_a_wait_that_can_end_is_not_stuck() -> None:
    two = WaitReport(1, (MailboxWait(0, 0, "x"), MailboxWait(1, 2, "y")), (0, 0, 0), (0, 0, 0), 0.0)
    one = WaitReport(0, (MailboxWait(0, 1, "z"),), (0, 0, 0), (0, 0, 0), 0.0)
    assert stuck({0: one, 1: two}) == {}  # rank 2 computes
    assert list(stuck({0: one, 1: replace(two, waits=two.waits[:1])})) == [0, 1]


def test_a_long_wait_is_named_once() -> None:
    now, texts = 0.0, []
    watch = RankReports(lambda: now)
    for second in range(15):
        now = float(second)
        watch.note(_report(0, 1))
        texts += watch.long_waits(10.0)
    assert texts == ["Rank 0 has waited 10 s for rank 1, in receive."]


def test_ranks_that_do_not_fit_together() -> None:
    with mailboxes(2) as boxes:
        for box in boxes:
            box.introduce(box.rank, "equal")
        for box in boxes:
            box.introduce(box.rank, f"of {box.rank}")
        match = r"the same configuration. Received: of \d on rank \d, of \d on rank \d"
        for box in boxes:
            with pytest.raises(CollectiveError, match=match):
                box.receive(1 - box.rank, "x")


def test_a_rank_that_computes_in_another_thread_is_not_stuck() -> None:
    """Both wait for each other, but one sends once it has computed."""

    def compute(box: Mailbox) -> None:
        end = time.monotonic() + 5  # longer than it takes to find ranks that are stuck
        while time.monotonic() < end:
            sum(range(10_000))
        box.send(1, "result", [])

    def run(box: Mailbox) -> None:
        if box.rank == 0:
            thread = threading.Thread(target=compute, args=(box,))
            thread.start()
            box.receive(1, "thanks")
            thread.join()
        else:
            box.receive(0, "result")
            box.send(0, "thanks", [])

    with mailboxes(2) as boxes:
        on_all(boxes, run)
