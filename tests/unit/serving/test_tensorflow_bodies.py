"""Bodies of TensorFlow Serving's predict, classify and regress: values, answers, bad input."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from served_fakes import Arrays, FakeModel, FakeServer, ask, content, error, half_plus, signature

from nanotf.inference.signature import CLASSIFY, DEFAULT, REGRESS
from nanotf.serving.tensorflow_rest import TensorflowRest

REST = TensorflowRest()


def _ask(model: FakeModel, body: bytes | str, verb: str = "predict") -> Any:
    return ask(FakeServer(REST, model), REST, "POST", f"/v1/models/half:{verb}", body)


def _model(inputs: str, outputs: str, function: Callable[..., Arrays]) -> FakeModel:
    return FakeModel({DEFAULT: signature(inputs, outputs)}, function)


def _several() -> FakeModel:
    """The documentation's model of three inputs."""
    return _model(
        "tag:string[?] signal:int32[?,5] sensor:float32[?,2,2]",
        "text:string[?] raw_bytes:string[?] sum:int64[?] sensor:float32[?,2,2]",
        lambda tag, signal, sensor: {
            "text": tag,
            "raw_bytes": tag,
            "sum": signal.sum(axis=1, dtype=np.int64),
            "sensor": sensor,
        },
    )


def test_named_inputs_in_rows_and_columns() -> None:
    """The request of the documentation, in both formats."""
    rows = [
        {"tag": "foo", "signal": [1, 2, 3, 4, 5], "sensor": [[1, 2], [3, 4]]},
        {"tag": {"b64": "YmFy"}, "signal": [3, 4, 1, 2, 5], "sensor": [[4, 5], [6, 8]]},
    ]
    answer = content(_ask(_several(), json.dumps({"instances": rows})))
    assert answer == {
        "predictions": [
            {
                "text": "foo",
                "raw_bytes": {"b64": "Zm9v"},
                "sum": 15,
                "sensor": [[1.0, 2.0], [3.0, 4.0]],
            },
            {
                "text": "bar",
                "raw_bytes": {"b64": "YmFy"},
                "sum": 15,
                "sensor": [[4.0, 5.0], [6.0, 8.0]],
            },
        ]
    }
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    answer = content(_ask(_several(), json.dumps({"inputs": {**columns, "extra": 1}})))
    assert answer["outputs"]["text"] == ["foo", "bar"]
    assert answer["outputs"]["raw_bytes"] == [{"b64": "Zm9v"}, {"b64": "YmFy"}]
    assert answer["outputs"]["sum"] == [15, 15]


def test_one_input_in_rows() -> None:
    texts = _model("x:string*", "y:string*", lambda x: {"y": x})
    answer = content(_ask(texts, '{"instances": ["foo", "bär", {"b64": "YQ=="}]}'))
    assert answer == {"predictions": ["foo", "bär", "a"]}
    answer = _ask(half_plus(0), '{"instances": [[[1, 2]], [[3, 4]]]}')
    assert content(answer) == {"predictions": [[[0.5, 1.0]], [[1.5, 2.0]]]}
    answer = _ask(half_plus(0), '{"instances": [{"x": 1}, {"x": 3}]}')
    assert answer.body == b'{"predictions":[0.5,1.5]}'


def test_one_input_in_columns() -> None:
    assert _ask(half_plus(2), '{"inputs": 3}').body == b'{"outputs":3.5}'
    assert _ask(half_plus(2), '{"inputs": {"x": [[1], [2]]}}').body == b'{"outputs":[[2.5],[3.0]]}'
    texts = _model("x:string*", "y_bytes:string*", lambda x: {"y_bytes": x})
    assert content(_ask(texts, '{"inputs": {"b64": "AAEA"}}')) == {"outputs": {"b64": "AAEA"}}


def test_a_signature_by_name() -> None:
    model = half_plus(0)
    model.signatures["other"] = signature("z:float32*", "y:float32*")
    model.function = lambda z: {"y": z}
    body = '{"signature_name": "other", "instances": [7]}'
    assert _ask(model, body).body == b'{"predictions":[7.0]}'


