"""The workers of a server: N that answer, replaced when they die and when versions change.

A change of the versions reaches one worker first. If a version cannot be loaded there, the other
workers continue with what they have. Otherwise they are replaced one after another, each by a new
process that is ready before the old one leaves:

    slot 0   old ------> leaves
                  new starts, loads, warms up -> answers
    slot 1   old ----------------------------------------> leaves
                                                 new starts ... -> answers
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping

from nanotf.console import logger
from nanotf.machine import topology
from nanotf.serving.front.serving_worker import ServingWorker
from nanotf.serving.front.waiting_line import Key
from nanotf.serving.repository.model_sources import ModelVersion
from nanotf.serving.worker_messages import Loaded, WorkerOptions

LOADING, AVAILABLE, END = "LOADING", "AVAILABLE", "END"
_PAUSE = 0.25  # seconds before another worker starts after one died while it loaded; then doubled
_LONGEST_PAUSE = 30.0
_END_SECONDS = 3.0  # for workers to end with the server
# TensorFlow Serving tries a version that cannot be loaded 5 more times, once in a minute.
_RETRY = 60.0  # seconds; then doubled
_MOST_RETRIES = 5  # of a version that was never served
_MOST_KNOWN = 100  # versions of a model of which clients are told
_MOST_DEATHS = 3  # of workers, before what they loaded counts as what kills them
_SOON = 5.0  # seconds to the next try to load a version, for which its requests wait


@dataclasses.dataclass
class _Slot:
    """The place of one worker, on its cores."""

    placement: topology.Placement
    worker: ServingWorker | None = None  # that answers
    coming: ServingWorker | None = None  # that is to take its place
    deaths: int = 0  # of workers that died while they loaded, one after another
    is_pausing: bool = False  # after such a death
    next_start: float = 0.0  # the loop's time at which it ends


class Fleet:
    """The workers.

    Args:
        plan: the cores of each.
        options: what each is to do; its versions are replaced.
        on_free: called with a worker that may get requests.
        on_lost: called with a worker that died with requests.
        on_replaced: called with a worker that is to leave after its requests.
        on_kept: called with the versions that a worker has or may load, when these change.
        load_timeout: seconds that a worker may take to load a version.

    Attributes:
        failed: dict of a version to why it could not be loaded.
    """

    def __init__(
        self,
        plan: topology.Plan,
        options: WorkerOptions,
        on_free: Callable[[ServingWorker], None],
        on_lost: Callable[[ServingWorker], None],
        on_replaced: Callable[[ServingWorker], None],
        on_kept: Callable[[frozenset[ModelVersion]], None],
        load_timeout: float,
    ) -> None:
        self._on_kept, self._load_timeout = on_kept, load_timeout
        self._alive: set[ServingWorker] = set()  # also those that are leaving
        self._slots = [_Slot(placement) for placement in plan.placements]
        self._options = options
        self._on_free, self._on_lost, self._on_replaced = on_free, on_lost, on_replaced
        self._wanted: frozenset[ModelVersion] = frozenset()
        # Those that were wanted of models that still are; of a number, the files that came last.
        self._known: list[ModelVersion] = []
        self.failed: dict[ModelVersion, str] = {}
        self._loaded: dict[ModelVersion, Loaded] = {}
        self._tries: collections.Counter[ModelVersion] = collections.Counter()  # that failed
        # The workers that each version has killed, and the versions that are left out for that: a
        # worker that loads them would serve nothing else.
        self._deaths: collections.Counter[ModelVersion] = collections.Counter()
        self._deadly: set[ModelVersion] = set()
        self._last: dict[str, list[ModelVersion]] = {}  # by model, what was served last
        self._is_ending = False
        self.restarts = 0  # of workers that died
        # Of `served` and `states`, until something changes.
        self._served: dict[str, dict[int, Loaded]] | None = None
        self._states: dict[str, list[tuple[int, str, str]]] = {}
        self._news = asyncio.Event()  # set when `outcome` may have changed

    # ----------------------------------------------------------------------------------- wishes
    def want(self, versions: Iterable[ModelVersion]) -> None:
        """Serves these versions from now on, as soon as they are loaded."""
        wanted = frozenset(versions)
        self._news.set()  # even with equal versions: a model without any may have gone
        if wanted != self._wanted:
            self._wanted = wanted
            self._forget()
            self._continue()
        self._tell_kept()  # a model that never had a version may have files, too

    def _forget(self) -> None:
        """Forgets all that is known of versions that are gone, so that years of reloads fit."""
        models = {version.model for version in self._wanted}
        latest: dict[str, dict[int, ModelVersion]] = {model: {} for model in models}
        for version in (*self._known, *self._wanted):
            if version.model in models:
                latest[version.model][version.number] = version
        self._last = {model: self._last[model] for model in self._last.keys() & models}
        kept = self._wanted.union(*self._last.values())
        self._known = [
            version
            for each in latest.values()
            for place, version in enumerate(sorted(each.values(), key=_order, reverse=True))
            if place < _MOST_KNOWN or version in kept
        ]
        self._loaded = {v: self._loaded[v] for v in self._loaded.keys() & kept}
        for counted in (self._tries, self._deaths):
            for version in counted.keys() - kept:
                del counted[version]
        # Files that have changed are another version: what failed is tried again.
        self.failed = {v: self.failed[v] for v in self.failed.keys() & self._wanted}
        self._deadly &= self._wanted

    def _tell_kept(self) -> None:
        used = {version for worker in self._alive for version in worker.options.versions}
        self._on_kept(self._wanted | used | frozenset(self._target))

    @property
    def _target(self) -> tuple[ModelVersion, ...]:
        """The versions for workers to serve: those that are wanted, or else the last that were."""
        found: list[ModelVersion] = []
        for model in {version.model for version in self._wanted}:
            wanted = [version for version in self._wanted if version.model == model]
            good = [version for version in wanted if version not in self.failed]
            found += good or self._last.get(model, ())
        return tuple(sorted(found, key=_order))

    @property
    def _loadable(self) -> tuple[ModelVersion, ...]:
        """The versions for new workers to load."""
        return tuple(version for version in self._target if version not in self._deadly)

    def _continue(self) -> None:
        """Starts the next worker that is missing, or that must be replaced."""
        if self._is_ending:
            return
        self._note_change()
        if not self._wanted:
            self._release()
        if not self._loadable:
            return
        for slot in self._slots:
            if slot.coming is not None and slot.coming.options.versions != self._loadable:
                slot.coming.kill()  # nobody wants what it loads
                slot.coming = None
            if slot.worker is None and slot.coming is None and not slot.is_pausing:
                self._start(slot)
        if any(slot.coming is not None or slot.is_pausing for slot in self._slots):
            return  # one after another
        for slot in self._slots:
            if slot.worker is not None and not self._is_right(slot.worker):
                self._start(slot)
                return

    def _is_right(self, worker: ServingWorker) -> bool:
        """Returns True if a worker serves what it should, as far as that can be loaded."""
        served = set(_served_by(worker))
        return served.issuperset(self._loadable) and served.issubset(self._target)

    def _release(self) -> None:
        """Ends the workers after their requests: there is nothing to serve."""
        for slot in self._slots:
            if slot.worker is not None:
                self._on_replaced(slot.worker)
            if slot.coming is not None:
                slot.coming.kill()
            slot.worker = slot.coming = None

    def _start(self, slot: _Slot) -> None:
        options = dataclasses.replace(self._options, versions=self._loadable)
        try:
            slot.coming = ServingWorker(slot.placement, options, self._has_loaded, self._has_gone)
        except OSError as error:  # no descriptors, no memory
            logger.warning("A worker could not be started: %s", error)
            self._pause(slot)
        else:
            self._alive.add(slot.coming)

    # ----------------------------------------------------------------------------------- events
    def _has_loaded(self, worker: ServingWorker) -> None:
        slot = self._slot_of(worker)
        if slot is None:  # it is not wanted any more
            worker.kill()
            return
        found = dict(zip(worker.options.versions, worker.loaded, strict=True))
        bad = {version: loaded.error for version, loaded in found.items() if loaded.error}
        self._note_failed(bad)
        old, slot.coming, slot.deaths = slot.worker, None, slot.deaths + 1 if bad else 0
        if bad:
            self._pause(slot)  # what failed may be served elsewhere, and is tried again then
        if bad and old is not None:
            worker.kill()  # the old one serves more
        else:
            self._take(slot, worker, {v: found[v] for v in found.keys() - bad.keys()})
        self._note_change()
        self._continue()

    def _note_change(self) -> None:
        """Wakes those that wait for an `outcome`."""
        self._served, self._states = None, {}
        self._news.set()

    def _take(
        self, slot: _Slot, worker: ServingWorker, loaded: Mapping[ModelVersion, Loaded]
    ) -> None:
        """Lets a worker answer in a slot."""
        self._loaded.update(loaded)
        for version in loaded:
            self.failed.pop(version, None)
            for counted in (self._deaths, self._tries):
                counted.pop(version, None)
        for model in {version.model for version in loaded}:
            self._last[model] = [version for version in loaded if version.model == model]
        old, slot.worker = slot.worker, worker
        if old is not None:
            self._on_replaced(old)
        self._on_free(worker)

    def _has_gone(self, worker: ServingWorker, said: str) -> None:
        self._alive.discard(worker)
        slot = self._slot_of(worker)
        if worker.batch:
            self._on_lost(worker)
        if slot is not None and not self._is_ending:
            logger.warning("%s Another one starts.", said)
            self.restarts += 1
            if slot.worker is worker:
                slot.worker = None
            else:
                self._has_died_loading(slot, worker, said)
            self._continue()
        self._note_change()
        self._tell_kept()

    def _has_died_loading(self, slot: _Slot, worker: ServingWorker, said: str) -> None:
        slot.coming = None
        slot.deaths += 1
        if worker.loading is not None:
            self._blame(worker.loading, said)
        elif slot.deaths >= _MOST_DEATHS:  # before it has loaded anything
            new = [v for v in worker.options.versions if v not in self._loaded]
            self._note_failed(dict.fromkeys(new, said))
        self._pause(slot)

    def _blame(self, version: ModelVersion, said: str) -> None:
        """Takes note that a version has killed a worker. Once may be the system's doing."""
        self._deaths[version] += 1
        if self._deaths[version] >= _MOST_DEATHS:
            self._leave_out(version, said)

    def _leave_out(self, version: ModelVersion, said: str) -> None:
        del self._deaths[version]
        if len(self._loadable) > 1:  # alone it keeps nothing from being served
            self._deadly.add(version)
        self._note_failed({version: said})

    def check_time(self) -> None:
        """Ends workers that take too long to load a version. Called each second."""
        now = time.monotonic()
        for slot in self._slots:
            worker = slot.coming
            if worker is None or now - worker.heard < self._load_timeout:
                continue
            slot.coming = None
            worker.kill()
            slot.deaths += 1
            self._pause(slot)
            said = f"it was not loaded within {self._load_timeout:g} s"
            logger.warning("A worker is ended. It was to load %s: %s.", worker.loading, said)
            if worker.loading is not None:
                self._leave_out(worker.loading, said)
            self._note_change()

    def _note_failed(self, versions: Mapping[ModelVersion, str]) -> None:
        """Gives versions up for a while. What fails may be this moment, such as a full memory."""
        self.failed.update(versions)
        for version in versions:
            self._tries[version] += 1
            if self._tries[version] <= _MOST_RETRIES or version in self._loaded:
                pause = _RETRY * 2 ** (min(self._tries[version], _MOST_RETRIES) - 1)
                asyncio.get_running_loop().call_later(pause, self._try_again, version)

    def _try_again(self, version: ModelVersion) -> None:
        self._deadly.discard(version)
        if self.failed.pop(version, None) is not None:
            self._continue()

    def _pause(self, slot: _Slot) -> None:
        """Starts no worker in a slot for a while."""

        def resume() -> None:
            slot.is_pausing = False
            self._continue()

        slot.is_pausing = True
        # A large power would be too large for a float.
        pause = min(_LONGEST_PAUSE, _PAUSE * 2 ** min(slot.deaths, 10))
        slot.next_start = time.monotonic() + pause
        asyncio.get_running_loop().call_later(pause, resume)

    def _slot_of(self, worker: ServingWorker) -> _Slot | None:
        for slot in self._slots:
            if worker in (slot.worker, slot.coming):
                return slot
        return None

    # ------------------------------------------------------------------------------------ facts
    @property
    def workers(self) -> list[ServingWorker]:
        """The workers that take requests."""
        return [s.worker for s in self._slots if s.worker is not None and s.worker.is_ready]

    @property
    def size(self) -> int:
        """The number of workers that there are to be."""
        return len(self._slots)

    def served(self, model: str) -> dict[int, Loaded]:
        """Returns what workers serve of a model, by the version's number."""
        if self._served is None:
            self._served = collections.defaultdict(dict)
            for worker in self.workers:
                loaded = dict(zip(worker.options.versions, worker.loaded, strict=True))
                for version in _served_by(worker):
                    self._served[version.model][version.number] = loaded[version]
        return self._served.get(model, {})

    def states(self, model: str) -> list[tuple[int, str, str]]:
        """Returns the versions of a model; see `ServerState.states`."""
        if model not in self._states:
            self._states[model] = self._found_states(model)
        return self._states[model]

    def _found_states(self, model: str) -> list[tuple[int, str, str]]:
        served, found = self.served(model), {}
        for version in self._known:
            if version.model == model:
                found[version.number] = self._state_of(version, served)
        return [(number, *found[number]) for number in sorted(found, reverse=True)]

    def _state_of(self, version: ModelVersion, served: Mapping[int, Loaded]) -> tuple[str, str]:
        why = self.failed.get(version, "")
        if version.number in served:  # also the last one, until another can take its place
            return AVAILABLE, why
        is_coming = version in self._wanted or version in self._target
        return (LOADING if is_coming and not why else END), why

    def is_promised(self, key: Key) -> bool:
        """Returns True if a worker may soon answer for a key, as some have before."""
        if not any(_fits(version, key) for version in self._loaded):
            return False
        found = [version for version in self._loadable if _fits(version, key)]
        return any(version not in self.failed for version in found) or any(
            self._is_tried_soon(version) for version in found
        )

    def _is_tried_soon(self, version: ModelVersion) -> bool:
        """Returns True if a worker loads a version that has failed again now, or soon."""
        if any(s.coming is not None and version in s.coming.options.versions for s in self._slots):
            return True
        soon = time.monotonic() + _SOON
        return any(slot.is_pausing and slot.next_start < soon for slot in self._slots)

    def why_not(self, key: Key) -> tuple[str, bool]:
        """Returns why no worker can answer for a key, and whether one could before.

        Returns:
            An empty text if no version for the key has failed.
        """
        found = [version for version in self.failed if _fits(version, key)]
        if not found:
            return "", False
        latest = max(found, key=_order)
        return self.failed[latest], latest in self._loaded

    async def outcome(self, model: str, is_still_known: Callable[[], bool] | None = None) -> str:
        """Waits until a version of a model is served, or those that are wanted cannot be.

        Args:
            is_still_known: returns False once no version will be wanted; None if one always may.

        Returns:
            Why they cannot; empty if one is served.
        """
        while True:
            # First: for a moment, workers still serve a model that was unloaded.
            if is_still_known is not None and not is_still_known():
                return "it was unloaded meanwhile"
            if self.served(model):
                return ""
            wanted = [version for version in self._wanted if version.model == model]
            if wanted and all(version in self.failed for version in wanted):
                return self.failed[wanted[0]]
            self._news.clear()
            await self._news.wait()

    # -------------------------------------------------------------------------------------- end
    async def end(self) -> None:
        """Ends all workers, and waits until they have ended."""
        self._is_ending = True
        waiting = [w for s in self._slots for w in (s.worker, s.coming) if w is not None]
        for worker in waiting:
            worker.kill()
        # One that still imports TensorFlow ends with this process.
        end = time.monotonic() + _END_SECONDS
        while not all(worker.is_gone for worker in waiting) and time.monotonic() < end:
            self._news.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), 0.1)


def _served_by(worker: ServingWorker) -> tuple[ModelVersion, ...]:
    """Returns the versions that a worker could load, in the order of `Fleet`'s targets."""
    both = zip(worker.options.versions, worker.loaded, strict=True)
    return tuple(version for version, loaded in both if not loaded.error)


def _fits(version: ModelVersion, key: Key) -> bool:
    model, number = key
    return version.model == model and number in (None, version.number)


def _order(version: ModelVersion) -> tuple[str, int]:
    return version.model, version.number
