"""Requests and workers find each other."""

import asyncio
import time
import types

import pytest

pytest.importorskip("httptools")

from nanotf.serving.front import dispatcher as dispatchers
from nanotf.serving.front.counters import Counters
from nanotf.serving.front.dispatcher import HEAR_SECONDS, LOOK_SECONDS, Dispatcher, ServerLimits
from nanotf.serving.front.waiting_line import Pending
from nanotf.serving.interface import Refusal, Request, Response
from nanotf.serving.worker_messages import Loaded

LIMITS = ServerLimits(
    most_rows=4,
    most_waiting=6,
    most_waiting_bytes=1000,
    max_latency=None,
    timeout=60.0,
    overload_status=429,
)


class Worker:
    """A worker without a process. It answers when the test says so."""

    def __init__(self, *keys, code=None):
        self.keys = dict.fromkeys(keys or [("m", None)], 0)
        self.loaded = [Loaded()]
        self.options = types.SimpleNamespace(versions=[types.SimpleNamespace(code=code)])
        self.batch, self.since, self.is_ready, self.aborted = [], 0.0, True, False
        self.asked, self.has_answer = [], False
        self.placement = types.SimpleNamespace(cores=(0,))

    def place_of(self, key):
        return self.keys.get(key)

    def computes_one_by_one(self, key):
        return self.options.versions[0].code is not None

    def ask(self, place, batch, then):
        self.batch, self.since, self._then = list(batch), time.monotonic(), then
        self.asked.append([each.request.body for each in batch])

    def answer(self, seconds=0.01):
        batch, self.batch = self.batch, []
        self._then(seconds, [(Response(200, each.request.body), 1) for each in batch])

    def hear(self):
        if self.has_answer:
            self.has_answer = False
            self.answer()

    def leave(self):
        self.is_ready = False

    def abort(self):
        self.aborted = True


class Refuses:
    def refuse(self, refusal):
        return Response(refusal.status, refusal.text.encode())


class Requests:
    """Makes requests, and keeps their answers."""

    def __init__(self):
        self.answers = {}

    def make(self, body, key=("m", None), age=0.0):
        began = time.monotonic() - age
        incoming = types.SimpleNamespace(began=began, has_left=False)

        def answer(pending, response):
            assert body not in self.answers, "answered twice"
            self.answers[body] = response.status

        request = Request("i", "predict", body)
        return Pending(incoming, Refuses(), request, key, began + 60.0, answer)


def run(script, hear_seconds=60.0, **changes):
    """Runs `script(dispatcher, requests, turn)` in a loop; `turn()` lets the loop run once.

    A turn in which the process is not preempted hears no worker.
    """
    limits = ServerLimits(**{**vars(LIMITS), **changes})

    async def begin():
        async def turn():
            await asyncio.sleep(0)
            await asyncio.sleep(0)

        await script(Dispatcher(limits, Counters()), Requests(), turn)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatchers, "HEAR_SECONDS", hear_seconds)
        asyncio.run(begin())


def test_a_request_goes_to_a_free_worker_at_once():
    async def script(dispatcher, requests, turn):
        worker = Worker()
        dispatcher.is_free(worker)
        dispatcher.submit(requests.make(b"a"))
        await turn()
        assert worker.asked == [[b"a"]]
        worker.answer()
        assert requests.answers == {b"a": 200}
        assert dispatcher.is_idle

    run(script)


def test_what_waits_becomes_a_batch():
    async def script(dispatcher, requests, turn):
        worker = Worker()
        dispatcher.is_free(worker)
        for body in (b"a", b"b", b"c"):  # of one turn of the loop
            dispatcher.submit(requests.make(body))
        await turn()
        for body in (b"d", b"e", b"f", b"g", b"h"):
            dispatcher.submit(requests.make(body))
        await turn()
        worker.answer()
        await turn()
        worker.answer()
        await turn()
        worker.answer()
        assert worker.asked == [[b"a", b"b", b"c"], [b"d", b"e", b"f", b"g"], [b"h"]]
        assert len(requests.answers) == 8

    run(script)


