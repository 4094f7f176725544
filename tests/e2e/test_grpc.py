"""gRPC: the clients of TensorFlow Serving and Triton, which nobody here has written, get answers.

TensorFlow Serving's stubs are published in a package that wants a TensorFlow of its own:

    pip install --no-deps tensorflow-serving-api tritonclient
"""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import re
import signal
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from waiting import freeze, wait_until

pytest.importorskip("grpc")
pytest.importorskip("httptools")

import grpc

from nanotf.serving.remote import serving_messages
from tests.e2e.grpc_models import ODD, TYPES, save_examples, save_types
from tests.e2e.served import SECONDS, Served, serving

_STUBS = "needs the stubs of TensorFlow Serving: pip install --no-deps tensorflow-serving-api"
_CONFIG = """model_config_list {
  config { name: "types" base_path: "%s/types" model_platform: "tensorflow"
           model_version_policy { all {} } version_labels { key: "stable" value: 3 } }
  config { name: "examples" base_path: "%s/examples" model_platform: "tensorflow" }
}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("grpc")
    for version in (3, 5):
        save_types(folder / "types" / str(version))
    save_examples(folder / "examples" / "1")
    (folder / "models.config").write_text(_CONFIG % (folder, folder))
    words = ("--config", str(folder / "models.config"), "--grpc-port", "0", "-n", "1")
    with serving(folder / "server", *words, "--max-body", "16") as found:
        yield found


@pytest.fixture
def channel(server: Served) -> Iterator[Any]:
    options = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", options) as found:
        yield found


class Clients:
    """The published stubs."""

    def __init__(self, channel: Any) -> None:
        from tensorflow_serving.apis import model_service_pb2_grpc, prediction_service_pb2_grpc

        self.predictions = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        self.models = model_service_pb2_grpc.ModelServiceStub(channel)

    def predict(self, arrays: Any, **spec: Any) -> Any:
        from tensorflow_serving.apis import predict_pb2

        request = predict_pb2.PredictRequest(output_filter=spec.pop("output_filter", ()))
        _fill_spec(request.model_spec, **spec)
        for name, array in arrays.items():
            request.inputs[name].CopyFrom(tf.make_tensor_proto(array))
        return self.predictions.Predict(request, timeout=SECONDS)


def _fill_spec(spec: Any, name: str = "types", version: int | None = None, **fields: str) -> None:
    spec.name = name
    if version is not None:
        spec.version.value = version
    for field, value in fields.items():
        setattr(spec, field, value)


@pytest.fixture
def clients(channel: Any) -> Clients:
    pytest.importorskip("tensorflow_serving.apis.predict_pb2", reason=_STUBS)
    return Clients(channel)


def _rows(dtype: str) -> Any:
    if dtype == "string":
        return np.array([[b"\x00\xff", "é".encode()], [b"", b"a\0"], [b"x", b"y" * 999]], object)
    found = np.array([[0, 1], [1, 0], [1, 1]], tf.as_dtype(dtype).as_numpy_dtype)
    if "int" in dtype:
        found[0] = np.iinfo(dtype).min, np.iinfo(dtype).max
    elif dtype != "bool":
        found[0] = np.nan, np.inf
    return found


# ------------------------------------------------------------------------- TensorFlow Serving's
def test_types(clients: Clients) -> None:
    rows = {name: _rows(name) for name in TYPES}
    answer, odd = clients.predict(rows), clients.predict({ODD: _rows(ODD)}, signature_name=ODD)
    for name in (*TYPES, ODD):
        found = tf.make_ndarray((odd if name == ODD else answer).outputs[f"{name}_out"])
        assert found.dtype == _rows(name).dtype
        _assert_equal(found, _rows(name))
    spec = answer.model_spec
    assert (spec.name, spec.version.value, spec.signature_name) == ("types", 5, "serving_default")


def _assert_equal(found: Any, wanted: Any) -> None:
    if "bfloat16" in (found.dtype.name, wanted.dtype.name):  # whose NaN NumPy does not know
        found, wanted = found.astype(np.float32), wanted.astype(np.float32)
    np.testing.assert_array_equal(found, wanted)


def test_values_lie_in_the_fields_that_clients_read(clients: Clients) -> None:
    answer = clients.predict({"float32": np.float32([[1, 2]])}, signature_name="float32")
    assert list(answer.outputs["float32_out"].float_val) == [1, 2]
    answer = clients.predict({"string": np.array([["a", "b"]])}, signature_name="string")
    assert list(answer.outputs["string_out"].string_val) == [b"a", b"b"]


def test_values_in_fields_are_read_and_the_last_is_repeated(clients: Clients) -> None:
    from tensorflow_serving.apis import predict_pb2

    request = predict_pb2.PredictRequest()
    _fill_spec(request.model_spec, signature_name="float32")
    sent = request.inputs["float32"]
    sent.dtype = tf.float32.as_datatype_enum
    sent.tensor_shape.CopyFrom(tf.TensorShape([2, 2]).as_proto())
    sent.float_val.extend([4, 7])
    answer = clients.predictions.Predict(request, timeout=SECONDS)
    assert list(answer.outputs["float32_out"].float_val) == [4, 7, 7, 7]
    sent.tensor_shape.CopyFrom(tf.TensorShape([1 << 40, 2]).as_proto())
    _refused(grpc.StatusCode.INVALID_ARGUMENT, "at most", clients.predictions.Predict, request)


def test_output_filter(clients: Clients) -> None:
    rows = {name: _rows(name) for name in TYPES}
    answer = clients.predict(rows, output_filter=["int8_out", "bool_out"])
    assert set(answer.outputs) == {"int8_out", "bool_out"}
    assert set(clients.predict(rows).outputs) == {f"{name}_out" for name in TYPES}
    code = grpc.StatusCode.INVALID_ARGUMENT
    _refused(code, "alias not found.*nothing", clients.predict, rows, output_filter=["nothing"])


def _refused(code: Any, text: str, call: Any, *arguments: Any, **named: Any) -> Any:
    with pytest.raises(grpc.RpcError) as found:
        call(*arguments, **named)
    error: Any = found.value
    assert error.code() == code, error
    assert re.search(text, error.details()), error.details()
    return error


def test_versions_and_labels(clients: Clients) -> None:
    rows, name = {"int8": _rows("int8")}, {"signature_name": "int8"}
    assert clients.predict(rows, version=3, **name).model_spec.version.value == 3
    assert clients.predict(rows, version_label="stable", **name).model_spec.version.value == 3
    missing = grpc.StatusCode.NOT_FOUND
    _refused(missing, r"Specific\(types, 4\)", clients.predict, rows, version=4, **name)
    _refused(missing, r"Latest\(other\)", clients.predict, rows, name="other")
    wrong = grpc.StatusCode.INVALID_ARGUMENT
    _refused(wrong, "Unrecognized.*label: x", clients.predict, rows, version_label="x", **name)
    _refused(wrong, "no name", clients.predict, rows, name="")
    _refused(wrong, '"s" not found', clients.predict, rows, signature_name="s")


def test_wrong_inputs(clients: Clients) -> None:
    code, name = grpc.StatusCode.INVALID_ARGUMENT, {"signature_name": "int8"}
    for text, rows in {
        "shape": {"int8": np.zeros((2, 3), np.int8)},
        "type": {"int8": np.zeros((2, 2), np.float32)},
        "inputs must be": {"x": _rows("int8")},
    }.items():
        _refused(code, text, clients.predict, rows, **name)
    _refused(code, "inputs must be", clients.predict, {}, **name)


def test_metadata_and_status(clients: Clients) -> None:
    from tensorflow_serving.apis import get_model_metadata_pb2, get_model_status_pb2

    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
    _fill_spec(request.model_spec, version_label="stable")
    answer = clients.predictions.GetModelMetadata(request, timeout=SECONDS)
    assert (answer.model_spec.name, answer.model_spec.version.value) == ("types", 3)
    found = get_model_metadata_pb2.SignatureDefMap()
    assert answer.metadata["signature_def"].Unpack(found)
    info = found.signature_def["serving_default"].inputs["bfloat16"]
    assert info.dtype == tf.bfloat16.as_datatype_enum
    assert [dim.size for dim in info.tensor_shape.dim] == [-1, 2]
    assert found.signature_def["int8"].method_name == "tensorflow/serving/predict"
    request.metadata_field[:] = ["weights"]
    wrong = grpc.StatusCode.INVALID_ARGUMENT
    _refused(wrong, "weights", clients.predictions.GetModelMetadata, request)

    question = get_model_status_pb2.GetModelStatusRequest()
    _fill_spec(question.model_spec)
    states = clients.models.GetModelStatus(question, timeout=SECONDS).model_version_status
    available = get_model_status_pb2.ModelVersionStatus.AVAILABLE
    assert [(each.version, each.state) for each in states] == [(5, available), (3, available)]
    question.model_spec.version_label = "stable"
    states = clients.models.GetModelStatus(question, timeout=SECONDS).model_version_status
    assert [each.version for each in states] == [3]
    question.model_spec.name = "other"
    question.model_spec.version.value = 1
    _refused(grpc.StatusCode.NOT_FOUND, "other", clients.models.GetModelStatus, question)


def _example(**features: float) -> Any:
    example = tf.train.Example()
    for name, value in features.items():
        example.features.feature[name].float_list.value.append(value)
    return example


def test_classify_and_regress(clients: Clients) -> None:
    from tensorflow_serving.apis import classification_pb2, regression_pb2

    request = classification_pb2.ClassificationRequest()
    _fill_spec(request.model_spec, name="examples", signature_name="kinds")
    request.input.example_list.examples.extend([_example(x=0.25), _example(x=0.75)])
    answer = clients.predictions.Classify(request, timeout=SECONDS)
    found = [[(c.label, c.score) for c in each.classes] for each in answer.result.classifications]
    assert found == [[("yes", 0.25), ("no", 0.75)], [("yes", 0.75), ("no", 0.25)]]
    assert answer.model_spec.signature_name == "kinds"

    regress = regression_pb2.RegressionRequest()
    _fill_spec(regress.model_spec, name="examples")
    sent = regress.input.example_list_with_context
    sent.examples.extend([_example(x=3), _example()])
    sent.context.CopyFrom(_example(x=4))
    values = clients.predictions.Regress(regress, timeout=SECONDS).result.regressions
    assert [each.value for each in values] == [6, 8]
    regress.model_spec.signature_name = "kinds"
    wrong = grpc.StatusCode.INVALID_ARGUMENT
    _refused(wrong, "method_name to be", clients.predictions.Regress, regress)
    del sent.examples[:]
    _refused(wrong, "Input is empty", clients.predictions.Regress, regress)


def test_multi_inference(clients: Clients) -> None:
    from tensorflow_serving.apis import inference_pb2

    request = inference_pb2.MultiInferenceRequest()
    for signature, method in {"kinds": "classify", "serving_default": "regress"}.items():
        task = request.tasks.add(method_name=f"tensorflow/serving/{method}")
        _fill_spec(task.model_spec, name="examples", signature_name=signature)
    request.input.example_list.examples.append(_example(x=0.5))
    first, second = clients.predictions.MultiInference(request, timeout=SECONDS).results
    assert first.classification_result.classifications[0].classes[1].score == 0.5
    assert second.regression_result.regressions[0].value == 1
    request.tasks[0].model_spec.name = "types"
    wrong = grpc.StatusCode.INVALID_ARGUMENT
    _refused(wrong, "same model", clients.predictions.MultiInference, request)


def test_large_messages(clients: Clients) -> None:
    """Clients and servers of gRPC take 4 MiB unless told otherwise; this server 16 MiB."""
    rows, name = np.array([[b"x" * (6 << 20), b"y"]], object), {"signature_name": "string"}
    answer = clients.predict({"string": rows}, **name)
    assert (tf.make_ndarray(answer.outputs["string_out"]) == rows).all()
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    _refused(code, "larger than max", clients.predict, {"string": np.tile(rows, (3, 1))}, **name)


def test_the_tables_are_those_of_the_stubs() -> None:
    pytest.importorskip("tensorflow_serving.apis.predict_pb2", reason=_STUBS)
    from tensorflow_serving.apis import (
        classification_pb2,
        get_model_metadata_pb2,
        get_model_status_pb2,
        inference_pb2,
        predict_pb2,
        regression_pb2,
    )

    roots = [
        *(predict_pb2.PredictRequest, predict_pb2.PredictResponse),
        *(classification_pb2.ClassificationRequest, classification_pb2.ClassificationResponse),
        *(regression_pb2.RegressionRequest, regression_pb2.RegressionResponse),
        *(inference_pb2.MultiInferenceRequest, inference_pb2.MultiInferenceResponse),
        get_model_metadata_pb2.GetModelMetadataRequest,
        get_model_metadata_pb2.GetModelMetadataResponse,
        get_model_metadata_pb2.SignatureDefMap,
        get_model_status_pb2.GetModelStatusResponse,
    ]
    for root in roots:
        ours = serving_messages.message_class(root.DESCRIPTOR.name).DESCRIPTOR
        _compare(ours, root.DESCRIPTOR)


def _compare(ours: Any, theirs: Any) -> None:
    """Compares the fields of ours; a field of bytes may be anything with a length."""
    for field in ours.fields:
        other = theirs.fields_by_name[field.name]
        assert field.number == other.number, field.full_name
        if field.type == field.TYPE_BYTES and other.type != field.TYPE_STRING:
            lengths = (other.TYPE_BYTES, other.TYPE_MESSAGE, other.TYPE_FLOAT, other.TYPE_DOUBLE)
            assert other.type in lengths, field.full_name
        elif field.type == field.TYPE_MESSAGE:
            _compare(field.message_type, other.message_type)
        elif other.type == other.TYPE_ENUM:
            assert field.type == field.TYPE_INT32, field.full_name
        else:
            assert field.type == other.type, field.full_name


# ------------------------------------------------------------------------------------- Triton's
def test_the_client_of_triton(server: Served) -> None:
    triton = pytest.importorskip("tritonclient.grpc", reason="pip install --no-deps tritonclient")
    with triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        assert client.is_server_live() and client.is_server_ready()
        assert client.is_model_ready("types") and client.is_model_ready("types", "3")
        metadata = client.get_model_metadata("types", "3")
        assert list(metadata.versions) == ["5", "3"]
        datatypes = {each.name: each.datatype for each in metadata.inputs}
        inputs, rows = [], {name: _rows(name) for name in TYPES}
        for name, array in rows.items():
            sent = triton.InferInput(name, array.shape, datatypes[name])
            sent.set_data_from_numpy(array)
            inputs.append(sent)
        answer = client.infer("types", inputs, request_id="7")
        assert (answer.get_response().model_version, answer.get_response().id) == ("5", "7")
        for name, array in rows.items():
            found = answer.as_numpy(f"{name}_out")
            _assert_equal(found, array)
        wanted = [triton.InferRequestedOutput("int8_out")]
        answer = client.infer("types", inputs, "3", outputs=wanted)
        assert answer.as_numpy("bool_out") is None and answer.as_numpy("int8_out") is not None
        with pytest.raises(triton.InferenceServerException, match=r"int8.* once"):
            client.infer("types", [*inputs, inputs[0]])


# ------------------------------------------------------------------ without a published client
def _call(channel: Any, method: str, body: bytes = b"", timeout: float = SECONDS) -> bytes:
    return bytes(channel.unary_unary(method)(body, timeout=timeout))


def _predict_body(dtype: str = "float32", name: str = "types") -> bytes:
    request = serving_messages.message_class("PredictRequest")()
    request.model_spec.name, request.model_spec.signature_name = name, dtype
    request.inputs[dtype] = tf.make_tensor_proto(_rows(dtype)).SerializeToString()
    return bytes(request.SerializeToString())


_WAITING = "nanotf_queue_requests"
_HEALTH = "/grpc.health.v1.Health/Check"
_PREDICT = "/tensorflow.serving.PredictionService/Predict"


def test_health(channel: Any) -> None:
    assert _call(channel, _HEALTH) == b"\x08\x01"  # SERVING
    known = b"tensorflow.serving.PredictionService"
    assert _call(channel, _HEALTH, bytes([10, len(known)]) + known) == b"\x08\x01"
    _refused(grpc.StatusCode.NOT_FOUND, "service", _call, channel, _HEALTH, b"\x0a\x01x")
    _refused(grpc.StatusCode.UNIMPLEMENTED, "", _call, channel, "/grpc.health.v1.Health/Watch")


def test_many_at_once_and_metrics(server: Served, channel: Any) -> None:
    body = _predict_body()
    expected = _call(channel, _PREDICT, body)
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda _: _call(channel, _PREDICT, body), range(200)))
    found = serving_messages.message_class("PredictResponse")
    wanted = found.FromString(expected)
    assert all(found.FromString(answer) == wanted for answer in answers)
    labels = '{model_name="types",API="predict",entrypoint="GRPC"}'
    assert server.metric(f":tensorflow:serving:request_latency_count{labels}") >= 201


def test_the_start_names_all_versions(server: Served) -> None:
    assert "types (versions 3, 5)" in server.log()
    server.wait_until(lambda: "examples (version 1)" in server.log(), "the start is told")


def test_random_bytes(channel: Any) -> None:
    rng = np.random.default_rng(11)
    good = _predict_body()
    methods = [_PREDICT, "/inference.GRPCInferenceService/ModelInfer"]
    methods += [
        f"/tensorflow.serving.PredictionService/{m}" for m in ("Classify", "MultiInference")
    ]
    for _ in range(150):
        body = bytearray(good)
        for place in rng.integers(0, len(body), rng.integers(1, 6)):
            body[place] = rng.integers(0, 256)
        body = body[: rng.integers(0, len(body) + 1)]
        for method in methods:
            try:
                _call(channel, method, bytes(body))
            except grpc.RpcError as error:
                expected = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
                assert error.code() in expected, (bytes(body), method, error)
    assert _call(channel, _PREDICT, good)


def _occupy(server: Served, channel: Any, body: bytes) -> list[Any]:
    """Stops the worker, and makes calls until one waits behind those that it has.

    The server has all of them: they came before one that it has answered.
    """
    assert _call(channel, _HEALTH, b"")  # once connected, calls keep their order
    freeze(server.workers()[0])
    calls: list[Any] = []

    def waits() -> bool:
        calls.append(channel.unary_unary(_PREDICT).future(body))
        return server.metric(_WAITING) > 0

    server.wait_until(waits, "a call waits")
    assert _call(channel, _HEALTH, b"")
    return calls


def test_deadlines_and_cancelled_calls_leave_the_queue(server: Served, channel: Any) -> None:
    body, (worker,) = _predict_body(), server.workers()
    try:
        first, *others = _occupy(server, channel, body)
        for call in others:
            call.cancel()
        server.wait_until(lambda: server.metric(_WAITING) == 0, "cancelled calls are dropped")
        _refused(grpc.StatusCode.DEADLINE_EXCEEDED, "", _call, channel, _PREDICT, body, 0.5)
        server.wait_until(lambda: server.metric(_WAITING) == 0, "the late call is dropped")
    finally:
        os.kill(worker, signal.SIGCONT)
    assert first.result(SECONDS)
    assert _call(channel, _PREDICT, body)


def test_sigterm_ends_after_the_calls_that_run(tmp_path: pathlib.Path) -> None:
    save_types(tmp_path / "types" / "1")
    words = (str(tmp_path / "types"), "--grpc-port", "0", "-n", "1")
    with (
        serving(tmp_path / "server", *words) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
    ):
        (worker,) = server.workers()
        calls = _occupy(server, channel, _predict_body())
        server.process.send_signal(signal.SIGTERM)
        server.wait_until(lambda: _is_refused(server.port), "it takes no more connections")
        os.kill(worker, signal.SIGCONT)
        assert all(call.result(SECONDS) for call in calls)
        assert server.process.wait(SECONDS) == 0


def test_sigterm_ends_after_the_calls_that_have_come(tmp_path: pathlib.Path) -> None:
    """The server has not looked at them yet: it was stopped when they came."""
    save_types(tmp_path / "types" / "1")
    words, body = (str(tmp_path / "types"), "--grpc-port", "0", "-n", "1"), _predict_body()
    with (
        serving(tmp_path / "server", *words) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
    ):
        assert _call(channel, _PREDICT, body)
        freeze(server.process.pid)
        calls = [channel.unary_unary(_PREDICT).future(body) for _ in range(20)]
        counts = [0]

        def have_come() -> bool:
            counts.append(_bytes_to_read(server.grpc_port))
            return counts[-1] == counts[-2] > len(body) * len(calls)

        wait_until(have_come, "the calls have come")
        server.process.send_signal(signal.SIGTERM)
        os.kill(server.process.pid, signal.SIGCONT)
        assert all(call.result(SECONDS) for call in calls)
        assert server.process.wait(SECONDS) == 0


def _bytes_to_read(port: int) -> int:
    """Returns how many bytes have come to a port that nobody has read, as Linux tells them."""
    tables = (pathlib.Path("/proc/net", name).read_text() for name in ("tcp", "tcp6"))
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return sum(int(row[4].partition(":")[2], 16) for row in rows if _port_of(row[1]) == port)


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def _is_refused(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) != 0