def test_floats_have_the_fewest_digits() -> None:
    body = '{"instances": [0.1, 9000000, 0.00003, 1e10, 16777217]}'
    model = _model("x:float32[?]", "y:float32[?]", lambda x: {"y": x})
    answer = _ask(model, body)
    assert re.findall(r"[^\[\],]+", answer.body.decode())[1:-1] == [
        *("0.1", "9000000.0", "0.00003", "10000000000.0", "16777216.0")
    ]
    assert np.array_equal(
        np.float32(content(answer)["predictions"]), np.float32(json.loads(body)["instances"])
    )


@pytest.mark.parametrize("key", ["instances", "inputs"])
def test_values_that_are_not_finite(key: str) -> None:
    model = _model("x:float32[?]", "y:float32[?] z:string[?]", lambda x: {"y": x, "z": _words(x)})
    answer = _ask(model, f'{{"{key}": [NaN, 1, -Infinity, Infinity]}}')
    assert answer.headers == (("X-Nanotf-Nonfinite", "1"),)
    assert re.findall(rb"NaN|-Infinity|Infinity|1\.0", answer.body) == [
        *(b"NaN", b"1.0", b"-Infinity", b"Infinity")
    ]
    assert answer.body.count(b'"null"') == 4  # texts are left alone
    json.loads(answer.body)


def _words(x: Any) -> Any:
    return np.full(x.shape, b"null", object)


# By the error's text: a model, and a request.
PLAIN = half_plus(0)
TWO = _model("a:float32[?] b:float32[?]", "y:float32[?]", lambda a, b: {"y": a + b})
IMAGE = half_plus(0, "[?,8,8,1]")
BAD = [
    (PLAIN, b"", "^JSON Parse error: The document is empty$"),
    (PLAIN, b" \n", "JSON Parse error: The document is empty"),
    (PLAIN, b"instances = [1, 2]", "JSON Parse error: Invalid value. at offset: 0"),
    (PLAIN, b'{"instances": [1]} {}', "JSON Parse error: Invalid value. at offset: 19"),
    (PLAIN, b'{"instances": [1', "JSON Parse error"),
    (PLAIN, b'{"instances": [1e999]}', "JSON Parse error: Number too big"),
    (PLAIN, b'{"instances": ["\\ud800"]}', "surrogate pair in string is invalid"),
    (PLAIN, b'{"instances": ["\xff"]}', "Invalid encoding in string. at offset: 16"),
    (PLAIN, b"[" * 100_000, "nested too deeply"),
    (PLAIN, b'{"instances": [' + b"[" * 900 + b"]" * 900 + b"]}", "at most 31 axes"),
    (PLAIN, b"[1]", r"^JSON Value: \[1\] Is not object$"),
    (PLAIN, b"{}", "^Missing 'inputs' or 'instances' key$"),
    (PLAIN, b'{"instances": [1], "inputs": [1]}', "expecting only one of 'inputs' or 'instances'"),
    (PLAIN, b'{"instances": 1}', "Expecting 'instances' to be an list/array"),
    (PLAIN, b'{"instances": []}', "No values in 'instances' array"),
    (PLAIN, b'{"signature_name": 100}', "'signature_name' key must be a string value."),
    (
        PLAIN,
        b'{"signature_name": "x", "instances": [1]}',
        '^Serving signature name: "x" not found in signature def$',
    ),
    (
        PLAIN,
        b'{"instances": ["x", "y"]}',
        'JSON Value: "x" Type: String is not of expected type: f',
    ),
    (PLAIN, b'{"instances": [1, null]}', "element: 1 .* Type: Null is not of expected type: float"),
    (PLAIN, b'{"instances": [1.5, true]}', "Type: True is not of expected type: float"),
    (PLAIN, b'{"instances": ["1.5"]}', "Type: String is not of expected type: float"),
    (PLAIN, b'{"inputs": [[1, 2, 3], [1, 2]]}', "size: 2 at level: 1 expected size: 3"),
    (PLAIN, b'{"inputs": [1, [2]]}', "Encountered list at unexpected level: 1 expected < 1"),
    (PLAIN, b'{"inputs": [[1], 2]}', "JSON Value: 2 found at incorrect level: 2"),
    (
        PLAIN,
        b'{"instances": [[1, 2, 3, 4], [1, 2, 3]]}',
        "Failed to process element: 1 of 'instances' list. Error: INVALID_ARGUMENT: Expecting "
        "tensor size: 4 but got: 3",
    ),
    (
        PLAIN,
        b'{"instances": [[[1, 2], [3, 4]], [1, 2, 3, 4]]}',
        r"Expecting shape \[2,2\] but got: \[4\]",
    ),
    (PLAIN, b'{"instances": [{"x": 1}, 2]}', "Expecting object but got list at item 1"),
    (PLAIN, b'{"instances": [1, {"x": 2}]}', "Expecting value/list but got object at item 1"),
    (PLAIN, b'{"instances": [{"z": 1}]}', "keys must be equal to: x$"),
    (TWO, b'{"instances": [1]}', "^instances is a plain list, but expecting list of objects"),
    (TWO, b'{"instances": [{"b64": "YQ=="}]}', "keys must be equal to: a,b$"),
    (TWO, b'{"instances": [{"a": 1, "b": 1}, {"a": 1}]}', "element: 1 .*must be equal to: a,b$"),
    (TWO, b'{"instances": [{"a": 1, "b": "x"}]}', "element: 0 key: b of 'instances'.*: String"),
    (TWO, b'{"inputs": [1]}', "^inputs is a plain value/list, but expecting an object"),
    (TWO, b'{"inputs": {"a": [1]}}', "^Missing named input: b in 'inputs' object.$"),
    (
        IMAGE,
        b'{"instances": [[1]]}',
        r"x must have the shape \(None, 8, 8, 1\). Received: \(1, 1\)",
    ),
    (IMAGE, b'{"inputs": 1}', r"x must have the shape \(None, 8, 8, 1\). Received: \(\)"),
]


