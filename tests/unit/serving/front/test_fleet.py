"""The workers of a server: new ones for new versions, and for those that died."""

import asyncio
import pathlib
import time

import pytest

pytest.importorskip("httptools")

from nanotf.machine.topology import Placement, Plan
from nanotf.serving.front import fleet as fleets
from nanotf.serving.repository.model_sources import ModelVersion
from nanotf.serving.worker_messages import Loaded, WorkerOptions

PLAN = Plan((Placement(0, (0,)), Placement(1, (1,))))
LIMIT = 100.0  # seconds that a version may take to load
OPTIONS = WorkerOptions((), (), None, 1, pathlib.Path(), 32, 1000)


def version(number, model="m", stamp=0):
    return ModelVersion(model, number, pathlib.Path(f"/{model}/{number}"), None, (stamp,))


class Worker:
    """A worker without a process, of which the test says what happens to it."""

    made: list = []  # noqa: RUF012

    def __init__(self, placement, options, on_loaded, on_gone):
        self.placement, self.options = placement, options
        self._on_loaded, self._on_gone = on_loaded, on_gone
        self.loaded, self.batch = [], []
        self.loading, self.heard = None, time.monotonic()
        self.is_leaving = self.is_gone = False
        Worker.made.append(self)

    @property
    def numbers(self):
        return [(each.model, each.number) for each in self.options.versions]

    @property
    def is_ready(self):
        return bool(self.loaded) and not self.is_leaving and not self.is_gone

    def begin(self, number, model="m"):
        """Tells which version it loads now."""
        found = [v for v in self.options.versions if (v.model, v.number) == (model, number)]
        (self.loading,) = found

    def load(self, *errors):
        """Tells that it has loaded its models, but those that have an error."""
        known = dict(errors)
        self.loaded = [Loaded(known.get(each.number, "")) for each in self.options.versions]
        self._on_loaded(self)

    def die(self):
        self.is_gone = True
        self._on_gone(self, "It was killed.")

    def leave(self):
        self.is_leaving = True
        if not self.batch:
            self.kill()

    def kill(self):
        self.is_leaving = True
        asyncio.get_running_loop().call_soon(self.die)


def run(script, monkeypatch):
    """Runs `script(fleet, made, free, lost)` in a loop."""

    async def begin():
        Worker.made = []
        free, lost, kept = [], [], []
        fleet = fleets.Fleet(
            PLAN, OPTIONS, free.append, lost.append, Worker.leave, kept.append, LIMIT
        )
        fleet.kept = kept
        await script(fleet, Worker.made, free, lost)

    monkeypatch.setattr(fleets, "ServingWorker", Worker)
    monkeypatch.setattr(fleets, "_PAUSE", 0.001)
    asyncio.run(begin())


async def soon():
    await asyncio.sleep(0.05)


def test_all_workers_start_at_once(monkeypatch):
    async def script(fleet, made, free, lost):
        fleet.want([version(1)])
        assert [worker.placement.rank for worker in made] == [0, 1]
        assert fleet.states("m") == [(1, "LOADING", "")]
        made[1].load()
        assert free == [made[1]]
        assert fleet.states("m") == [(1, "AVAILABLE", "")]
        assert await fleet.outcome("m") == ""

    run(script, monkeypatch)


def test_a_new_version_reaches_one_worker_after_another(monkeypatch):
    async def script(fleet, made, free, lost):
        fleet.want([version(1)])
        made[0].load()
        made[1].load()
        fleet.want([version(2)])
        assert len(made) == 3 and made[2].numbers == [("m", 2)]
        assert fleet.states("m") == [(2, "LOADING", ""), (1, "AVAILABLE", "")]
        made[2].load()
        assert made[0].is_leaving and not made[1].is_leaving
        await soon()
        assert len(made) == 4
        assert fleet.states("m") == [(2, "AVAILABLE", ""), (1, "AVAILABLE", "")]
        made[3].load()
        await soon()
        assert fleet.workers == [made[2], made[3]]
        assert len(made) == 4
        assert fleet.states("m") == [(2, "AVAILABLE", ""), (1, "END", "")]

    run(script, monkeypatch)


