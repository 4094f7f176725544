"""The bodies of TensorFlow Serving's `:predict`, in rows and in columns.

Source: `util/json_tensor.cc` of tensorflow/serving, and its documentation, "RESTful API".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nanotf.inference.signature import DEFAULT, STRING, Signature, TensorSpec
from nanotf.serving import json_tensors
from nanotf.serving.common_rows import common_rows
from nanotf.serving.interface import Decoded, Refusal, Response
from nanotf.serving.json_text import shown

Arrays = Mapping[str, np.ndarray[Any, Any]]

_ROWS, _COLUMNS = "instances", "inputs"  # the keys of a request
_ANSWERS = {_ROWS: b"predictions", _COLUMNS: b"outputs"}
# TensorFlow Serving reads these types; a Keras model has hardly an input of another.
# fmt: off
_TYPES = {
    "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint32", "uint64", "bool",
    STRING,
}
# fmt: on
_BYTES_SUFFIX = "_bytes"  # ends the name of an output whose texts are bytes


def signature_name(request: Mapping[str, Any]) -> str:
    """Returns the name of the signature that a request is for.

    Raises:
        Refusal: It is no text. Status 400.
    """
    name = request.get("signature_name", DEFAULT)
    if not isinstance(name, str):
        raise Refusal(
            400,
            f"JSON Value: {shown(request)} not formatted correctly. 'signature_name' key must be a "
            "string value.",
        )
    return name or DEFAULT


def decode(request: Mapping[str, Any], signatures: Mapping[str, Signature]) -> Decoded:
    """Reads the object that is a request's body.

    Args:
        request: of the body.
        signatures: of the model.

    Returns:
        The content; `encode` makes its answer.

    Raises:
        Refusal: It cannot be used. Status 400, or 501 for a type that JSON cannot express.
        NanoError: See `Signature.checked`.
    """
    name = signature_name(request)
    signature = signatures.get(name)
    if signature is None:
        raise Refusal(400, f'Serving signature name: "{name}" not found in signature def')
    if not signature.inputs:
        raise Refusal(400, f"Failed to get input map for signature: {name}")
    key = _key(request)
    _check_types(signature)
    if key == _ROWS:
        arrays = _by_rows(request[key], signature.inputs)
    else:
        arrays = _by_columns(request[key], signature.inputs)
    inputs = signature.checked(arrays)
    return Decoded(name, inputs, common_rows(signature, inputs), key)


def encode(decoded: Decoded, outputs: Arrays) -> Response:
    """Makes the answer: in the form of the request, and with names if there are several outputs.

    Raises:
        Refusal: The outputs have no such form. Status 400.
    """
    if not outputs:
        raise Refusal(400, "Cannot convert empty tensor map to JSON")
    if decoded.form == _ROWS:
        _check_rows(outputs)
    if len(outputs) == 1:
        ((name, array),) = outputs.items()
        text, finite = _text(name, array)
    elif decoded.form == _ROWS:
        text, finite = _objects(outputs)
    else:
        text, finite = _object({name: _text(name, array) for name, array in outputs.items()})
    body = b'{"' + _ANSWERS[decoded.form] + b'":' + text + b"}"
    return Response(200, body, headers=() if finite else (json_tensors.NONFINITE,))


def _key(request: Mapping[str, Any]) -> str:
    """Returns the key of the inputs."""
    if _ROWS in request and _COLUMNS in request:
        raise Refusal(
            400,
            f"JSON Value: {shown(request)} Not formatted correctly expecting only one of 'inputs' "
            "or 'instances' keys to exist ",
        )
    if _COLUMNS in request:
        return _COLUMNS
    if _ROWS not in request:
        raise Refusal(400, "Missing 'inputs' or 'instances' key")
    if not isinstance(request[_ROWS], list):
        raise Refusal(
            400, f"JSON Value: {shown(request)} Expecting 'instances' to be an list/array"
        )
    if not request[_ROWS]:
        raise Refusal(400, f"JSON Value: {shown(request)} No values in 'instances' array")
    return _ROWS


def _check_types(signature: Signature) -> None:
    for spec in signature.inputs:
        if spec.dtype not in _TYPES:
            raise Refusal(
                501,
                f"Conversion of JSON Value: {spec.name} to type: "
                f"{json_tensors.type_name(spec.dtype)}",
            )


def _is_named(value: Any) -> bool:
    """Returns True for an object of inputs by name."""
    return isinstance(value, dict) and not json_tensors.is_bytes_object(value)


def _by_rows(rows: list[Any], specs: tuple[TensorSpec, ...]) -> dict[str, Any]:
    if not isinstance(rows[0], dict) and len(specs) > 1:
        raise Refusal(
            400,
            "instances is a plain list, but expecting list of objects as multiple input tensors "
            "required as per tensorinfo_map",
        )
    if not _is_named(rows[0]):
        for index, row in enumerate(rows):
            if _is_named(row):
                raise Refusal(
                    400, f"Expecting value/list but got object at item {index} of input list"
                )
        # A single object of bytes, where several inputs are wanted, is an object without them.
        if len(specs) == 1:
            return {specs[0].name: json_tensors.rows(rows, specs[0].dtype)}
    _check_names(rows, {spec.name for spec in specs})
    return {
        spec.name: json_tensors.rows(
            [row[spec.name] for row in rows], spec.dtype, f" key: {spec.name}"
        )
        for spec in specs
    }


def _check_names(rows: list[Any], names: set[str]) -> None:
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise Refusal(400, f"Expecting object but got list at item {index} of input list")
        if set(row) != names:
            raise Refusal(
                400,
                f"Failed to process element: {index} of 'instances' list. JSON object: "
                f"{shown(row)} keys must be equal to: {','.join(sorted(names))}",
            )


def _by_columns(value: Any, specs: tuple[TensorSpec, ...]) -> dict[str, Any]:
    if not _is_named(value):
        if len(specs) > 1:
            raise Refusal(
                400,
                "inputs is a plain value/list, but expecting an object as multiple input tensors "
                "required as per tensorinfo_map",
            )
        return {specs[0].name: json_tensors.tensor(value, specs[0].dtype)}
    for spec in specs:
        if spec.name not in value:
            raise Refusal(400, f"Missing named input: {spec.name} in 'inputs' object.")
    return {spec.name: json_tensors.tensor(value[spec.name], spec.dtype) for spec in specs}


# ---------------------------------------------------------------------------------------- answers
def _check_rows(outputs: Arrays) -> None:
    wanted = None
    for name, array in outputs.items():
        if not array.ndim:
            raise Refusal(400, f"Tensor name: {name} has no shape information ")
        if wanted not in (None, len(array)):
            raise Refusal(
                400,
                f"Tensor name: {name} has inconsistent batch size: {len(array)} expecting: "
                f"{wanted}",
            )
        wanted = len(array)


def _text(name: str, array: np.ndarray[Any, Any]) -> tuple[bytes, bool]:
    return json_tensors.tensor_text(array, as_bytes=name.endswith(_BYTES_SUFFIX))


def _object(texts: Mapping[str, tuple[bytes, bool]]) -> tuple[bytes, bool]:
    import orjson

    text = b",".join(orjson.dumps(name) + b":" + text for name, (text, _) in texts.items())
    return b"{" + text + b"}", all(finite for _, finite in texts.values())


def _objects(outputs: Arrays) -> tuple[bytes, bool]:
    count = len(next(iter(outputs.values())))
    # A slice and its only element: an element of an array of texts would be no array.
    rows = [
        _object({name: _text(name, array[row, ...]) for name, array in outputs.items()})
        for row in range(count)
    ]
    return b"[" + b",".join(text for text, _ in rows) + b"]", all(finite for _, finite in rows)
