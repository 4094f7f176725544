"""A worker of a server, as the front sees it: a pool of one process, which answers until it ends.

    front's loop                     thread of this worker         worker
      |  start ->                      |  starts the pool            |  forked, pinned
      |                                |  order: serve ->            |  loads the models
      |  <- on_loaded                  |                             |
      |  requests and answers over the link, in the loop             |
      |  <- on_gone                    |  <- the process has ended   |

Each version of a server's models gets new processes, so that the memory of old ones comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import pickle
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from nanotf.console import logger, pass_on, silent
from nanotf.errors import NanoError
from nanotf.machine import topology
from nanotf.pool.items import ItemPool, WorkerGone
from nanotf.pool.transports import CALLS
from nanotf.serving import worker_messages
from nanotf.serving.computing import worker_entry
from nanotf.serving.front.waiting_line import Key, Pending
from nanotf.serving.interface import Response
from nanotf.serving.link import Link, LinkClosed
from nanotf.serving.repository.model_sources import ModelVersion
from nanotf.serving.worker_messages import Loaded, WorkerOptions
from nanotf.wire import messages

_EVENT_SECONDS = 5.0  # between looks whether the process lives, if its channel does not tell


class ServingWorker:
    """A worker, from before its start to after its end.

    All but `_run` happens in the loop's thread.

    Args:
        placement: its cores.
        options: what it is to do.
        on_loaded: called once it has loaded its models.
        on_gone: called once it has ended, with what it says of itself.

    Attributes:
        loaded: list of `Loaded` in the order of `options.versions`; empty before.
        loading: `ModelVersion`, the one that it loads now; None before the first.
        heard: float, the loop's time at which it began with that, or was made.
        batch: list of `Pending`, what it computes now.
        since: float, the loop's time at which it got that.
        is_leaving: bool, whether it gets no more requests.
    """

    def __init__(
        self,
        placement: topology.Placement,
        options: WorkerOptions,
        on_loaded: Callable[[ServingWorker], None],
        on_gone: Callable[[ServingWorker, str], None],
    ) -> None:
        self.placement, self.options = placement, options
        self._on_loaded, self._on_gone = on_loaded, on_gone
        self.loaded: list[Loaded] = []
        self.loading: ModelVersion | None = None
        self.heard = time.monotonic()
        self.batch: list[Pending] = []
        self.since = 0.0
        self.is_leaving = self.is_gone = False
        self._is_open = True  # as far as the link says
        self._on_answers: Callable[[float, list[tuple[Response, int]]], None] | None = None
        self._places: dict[Key, int] = {}
        self._pool: ItemPool | None = None
        self._ending = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._link, self._theirs = Link.pair()
        self._loop.add_reader(self._link.sock, self.hear)
        thread = threading.Thread(target=self._run, name="nanotf-serving", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system allows no further thread
            self._loop.remove_reader(self._link.sock)
            self._link.close()
            self._theirs.close()
            raise OSError(errno.EAGAIN, str(error)) from error

    # ------------------------------------------------------------------------------- in a thread
    def _run(self) -> None:
        try:
            said = self._live()
        except NanoError as error:
            said = str(error)
        except BaseException as error:  # nobody else would tell the loop
            said = f"{type(error).__name__}: {error}"
        finally:
            self._theirs.close()
        self._tell(self._gone, said)

    def _live(self) -> str:
        """Starts the process, and waits for its end; returns what there is to say about it."""
        plan = topology.Plan((dataclasses.replace(self.placement, rank=0),))
        folder = tempfile.TemporaryDirectory(
            prefix="worker-", dir=self.options.folder, ignore_cleanup_errors=True
        )
        with folder as temporary:
            with silent(True):  # the server itself says what starts
                pool = ItemPool(plan, CALLS)
            try:
                self._pool = pool
                body = pickle.dumps((worker_entry.serve, (self.options, temporary)))
                theirs = self._theirs.fileno()
                pool.send_to(0, messages.Order(pool.next_order(), body, descriptors=(theirs,)))
                # The link closes with the worker only if this process holds no end of its socket.
                self._theirs.close()
                return self._said(pool)
            finally:
                pool.kill()

    def _said(self, pool: ItemPool) -> str:
        while not self._ending.is_set():
            event = pool.event(_EVENT_SECONDS)
            found = None if event is None else event[1]
            if isinstance(found, messages.Printed):
                with contextlib.suppress(OSError, ValueError):  # nobody reads the log
                    pass_on("stderr", found.text)
            elif isinstance(found, WorkerGone):
                return found.worker.died("serving").what
            elif isinstance(found, messages.OrderFailed):
                return f"A worker of the server has failed:\n{found.traceback}"
            elif isinstance(found, messages.OrderDone):
                return ""
        return ""

    def _tell(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, *arguments)

    # ------------------------------------------------------------------------------- in the loop
    def place_of(self, key: Key) -> int | None:
        """Returns the place of the version that answers requests for a key; None for none."""
        return self._places.get(key)

    def computes_one_by_one(self, key: Key) -> bool:
        """Returns True if requests for a key gain nothing from being given together."""
        place = self._places[key]
        has_code = self.options.versions[place].code is not None
        return has_code or bool(self.loaded[place].kept_together)

    @property
    def is_ready(self) -> bool:
        """True if it takes requests, now or after those that it has."""
        return bool(self.loaded) and self._is_open and not self.is_leaving

    def ask(
        self,
        place: int,
        batch: Sequence[Pending],
        then: Callable[[float, list[tuple[Response, int]]], None],
    ) -> None:
        """Gives it requests for one version.

        Args:
            then: called with the seconds that it took, and the answers with the rows of each.

        Raises:
            OSError: This process has no memory or descriptors left. The worker is as before.
        """
        self.batch, self._on_answers = list(batch), then
        self.since = time.monotonic()
        try:
            worker_messages.ask(self._link, place, [each.request for each in batch])
        except LinkClosed:
            pass  # it has died: `_gone` follows, and handles the batch
        except OSError:  # no memory, no descriptors: nothing was sent
            self.batch, self._on_answers = [], None
            raise

    def hear(self) -> None:
        """Takes the message that has come from it, if there is one."""
        try:
            if not self.loaded:
                header, _ = self._link.receive()
                self._note_load(header)
                return
            seconds, answers = worker_messages.answers(self._link)
        except BlockingIOError:
            return
        except LinkClosed:
            self._is_open = False  # the process has ended: `_gone` follows
            self._loop.remove_reader(self._link.sock)
            return
        except Exception:  # nothing that a worker of this version sends
            logger.exception("An answer of a worker cannot be read.")
            self._is_open = False
            self._loop.remove_reader(self._link.sock)
            self.abort()
            return
        assert self._on_answers is not None, "it answers what it was asked"
        then, self._on_answers, self.batch = self._on_answers, None, []
        then(seconds, answers)
        if self.is_leaving and not self.batch:
            self.kill()

    def _note_load(self, said: int | list[Loaded]) -> None:
        """Takes note of what it loads now, or of what it has loaded in the end."""
        self.heard = time.monotonic()
        if isinstance(said, int):
            self.loading = self.options.versions[said]
        else:
            self._load(said)

    def _load(self, loaded: list[Loaded]) -> None:
        self.loaded = loaded
        for place, (version, found) in enumerate(zip(self.options.versions, loaded, strict=True)):
            if not found.error:
                self._places[version.model, version.number] = place
        for model in {model for model, _ in self._places}:
            latest = max(number or 0 for name, number in self._places if name == model)
            self._places[model, None] = self._places[model, latest]
        self._on_loaded(self)

    def leave(self) -> None:
        """Ends it as soon as it has answered what it has."""
        self.is_leaving = True
        if not self.batch:
            self.kill()

    def kill(self) -> None:
        """Ends it at once, for good."""
        self.is_leaving = True
        self._ending.set()
        self.abort()

    def abort(self) -> None:
        """Kills the process, as if it had died."""
        pool = self._pool
        if pool is not None:
            pool.kill_workers()  # its end wakes the thread

    def _gone(self, said: str) -> None:
        self.is_gone, self._is_open = True, False
        if self.batch:
            self.hear()  # its last answer may have come
        self._on_answers = None  # it refers to this object, which holds shared memory
        self._loop.remove_reader(self._link.sock)
        self._link.close()
        self._on_gone(self, said)
