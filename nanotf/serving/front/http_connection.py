"""HTTP/1.1 for a client's connection: limits, timeouts, one answer after another.

llhttp parses (httptools). This protocol takes a tenth of the time that an ASGI server takes for a
small request, and limits what ASGI servers leave to a proxy: the time for the headers of a request
and for its body, their size, and a body that is too large before it is read.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import http
import re
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import httptools

from nanotf.serving.front.incoming import Incoming
from nanotf.serving.interface import REST, Response

MAX_HEADERS = 1 << 16  # bytes of a request's first line and headers
HEADER_SECONDS = 10.0  # from the first byte of a request to the end of its headers
BODY_SECONDS = 60.0  # from there to the end of its body
IDLE_SECONDS = 75.0  # between two requests; longer than that of usual proxies
WRITE_SECONDS = 60.0  # for a client to take an answer
_REASONS = {status.value: status.phrase for status in http.HTTPStatus}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

# What comes before the path in the absolute form of a request's target (RFC 9112).
_BEFORE_PATH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?]*")

_LONG_HEADERS = f"The headers must have at most {MAX_HEADERS} bytes."

# `_BROKEN`: an error was answered. What still comes is dropped, so that the client reads the
# answer: a connection that is closed with unread data is reset.
_IDLE, _HEADERS, _BODY, _COMPLETE, _BROKEN = range(5)
_LIMITS = {_IDLE: IDLE_SECONDS, _HEADERS: HEADER_SECONDS, _BODY: BODY_SECONDS, _BROKEN: 2.0}


@dataclasses.dataclass
class HttpRequest(Incoming):
    """A request as it has come by HTTP."""

    entrypoint: ClassVar[str] = REST

    connection: HttpConnection
    keeps_open: bool
    is_http_1_0: bool  # whose clients close unless they are told not to

    @property
    def client(self) -> str:
        """The client's address."""
        return self.connection.client

    @property
    def has_left(self) -> bool:
        """True if the client has closed the connection."""
        return self.connection.is_closed

    def reply(self, answer: Response) -> None:
        """Sends the answer, unless the client has left. Called once."""
        self.connection.reply(self, answer)


class RequestTaker(Protocol):
    """The place where requests are answered."""

    most_bytes: int  # of a body
    most_connections: int
    is_leaving: bool  # whether connections end after their next answer

    def take(self, incoming: Incoming) -> None:
        """Answers a request, now or later."""

    def broken(self, status: int, text: str) -> Response:
        """Returns the answer to what is no request, or too large or slow a one."""


