"""Clients of a server, in a process of their own: `python -m benchmarks.load_generator LOAD`.

LOAD is the JSON text of a `Load`. Prints a JSON object: see `Generator.result`.

With rate 0, each connection asks again as soon as it has its answer: the server is as busy as that
number of clients makes it. With a rate, requests are due at random moments (a Poisson process), and
a request's time counts from the moment at which it was due, also if no connection was free then:
otherwise a slow server would be asked less often, and would look fast.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import pathlib
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import httptools

LAST_SECONDS = 30.0  # for the answers to what was asked before the end


@dataclasses.dataclass(frozen=True)
class Load:
    """The requests of clients, and their number.

    Args:
        port: int, of the server on 127.0.0.1.
        path: str.
        body: str, the path of a file with JSON.
        connections: int, kept open.
        seconds: float.
        rate: float, requests per second; 0 for as many as the server answers.
    """

    port: int
    path: str
    body: str
    connections: int
    seconds: float
    rate: float = 0.0

    def request(self) -> bytes:
        """Returns the request's bytes."""
        body = pathlib.Path(self.body).read_bytes()
        head = (
            f"POST {self.path} HTTP/1.1\r\nhost: 127.0.0.1:{self.port}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class _Connection(asyncio.Protocol):
    """A client's connection, which has at most one request at a time."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._transport: Any = None
        self._due: float | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._body = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._generator.is_free(self)

    def ask(self, due: float) -> None:
        self._due = due
        self._transport.write(self._generator.request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._body = b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        due, self._due = self._due, None
        assert due is not None, "a server answers what it was asked"
        closes = not self._parser.should_keep_alive()
        self._generator.answered(due, self._parser.get_status_code(), self._body)
        if closes:
            self._transport.close()
        else:
            self._generator.is_free(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._generator.is_lost(self, self._due is not None)

    def close(self) -> None:
        self._transport.close()


class Generator:
    """All clients.

    Args:
        load: `Load`.

    Attributes:
        request: bytes that a connection sends.
    """

    def __init__(self, load: Load) -> None:
        self._load, self.request = load, load.request()
        self._loop = asyncio.get_running_loop()
        self._begin = self._end = self._last = 0.0
        self._free: collections.deque[_Connection] = collections.deque()
        self._due: collections.deque[float] = collections.deque()  # nobody was free
        self._open: set[_Connection] = set()
        self._asked = self._answers = self._lost = 0
        self._times: collections.defaultdict[int, list[float]] = collections.defaultdict(list)
        self._late: list[float] = []
        self._body = b""

    async def run(self) -> None:
        """Asks until the time is over, and waits for the answers."""
        load = self._load
        await asyncio.gather(*(self._connect() for _ in range(load.connections)))
        self._begin = time.monotonic()  # uvloop's own clock counts milliseconds
        self._end = self._begin + load.seconds
        if load.rate:
            await self._ask_at_rate(load.rate)
        else:
            for connection in list(self._free):
                self._ask(connection, self._begin)
            await asyncio.sleep(load.seconds)
        limit = self._end + LAST_SECONDS
        while self._answers + self._lost < self._asked and time.monotonic() < limit:
            await asyncio.sleep(0.01)
        for connection in list(self._open):
            connection.close()

    async def _connect(self) -> None:
        _, connection = await self._loop.create_connection(
            lambda: _Connection(self), "127.0.0.1", self._load.port
        )
        self._open.add(connection)

    async def _ask_at_rate(self, rate: float) -> None:
        draw = random.Random(1)
        due = self._begin
        while (due := due + draw.expovariate(rate)) < self._end:
            if (wait := due - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            elif not self._asked % 64:
                await asyncio.sleep(0)  # late; answers must be read all the same
            if self._free:
                self._late.append(time.monotonic() - due)
                self._ask(self._free.popleft(), due)
            else:
                self._due.append(due)
                self._asked += 1
                await asyncio.sleep(0)

    def _ask(self, connection: _Connection, due: float) -> None:
        self._asked += 1
        connection.ask(due)

    def is_free(self, connection: _Connection) -> None:
        """Takes note of a connection that may ask."""
        now = time.monotonic()
        if self._due:
            connection.ask(self._due.popleft())
        elif self._begin and not self._load.rate and now < self._end:
            self._ask(connection, now)
        else:
            self._free.append(connection)

    def answered(self, due: float, status: int, body: bytes) -> None:
        """Counts an answer."""
        self._last = time.monotonic()
        self._answers += 1
        self._times[status].append(self._last - due)
        if status == 200:
            self._body = body

    def is_lost(self, connection: _Connection, was_asked: bool) -> None:
        """Replaces a connection that the server has closed."""
        self._open.discard(connection)
        if connection in self._free:
            self._free.remove(connection)
        self._lost += was_asked
        if time.monotonic() < self._end:
            self._loop.create_task(self._connect())

    def result(self) -> dict[str, Any]:
        """Returns what was seen.

        Returns:
            A dict: `seconds` from the first request to the last answer; `asked`, `lost` (without an
            answer); `answers`, for each status a dict of `count` and the times `mean`, `p50`,
            `p99`, `max` in s; `body`, the last answer with status 200; `late`, the 99th percentile
            of the seconds by which the clients themselves asked later than was due, although a
            connection was free: times that are not much longer tell nothing about the server.
        """
        return {
            "seconds": max(self._last - self._begin, 1e-9),
            "asked": self._asked,
            "lost": self._asked - self._answers,
            "answers": {status: _summary(times) for status, times in self._times.items()},
            "body": self._body.decode(errors="replace"),
            "late": _summary(self._late)["p99"] if self._late else 0.0,
        }


def _summary(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    last = len(ordered) - 1
    return {
        "count": len(ordered),
        "mean": sum(ordered) / len(ordered),
        "p50": ordered[last // 2],
        "p99": ordered[round(last * 0.99)],
        "max": ordered[last],
    }


def main(arguments: Sequence[str]) -> None:
    """Asks, and prints the result."""
    load = Load(**json.loads(arguments[0]))

    async def run() -> dict[str, Any]:
        generator = Generator(load)
        await generator.run()
        return generator.result()

    try:
        import uvloop
    except ImportError:
        print(json.dumps(asyncio.run(run())))
    else:
        print(json.dumps(uvloop.run(run())))


if __name__ == "__main__":
    main(sys.argv[1:])