@pytest.mark.parametrize(("model", "body", "text"), BAD)
def test_bad_input(model: FakeModel, body: bytes, text: str) -> None:
    status, received = error(_ask(model, body))
    assert status == 400 and re.search(text, received), received


@pytest.mark.parametrize(
    ("dtype", "value", "status", "text"),
    [
        ("int32", "1.0", 400, "JSON Value: 1.0 Type: Number is not of expected type: int32"),
        ("int32", "1e2", 400, "not of expected type: int32"),
        ("int32", "2147483648", 400, "not of expected type: int32"),
        ("int32", "true", 400, "Type: True is not of expected type: int32"),
        ("int8", "-129", 400, "not of expected type: int8"),
        ("uint8", "-1", 400, "not of expected type: uint8"),
        ("uint64", "18446744073709551616", 400, "not of expected type: uint64"),
        ("int64", "9223372036854775808", 400, "not of expected type: int64"),
        ("bool", "1", 400, "Type: Number is not of expected type: bool"),
        ("bool", '"true"', 400, "Type: String is not of expected type: bool"),
        ("float64", '{"b64": "YQ=="}', 400, "Type: Object is not of expected type: double"),
        ("string", "1", 400, "Type: Number is not of expected type: string"),
        ("string", '{"x": [{"b64": 1}]}', 400, "not formatted correctly for base64 data"),
        ("string", '{"b64": "*"}', 400, "Unable to base64 decode"),
        ("string", '{"b64": "YWJjZ"}', 400, "Unable to base64 decode"),
        ("string", '{"b64": "\u00e4"}', 400, "Unable to base64 decode"),
        ("float16", "1", 501, "to type: half"),
        ("bfloat16", "1", 501, "to type: bfloat16"),
        ("complex64", "1", 501, "to type: complex64"),
    ],
)
def test_types(dtype: str, value: str, status: int, text: str) -> None:
    model = _model(f"x:{dtype}*", f"y:{dtype}*", lambda x: {"y": x})
    for body in (f'{{"instances": [{value}]}}', f'{{"inputs": {value}}}'):
        found, received = error(_ask(model, body))
        assert found == status and text in received


def test_outputs_without_a_form() -> None:
    def answer(**outputs: Any) -> tuple[int, str]:
        return error(
            _ask(_model("x:float32*", "y:float32*", lambda x: outputs), '{"instances":[1]}')
        )

    assert answer() == (400, "Cannot convert empty tensor map to JSON")
    assert answer(y=np.array(1.0)) == (400, "Tensor name: y has no shape information ")
    assert answer(a=np.zeros(1), y=np.zeros((2, 2))) == (
        400,
        "Tensor name: y has inconsistent batch size: 2 expecting: 1",
    )
    assert "tensor type: complex64" in answer(y=np.zeros(1, "complex64"))[1]
    assert "end in _bytes" in answer(y=np.array([b"\xff"], object))[1]
    assert "tensor type: int" in answer(y=np.array([3], object))[1]