def test_a_version_that_fails_stays_with_one_worker(monkeypatch):
    async def script(fleet, made, free, lost):
        fleet.want([version(1), version(5, "other")])
        made[0].load()
        made[1].load()
        fleet.want([version(2), version(5, "other")])
        made[2].load((2, "no such layer"))
        await soon()
        assert len(made) == 3
        assert fleet.workers == made[:2]
        assert fleet.states("m") == [(2, "END", "no such layer"), (1, "AVAILABLE", "")]
        # A worker that dies is replaced by one with the last version that could be served.
        made[0].die()
        assert made[3].numbers == [("m", 1), ("other", 5)]
        # Other files of the same version are tried.
        made[3].load()
        fleet.want([version(2, stamp=1), version(5, "other")])
        assert made[4].numbers == [("m", 2), ("other", 5)]

    run(script, monkeypatch)


def test_a_load_that_fails_for_a_moment_is_tried_again(monkeypatch):
    async def script(fleet, made, free, lost):
        fleet.want([version(1)])
        made[0].load()
        made[1].load()
        made[0].die()
        made[1].die()
        made[2].load((1, "no memory"))
        made[3].load((1, "no memory"))
        await soon()
        assert not fleet.served("m")
        for place in (4, 5):
            made[place].load()
            await soon()
        assert fleet.workers == [made[4], made[5]]
        assert len(made) == 6

    run(script, monkeypatch)


def test_a_version_that_kills_its_workers_is_given_up(monkeypatch):
    async def script(fleet, made, free, lost):
        fleet.want([version(1)])
        made[0].load()
        made[1].load()
        fleet.want([version(2)])
        for place in (2, 3, 4):
            assert len(made) == place + 1
            made[place].begin(2)
            made[place].die()
            await soon()
        assert len(made) == 5
        assert fleet.workers == made[:2]
        assert fleet.states("m")[0] == (2, "END", "It was killed.")

    run(script, monkeypatch)


def test_versions_are_kept_until_their_last_worker_has_ended(monkeypatch):
    async def script(fleet, made, free, lost):
        fleet.want([version(1)])
        made[0].load()
        made[1].load()
        made[1].batch = ["a request"]
        fleet.want([version(2)])
        made[2].load()
        await soon()
        made[3].load()
        await soon()
        assert made[1].is_leaving and not made[1].is_gone
        assert fleet.kept[-1] == {version(1), version(2)}
        made[1].batch = []
        made[1].die()
        assert fleet.kept[-1] == {version(2)}

    run(script, monkeypatch)


def test_files_of_a_model_that_never_had_a_version_go(monkeypatch):
    async def script(fleet, made, free, lost):
        fleet.want([])
        assert fleet.kept == [frozenset()]

    run(script, monkeypatch)


def test_reloads_leave_nothing_behind(monkeypatch):
    async def script(fleet, made, free, lost):
        for stamp in range(5):
            for versions in ([version(3), version(1, "other", stamp)], [version(3)]):
                fleet.want(versions)
                while coming := [w for w in made if not (w.loaded or w.is_leaving)]:
                    for worker in coming:
                        worker.load((1, "no memory"))
                    await soon()
        for known in (fleet._known, fleet._loaded, fleet._tries, fleet._last):
            assert len(known) <= 1, known

    run(script, monkeypatch)


def test_new_versions_over_years_leave_a_list_of_the_last_ones(monkeypatch):
    async def script(fleet, made, free, lost):
        for number in range(5):
            fleet.want([version(number)])
            while coming := [w for w in made if not (w.loaded or w.is_leaving)]:
                for worker in coming:
                    worker.load((2, "no memory"))
                await soon()
        assert fleet._loaded.keys() == {version(3), version(4)} and not fleet._tries
        assert fleet.states("m") == [(4, "AVAILABLE", ""), (3, "END", ""), (2, "END", "")]
        fleet.want([version(0)])  # back to an early one, which counts whatever else is known
        assert (0, "LOADING", "") in fleet.states("m")

    monkeypatch.setattr(fleets, "_MOST_KNOWN", 3)
    run(script, monkeypatch)