class HttpConnection(asyncio.Protocol):
    """A client's connection.

    Args:
        desk: what answers.
        open_connections: those that are open; this adds itself.
        now: returns the loop's time.
    """

    def __init__(
        self, desk: RequestTaker, open_connections: set[HttpConnection], now: Callable[[], float]
    ) -> None:
        self._desk, self._open, self._now = desk, open_connections, now
        self._parser = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self.is_closed = False
        self._state, self._since = _IDLE, now()
        self._waiting: collections.deque[HttpRequest] = collections.deque()
        self._is_answering = self._is_taking = False
        self._ends = False  # after the answers that wait
        self._blocked_since: float | None = None  # when the client stopped to read
        self._closing_since: float | None = None  # when this side has written all that it will
        self._has_completed = False  # a request, in what is parsed now
        self._unread = 0  # bytes of headers that the parser may hold back
        self._clear()

    def _clear(self) -> None:
        self._url = b""
        self._headers: dict[str, str] = {}
        self._head_bytes = 0
        self._content = bytearray()

    @property
    def client(self) -> str:
        """The client's address."""
        found = self._transport.get_extra_info("peername")
        return str(found[0]) if found else ""

    # --------------------------------------------------------------------- from the transport
    def connection_made(self, transport: Any) -> None:
        """Begins, unless there are as many connections as the server may have."""
        self._transport = transport
        self._open.add(self)
        if len(self._open) > self._desk.most_connections:
            transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Ends, also if the client has closed its side alone: most have left then."""
        self.is_closed = True
        self._open.discard(self)
        self._waiting.clear()

    def pause_writing(self) -> None:
        """Stops reading while the client does not read: its answers would fill the memory."""
        self._blocked_since = self._now()
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Reads again."""
        self._blocked_since = None
        self._read_on()

    def data_received(self, data: bytes) -> None:
        """Parses what has come."""
        unread: bytes | None = data
        while unread is not None and not self._ends:
            unread = self._feed(unread)

    def _feed(self, data: bytes) -> bytes | None:
        """Parses; returns what is to be parsed instead of the rest, or None."""
        # Of a chunk with the end of another request, the bytes of these headers are not known.
        all_headers, self._has_completed = self._state in (_IDLE, _HEADERS), False
        if self._state == _IDLE:
            self._enter(_HEADERS)
        before = self._unread
        try:
            self._parser.feed_data(data)
            all_headers = all_headers and not self._has_completed and self._state == _HEADERS
            self._unread = before + len(data) if all_headers else 0
            if self._unread > MAX_HEADERS:  # of a line whose end has not come
                raise _TooMuch(431, _LONG_HEADERS)
        except httptools.HttpParserUpgrade as error:
            return self._without_upgrade(data[error.args[0] :])
        except _TooMuch as error:
            self._break(error.status, str(error))
        except httptools.HttpParserError as error:
            # A limit that a callback has raised is the parser's cause.
            cause = error.__context__
            if isinstance(cause, _TooMuch):
                self._break(cause.status, str(cause))
            else:
                self._break(400, f"Not a request of HTTP/1.1: {error}")
        return None

    def _without_upgrade(self, rest: bytes) -> bytes | None:
        """Ignores a wish for another protocol, as every server may.

        The parser stops after the headers of such a request. Another one gets the headers without
        the wish, so that it reads the body.

        Args:
            rest: what has come after the headers.
        """
        if self._parser.get_method() == b"CONNECT":  # which has no body, and was answered
            self._ends = True
            return None
        version = self._parser.get_http_version()
        lines = [f"{name}: {text}" for name, text in self._headers.items() if name != "upgrade"]
        first = self._parser.get_method() + b" " + self._url + f" HTTP/{version}\r\n".encode()
        head = first + "\r\n".join([*lines, "", ""]).encode("latin-1")
        self._parser = httptools.HttpRequestParser(self)
        return head + rest

    def _wishes_upgrade(self) -> bool:
        return self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT"

    # ------------------------------------------------------------------------ from the parser
    def on_message_begin(self) -> None:
        """A request begins."""
        self._clear()
        self._enter(_HEADERS)

    def on_url(self, url: bytes) -> None:
        """A piece of the path."""
        self._url += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header. One that comes twice is a list, by RFC 9110."""
        self._count(len(name) + len(value) + 4)  # with the colon, the space and the line's end
        if self._state == _BODY:  # a trailer, which is no header
            return
        # Latin-1 has a character for each byte, so that no header fails here.
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        before = self._headers.get(key)
        self._headers[key] = text if before is None else f"{before}, {text}"

    def _count(self, nbytes: int) -> None:
        self._head_bytes += nbytes
        if self._head_bytes > MAX_HEADERS:
            raise _TooMuch(431, _LONG_HEADERS)

    def on_headers_complete(self) -> None:
        """The headers end."""
        if self._wishes_upgrade():
            return
        self._enter(_BODY)
        length = self._headers.get("content-length", "")
        if length.isdigit() and int(length) > self._desk.most_bytes:
            raise self._too_large(int(length))
        # After the limit: a client that waits for this has not sent the body that is too large.
        expects = self._headers.get("expect", "").lower() == "100-continue"
        if expects and self._parser.get_http_version() != "1.0":  # whose clients expect nothing
            self._transport.write(_CONTINUE)

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._content += body
        if len(self._content) > self._desk.most_bytes:  # a chunked one states no length before
            raise self._too_large(len(self._content))

    def _too_large(self, nbytes: int) -> _TooMuch:
        most = self._desk.most_bytes
        return _TooMuch(413, f"A body must have at most {most} bytes. Received: {nbytes}.")

    def on_message_complete(self) -> None:
        """A request is whole."""
        if self._wishes_upgrade():
            return
        incoming = HttpRequest(
            self._parser.get_method().decode("latin-1"),
            _origin_form(self._url.decode("latin-1")),
            self._headers,
            bytes(self._content),
            self._since,
            self,
            self._parser.should_keep_alive() and not self._parser.should_upgrade(),
            self._parser.get_http_version() == "1.0",
        )
        self._has_completed = True
        self._enter(_COMPLETE)
        self._clear()
        self._waiting.append(incoming)
        self._next()
        if self._waiting:  # what a client sends ahead then waits in the kernel
            self._transport.pause_reading()

    # -------------------------------------------------------------------------------- answers
    def _next(self) -> None:
        if self._is_taking:  # the desk answers at once; the loop below takes the next one
            return
        self._is_taking = True
        try:
            while self._waiting and not self._is_answering:
                self._is_answering = True
                self._desk.take(self._waiting.popleft())
        finally:
            self._is_taking = False

    def reply(self, incoming: HttpRequest, answer: Response) -> None:
        """Sends the answer to the request that the desk has taken."""
        if self.is_closed:
            return
        closes = self._desk.is_leaving or not incoming.keeps_open
        connection = "close" if closes else "keep-alive" if incoming.is_http_1_0 else ""
        # RFC 9110: the answer to HEAD states the length of a body that it does not have.
        self._write(answer, connection, with_body=incoming.method != "HEAD")
        self._is_answering = False
        if closes or (self._ends and not self._waiting):
            self._waiting.clear()
            self._close()
            return
        if self._state == _COMPLETE and not self._waiting:
            self._enter(_IDLE)
        self._next()
        self._read_on()

    def _read_on(self) -> None:
        """Reads again, unless a request waits or the client does not read its answers."""
        if not self._waiting and self._blocked_since is None:
            self._transport.resume_reading()

    def _write(self, answer: Response, connection: str, with_body: bool = True) -> None:
        head = f"HTTP/1.1 {answer.status} {_REASONS.get(answer.status, 'Status')}\r\n"
        if answer.content_type:
            head += f"content-type: {_one_line(answer.content_type)}\r\n"
        for name, value in answer.headers:
            head += f"{_one_line(name)}: {_one_line(value)}\r\n"
        head += f"content-length: {len(answer.body)}\r\n"
        head += f"connection: {connection}\r\n\r\n" if connection else "\r\n"
        self._transport.write(
            head.encode("latin-1", "replace") + (answer.body if with_body else b"")
        )

    def _break(self, status: int, text: str) -> None:
        """Answers what is no request, and ends the connection: nobody knows where another begins.

        Requests before it are answered first.
        """
        self._ends = True
        if self._is_answering:  # the answer would be taken for that of the request before
            return
        self._write(self._desk.broken(status, text), "close")
        self._transport.write_eof()
        self._enter(_BROKEN)

    # ----------------------------------------------------------------------------------- time
    def _enter(self, state: int) -> None:
        if state != self._state:
            self._state, self._since = state, self._now()

    def _close(self) -> None:
        """Ends the connection, once the client has read what is left."""
        if self._closing_since is None:
            self._closing_since = self._now()
        self._transport.close()

    def check_time(self, now: float) -> None:
        """Ends the connection if its client lets the server wait too long. Called each second."""
        for since in (self._blocked_since, self._closing_since):
            if since is not None and now - since > WRITE_SECONDS:
                self._transport.abort()
                return
        limit = _LIMITS.get(self._state)
        if limit is None or self._is_answering or now - self._since < limit:
            return
        if self._state in (_IDLE, _BROKEN):
            self._close()
        else:
            self._break(408, f"A request must be whole within {limit:g} s.")

    def leave(self) -> None:
        """Ends the connection if it waits for a request."""
        if self._state in (_IDLE, _BROKEN) and not self._is_answering:
            self._close()


def _origin_form(target: str) -> str:
    """Returns the path and query of a request's target, which may be a whole URL."""
    if target.startswith("/"):
        return target
    rest, count = _BEFORE_PATH.subn("", target, count=1)
    return f"/{rest}" if count and not rest.startswith("/") else rest


def _one_line(text: str) -> str:
    """Returns a header without line ends, whatever the user's code has made of it."""
    return text if text.isprintable() else "".join(filter(str.isprintable, text))


class _TooMuch(Exception):
    """A request exceeds a limit.

    Args:
        status: of the answer.
        text: for the client.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
