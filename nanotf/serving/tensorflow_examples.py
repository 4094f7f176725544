"""The bodies of TensorFlow Serving's `:classify` and `:regress`: examples of named features.

They reach the model as `tf.train.Example` protos, in a tensor of strings. Sources:
`util/json_tensor.cc`, `servables/tensorflow/classifier.cc`, `.../regressor.cc` and
`apis/input.proto` of tensorflow/serving.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nanotf.inference.signature import CLASSIFY, REGRESS, Signature
from nanotf.serving import json_tensors
from nanotf.serving.common_rows import common_rows
from nanotf.serving.interface import Decoded, Refusal, Response
from nanotf.serving.json_text import shown
from nanotf.serving.tensorflow_predict import Arrays, signature_name

VERBS = ("classify", "regress")

_WORDS = {"classify": "classification", "regress": "regression"}
_METHODS = {"classify": CLASSIFY, "regress": REGRESS}
_INPUT, _CLASSES, _SCORES, _VALUES = "inputs", "classes", "scores", "outputs"


@dataclasses.dataclass(frozen=True)
class Examples:
    """`Decoded.form` of these requests."""

    verb: str
    count: int


def decode(request: Mapping[str, Any], signatures: Mapping[str, Signature], verb: str) -> Decoded:
    """Reads the object that is a request's body. It imports TensorFlow.

    Args:
        request: of the body.
        signatures: of the model.
        verb: one of `VERBS`; the signature must be made for it.

    Returns:
        The content; `encode` makes its answer.

    Raises:
        Refusal: It cannot be used. Status 400.
        NanoError: See `Signature.checked`.
    """
    return decoded(signature_name(request), _examples(request, verb), signatures, verb)


def decoded(
    name: str, examples: list[bytes], signatures: Mapping[str, Signature], verb: str
) -> Decoded:
    """Makes the content of a request of its examples.

    Args:
        name: of the signature.
        examples: protos, as they are sent.
        signatures, verb: see `decode`.

    Raises:
        Refusal, NanoError: See `decode`.
    """
    signature = signatures.get(name)
    if signature is None:
        raise Refusal(400, f"No signature was found with the name: {name}")
    _check_signature(signature, verb)
    serialized: np.ndarray[Any, Any] = np.empty(len(examples), object)
    serialized[:] = examples
    inputs = signature.checked({_INPUT: serialized})
    return Decoded(name, inputs, common_rows(signature, inputs), Examples(verb, len(examples)))


def encode(examples: Examples, outputs: Arrays) -> Response:
    """Makes the answer: the classes and scores of each example, or its value.

    Raises:
        Refusal: The outputs have no such form. Status 400.
    """
    make = _classification_text if examples.verb == "classify" else _regression_text
    text, finite = make(outputs, examples.count)
    return Response(
        200, b'{"results":' + text + b"}", headers=() if finite else (json_tensors.NONFINITE,)
    )


def _check_signature(signature: Signature, verb: str) -> None:
    if signature.method != _METHODS[verb]:
        raise Refusal(
            400,
            f"Expected {_WORDS[verb]} signature method_name to be {_METHODS[verb]}. Was: "
            f"{signature.method}",
        )
    if len(signature.inputs) != 1:
        raise Refusal(400, "Expected one input Tensor.")
    if signature.inputs[0].name != _INPUT:
        raise Refusal(
            400,
            f"No {_WORDS[verb]} inputs found in SignatureDef: {signature.inputs[0].name}",
        )


# --------------------------------------------------------------------------------------- examples
def _examples(request: Mapping[str, Any], verb: str) -> list[bytes]:
    """Returns the protos, as they are sent."""
    # Concatenated messages are merged: a feature of the example replaces one of the context.
    context = _proto(request["context"]) if "context" in request else b""
    if "examples" not in request:
        raise Refusal(
            400,
            f"JSON Value: {shown(request)} When method is {verb}, key 'examples' is expected and "
            "was not found",
        )
    examples = request["examples"]
    if not isinstance(examples, list):
        raise Refusal(
            400, f"JSON Value: {shown(request)} Expecting 'examples' value to be an list/array"
        )
    if not examples:
        raise Refusal(400, f"JSON Value: {shown(request)} 'examples' value is an empty array")
    return [context + _proto(example) for example in examples]


def _proto(features: Any) -> bytes:
    import tensorflow as tf

    if not isinstance(features, dict):
        raise Refusal(
            400, f"Example must be JSON object but got JSON {json_tensors.kind_of(features)}"
        )
    example = tf.train.Example()
    for name, content in features.items():
        feature = example.features.feature[name]  # made by looking it up
        _fill(feature, name, content if isinstance(content, list) else [content])
    return bytes(example.SerializeToString())


def _fill(feature: Any, name: str, values: list[Any]) -> None:
    kind = None
    for value in values:
        found, read = _kind(value, name)
        if kind not in (None, found):
            raise Refusal(400, f"Unexpected element type in feature: {name} expecting type: {kind}")
        kind = found
        getattr(feature, f"{kind}_list").value.append(read(value))


def _kind(value: Any, name: str) -> tuple[str, Callable[[Any], Any]]:
    """Returns the kind of list that holds a value, and what makes an element of the value."""
    if isinstance(value, str):
        return "bytes", str.encode
    if json_tensors.is_bytes_object(value):
        return "bytes", json_tensors.bytes_of
    if isinstance(value, float):
        return "float", _single
    if not isinstance(value, int):
        raise Refusal(
            400,
            f"Feature: {name} has element with unexpected JSON type: {json_tensors.kind_of(value)}",
        )
    if value >= 2**63:
        raise Refusal(400, f"Feature: {name} has uint64 element. Only int64 is supported.")
    return "int64", int


def _single(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(value))


# ---------------------------------------------------------------------------------------- answers
def classifications(
    outputs: Arrays, count: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Returns the labels and the scores of each example's classes.

    Labels are empty, or scores 0, if the model has none.

    Raises:
        Refusal: The outputs have no such form. Status 400.
    """
    classes, scores = outputs.get(_CLASSES), outputs.get(_SCORES)
    if classes is None and scores is None:
        raise Refusal(
            400,
            "Expected classification signature outputs to contain at least one of "
            f'"{_CLASSES}" or "{_SCORES}". Signature was: {",".join(outputs)}',
        )
    if classes is not None:
        _check_matrix(_CLASSES, "DT_STRING", classes, "OSU", count)
    if scores is not None:
        _check_matrix(_SCORES, "DT_FLOAT", scores, "f", count)
    if classes is not None and scores is not None and classes.shape != scores.shape:
        raise Refusal(
            400,
            "Tensors class and score should match in dim_size(1). Got "
            f"{classes.shape[1]} vs. {scores.shape[1]}",
        )
    found = classes if classes is not None else scores
    assert found is not None
    labels = np.full(found.shape, "", object) if classes is None else classes
    numbers = np.zeros(found.shape, np.float32) if scores is None else scores
    return labels, numbers


