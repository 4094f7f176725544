"""TensorFlow Serving's REST: paths, status, metadata, errors, the documentation's examples."""

from __future__ import annotations

import re

import numpy as np
import pytest
from served_fakes import FakeModel, FakeServer, ask, content, error, half_plus, signature

from nanotf.inference.signature import DEFAULT, REGRESS
from nanotf.serving.interface import Refusal, RoutedRequest
from nanotf.serving.tensorflow_rest import TensorflowRest

REST = TensorflowRest()
STATUS = {
    "version": "123",
    "state": "AVAILABLE",
    "status": {"error_code": "OK", "error_message": ""},
}


def _server() -> FakeServer:
    return FakeServer(REST, half_plus(3))


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/half:predict",
        "/V1/Models/half:Predict",
        "/v1/models/half/versions/123:predict",
        "/v1/models/half/versions/000123:predict",
        "/v1/models/half/labels/stable:predict",
        "/v1/models/h%61lf:predict",
        "/v1/models/half:predict?key=1",
    ],
)
def test_predict_of_the_documentation(path: str) -> None:
    answer = ask(_server(), REST, "POST", path, '{"instances": [1.0,2.0,5.0]}')
    assert answer is not None and answer.status == 200 and answer.headers == ()
    assert answer.body == b'{"predictions":[3.5,4.0,5.5]}'


@pytest.mark.parametrize("path", ["/", "/ping", "/v2", "/v1", "/invocations", "/x/v1/models/half"])
def test_other_paths_belong_to_others(path: str) -> None:
    assert REST.route("GET", path, {}, b"", _server()) is None


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("GET", "/v1/models", 400, "Missing model name in request."),
        ("GET", "/v1/models/metadata/metadata", 404, "Servable not found.*Latest.metadata"),
        ("GET", "/v1/models/versions/3", 400, "Missing model name in request."),
        ("GET", "/v1/foo", 400, "^Malformed request: GET /v1/foo$"),
        ("POST", "/v1/foo", 400, "Malformed request: POST /v1/foo"),
        ("POST", "/v1/models", 400, "Malformed request"),
        ("GET", "/v1/models/debug/model_name", 400, "Malformed request"),
        ("GET", "/v1/models/half:predict", 400, "Malformed request"),
        ("POST", "/v1/models/half/metadata", 400, "Malformed request"),
        ("POST", "/v1/models/half/version/50:regress", 400, "Malformed request"),
        ("POST", "/v1/models/half/versions/HELLO:regress", 400, "Malformed request"),
        ("POST", "/v1/models/half/versions/1/labels/a:regress", 400, "Malformed request"),
        ("POST", "/v1/models/half/label/some:regress", 400, "Malformed request"),
        ("POST", "/v1/models/half:explain", 400, "Malformed request"),
        ("DELETE", "/v1/models/half", 400, "Malformed request: DELETE"),
        (
            "POST",
            "/v1/models/half/versions/9223372036854775808:predict",
            400,
            "^Failed to convert version: 9223372036854775808 to numeric.$",
        ),
        ("POST", f"/v1/models/half/versions/{'9' * 9000}:predict", 400, "Failed to convert"),
        ("POST", "/v1/models/foo:predict", 404, "^Servable not found for request: Latest.foo.$"),
        (
            "POST",
            "/v1/models/half/versions/50:predict",
            404,
            r"^Servable not found for request: Specific\(half, 50\)$",
        ),
        ("POST", "/v1/models/half/labels/x:predict", 400, "Unrecognized servable version label: x"),
        ("GET", "/v1/models/foo", 404, "^Could not find any versions of model foo$"),
        ("GET", "/v1/models/half/versions/5", 404, "^Could not find version 5 of model half$"),
        ("GET", "/v1/models/half/labels/x", 400, "Unrecognized servable version label: x"),
        ("GET", "/v1/models/half/versions/5/metadata", 404, r"Specific\(half, 5\)"),
        ("OPTIONS", "/v1/models/half:predict", 400, "Origin header is missing in CORS preflight"),
    ],
)
def test_wrong_requests(method: str, path: str, status: int, text: str) -> None:
    answer = ask(_server(), REST, method, path, '{"instances": [1.0]}')
    found, received = error(answer)
    assert found == status
    assert re.search(text, received), received


def test_a_preflight() -> None:
    headers = {"origin": "http://a.example"}
    answer = ask(_server(), REST, "OPTIONS", "/v1/models/half:predict", headers=headers)
    assert answer is not None and (answer.status, answer.body) == (200, b"")


