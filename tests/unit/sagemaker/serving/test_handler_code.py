"""A user's `handler`, `input_handler` and `output_handler`."""

from __future__ import annotations

import dataclasses
import http.client
import json
import logging
import pathlib
from collections.abc import Iterator

import pytest
from hosting_fakes import JSON, HostedModel, HostServer, double, error, value, with_code

POST = """
    import json, urllib.request, urllib.error

    def post(uri, body):
        request = urllib.request.Request(uri, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()
"""
ASKS = """
    from posts import post

    def handler(data, context):
        status, body = post(context.rest_uri, data.read())
        return body, f"x/{status}"
"""
BOTH = """
    import json

    def input_handler(data, context):
        assert context.request_content_type == "text/x-numbers"
        rows = [list(map(float, line.split())) for line in data.read().decode().splitlines()]
        return json.dumps({"instances": rows})

    def output_handler(response, context):
        assert response.json() == json.loads(response.content) == json.loads(response.text)
        assert response.headers["Content-Type"] == "application/json"
        found = [response.status_code, response.ok, response.json()]
        return json.dumps(found), context.accept_header
"""
RAISES = """
    def input_handler(data, context):
        return data.read()

    def output_handler(response, context):
        try:
            response.raise_for_status()
        except OSError as error:
            return str(error), f"x/{response.reason}"
        return response.content, f"x/{response.reason}"
"""
FIELDS = """
    import json

    def handler(data, context):
        return json.dumps([list(context._fields), list(context)]), "application/json"
"""


@pytest.fixture(name="servers")
def fixture_servers() -> Iterator[list[HostServer]]:
    servers: list[HostServer] = []
    yield servers
    for server in servers:
        server.interface.close()


def _serve(servers: list[HostServer], *models: HostedModel) -> HostServer:
    servers.append(HostServer(*models))
    return servers[-1]


def test_handler_asks_over_http(servers: list[HostServer], tmp_path: pathlib.Path) -> None:
    server = _serve(servers, with_code(double(), tmp_path, ASKS, posts=POST))
    assert server.computed_by_code == [False]
    answer = server.invoke('{"instances": [[1, 2]]}', "text/anything")
    assert (answer.status, answer.content_type) == (200, "x/200")
    assert json.loads(answer.body) == {"predictions": [[2.0, 4.0]]}
    answer = server.invoke("[1")
    assert answer.content_type == "x/400" and b"JSON Parse error" in answer.body


def test_responses_raise_for_status(servers: list[HostServer], tmp_path: pathlib.Path) -> None:
    server = _serve(servers, with_code(double(), tmp_path, RAISES))
    answer = server.invoke('{"instances": [[1, 2]]}', JSON)
    assert answer.content_type == "x/OK"
    assert json.loads(answer.body) == {"predictions": [[2.0, 4.0]]}
    answer = server.invoke("[1", JSON)
    assert answer.content_type == "x/Bad Request"
    assert answer.body.startswith(b'400 Bad Request: { "error": "JSON Parse error')


def test_rest_uri_answers_each_request_of_a_connection(
    servers: list[HostServer], tmp_path: pathlib.Path
) -> None:
    other = dataclasses.replace(double(), name="other/model")
    server = _serve(servers, with_code(double(), tmp_path, FIELDS), other)
    host = value(server.ask("POST", "/models/half/invoke"))[1][3].split("/")[2]
    connection = http.client.HTTPConnection(host, timeout=60)
    try:
        for method, path, body, status in (
            ("POST", "/v1/models/half:predict", '{"instances": [[1, 2]]}', 200),
            ("POST", "/v1/models/half/versions/3:predict", '{"inputs": [[1, 2]]}', 200),
            ("POST", "/v1/models/half/versions/4:predict", '{"inputs": [[1, 2]]}', 404),
            ("POST", "/v1/models/other%2Fmodel:predict", '{"instances": [[1, 2]]}', 200),
            ("POST", "/v1/models/none:predict", "{}", 404),
            ("POST", "/v1/models/half/labels/a:predict", "{}", 400),
            ("POST", "/v1/models/half:predict", '{"instances": [[1]]}', 400),
            ("GET", "/v1/models/half", "", 200),
            ("GET", "/v1/models/half/metadata", "", 200),
            ("GET", "/none", "", 404),
        ):
            connection.request(method, path, body)
            response = connection.getresponse()
            content = json.loads(response.read())
            assert response.status == status, (path, content)
            assert ("error" in content) == (status != 200)
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Length": "x"}, 411),
        ({"Content-Length": "-1"}, 411),
        ({"Content-Length": str(10**12)}, 413),
        ({"Transfer-Encoding": "chunked"}, 411),
    ],
)
def test_rest_uri_refuses_lengths(
    servers: list[HostServer], tmp_path: pathlib.Path, headers: dict[str, str], status: int
) -> None:
    server = _serve(servers, with_code(double(), tmp_path, FIELDS))
    connection = http.client.HTTPConnection(_uri(server).split("/")[2], timeout=60)
    try:
        connection.putrequest("POST", "/v1/models/half:predict")
        for name, text in headers.items():
            connection.putheader(name, text)
        connection.endheaders()
        assert connection.getresponse().status == status
    finally:
        connection.close()