def _classification_text(outputs: Arrays, count: int) -> tuple[bytes, bool]:
    import orjson

    labels, numbers = classifications(outputs, count)
    rows, all_finite = [], True
    for row in range(count):
        names = orjson.loads(json_tensors.tensor_text(labels[row])[0])
        text, finite = json_tensors.tensor_text(numbers[row])
        all_finite &= finite
        pairs = zip(names, text[1:-1].split(b","), strict=False)  # no names: one empty text
        rows.append(b",".join(b"[" + orjson.dumps(n) + b"," + v + b"]" for n, v in pairs))
    return b"[" + b",".join(b"[" + row + b"]" for row in rows) + b"]", all_finite


def _check_matrix(
    name: str, wanted: str, array: np.ndarray[Any, Any], kinds: str, count: int
) -> None:
    if array.ndim != 2:
        raise Refusal(
            400,
            f"Expected Tensor shape: [batch_size num_classes] but got {_shape_text(array)}",
        )
    if array.dtype.kind not in kinds:
        raise Refusal(400, f"Expected {name} Tensor of {wanted}. Got: {array.dtype}")
    if len(array) != count:
        raise Refusal(400, f"Expected {name} output batch size of {count}. Got: {len(array)}")


def regressions(outputs: Arrays, count: int) -> np.ndarray[Any, Any]:
    """Returns the value of each example.

    Raises:
        Refusal: The outputs have no such form. Status 400.
    """
    array = outputs.get(_VALUES)
    if array is None:
        raise Refusal(400, f"No regression outputs found in SignatureDef: {','.join(outputs)}")
    if array.ndim != 1 and (array.ndim != 2 or array.shape[1] != 1):
        raise Refusal(
            400,
            "Expected output Tensor shape to be either [batch_size] or [batch_size, 1] but got "
            f"{_shape_text(array)}",
        )
    if len(array) != count:
        raise Refusal(
            400,
            f"Input batch size did not match output batch size: {count} vs. {len(array)}",
        )
    if array.dtype.kind != "f":
        raise Refusal(400, f"Expected output Tensor of DT_FLOAT.  Got: {array.dtype}")
    return array.reshape(count)


def _regression_text(outputs: Arrays, count: int) -> tuple[bytes, bool]:
    return json_tensors.tensor_text(regressions(outputs, count))


def _shape_text(array: np.ndarray[Any, Any]) -> str:
    return "[" + ",".join(map(str, array.shape)) + "]"
