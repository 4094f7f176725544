"""Answers TensorFlow Serving's REST requests that user code makes, in the worker that runs it.

A handler posts to its context's `rest_uri`, as in a SageMaker container, where TensorFlow Serving
listens. Here a thread of the same process does, so that one worker suffices for a request:

    worker's main thread                        this thread
      handler(data, context)
        requests.post(context.rest_uri)  -->    route, decode, `ServedModel.run`, encode
        returns body, type               <--

The main thread waits for the handler meanwhile, so a model is never computed twice at once. The
port is free, and open to this machine alone.
"""

from __future__ import annotations

import http.server
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from nanotf.console import logger
from nanotf.errors import NanoError
from nanotf.serving.interface import (
    Interface,
    Refusal,
    Request,
    Response,
    RoutedRequest,
    ServedModel,
)
from nanotf.serving.served_versions import not_found

_HOST = "127.0.0.1"
_IDLE = 60.0  # s without a request, after which a connection is closed


class _Models:
    """The models of this worker, as `Interface.route` asks for them."""

    default_model: str | None = None  # a path of TensorFlow Serving's names a model

    def __init__(self, interface: Interface) -> None:
        self.interface = interface
        self.found: dict[str, dict[int, ServedModel]] = {}

    def models(self) -> list[str]:
        return list(self.found)

    def states(self, model: str) -> list[tuple[int, str, str]]:
        return [(n, "AVAILABLE", "") for n in sorted(self.found.get(model, {}), reverse=True)]

    def described(
        self, interface: str, model: str, version: int | None, label: str | None
    ) -> bytes:
        return self.interface.describe(self.pick(model, version, label))

    def is_ready(self) -> bool:
        return True

    async def load(self, model: str, folder: Any) -> None:
        raise Refusal(501, "A worker loads no models.")

    async def unload(self, model: str) -> None:
        raise Refusal(501, "A worker unloads no models.")

    def pick(self, model: str | None, version: int | None, label: str | None) -> ServedModel:
        versions = self.found.get(model or "", {})
        if label is not None:  # only the front knows labels
            raise Refusal(400, f"Unrecognized servable version label: {label}")
        if version is None and versions:
            return versions[max(versions)]
        if version not in versions:
            raise Refusal(404, not_found(model, version))
        return versions[version]


class LocalRest:
    """A REST server for the code of a worker's models.

    Args:
        interface: TensorFlow Serving's REST.
        most: bytes that a body may have.
    """

    def __init__(self, interface: Interface, most: int) -> None:
        self._interface = interface
        self._most = most
        self._models = _Models(interface)
        self._server: http.server.ThreadingHTTPServer | None = None
        self._computing = threading.Lock()  # the code may use several threads

    def add(self, model: ServedModel) -> None:
        """Makes a model known."""
        self._interface.begin(model)
        self._models.found.setdefault(model.name, {})[model.version] = model

    def uri(self, model: str, version: str | None, method: str) -> str:
        """Returns the address of a model. The first call starts the server."""
        if self._server is None:
            self._server = _start(self, self._most)
        return f"http://{_HOST}:{self._server.server_address[1]}{path_of(model, version, method)}"

    def close(self) -> None:
        """Ends the server, if there is one."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def respond(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Response:
        """Answers a request."""
        interface = self._interface
        try:
            found = interface.route(method, path, headers, body, self._models)
            if isinstance(found, Response):
                return found
            if not isinstance(found, RoutedRequest):
                raise Refusal(404, "Not Found")
            model = self._models.pick(found.model, found.version, found.label)
            with self._computing:
                return computed(interface, found.request, model)
        except Refusal as refusal:
            return interface.refuse(refusal)
        except NanoError as error:  # an input that does not fit the model
            return interface.refuse(Refusal(400, str(error)))
        except Exception as error:
            logger.error("A prediction for a model's code failed.", exc_info=True)
            return interface.refuse(Refusal(500, str(error)))


def path_of(model: str, version: str | None, method: str) -> str:
    """Returns the path of TensorFlow Serving's REST for a model."""
    place = f"/versions/{quote(version, safe='')}" if version else ""
    return f"/v1/models/{quote(model, safe='')}{place}:{method}"


def computed(interface: Interface, request: Request, model: ServedModel) -> Response:
    """Answers one request by itself, in this thread.

    Raises:
        Refusal: The interface refuses it.
        NanoError: An input does not fit the model.
    """
    answer = interface.answer(request, model)
    if answer is None:
        decoded = interface.decode(request, model)
        answer = interface.encode(decoded, model.run(decoded.inputs, decoded.signature), model)
    return answer


def _start(rest: LocalRest, most: int) -> http.server.ThreadingHTTPServer:
    # `http.server` makes the handlers itself, from a class, which therefore holds the settings.
    class RestHandler(_RestHandler):
        local_rest, largest = rest, most

    server = http.server.ThreadingHTTPServer((_HOST, 0), RestHandler)
    server.daemon_threads = True
    server.block_on_close = False  # a connection that the code left open must not delay the end
    threading.Thread(target=server.serve_forever, name="nanotf rest_uri", daemon=True).start()
    return server


class _RestHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are kept, as `requests.Session` wants
    timeout = _IDLE
    # Head and body in one packet: else the client delays its ACK of the head by 40 ms.
    wbufsize = -1
    disable_nagle_algorithm = True
    local_rest: LocalRest
    largest: int

    def do_GET(self) -> None:
        self._respond()

    def do_POST(self) -> None:
        self._respond()

    def _respond(self) -> None:
        length = self.headers.get("Content-Length", "0")
        # `http.server` decodes no chunks.
        if "Transfer-Encoding" in self.headers or not (length.isascii() and length.isdigit()):
            self.send_error(411)  # closes the connection
            return
        if int(length) > self.largest:
            self.send_error(413)
            return
        body = self.rfile.read(int(length))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self._send(self.local_rest.respond(self.command, self.path, headers, body))

    def _send(self, answer: Response) -> None:
        self.send_response(answer.status)
        if answer.content_type:
            self.send_header("Content-Type", answer.content_type)
        for name, value in answer.headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: the front logs the request that the code answers."""