def test_a_long_turn_of_the_loop_lets_no_worker_wait():
    async def script(dispatcher, requests, turn):
        worker = Worker()
        dispatcher.is_free(worker)
        dispatcher.submit(requests.make(b"a"))
        await turn()
        dispatcher.submit(requests.make(b"b"))
        worker.has_answer = True  # the loop would read it in its next turn
        time.sleep(HEAR_SECONDS)
        dispatcher.submit(requests.make(b"c"))
        assert requests.answers == {b"a": 200}
        assert worker.asked == [[b"a"], [b"b"]]

    run(script, HEAR_SECONDS)


def test_a_request_that_an_answer_lets_in_hears_no_worker():
    async def script(dispatcher, requests, turn):
        worker, heard = Worker(), []
        dispatcher.is_free(worker)

        def hear():
            heard.append(len(heard))
            time.sleep(HEAR_SECONDS)
            dispatcher.submit(requests.make(b"more%d" % len(heard)))

        dispatcher.submit(requests.make(b"a"))
        await turn()
        worker.hear = hear
        time.sleep(HEAR_SECONDS)
        dispatcher.submit(requests.make(b"b"))
        assert heard == [0]

    run(script, HEAR_SECONDS)


def test_several_workers_share_what_waits():
    async def script(dispatcher, requests, turn):
        one, two = Worker(), Worker()
        for worker in (one, two):
            dispatcher.is_free(worker)
            dispatcher.is_free(worker)  # told twice
        for number in range(5):
            dispatcher.submit(requests.make(b"%d" % number))
        await turn()
        assert sorted(map(len, one.asked + two.asked)) == [1, 4]

    run(script)


def test_a_worker_gets_only_what_it_serves():
    async def script(dispatcher, requests, turn):
        old, new = Worker(("m", None), ("m", 1)), Worker(("m", None), ("m", 2))
        dispatcher.is_free(old)
        dispatcher.is_free(new)
        dispatcher.submit(requests.make(b"one", ("m", 1)))
        dispatcher.submit(requests.make(b"two", ("m", 2)))
        dispatcher.submit(requests.make(b"three", ("m", 3)))
        await turn()
        assert (old.asked, new.asked) == ([[b"one"]], [[b"two"]])
        dispatcher.submit(requests.make(b"four", ("m", 4)))
        refused = {("m", 3): Refusal(404, "not found"), ("m", 4): Refusal(503, "no memory")}
        dispatcher.drop_unserved(refused.get)
        assert requests.answers == {b"three": 404, b"four": 503}

    run(script)


def test_a_worker_that_is_replaced_answers_what_it_alone_can():
    async def script(dispatcher, requests, turn):
        old, new = Worker(("m", None), ("m", 1)), Worker(("m", None), ("m", 2))
        dispatcher.is_free(old)
        dispatcher.submit(requests.make(b"running"))
        await turn()
        dispatcher.submit(requests.make(b"one", ("m", 1)))
        dispatcher.submit(requests.make(b"any"))
        dispatcher.dismiss(old)
        dispatcher.is_free(new)
        await turn()
        assert new.asked == [[b"any"]]
        dispatcher.drop_unserved(lambda key: Refusal(404, "not found"))
        old.answer()
        await turn()
        assert old.asked == [[b"running"], [b"one"]] and not old.is_ready
        old.answer()
        new.answer()
        assert requests.answers == dict.fromkeys([b"running", b"one", b"any"], 200)
        assert dispatcher.is_idle

    run(script)


