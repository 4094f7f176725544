"""A server for tests of endpoints, with the options and the ready file of `nanotf serve`.

Its model is a text: "fail" ends it at the start, "silent" never answers, "once" fails at a restart,
"stubborn" ignores SIGTERM. To a request it answers with what it has received.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_REPLY_HEADERS = ("content-type", "accept", "x-amzn-sagemaker-custom-attributes")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/ping" else 404, b"")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        print("request", self.path, len(body), flush=True)
        if body == b"refuse":
            self._answer(400, b'{"error": "x: expected (None, 2)"}')
        elif self.headers["Content-Type"] == "text/csv":
            self._answer(200, body.upper(), "text/csv")
        else:
            found = {
                "body": body.decode(),
                "headers": {name: self.headers[name] for name in _REPLY_HEADERS},
                "environment": os.environ.get("TEST_OF_ENDPOINTS"),
                "pid": os.getpid(),
            }
            self._answer(200, json.dumps(found).encode())

    def _answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def main() -> None:
    """Serves until a signal ends it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ready-file", type=pathlib.Path, required=True)
    options = parser.parse_args()
    model = pathlib.Path(options.model)
    text = model.read_text() if model.is_file() and model.suffix == ".keras" else ""
    if text == "fail":
        print("loading the model", flush=True)
        sys.exit("no SavedModel bundles found!")
    if text == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if text == "silent":
        time.sleep(600)
    again = model.with_name("begun")
    if text == "once" and again.exists():
        sys.exit("the model is gone")
    again.touch()
    server = ThreadingHTTPServer((options.host, options.port), _Handler)
    part = options.ready_file.with_suffix(".part")
    part.write_text(json.dumps({"port": server.server_address[1], "pid": os.getpid()}))
    part.replace(options.ready_file)
    print("serving", model.name, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