def _uri(server: HostServer) -> str:
    uri: str = value(server.invoke(""))[1][3]
    return uri


def test_the_model_that_fails_is_an_error_of_rest_uri(
    servers: list[HostServer], tmp_path: pathlib.Path
) -> None:
    def fail(x: object) -> dict[str, object]:
        raise RuntimeError("out of order")

    model = dataclasses.replace(double(), function=fail)
    answer = _serve(servers, with_code(model, tmp_path, ASKS, posts=POST)).invoke(
        '{"instances": [[1, 2]]}'
    )
    assert answer.content_type == "x/500" and b"out of order" in answer.body


def test_context_with_defaults(servers: list[HostServer], tmp_path: pathlib.Path) -> None:
    server = _serve(servers, with_code(double(), tmp_path, FIELDS))
    names, values = value(server.invoke("12345", None))
    assert names == [
        *("model_name", "model_version", "method", "rest_uri", "grpc_port", "channel"),
        *("custom_attributes", "request_content_type", "accept_header", "content_length"),
    ]
    uri = values.pop(3)
    assert uri.startswith("http://127.0.0.1:") and uri.endswith("/v1/models/half:predict")
    assert values == [None, None, None, None, None, None, JSON, JSON, 5]


def test_context_of_what_a_client_says(servers: list[HostServer], tmp_path: pathlib.Path) -> None:
    server = _serve(servers, with_code(double(), tmp_path, FIELDS))
    attributes = "tfs-model-name=half,tfs-model-version=3,tfs-method=regress,mine=1"
    _, values = value(
        server.invoke("", "a/b", accept="c/d", x_amzn_sagemaker_custom_attributes=attributes)
    )
    assert values[:3] == ["half", "3", "regress"]
    assert values[3].endswith("/v1/models/half/versions/3:regress")
    assert values[6:] == [attributes, "a/b", "c/d", 0]
    _, values = value(server.ask("POST", "/models/half/invoke"))
    assert values[0] == "half"


def test_two_handlers(servers: list[HostServer], tmp_path: pathlib.Path) -> None:
    server = _serve(servers, with_code(double(), tmp_path, BOTH))
    answer = server.invoke("1 2\n3 4", "text/x-numbers", accept="my/type")
    assert (answer.status, answer.content_type) == (200, "my/type")
    assert json.loads(answer.body) == [200, True, {"predictions": [[2.0, 4.0], [6.0, 8.0]]}]
    status, ok, content = json.loads(server.invoke("1", "text/x-numbers").body)
    assert (status, ok) == (400, False) and "shape" in content["error"]


def test_handler_wins_over_the_two(servers: list[HostServer], tmp_path: pathlib.Path) -> None:
    script = BOTH + "    def handler(data, context):\n        return b'mine', 'a/b'\n"
    answer = _serve(servers, with_code(double(), tmp_path, script)).invoke("")
    assert (answer.body, answer.content_type) == (b"mine", "a/b")


@pytest.mark.parametrize(
    "script",
    ["def input_handler(data, context): ...", "def output_handler(data, context): ...", "x = 1"],
)
def test_code_without_handlers(tmp_path: pathlib.Path, script: str) -> None:
    with pytest.raises(NotImplementedError, match="Handlers are not implemented correctly"):
        HostServer(with_code(double(), tmp_path, script))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("raise ValueError('no such thing')", "no such thing"),
        ("return 'body'", "handler must return the body and its content type. Received: str."),
        ("return {}, 'a/b'", "handler must return text or bytes. Received: dict."),
    ],
)
def test_errors_of_a_handler(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, body: str, text: str
) -> None:
    server = HostServer(with_code(double(), tmp_path, f"def handler(data, context): {body}"))
    with caplog.at_level(logging.ERROR, "nanotf"):
        status, found = error(server.invoke(""))
    server.interface.close()
    assert status == 500 and found.startswith(text)
    assert "Traceback" not in found
    if body.startswith("raise"):
        assert "inference.py" in caplog.text and "Traceback" in caplog.text