def test_of_two_workers_that_are_replaced_the_last_one_answers():
    async def script(dispatcher, requests, turn):
        old = [Worker(("m", None), ("m", 1)) for _ in range(2)]
        new = [Worker(("m", None), ("m", 2)) for _ in range(2)]
        for worker in old:
            dispatcher.is_free(worker)
        for body in (b"a", b"b", b"c", b"d", b"e"):
            dispatcher.submit(requests.make(body, ("m", 1)))
        await turn()  # four, a batch, and one
        dispatcher.submit(requests.make(b"late", ("m", 1)))
        for each in zip(old, new, strict=True):
            dispatcher.dismiss(each[0])
            dispatcher.is_free(each[1])
            await turn()
        first, second = old
        assert not first.is_ready and second.is_ready
        second.answer()
        await turn()
        assert second.asked[-1] == [b"late"]
        for worker in old:
            worker.answer()
        assert set(requests.answers.values()) == {200} and dispatcher.is_idle

    run(script)


def test_a_worker_that_is_replaced_answers_nothing_that_a_new_one_can():
    async def script(dispatcher, requests, turn):
        old, new = Worker(("m", None), ("m", 1)), Worker(("m", None), ("m", 2))
        dispatcher.is_free(old)
        dispatcher.submit(requests.make(b"running"))
        await turn()
        dispatcher.is_free(new)
        dispatcher.submit(requests.make(b"running, too"))
        await turn()
        dispatcher.submit(requests.make(b"any", age=1.0))
        dispatcher.submit(requests.make(b"one", ("m", 1)))
        dispatcher.dismiss(old)
        await turn()
        old.answer()
        await turn()
        assert old.asked == [[b"running"], [b"one"]] and new.asked == [[b"running, too"]]
        new.answer()
        await turn()
        assert new.asked[-1] == [b"any"]

    run(script)


def test_a_worker_that_is_replaced_leaves_when_nobody_waits_any_more():
    async def script(dispatcher, requests, turn):
        old = Worker()
        dispatcher.is_free(old)
        dispatcher.submit(requests.make(b"running"))
        await turn()
        late = requests.make(b"late")
        dispatcher.submit(late)
        dispatcher.dismiss(old)
        await turn()
        assert old.is_ready
        late.deadline = 0.0
        dispatcher.check_time()
        assert not old.is_ready
        assert requests.answers == {b"late": 504}

    run(script)


def test_requests_of_a_worker_that_died_are_tried_once_more_alone():
    async def script(dispatcher, requests, turn):
        one, two = Worker(), Worker()
        dispatcher.is_free(one)
        for body in (b"a", b"b"):
            dispatcher.submit(requests.make(body))
        await turn()
        one.is_ready = False
        dispatcher.has_lost(one)
        dispatcher.submit(requests.make(b"c"))
        dispatcher.is_free(two)
        await turn()
        two.answer()
        await turn()
        two.is_ready = False
        dispatcher.has_lost(two)  # with b
        three = Worker()
        dispatcher.is_free(three)
        await turn()
        three.answer()
        assert (two.asked, three.asked) == ([[b"a"], [b"b"]], [[b"c"]])
        assert requests.answers == {b"a": 200, b"b": 500, b"c": 200}
        assert dispatcher.is_idle

    run(script)


def test_requests_for_code_of_the_user_are_not_tried_again():
    async def script(dispatcher, requests, turn):
        worker = Worker(code="code")
        dispatcher.is_free(worker)
        dispatcher.submit(requests.make(b"a"))
        await turn()
        dispatcher.has_lost(worker)
        assert requests.answers == {b"a": 500}

    run(script)


def test_what_is_computed_one_by_one_is_given_so():
    async def script(dispatcher, requests, turn):
        one, two = Worker(code="code"), Worker(code="code")
        dispatcher.is_free(one)
        dispatcher.is_free(two)
        for body in (b"a", b"b", b"c"):
            dispatcher.submit(requests.make(body))
        await turn()
        assert sorted(one.asked + two.asked) == [[b"a"], [b"b"]]

    run(script)


