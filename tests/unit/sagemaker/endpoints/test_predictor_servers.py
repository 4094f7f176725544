"""A predictor finds the server that it asks, and says what it sends."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from nanotf.errors import EndpointError, InvalidArgumentError
from nanotf.estimator import Predictor, TensorFlowModel, TensorFlowPredictor
from nanotf.sagemaker.endpoints.endpoint_record import (
    DELETED,
    IN_SERVICE,
    EndpointFolder,
    EndpointRequest,
    new_state,
)


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        found = {"name": self.server.name, "type": self.headers["Content-Type"]}  # type: ignore[attr-defined]
        body = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""


@contextlib.contextmanager
def _server(name: str, port: int = 0) -> Iterator[int]:
    """Answers with a name and the content type of each request. Yields the port."""
    server = http.server.HTTPServer(("127.0.0.1", port), _Handler)
    server.name = name  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _endpoint(folder: pathlib.Path, name: str, port: int) -> EndpointFolder:
    endpoint = EndpointFolder(folder / name)
    endpoint.path.mkdir()
    endpoint.write_request(EndpointRequest(name, "m", "m", ("x",), (0,)))
    endpoint.write_state(dataclasses.replace(new_state(), status=IN_SERVICE, port=port))
    return endpoint


def test_another_endpoint_has_got_the_port(tmp_path: pathlib.Path) -> None:
    with _server("a") as port:
        endpoint = _endpoint(tmp_path, "a", port)
        predictor = TensorFlowPredictor("a", output_path=tmp_path)
        assert predictor.predict([1])["name"] == "a"
    endpoint.write_state(dataclasses.replace(endpoint.read_state(), status=DELETED))
    with _server("b", port):
        _endpoint(tmp_path, "b", port)
        with pytest.raises(EndpointError, match=r"Received: a, whose status"):
            predictor.predict([1])
        assert TensorFlowPredictor("b", output_path=tmp_path).predict([1])["name"] == "b"


def test_an_endpoint_of_the_same_name(tmp_path: pathlib.Path) -> None:
    with _server("old") as first, _server("new") as second:
        endpoint = _endpoint(tmp_path, "a", first)
        predictor = TensorFlowPredictor("a", output_path=tmp_path)
        assert [predictor.predict([1])["name"] for _ in range(2)] == ["old", "old"]
        endpoint.write_state(dataclasses.replace(endpoint.read_state(), port=second))
        assert predictor.predict([1])["name"] == "new"
        (endpoint.path / "state.json").unlink()
        with pytest.raises(InvalidArgumentError, match=r"The endpoint must exist\. Received: a"):
            predictor.predict([1])


def test_content_types(tmp_path: pathlib.Path) -> None:
    with _server("a") as port:
        predictor = TensorFlowPredictor(f"http://127.0.0.1:{port}")
        given: list[dict[str, str | None]] = [{}, {"ContentType": "a/b"}, {"ContentType": None}]
        found = [predictor.predict([1], each)["type"] for each in given]
    assert found == ["application/json", "a/b", None]
    assert predictor.endpoint == predictor.endpoint_name


@pytest.mark.parametrize("kind", [None, "text/csv"])
def test_content_type_of_a_transform(
    kind: str | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "rows").write_text("1,2")
    transformer = TensorFlowModel("model.tar.gz").transformer(output_path=tmp_path / "out")
    with _server("a") as port:
        predictor = Predictor(f"http://127.0.0.1:{port}")
        monkeypatch.setattr(transformer, "_server", lambda: contextlib.nullcontext(predictor))
        transformer.transform(tmp_path / "in", content_type=kind)
    assert json.loads((tmp_path / "out" / "rows.out").read_text())["type"] == kind


def test_an_owner_that_was_killed(tmp_path: pathlib.Path) -> None:
    """Its server has ended with it; the state still says that it is in service."""
    with _server("a") as port:
        endpoint = _endpoint(tmp_path, "a", port)
        predictor = TensorFlowPredictor("a", output_path=tmp_path)
        predictor.predict([1])
        found = predictor._found
        assert found is not None
        ended = dataclasses.replace(found.owner, start="another")
        endpoint.write_state(dataclasses.replace(endpoint.read_state(), owner=ended))
        predictor._found = found._replace(stamp=endpoint.state_stamp(), owner=ended)
        with pytest.raises(EndpointError, match="whose status is Failed"):
            predictor.predict([1])
