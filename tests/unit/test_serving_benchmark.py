"""The clients, tables and goals of `benchmarks.serving`; no model is served."""

from __future__ import annotations

import contextlib
import copy
import http.server
import json
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("httptools")

from benchmarks import goals, report

_LOCK = threading.Lock()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # one packet for headers and body
    asked = 0

    def do_POST(self) -> None:
        with _LOCK:  # each request has a thread
            type(self).asked += 1
            number = type(self).asked
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(429 if number % 5 == 0 else 200)
        self.send_header("content-length", str(len(body)))
        if number % 7 == 0:
            self.send_header("connection", "close")
            self.close_connection = True
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@contextlib.contextmanager
def _server() -> Iterator[int]:
    _Handler.asked = 0
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def _asked(folder: pathlib.Path, **how: Any) -> dict[str, Any]:
    (folder / "body").write_text('{"instances": [1]}')
    with _server() as port:
        load = {"port": port, "path": "/", "body": str(folder / "body"), "seconds": 0.5, **how}
        command = [sys.executable, "-m", "benchmarks.load_generator", json.dumps(load)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        found: dict[str, Any] = json.loads(done.stdout)
        assert found["asked"] == _Handler.asked
        return found


@pytest.mark.parametrize("rate", [0.0, 100.0])
def test_each_request_gets_its_answer(tmp_path: pathlib.Path, rate: float) -> None:
    found = _asked(tmp_path, connections=3, rate=rate)
    counts = {status: each["count"] for status, each in found["answers"].items()}
    assert found["lost"] == 0
    assert sum(counts.values()) == found["asked"] > 10
    assert counts["429"] == found["asked"] // 5
    assert found["body"] == '{"instances": [1]}'


def test_requests_come_at_the_wanted_rate(tmp_path: pathlib.Path) -> None:
    # The draws are the same in each run: these are within three standard deviations.
    assert abs(_asked(tmp_path, connections=4, rate=200.0)["asked"] - 100) <= 30


def _row(server: str, processors: list[float], **more: Any) -> dict[str, Any]:
    rates = [1 / each for each in processors]
    row = {"model": "cnn8", "server": server, "rates": rates, "processors": processors}
    return {**row, "fronts": [5e-5] * 3, "others": [0.1] * 3, **more}


def _block(rate: float, count: int, refused: int = 0) -> dict[str, Any]:
    times = {"mean": 0.002, "p50": 0.002, "p99": 0.003, "max": 0.004}
    answers = {"200": {"count": count, **times}}
    if refused:
        answers["429"] = {"count": refused, **times}
    seen = {"seconds": 1.0, "asked": count + refused, "lost": 0, "answers": answers, "late": 1e-4}
    return {"rate": rate, "batch": 0.0015, "seen": seen}


RESULT: dict[str, Any] = {
    "rows": [
        _row("predict", [0.1, 0.3, 0.2]),
        _row("function", [0.001, 0.003, 0.002]),
        _row(
            "nanotf tensorflow",
            [0.0001, 0.0003, 0.0002],
            one=_block(400, 400),
            overload={**_block(950, 950, 1050), "limit": 0.05, "capacity": 1000.0},
            **{"70 %": _block(700, 700), "front, wrk": 4e-5},
        ),
    ],
    "problems": ["lstm, nanotf litert: it does not load"],
}


def test_the_tables_of_servers() -> None:
    text = report.serving(RESULT)
    line = next(each for each in text.splitlines() if "nanotf tensorflow" in each)
    assert line.split()[-2:] == ["1,000.0", "10.0"]
    assert "95%" in text and "2.0" in text
    assert text.endswith("it does not load")


def test_the_goals_of_servers() -> None:
    found = {goal.text: goal for goal in goals.goals({"serving": RESULT})}
    met = {text: goal.met for text, goal in found.items() if text.startswith("serving")}
    assert len(met) == 5 and all(met.values())
    assert found["serving: the front per request"].measured == pytest.approx(40)
    missing = [g for g in goals.goals({}) if g.text.startswith("serving")]
    assert [goal.met for goal in missing] == [None] * 5


def test_clients_that_were_late_tell_nothing_about_a_server() -> None:
    late = copy.deepcopy(RESULT)
    for block in ("70 %", "overload"):
        late["rows"][-1][block]["seen"]["late"] = 0.01
    found = {goal.text: goal.met for goal in goals.goals({"serving": late})}
    assert found["serving: p99 at 70 % load / a batch"] is None
    assert found["serving: goodput at twice the load / capacity"] is None
    assert found["serving: the front per request"] is True