def test_a_late_request_in_a_worker_gets_its_answer_once():
    async def script(dispatcher, requests, turn):
        worker = Worker()
        dispatcher.is_free(worker)
        dispatcher.submit(requests.make(b"a"))
        dispatcher.submit(requests.make(b"b"))
        await turn()
        worker.batch[0].deadline -= 61.0
        dispatcher.check_time()
        assert requests.answers == {b"a": 504}
        worker.answer()
        assert requests.answers == {b"a": 504, b"b": 200}

    run(script)


def test_an_answer_that_cannot_be_sent_keeps_no_other():
    async def script(dispatcher, requests, turn):
        worker = Worker()
        dispatcher.is_free(worker)
        for body in (b"a", b"b"):
            dispatcher.submit(requests.make(body))
        await turn()

        def fail(pending, response):
            raise OSError("no space left")

        worker.batch[0].answer = fail
        worker.answer()
        dispatcher.submit(requests.make(b"c"))
        await turn()
        worker.answer()
        assert requests.answers == {b"b": 200, b"c": 200}

    run(script)


def test_a_full_line_refuses_and_clients_that_left_make_room():
    async def script(dispatcher, requests, turn):
        waiting = [requests.make(b"%d" % number) for number in range(6)]
        for each in waiting:
            dispatcher.submit(each)
        with pytest.raises(Refusal) as refused:
            dispatcher.submit(requests.make(b"more"))
        assert refused.value.status == 429
        assert dispatcher.retry_after() >= 1
        waiting[3].incoming.has_left = True
        await asyncio.sleep(LOOK_SECONDS)
        dispatcher.submit(requests.make(b"more"))
        assert dispatcher.line.count == 6

    run(script)


def test_a_refusal_does_not_look_through_the_whole_line():
    async def script(dispatcher, requests, turn):
        looked = []
        for number in range(6):
            dispatcher.submit(requests.make(b"%d" % number))
        dispatcher.line.remove = lambda is_unwanted: looked.append(is_unwanted) or []
        for _ in range(100):
            with pytest.raises(Refusal):
                dispatcher.submit(requests.make(b"more"))
        assert len(looked) < 100

    run(script)


def test_bodies_are_limited_but_one_may_always_wait():
    async def script(dispatcher, requests, turn):
        dispatcher.submit(requests.make(b"x" * 5000))
        with pytest.raises(Refusal):
            dispatcher.submit(requests.make(b"y"))

    run(script)


def test_a_wait_that_is_too_long_is_refused():
    async def script(dispatcher, requests, turn):
        worker = Worker()
        dispatcher.is_free(worker)
        dispatcher.submit(requests.make(b"a"))
        await turn()
        worker.answer(seconds=0.4)  # a row
        await turn()
        dispatcher.submit(requests.make(b"b"))
        await turn()
        for body in (b"c", b"d", b"e"):
            dispatcher.submit(requests.make(body))
        with pytest.raises(Refusal):
            dispatcher.submit(requests.make(b"f"))
        worker.answer(seconds=0.4)
        await turn()
        # What a second row adds is not known yet.
        assert worker.asked[-1] == [b"c", b"d"]
        worker.answer(seconds=0.8)
        await turn()
        assert worker.asked[-1] == [b"e"]  # two rows took longer than half of the limit

    run(script, max_latency=1.0)


def test_what_is_late_is_given_up():
    async def script(dispatcher, requests, turn):
        dispatcher.submit(requests.make(b"late", age=61.0))
        dispatcher.submit(requests.make(b"early"))
        dispatcher.check_time()
        assert requests.answers == {b"late": 504}

    run(script)


def test_a_worker_that_computes_too_long_is_ended():
    async def script(dispatcher, requests, turn):
        worker = Worker()
        dispatcher.is_free(worker)
        dispatcher.submit(requests.make(b"a", age=59.0))
        await turn()
        dispatcher.check_time()
        assert not worker.aborted
        worker.since -= 61.0
        worker.batch[0].deadline -= 61.0
        dispatcher.check_time()
        assert worker.aborted
        dispatcher.has_lost(worker)
        assert requests.answers == {b"a": 504}

    run(script)
