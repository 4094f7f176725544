"""A server as a user starts it, and clients that talk to it over HTTP."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil

from tests.e2e.processes import ROOT

SECONDS = 300.0  # a cold start of TensorFlow, on a busy machine


@dataclasses.dataclass
class Reply:
    """The answer that a client has got."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Served:
    """A running server."""

    def __init__(self, process: subprocess.Popen[bytes], ready: Any, log: pathlib.Path) -> None:
        self.process, self._log = process, log
        self.port, self.grpc_port = ready["port"], ready.get("grpc_port")

    def ask(self, path: str, body: Any = None, method: str | None = None, **headers: str) -> Reply:
        """Asks once. A body that is no bytes is sent as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if data is not None:
            sent.setdefault("content-type", "application/json")
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        with contextlib.closing(connection):
            connection.request(method or ("GET" if data is None else "POST"), path, data, sent)
            found = connection.getresponse()
            return Reply(found.status, {k.lower(): v for k, v in found.getheaders()}, found.read())

    def predict(self, rows: Any, model: str) -> Any:
        """Returns the predictions of rows."""
        reply = self.ask(f"/v1/models/{model}:predict", {"instances": rows})
        assert reply.status == 200, reply.body
        return reply.json["predictions"]

    def metric(self, name: str) -> float:
        """Returns the value of a metric, given its name with its labels."""
        lines = self.ask("/monitoring/prometheus/metrics").body.decode().splitlines()
        found = [line.rpartition(" ") for line in lines]
        return next((float(value) for key, _, value in found if key == name), 0.0)

    def workers(self) -> list[int]:
        """Returns the process ids of the workers."""
        zygotes = psutil.Process(self.process.pid).children()
        return [worker.pid for zygote in zygotes for worker in zygote.children()]

    def log(self) -> str:
        """Returns what the server has printed."""
        return self._log.read_text(errors="replace")

    def wait_until(self, is_so: Any, what: str) -> None:
        """Waits until a condition holds."""
        end = time.monotonic() + SECONDS
        while not is_so():
            assert time.monotonic() < end, f"{what}\n{self.log()}"
            time.sleep(0.05)

    def stop(self) -> int:
        """Ends the server as a container's platform does; returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(SECONDS)


def start(folder: pathlib.Path, *words: str, **variables: str) -> subprocess.Popen[bytes]:
    """Starts `nanotf serve`. Its output goes to `folder / "log"`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ready.json").unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2", **variables}
    command = [sys.executable, "-m", "nanotf", "serve", *words]
    options = ["--port", "0", "--ready-file", str(folder / "ready.json")]
    with open(folder / "log", "wb") as log:  # noqa: PTH123
        return subprocess.Popen(
            [*command, *options], cwd=folder, env=environment, stdout=log, stderr=log
        )


@contextlib.contextmanager
def serving(folder: pathlib.Path, *words: str, **variables: str) -> Iterator[Served]:
    """Runs a server in this context, once it is ready.

    Args:
        folder: for its files.
        *words: of the command line.
        **variables: of its environment.
    """
    process = start(folder, *words, **variables)
    try:
        end = time.monotonic() + SECONDS
        while not (folder / "ready.json").is_file():
            log = (folder / "log").read_text(errors="replace")
            assert process.poll() is None, log
            assert time.monotonic() < end, log
            time.sleep(0.05)
        ready = json.loads((folder / "ready.json").read_text())
        yield Served(process, ready, folder / "log")
    finally:
        process.terminate()  # a killed server could not remove its temporary folder
        process.terminate()
        try:
            process.wait(SECONDS)
        finally:
            process.kill()