def test_files_that_come_back_are_the_ones_that_count(monkeypatch):
    async def script(fleet, made, free, lost):
        fleet.want([version(1)])
        made[0].load((1, "no memory"))
        made[1].load((1, "no memory"))
        fleet.want([version(1, stamp=1)])
        fleet.want([version(1)])
        assert fleet.states("m") == [(1, "LOADING", "")]

    run(script, monkeypatch)


def test_a_death_is_blamed_on_the_version_that_was_loading(monkeypatch):
    async def script(fleet, made, free, lost):
        fleet.want([version(1), version(7, "other")])
        for place in (0, 1, 2):
            made[place].begin(1)
            made[place].begin(7, "other")
            made[place].die()
            await soon()
        # What kills workers is left out, and keeps nothing else from being served.
        assert fleet.states("other") == [(7, "END", "It was killed.")]
        assert fleet.states("m") == [(1, "LOADING", "")]
        left = [worker for worker in made if not worker.is_gone]
        assert [worker.numbers for worker in left] == [[("m", 1)]] * 2
        for worker in left:
            worker.load()
        await soon()
        assert set(fleet.workers) == set(left) and fleet.states("m") == [(1, "AVAILABLE", "")]

    run(script, monkeypatch)


def test_a_version_that_is_served_and_kills_new_workers_stays_where_it_is(monkeypatch):
    async def script(fleet, made, free, lost):
        fleet.want([version(1), version(7, "other")])
        made[0].load()
        made[1].load()
        made[0].die()
        for place in (2, 3, 4):
            made[place].begin(7, "other")
            made[place].die()
            await soon()
        assert made[5].numbers == [("m", 1)]
        made[5].load()
        await soon()
        assert fleet.workers == [made[5], made[1]] and len(made) == 6
        assert fleet.states("other") == [(7, "AVAILABLE", "It was killed.")]
        fleet._try_again(version(7, "other"))
        assert made[6].numbers == [("m", 1), ("other", 7)]
        made[6].load()
        await soon()
        assert fleet.workers == [made[6], made[1]]
        assert fleet.states("other") == [(7, "AVAILABLE", "")]

    run(script, monkeypatch)


def test_the_only_version_is_tried_again_soon(monkeypatch):
    """Somebody else may have killed its workers."""

    async def script(fleet, made, free, lost):
        fleet.want([version(1)])
        made[0].load()
        made[1].load()
        for worker in made[:2]:
            worker.die()
        for place in (2, 3, 4):
            made[place].begin(1)
            made[place].die()
            await soon()
        assert fleet.states("m") == [(1, "END", "It was killed.")]
        assert made[5].numbers == [("m", 1)] and fleet.is_promised(("m", 1))
        made[5].load()
        assert fleet.states("m") == [(1, "AVAILABLE", "")]

    run(script, monkeypatch)


def test_a_load_that_hangs_is_ended_and_refused(monkeypatch):
    async def script(fleet, made, free, lost):
        fleet.want([version(1), version(7, "other")])
        waiting = asyncio.create_task(fleet.outcome("other"))
        for worker in made[:2]:
            worker.begin(7, "other")
        fleet.check_time()
        assert not any(worker.is_leaving for worker in made)
        for worker in made[:2]:
            worker.heard -= LIMIT
        fleet.check_time()
        await soon()
        assert made[0].is_gone and made[1].is_gone
        assert await waiting == "it was not loaded within 100 s"
        assert [worker.numbers for worker in made[2:]] == [[("m", 1)]] * 2
        assert fleet.states("other") == [(7, "END", "it was not loaded within 100 s")]

    run(script, monkeypatch)


def test_a_start_that_hangs_is_tried_again(monkeypatch):
    async def script(fleet, made, free, lost):
        fleet.want([version(1)])
        made[0].heard -= LIMIT
        fleet.check_time()
        await soon()
        assert made[0].is_gone and made[2].numbers == [("m", 1)]
        assert fleet.failed == {}

    run(script, monkeypatch)