# ------------------------------------------------------------------------- classify and regress
def _parsed(serialized: bytes) -> dict[str, Any]:
    import tensorflow as tf

    features = tf.train.Example.FromString(serialized).features.feature
    return {
        name: list(getattr(each, str(each.WhichOneof("kind"))).value) if each.ByteSize() else []
        for name, each in features.items()
    }


def _examples_model(function: Callable[..., Arrays], method: str = REGRESS) -> FakeModel:
    outputs = {REGRESS: "outputs:float32[?]", CLASSIFY: "classes:string[?,?] scores:float32[?,?]"}
    found = signature("inputs:string[?]", outputs[method], method)
    return FakeModel({"tensorflow/serving/regress": found, DEFAULT: found}, function)


def test_regress_of_the_documentation() -> None:
    model = _examples_model(
        lambda inputs: {
            "outputs": np.float32([[_parsed(each)["x"][0] * 0.5 + 3] for each in inputs])
        }
    )
    body = '{"signature_name": "tensorflow/serving/regress", "examples": [{"x": 1.0}, {"x": 2.0}]}'
    assert _ask(model, body, "regress").body == b'{"results":[3.5,4.0]}'


def test_classify() -> None:
    classes = np.array([[b"a", "\u00e4"], [b"b", b""]], object)
    scores = np.float32([[0.1, np.nan], [1, 0]])
    for outputs, wanted in (
        (
            {"classes": classes, "scores": scores},
            '{"results":[[["a",0.1],["\u00e4",NaN]],[["b",1.0],["",0.0]]]}',
        ),
        ({"scores": scores}, '{"results":[[["",0.1],["",NaN]],[["",1.0],["",0.0]]]}'),
        (
            {"classes": classes},
            '{"results":[[["a",0.0],["\u00e4",0.0]],[["b",0.0],["",0.0]]]}',
        ),
        ({"scores": np.zeros((2, 0), np.float32)}, '{"results":[[],[]]}'),
    ):
        model = _examples_model(lambda inputs, outputs=outputs: outputs, CLASSIFY)
        answer = _ask(model, '{"examples": [{}, {}]}', "classify")
        assert answer.body.decode() == wanted
        assert bool(answer.headers) == ("NaN" in wanted)


def test_examples() -> None:
    received = []

    def function(inputs: Any) -> Arrays:
        received[:] = map(_parsed, inputs)
        return {"outputs": np.zeros(len(inputs), np.float32)}

    body = """{"context": {"c": 1, "d": "old"}, "examples": [
        {"f": 1.5, "l": [1, true], "t": ["x", {"b64": "AAE="}], "n": [], "d": "new"},
        {"e": 1e2, "x": [NaN, 1e39]}]}"""
    assert _ask(_examples_model(function), body, "regress").status == 200
    assert received == [
        {"c": [1], "d": [b"new"], "f": [1.5], "l": [1, 1], "t": [b"x", b"\x00\x01"], "n": []},
        {"c": [1], "d": [b"old"], "e": [100.0], "x": [pytest.approx(np.nan, nan_ok=True), np.inf]},
    ]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("", "The document is empty"),
        ("{}", "When method is regress, key 'examples' is expected and was not found"),
        ('{"examples": {}}', "Expecting 'examples' value to be an list/array"),
        ('{"examples": []}', "'examples' value is an empty array"),
        ('{"examples": [[1]]}', "Example must be JSON object but got JSON Array"),
        ('{"context": 1, "examples": [{}]}', "Example must be JSON object but got JSON Number"),
        ('{"examples": [{"x": null}]}', "Feature: x has element with unexpected JSON type: Null"),
        ('{"examples": [{"x": [[1]]}]}', "unexpected JSON type: Array"),
        ('{"examples": [{"x": {"a": 1}}]}', "unexpected JSON type: Object"),
        ('{"examples": [{"x": [1, 1.5]}]}', "element type in feature: x expecting type: int64"),
        ('{"examples": [{"x": ["a", 1]}]}', "element type in feature: x expecting type: bytes"),
        ('{"examples": [{"x": {"b64": "*"}}]}', "Unable to base64 decode"),
        ('{"examples": [{"x": 9223372036854775808}]}', "Only int64 is supported."),
        ('{"signature_name": 1, "examples": [{}]}', "must be a string value"),
        ('{"signature_name": "x", "examples": [{}]}', "No signature was found with the name: x"),
    ],
)
def test_bad_examples(body: str, text: str) -> None:
    status, received = error(_ask(_examples_model(lambda inputs: {}), body, "regress"))
    assert status == 400 and text in received


