"""Calls by gRPC in the front: which model they ask for, read without TensorFlow and NumPy."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.unit.serving.served_fakes import FakeModel, FakeServer, half_plus

pytest.importorskip("google.protobuf")

from nanotf.serving.interface import GRPC, Refusal, RoutedRequest
from nanotf.serving.remote import inference_messages, serving_messages
from nanotf.serving.remote.inference_service import InferenceService
from nanotf.serving.remote.prediction_service import PredictionService

SERVING = PredictionService(most=1 << 20)
V2 = InferenceService()
PREDICTIONS = "/tensorflow.serving.PredictionService/"
STATUS = "/tensorflow.serving.ModelService/GetModelStatus"
INFERENCE = "/inference.GRPCInferenceService/"


class _Server(FakeServer):
    def described(self, interface: str, model: str, version: Any, label: Any) -> bytes:
        if interface == V2.name:
            return super().described(interface, model, version, label)
        answer = serving_messages.message_class("GetModelMetadataResponse")()
        answer.model_spec.version.value = self.found(model, version, label).version
        return bytes(answer.SerializeToString())


def _server(*models: FakeModel) -> Any:
    return _Server(V2, *(models or (half_plus(3, "[?]"),)))


def _spec(name: str = "half", **fields: Any) -> Any:
    spec = serving_messages.message_class("ModelSpec")(name=name)
    if "version" in fields:
        spec.version.value = fields.pop("version")
    for field, value in fields.items():
        setattr(spec, field, value)
    return spec


def _message(kind: str = "PredictRequest", **fields: Any) -> bytes:
    return bytes(serving_messages.message_class(kind)(**fields).SerializeToString())


def _route(path: str, body: bytes, interface: Any = SERVING, server: Any = None) -> Any:
    return interface.route("POST", path, {}, body, server or _server())


def _refusal(path: str, body: bytes, interface: Any = SERVING) -> tuple[int, str]:
    with pytest.raises(Refusal) as found:
        _route(path, body, interface)
    return found.value.status, found.value.text


@pytest.mark.parametrize("method", ["Predict", "Classify", "Regress"])
def test_calls_of_a_model(method: str) -> None:
    for spec, wanted in (
        (_spec(), ("half", None, None)),
        (_spec(version=123), ("half", 123, None)),
        (_spec(version_label="stable", signature_name="s"), ("half", None, "stable")),
    ):
        body = _message(model_spec=spec)
        found = _route(PREDICTIONS + method, body)
        assert isinstance(found, RoutedRequest)
        assert (found.model, found.version, found.label) == wanted
        assert (found.request.verb, found.request.body) == (method.lower(), body)


def test_pieces_of_a_message_are_merged_as_protobuf_does() -> None:
    pieces = _message(model_spec=_spec("other")), _message(model_spec=_spec("half", version=123))
    found = _route(PREDICTIONS + "Predict", pieces[0] + _message(output_filter=["y"]) + pieces[1])
    assert (found.model, found.version) == ("half", 123)


def test_calls_that_name_no_model() -> None:
    predict = PREDICTIONS + "Predict"
    assert _refusal(predict, b"") == (400, "Missing ModelSpec")
    assert _refusal(predict, _message(model_spec=_spec(""))) == (400, "ModelSpec has no name.")
    assert _refusal(predict, b"\x0a\x05abc")[0] == 400
    assert _refusal(predict, b"\x0a\x02\xff\xff")[0] == 400
    assert _refusal(PREDICTIONS + "MultiInference", b"")[0] == 400


def test_a_message_of_many_fields_is_refused() -> None:
    body = _message(model_spec=_spec(), output_filter=["y"] * 5000)
    assert "4096 fields" in _refusal(PREDICTIONS + "Predict", body)[1]


def test_tasks_must_be_for_one_model() -> None:
    request = serving_messages.message_class("MultiInferenceRequest")()
    for name in ("half", "half"):
        request.tasks.add(model_spec=_spec(name))
    assert _route(PREDICTIONS + "MultiInference", request.SerializeToString()).model == "half"
    request.tasks.add(model_spec=_spec(version=123))
    text = _refusal(PREDICTIONS + "MultiInference", request.SerializeToString())[1]
    assert "same model" in text


def test_status() -> None:
    server = _server()
    server.other_states["half"] = [(124, "END", "broken"), (125, "LOADING", "")]
    kind = serving_messages.message_class("GetModelStatusResponse")

    def states(**fields: Any) -> list[tuple[int, int, int, str]]:
        body = _message(model_spec=_spec(**fields))
        found = kind.FromString(_route(STATUS, body, server=server).body).model_version_status
        return [(s.version, s.state, s.status.error_code, s.status.error_message) for s in found]

    assert states() == [(125, 20, 0, ""), (124, 50, 2, "broken"), (123, 30, 0, "")]
    assert states(version=124) == [(124, 50, 2, "broken")]
    assert states(version_label="stable") == [(123, 30, 0, "")]
    missing = (404, "Could not find any versions of model other")
    assert _refusal(STATUS, _message(model_spec=_spec("other"))) == missing


def test_metadata() -> None:
    path, kind = PREDICTIONS + "GetModelMetadata", "GetModelMetadataRequest"
    fields = ["signature_def"]
    body = _message(kind, model_spec=_spec(version_label="stable"), metadata_field=fields)
    answer = serving_messages.message_class("GetModelMetadataResponse")
    assert answer.FromString(_route(path, body).body).model_spec.version.value == 123
    text = _refusal(path, _message(kind, model_spec=_spec()))[1]
    assert text == "GetModelMetadataRequest must specify at least one metadata_field"
    body = _message(kind, model_spec=_spec(), metadata_field=["graph"])
    assert _refusal(path, body) == (400, "MetadataField graph is not supported")
    body = _message(kind, model_spec=_spec(version=7), metadata_field=fields)
    assert _refusal(path, body)[0] == 404


def test_questions_of_the_open_protocol() -> None:
    def ask(method: str, body: bytes = b"") -> Any:
        kind = inference_messages.message_class(f"{method}Response")
        return kind.FromString(_route(INFERENCE + method, body, V2).body)

    named = inference_messages.message_class("ModelReadyRequest")(name="half", version="123")
    assert ask("ServerLive").live and ask("ServerReady").ready
    assert ask("ServerMetadata").name == "nanotf"
    assert ask("ModelReady", named.SerializeToString()).ready
    found = ask("ModelMetadata", named.SerializeToString())
    assert (found.name, list(found.versions)) == ("half", ["123"])
    assert [(t.name, t.datatype, list(t.shape)) for t in found.outputs] == [("y", "FP32", [-1])]
    named.version = "7"
    assert not ask("ModelReady", named.SerializeToString()).ready
    named.version = "x"
    assert _refusal(INFERENCE + "ModelInfer", named.SerializeToString(), V2)[0] == 400
    named.name = "other"
    assert _refusal(INFERENCE + "ModelInfer", named.SerializeToString(), V2)[0] == 404
    assert _refusal(INFERENCE + "ModelReady", b"\x0a\x01\xff", V2)[0] == 400


def test_calls_of_others_services_are_not_taken() -> None:
    assert _route("/other.Service/Predict", b"") is None
    assert _route("/other.Service/ModelInfer", b"", V2) is None
    assert SERVING.entrypoint == V2.entrypoint == GRPC


def test_random_bytes_are_refused() -> None:
    rng = random.Random(3)
    request = serving_messages.message_class("PredictRequest")(model_spec=_spec())
    request.inputs["x"] = np.arange(9.0).tobytes()
    good, server = bytes(request.SerializeToString()), _server()
    paths = [(SERVING, PREDICTIONS + method) for method in SERVING.services[PREDICTIONS[1:-1]]]
    paths += [(SERVING, STATUS), *((V2, INFERENCE + m) for m in V2.services[INFERENCE[1:-1]])]
    for _ in range(500):
        body = bytearray(good)
        for _ in range(rng.randrange(1, 5)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        for interface, path in paths:
            try:
                _route(path, bytes(body[: rng.randrange(len(body) + 1)]), interface, server)
            except Refusal as refusal:
                assert refusal.status in (400, 404)


def test_the_front_needs_neither_tensorflow_nor_numpy() -> None:
    body = _message(model_spec=_spec("m", version=1))
    code = f"""
import sys
from nanotf.serving.remote.inference_service import InferenceService
from nanotf.serving.remote.prediction_service import PredictionService
class Server:
    def states(self, model):
        return [(1, "AVAILABLE", "")]
found = PredictionService(1).route("POST", {PREDICTIONS + "Predict"!r}, {{}}, {body!r}, Server())
assert (found.model, found.version) == ("m", 1)
body = b"\\x0a\\x01m"
found = InferenceService().route("POST", {INFERENCE + "ModelInfer"!r}, {{}}, body, Server())
assert (found.model, found.version) == ("m", None)
assert PredictionService(1).route("POST", {STATUS!r}, {{}}, {body!r}, Server()).status == 200
print([name for name in ("tensorflow", "numpy") if name in sys.modules])
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "[]"