def test_requests_wait_only_for_what_may_come_soon(monkeypatch):
    async def script(fleet, made, free, lost):
        key, other = ("m", None), ("m", 3)
        fleet.want([version(1)])
        assert not fleet.is_promised(key) and fleet.why_not(key) == ("", False)
        made[0].load()
        made[1].load()
        for worker in made[:2]:
            worker.die()
        # New workers start.
        assert fleet.states("m") == [(1, "LOADING", "")]
        assert fleet.is_promised(key) and fleet.is_promised(("m", 1))
        assert not fleet.is_promised(other)
        monkeypatch.setattr(fleets, "_PAUSE", fleets._SOON / 4)
        made[2].load((1, "no memory"))
        assert fleet.is_promised(key)  # worker 1 still loads it
        made[3].load((1, "no memory"))
        assert fleet.states("m") == [(1, "END", "no memory")]
        assert fleet.is_promised(key)  # in half of the time that counts as soon
        monkeypatch.setattr(fleets, "_SOON", 0.0)
        assert not fleet.is_promised(key)
        assert fleet.why_not(key) == ("no memory", True)
        assert fleet.why_not(other) == ("", False)

    run(script, monkeypatch)


def test_a_start_that_fails_says_why(monkeypatch):
    async def script(fleet, made, free, lost):
        fleet.want([version(1)])
        waiting = asyncio.create_task(fleet.outcome("m"))
        made[0].load((1, "no such layer"))
        assert await waiting == "no such layer"

    run(script, monkeypatch)


@pytest.mark.parametrize("has_version", [True, False])
def test_a_model_that_is_unloaded_while_it_loads(has_version, monkeypatch):
    async def script(fleet, made, free, lost):
        names, versions = ["m", "other"], [version(7, "other")] * has_version
        fleet.want([version(1), *versions])
        waiting = asyncio.create_task(fleet.outcome("other", lambda: "other" in names))
        await soon()
        assert not waiting.done()
        names.remove("other")
        fleet.want([version(1)])
        assert await waiting == "it was unloaded meanwhile"

    run(script, monkeypatch)


def test_a_worker_that_dies_is_replaced_and_its_requests_are_told(monkeypatch):
    async def script(fleet, made, free, lost):
        fleet.want([version(1)])
        made[0].load()
        made[1].load()
        made[0].batch = ["a request"]
        made[0].die()
        assert lost == [made[0]]
        assert fleet.restarts == 1
        assert len(made) == 3 and made[2].placement == made[0].placement
        made[2].load()
        assert fleet.workers == [made[2], made[1]]

    run(script, monkeypatch)


def test_a_change_in_the_middle_of_another(monkeypatch):
    async def script(fleet, made, free, lost):
        fleet.want([version(1)])
        made[0].load()
        made[1].load()
        fleet.want([version(2)])
        fleet.want([version(3)])
        made[2].load()  # with version 2, which nobody wants any more
        await soon()
        while not all(worker.numbers == [("m", 3)] for worker in fleet.workers):
            made[-1].load()
            await soon()
        assert len(fleet.workers) == 2

    run(script, monkeypatch)


def test_workers_leave_when_there_is_nothing_to_serve(monkeypatch):
    async def script(fleet, made, free, lost):
        fleet.want([version(1)])
        made[0].load()
        fleet.want([])
        await soon()
        assert fleet.workers == []
        made[1].load()  # too late
        await soon()
        assert fleet.workers == []
        fleet.want([version(4)])
        assert [worker.numbers for worker in made[2:]] == [[("m", 4)], [("m", 4)]]

    run(script, monkeypatch)


def test_the_end_waits_for_all(monkeypatch):
    async def script(fleet, made, free, lost):
        fleet.want([version(1)])
        made[0].load()
        await fleet.end()
        assert all(worker.is_gone for worker in made)
        assert len(made) == 2

    run(script, monkeypatch)
