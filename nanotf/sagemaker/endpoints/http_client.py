"""Sends requests to a server over connections that stay open: one for each thread.

A server that is busy answers 429 or 503 with a `Retry-After` header (RFC 9110, section 10.2.3). The
request is then sent again after that time, as long as the time for all tries is not over.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import io
import math
import os
import threading
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanotf.errors import EndpointError, InvalidArgumentError

_BUSY = (429, 503)
_TIMEOUT = 70.0  # seconds without an answer: a server gives up after 60, and says so
_RETRY_SECONDS = 60.0  # for all tries of a request that a busy server refuses
_SHOWN = 2000  # characters of an error's body in its message


@dataclass(frozen=True)
class HttpAnswer:
    """An answer with status 2xx."""

    body: bytes
    content_type: str

    def stream(self) -> io.BytesIO:
        """Returns the body as deserializers take it."""
        return io.BytesIO(self.body)


class NotReached(Exception):  # no OSError: `_exchange` takes those for a silent server
    """Nothing listens at the address: the request was not sent."""


class HttpClient:
    """A client of one server. It may be used by several threads, pickled, and used after a fork.

    Args:
        url: str, "http://host:port", with a path prefix or without.
        timeout: float, default 70, seconds for each answer.
        retry_seconds: float, default 60, seconds for all tries of a request that a busy server
            refuses with `Retry-After`; 0 for one try.

    Raises:
        InvalidArgumentError: The address is no such one.
    """

    def __init__(
        self, url: str, timeout: float = _TIMEOUT, retry_seconds: float = _RETRY_SECONDS
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        with contextlib.suppress(ValueError):  # a port that is no number
            if parts.scheme in ("http", "https") and parts.hostname:
                self._host, self._port = parts.hostname, parts.port
                self._is_secure, self._prefix = parts.scheme == "https", parts.path.rstrip("/")
                self.url, self._timeout, self._retry_seconds = url, timeout, retry_seconds
                self._local = threading.local()
                return
        raise InvalidArgumentError(
            f"A server's address must be http://host:port. Received: {url!r}."
        )

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return HttpClient, (self.url, self._timeout, self._retry_seconds)

    def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> HttpAnswer:
        """Sends a request.

        Raises:
            EndpointError: The server answers with another status than 2xx, or not at all.
            NotReached: Nothing listens there.
        """
        deadline = time.monotonic() + self._retry_seconds
        while True:
            status, answer, text = self._exchange(path, body, headers)
            if 200 <= status < 300:
                return answer
            pause = _retry_after(text) if status in _BUSY else None
            if pause is None or time.monotonic() + pause > deadline:
                raise self._refused(path, status, answer.body)
            time.sleep(pause)

    def _refused(self, path: str, status: int, body: bytes) -> EndpointError:
        text = body.decode(errors="replace")
        return EndpointError(
            f"A request must get an answer with status 200. Received: status {status} from "
            f"{self.url}{path}: {text[:_SHOWN].strip() or 'no text'}",
            status,
            text,
        )

    def _exchange(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, HttpAnswer, str | None]:
        """Returns the status, the answer, and the header `Retry-After`."""
        connection, is_used = self._connection()
        try:
            self._send(connection, path, body, headers)
            response = connection.getresponse()
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError) as error:
            self.close()
            # A server may close an idle connection at the moment when a request is sent. It has
            # not answered then, so the request may be sent once more, on a new connection.
            if is_used:  # once: a new connection is not used
                return self._exchange(path, body, headers)
            raise self._silent(path, error) from error
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise self._silent(path, error) from error
        return self._read(path, response)

    def _read(
        self, path: str, response: http.client.HTTPResponse
    ) -> tuple[int, HttpAnswer, str | None]:
        try:
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise self._silent(path, error) from error
        kind = response.getheader("Content-Type") or "application/octet-stream"  # RFC 9110, 8.3
        if response.will_close:
            self.close()
        return response.status, HttpAnswer(content, kind), response.getheader("Retry-After")

    def _send(
        self,
        connection: http.client.HTTPConnection,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
    ) -> None:
        # `request` would connect, too, but a refused one must be told apart from a broken one.
        if connection.sock is None:
            try:
                connection.connect()
            except ConnectionRefusedError as error:
                raise NotReached(f"{self.url}: {error}") from error
        connection.request("POST", self._prefix + path, body, dict(headers))

    def _silent(self, path: str, error: Exception) -> EndpointError:
        return EndpointError(
            f"A server must answer within {self._timeout:g} s. Received: "
            f"{type(error).__name__}: {error}, from {self.url}{path}. Look at the server's log."
        )

    def _connection(self) -> tuple[http.client.HTTPConnection, bool]:
        """Returns this thread's connection, and if it has been used before."""
        pid, connection = getattr(self._local, "connection", (None, None))
        if connection is not None and pid == os.getpid():  # a fork must not share its parent's
            return connection, connection.sock is not None
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout)
        self._local.connection = os.getpid(), connection
        return connection, False

    def close(self) -> None:
        """Closes this thread's connection; the next request opens another one."""
        _, connection = getattr(self._local, "connection", (None, None))
        if connection is not None:
            connection.close()


def _retry_after(text: str | None) -> float | None:
    """Returns the seconds of a header `Retry-After`: a number, or a date. None for neither."""
    if text is None:
        return None
    with contextlib.suppress(ValueError):
        # `float` also reads "nan", which no comparison with a deadline refuses.
        if math.isfinite(seconds := float(text)):
            return max(seconds, 0.0)
    # OverflowError: a time zone of many digits.
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return max(email.utils.parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
    return None