@pytest.mark.parametrize(
    ("verb", "found", "outputs", "text"),
    [
        ("classify", signature("inputs:string[?]", "s:float32[?]", REGRESS), {}, "Expected class"),
        ("regress", signature("inputs:string[?]", "s:float32[?]"), {}, "Was: tensorflow/serving/p"),
        ("regress", signature("x:string[?]", "s:float32[?]", REGRESS), {}, "No regression inputs"),
        ("regress", signature("a:string[?] b:string[?]", "s:float32[?]", REGRESS), {}, "one input"),
        ("regress", None, {}, "No regression outputs found"),
        ("regress", None, {"outputs": np.zeros((1, 2), "f4")}, r"but got \[1,2\]"),
        ("regress", None, {"outputs": np.zeros(2, "f4")}, "batch size: 1 vs. 2"),
        ("regress", None, {"outputs": np.zeros(1, "i4")}, "DT_FLOAT.  Got: int32"),
        ("classify", None, {"x": np.zeros(1)}, "at least one of"),
        ("classify", None, {"scores": np.zeros(1, "f4")}, r"num_classes. but got \[1\]"),
        ("classify", None, {"scores": np.zeros((2, 1), "f4")}, "batch size of 1. Got: 2"),
        ("classify", None, {"scores": np.zeros((1, 1), "i4")}, "scores Tensor of DT_FLOAT"),
        ("classify", None, {"classes": np.zeros((1, 1), "f4")}, "classes Tensor of DT_STRING"),
        (
            "classify",
            None,
            {"classes": np.full((1, 2), b"a", object), "scores": np.zeros((1, 1), "f4")},
            r"dim_size.1.. Got 2 vs. 1",
        ),
    ],
)
def test_models_without_classes_or_values(
    verb: str, found: Any, outputs: Arrays, text: str
) -> None:
    model = _examples_model(lambda **_: outputs, {"classify": CLASSIFY, "regress": REGRESS}[verb])
    if found is not None:
        model.signatures[DEFAULT] = found
    status, received = error(_ask(model, '{"examples": [{}]}', verb))
    assert status == 400 and re.search(text, received), received


# ----------------------------------------------------------------------------------- any request
def test_cut_and_changed_bodies_are_refused_or_answered() -> None:
    drawn = random.Random(0)
    bodies = [
        json.dumps({"signature_name": DEFAULT, "instances": [{"a": 1, "b": [NAN]}]}).encode(),
        b'{"inputs": {"a": [1.5, -2e3], "b": [1, 2]}}',
        b'{"instances": [{"b64": "YQ=="}, [[1, true, null]], "\\u00e4\\ud83d\\ude00"]}',
        b'{"context": {"c": 1}, "examples": [{"x": [1.0], "y": {"b64": "YWE="}}]}',
    ]
    models = (PLAIN, TWO, _several(), _examples_model(lambda inputs: {}))
    statuses = set()
    for body in bodies:
        cut = [body[:end] for end in range(len(body))]
        changed = [_changed(body, drawn) for _ in range(300)]
        for text in (*cut, *changed, *(drawn.randbytes(n) for n in range(40))):
            for model in models:
                verb = "predict" if model is not models[-1] else "regress"
                statuses.add(_ask(model, text, verb).status)
    assert statuses == {200, 400}


NAN = float("nan")


def _changed(body: bytes, drawn: random.Random) -> bytes:
    """Returns a text with some bytes replaced, most of them by what JSON has elsewhere."""
    found = bytearray(body)
    for _ in range(drawn.randint(1, 4)):
        place = drawn.randrange(len(found))
        found[place] = drawn.choice(b'[]{}",:0123456789.eE-+ntNI\\ \xff\x00')
    return bytes(found)