@pytest.mark.parametrize("where", ["", "/versions/123", "/labels/stable"])
def test_status(where: str) -> None:
    answer = ask(_server(), REST, "GET", f"/v1/models/half{where}")
    assert content(answer) == {"model_version_status": [STATUS]}


def test_states_of_versions() -> None:
    server = _server()
    server.other_states["half"] = [(124, "LOADING", ""), (122, "END", "It does not load.")]
    found = content(ask(server, REST, "GET", "/v1/models/half"))["model_version_status"]
    assert [each["version"] for each in found] == ["124", "123", "122"]
    assert found[0]["state"] == "LOADING"
    assert found[2]["status"] == {
        "error_code": "UNKNOWN",
        "error_message": "It does not load.",
    }
    label = content(ask(server, REST, "GET", "/v1/models/half/labels/stable"))
    assert label == {"model_version_status": [STATUS]}
    answer = ask(server, REST, "POST", "/v1/models/half/versions/122:predict", "{}")
    assert error(answer) == (404, "Servable not found for request: Specific(half, 122)")


@pytest.mark.parametrize("where", ["", "/versions/123", "/labels/stable"])
def test_metadata(where: str) -> None:
    model = FakeModel(
        {DEFAULT: signature("x:float32[?,2] t:string* i:int64[]", "p:float64[?]", REGRESS)},
        lambda **_: {},
    )
    answer = ask(FakeServer(REST, model), REST, "GET", f"/v1/models/half{where}/metadata")
    found = content(answer)
    assert found["model_spec"] == {"name": "half", "signature_name": "", "version": "123"}
    described = found["metadata"]["signature_def"]["signature_def"][DEFAULT]
    assert described["method_name"] == "tensorflow/serving/regress"
    assert described["inputs"]["x"] == {
        "dtype": "DT_FLOAT",
        "tensor_shape": {
            "dim": [{"size": "-1", "name": ""}, {"size": "2", "name": ""}],
            "unknown_rank": False,
        },
        "name": "",
    }
    assert described["inputs"]["t"]["dtype"] == "DT_STRING"
    assert described["inputs"]["t"]["tensor_shape"] == {"dim": [], "unknown_rank": True}
    assert described["inputs"]["i"]["tensor_shape"] == {"dim": [], "unknown_rank": False}
    assert described["inputs"]["i"]["dtype"] == "DT_INT64"
    assert described["outputs"]["p"]["dtype"] == "DT_DOUBLE"


def test_a_name_is_decoded() -> None:
    model = half_plus(2, name="a b")
    call = REST.route("POST", "/v1/models/a%20b:predict", {}, b"x", FakeServer(REST, model))
    assert isinstance(call, RoutedRequest)
    assert (call.model, call.version, call.label) == ("a b", None, None)
    assert (call.request.verb, call.request.body) == ("predict", b"x")


def test_a_refusal_is_json_whatever_its_text() -> None:
    text = 'a "quoted" \n line \ud800'
    answer = REST.refuse(Refusal(503, text))
    assert answer.status == 503 and answer.body.startswith(b'{ "error": "')
    assert error(answer) == (503, text)


def test_rows_of_other_requests() -> None:
    """The rows of a request tell a worker if it may be computed with others."""
    cases = {
        ("x:float32[?,2]", "y:float32[?]", '{"instances": [[1,2],[3,4]]}'): 2,
        ("x:float32[?,2]", "y:float32[?]", '{"inputs": [[1,2],[3,4],[5,6]]}'): 3,
        ("x:float32[2,2]", "y:float32[2]", '{"instances": [[1,2],[3,4]]}'): None,
        ("x:float32[?,2]", "y:float32[]", '{"instances": [[1,2],[3,4]]}'): None,
        ("x:float32[]", "y:float32[]", '{"inputs": 1}'): None,
        ("x:float32*", "y:float32*", '{"inputs": 1}'): None,
        ("a:float32[?] b:int32[?]", "y:float32[?]", '{"inputs": {"a": [1,2], "b": [1]}}'): None,
        ("a:float32[?] b:int32[?]", "y:float32[?]", '{"inputs": {"a": [1,2], "b": [1,2]}}'): 2,
        ("x:float32[?]", "y:float32[?]", '{"inputs": []}'): None,
    }
    for (inputs, outputs, body), rows in cases.items():
        model = FakeModel({DEFAULT: signature(inputs, outputs)}, lambda **_: {})
        server = FakeServer(REST, model)
        call = REST.route("POST", "/v1/models/half:predict", {}, body.encode(), server)
        assert isinstance(call, RoutedRequest)
        decoded = REST.decode(call.request, model)
        assert decoded.rows == rows, body
        assert all(isinstance(array, np.ndarray) for array in decoded.inputs.values())
