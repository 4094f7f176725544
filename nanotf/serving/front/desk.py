"""Requests come in, and interfaces say what they ask for; answers go out, and are counted."""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence

from nanotf.console import logger
from nanotf.errors import NanoError
from nanotf.serving.front import counters
from nanotf.serving.front.counters import Counters
from nanotf.serving.front.dispatcher import Dispatcher
from nanotf.serving.front.fleet import Fleet
from nanotf.serving.front.incoming import Incoming
from nanotf.serving.front.waiting_line import Key, Pending
from nanotf.serving.front.wanted_models import WantedModels
from nanotf.serving.interface import (
    ENCODING,
    REST,
    Interface,
    Refusal,
    Response,
    RoutedRequest,
)
from nanotf.serving.served_versions import not_found

_NO_PATH = "Not Found"
_BUSY = (429, 503)  # statuses whose answers say when to try again

# Called with a request, the model's name or "", and the answer.
Log = Callable[[Incoming, str, Response], None]


class Desk:
    """Answers requests: by itself, or by workers. It is the interfaces' `ServerState`.

    Args:
        wanted: the models that the server is told to serve.
        most_bytes: of a request's body.
        most_connections: clients at a time.
        timeout: seconds that a request may take.
        log: called for each answer; None for no access log.

    Attributes:
        is_leaving: bool, whether the server ends.
    """

    def __init__(
        self,
        interfaces: Sequence[Interface],
        fleet: Fleet,
        dispatcher: Dispatcher,
        counted: Counters,
        wanted: WantedModels,
        most_bytes: int,
        most_connections: int,
        timeout: float,
        log: Log | None,
    ) -> None:
        self._interfaces = {
            entrypoint: [each for each in interfaces if each.entrypoint == entrypoint]
            for entrypoint in {each.entrypoint for each in interfaces}
        }
        self._fleet, self._dispatcher, self._counters = fleet, dispatcher, counted
        self._wanted, self.most_connections = wanted, most_connections
        self.most_bytes, self._timeout, self._log = most_bytes, timeout, log
        self.is_leaving = False
        self._later: set[asyncio.Task[None]] = set()  # the loop itself keeps no task
        self._coming: set[str] = set()  # models that clients add now; `names` lacks them at first
        self._loop = asyncio.get_running_loop()

    # --------------------------------------------------------------------------------- requests
    def take(self, incoming: Incoming) -> None:
        """Answers a request, now or later."""
        if incoming.entrypoint == REST and incoming.path.partition("?")[0] == counters.PATH:
            text = self._counters.text()
            self._send(incoming, "", Response(200, text, counters.CONTENT_TYPE))
            return
        for interface in self._interfaces[incoming.entrypoint]:
            try:
                found = self._routed(interface, incoming)
            except Refusal as refusal:
                found = self._refused(interface, refusal)
            except Exception:
                found = self._failed(interface)
            if found is not None:
                if isinstance(found, Response):
                    self._send(incoming, "", found)
                elif not isinstance(found, bool):
                    task = self._loop.create_task(self._send_later(interface, incoming, found))
                    self._later.add(task)
                    task.add_done_callback(self._later.discard)
                return
        self._send(incoming, "", self.broken(404, _NO_PATH))

    async def _send_later(
        self, interface: Interface, incoming: Incoming, coming: Awaitable[Response]
    ) -> None:
        try:
            answer = await coming
        except Refusal as refusal:
            answer = self._refused(interface, refusal)
        except Exception:
            answer = self._failed(interface)
        self._send(incoming, "", answer)

    def _failed(self, interface: Interface) -> Response:
        logger.warning("A request has failed:\n%s", traceback.format_exc())
        return interface.refuse(Refusal(500, "The server has made a mistake; see its log."))

    def _routed(
        self, interface: Interface, incoming: Incoming
    ) -> Response | Awaitable[Response] | bool | None:
        """Returns an answer, True for a request that waits for workers, or None for no request."""
        found = interface.route(
            incoming.method, incoming.path, incoming.headers, incoming.body, self
        )
        if not isinstance(found, RoutedRequest):
            return found
        key = self._key_of(found)
        request, encoding = found.request, incoming.headers.get(ENCODING)
        if encoding is not None:  # workers inflate bodies, whatever the interface
            request = dataclasses.replace(request, headers={**request.headers, ENCODING: encoding})
        seconds = self._timeout
        if incoming.patience is not None:
            seconds = min(seconds, incoming.patience)
        deadline = incoming.began + seconds
        try:
            self._dispatcher.submit(
                Pending(incoming, interface, request, key, deadline, self._answered)
            )
        except Refusal as refusal:
            took = time.monotonic() - incoming.began
            verb, entrypoint = request.verb, interface.entrypoint
            self._counters.answered(key[0], verb, refusal.status, took, entrypoint)
            raise
        return True

    def _key_of(self, call: RoutedRequest) -> Key:
        model = call.model if call.model is not None else self.default_model
        if model is None:
            raise Refusal(404, "The server has several models, and none is the default: name one.")
        version = call.version
        if call.label is not None:
            version = self._labelled(model, call.label)
        if model not in self._wanted.names:
            raise Refusal(404, not_found(model, version))
        if refusal := self.refusal_of((model, version)):
            raise refusal
        return model, version

    def _labelled(self, model: str, label: str) -> int:
        if (model, label) not in self._wanted.labels:
            raise Refusal(400, f"Unrecognized servable version label: {label}")
        return self._wanted.labels[model, label]

    def refusal_of(self, key: Key) -> Refusal | None:
        """Returns why no worker answers for a key; None if one does, or may soon again."""
        if any(worker.place_of(key) is not None for worker in self._fleet.workers):
            return None
        if self._fleet.is_promised(key):
            return None
        why, was_served = self._fleet.why_not(key)
        text = f"{not_found(*key)}: {why}" if why else not_found(*key)
        return Refusal(503 if was_served else 404, text)

    # ---------------------------------------------------------------------------------- answers
    def _answered(self, pending: Pending, answer: Response) -> None:
        model = pending.key[0]
        seconds = time.monotonic() - pending.incoming.began
        entrypoint = pending.interface.entrypoint
        self._counters.answered(model, pending.request.verb, answer.status, seconds, entrypoint)
        self._send(pending.incoming, model, answer)

    def _refused(self, interface: Interface, refusal: Refusal) -> Response:
        answer = interface.refuse(refusal)
        if refusal.status not in _BUSY:
            return answer
        after = ("retry-after", str(self._dispatcher.retry_after()))
        return dataclasses.replace(answer, headers=(*answer.headers, after))

    def broken(self, status: int, text: str) -> Response:
        """Returns the answer to what no interface of HTTP knows."""
        return self._interfaces[REST][0].refuse(Refusal(status, text))

    def _send(self, incoming: Incoming, model: str, answer: Response) -> None:
        if self._log is not None:
            self._log(incoming, model, answer)
        incoming.reply(answer)

    # ------------------------------------------------------------------------------ ServerState
    @property
    def default_model(self) -> str | None:
        """The model of requests that name none."""
        return self._wanted.default_model

    def models(self) -> list[str]:
        """Returns the names of the models."""
        return list(self._wanted.names)

    def states(self, model: str) -> list[tuple[int, str, str]]:
        """Returns the versions of a model; see `ServerState.states`."""
        # The fleet also remembers models that were removed.
        return self._fleet.states(model) if model in self._wanted.names else []

    def described(
        self, interface: str, model: str, version: int | None, label: str | None
    ) -> bytes:
        """Returns what `Interface.describe` has said of a model's version in a worker."""
        if label is not None:
            version = self._labelled(model, label)
        served = self._fleet.served(model)
        if not served or (version is not None and version not in served):
            raise Refusal(404, not_found(model, version))
        return served[max(served) if version is None else version].described[interface]

    async def load(self, model: str, folder: pathlib.Path) -> None:
        """Adds a model, and waits until it is served; see `ServerState.load`."""
        if model in self._wanted.names or model in self._coming:
            raise Refusal(409, f"Model {model} is already loaded.")
        self._coming.add(model)
        try:
            await self._wanted.add(model, folder)
            # Another client may unload it before it is served.
            if why := await self._fleet.outcome(model, lambda: model in self._wanted.names):
                await self._wanted.remove(model)
                raise Refusal(500, f"Model {model} cannot be loaded: {why}")
        except NanoError as error:
            raise Refusal(404, str(error)) from None
        finally:
            self._coming.discard(model)

    async def unload(self, model: str) -> None:
        """Removes a model; see `ServerState.unload`."""
        if not await self._wanted.remove(model):
            raise Refusal(404, f"Model {model} is not loaded yet.")

    def is_ready(self) -> bool:
        """Returns True if each lasting model can be asked, and the server does not end."""
        return not self.is_leaving and all(map(self._fleet.served, self._wanted.lasting))
